"""Is the part of the backward pass that zero-bubble schedules put off priced as it is run, and what
does it gain?

For stages of GPT-350M with 8 layers the share of products in backward passes that planners price
as deferrable, beside the share that the runtime's programs for weight gradients run. Then GPT-2.6B
in 4 stages on two hosts of eight V100s, planned with zero-bubble and with 1F1B.

    python benchmarks/deferrable_shares.py [--quick]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from _results import Report, options, say

import aliquot as aq
from aliquot import zoo
from aliquot.core import InfeasibleError
from aliquot.graph import Graph, Phase, capture, items_of, split_scans
from aliquot.sharding import (
    Layout,
    Part,
    cut_graph,
    layer_step,
    plan_micro_batches,
    split_stages,
    stage_step,
)

TOLERANCE = 0.01
LAYERS = 8
CLUSTER = "2x8xV100-16GB"
SEQUENCES, MICRO_BATCHES, STAGES = 256, 32, 4


def product_flops(graph: Graph, ops: Iterable[int]) -> float:
    """Operations of the products among some operators, in all trips of the loops around them."""
    total = 0.0
    for op in (graph.ops[k] for k in ops):
        if op.name == "dot_general" and isinstance(op.inputs[0], int):
            (contracted, _), _ = op.params["dimension_numbers"]
            shape = graph.values[op.inputs[0]].shape
            result = math.prod(graph.values[op.outputs[0]].shape)
            total += 2.0 * result * math.prod(shape[d] for d in contracted) * op.trips
    return total


def shares(scan: bool, recompute: str, stages: int) -> list[dict[str, Any]]:
    """Deferrable shares of the products of each stage's backward pass, priced and run."""
    work = zoo.build(
        zoo.configure("gpt-350m", num_layers=LAYERS), 8, scan=scan, recompute=recompute
    )
    graph = capture(work.train_step, work.state, work.batch)
    if scan:
        graph = split_scans(graph, range(LAYERS + 1)).graph
    layered = layer_step(graph, 2)
    step = stage_step(layered, [k * len(layered.layers) // stages for k in range(stages)])
    plan = plan_micro_batches(graph, 2)
    parts = cut_graph(plan, Layout(groups=1, shards=1, micro_batches=2))
    programs = split_stages(parts, plan, step.staging, split_backward=True).programs
    rows = []
    for k, extract in enumerate(step.extracts):
        backward = [op.index for op in extract.graph.ops if op.phase is Phase.BACKWARD]
        deferrable = [op.index for op in extract.graph.ops if op.deferrable]
        run = {
            program.part: product_flops(
                program.graph, {o for item in items_of(program.graph) for o in item.ops}
            )
            for program in programs
            if program.stage == k
        }
        weight = run.get(Part.BACKWARD_WEIGHT, 0.0)
        rows.append(
            {
                "layers": "scanned" if scan else "written out",
                "recompute": recompute,
                "stage": f"{k + 1} of {stages}",
                "priced": (
                    product_flops(extract.graph, deferrable)
                    / product_flops(extract.graph, backward)
                ),
                "run": weight / (weight + run.get(Part.BACKWARD_INPUT, 0.0)),
            }
        )
    return rows


def gains(scan: bool, recompute: str) -> dict[str, Any]:
    """Predicted step times of GPT-2.6B with zero-bubble and with 1F1B."""
    work = zoo.build("gpt-2.6b", SEQUENCES, dtype="float16", scan=scan, recompute=recompute)
    seconds: dict[str, float] = {}
    for schedule in ("zero-bubble", "1f1b"):
        method = aq.PipeshardParallel(
            num_stages=STAGES, num_micro_batches=MICRO_BATCHES, schedule=schedule
        )
        cluster = aq.Cluster.preset(CLUSTER)
        try:
            plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
        except InfeasibleError:
            seconds[schedule] = math.inf
            continue
        seconds[schedule] = plan.prediction.step_time_s
        say(f"scan={scan} {recompute} {schedule}: {plan.prediction.step_time_s:.3f} s")
    return {
        "layers": "scanned" if scan else "written out",
        "recompute": recompute,
        **{f"{name} s": value for name, value in seconds.items()},
        "zero-bubble / 1f1b": (
            seconds["zero-bubble"] / seconds["1f1b"] if seconds["1f1b"] < math.inf else None
        ),
    }


def main() -> int:
    """Run the benchmark."""
    chosen = options(__doc__)
    report = Report(
        name="deferrable_shares",
        question=(
            "Is what zero-bubble schedules put off priced as it is run, and what does it gain?"
        ),
        bar=f"shares priced and run within {TOLERANCE} of each other, in every stage",
        method=(
            "Shares: of the operations of products in a stage's backward pass, GPT-350M with"
            f" {LAYERS} layers. Gains: predicted step times of GPT-2.6B in float16 with {SEQUENCES}"
            f" sequences in {MICRO_BATCHES} micro-batches and {STAGES} stages on {CLUSTER}, inf"
            " where no plan fits; nothing is run."
        ),
    )
    kinds = list(itertools.product((False, True), ("none", "block")))
    rows = [
        row
        for scan, recompute in kinds
        for stages in (2, 4)
        for row in shares(scan, recompute, stages)
    ]
    worst = max(abs(row["priced"] - row["run"]) for row in rows)
    report.tables["Shares of backward passes that are put off"] = rows
    if not chosen.quick:
        report.tables["Zero-bubble against 1F1B"] = [gains(*kind) for kind in kinds]
    report.summary = {"stages compared": len(rows), "largest difference of shares": worst}
    return report.finish(chosen, met=worst <= TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
