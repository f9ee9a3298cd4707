"""How much is lost by one decision for each ParallelBlock, and how many are there?

Every model of the zoo, or with `--ordinary` every step of `_block_steps.py`, is planned by
`ShardParallel` with the integer program and with `Blocks`; both are judged by the same cost model.
Beside them stand the blocks of a layer and the programs that profiling them would take.

    python benchmarks/blocks_against_ilp.py [--ordinary] [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import functools
import time
from typing import Any

from _block_steps import STEPS, step_of
from _results import Journal, Report, options, say, with_rows

from aliquot.cluster import Cluster
from aliquot.core import AliquotError
from aliquot.cost import make_problem
from aliquot.graph import capture
from aliquot.planners import Blocks, ShardParallel, Task
from aliquot.profiling import segment_step
from aliquot.sharding import find_blocks, outside_blocks
from aliquot.zoo import MODELS, build

_BAR = 0.02
# Models of at least so many parameters are planned on the larger cluster.
_LARGE = 5e9
_CLUSTERS = {False: ("8xH100", 64), True: ("8x8xH100", 256)}


def main() -> int:
    """Run, and write what came out; 1 if a bar is missed."""
    chosen = options(__doc__, _more)
    what = "step outside the zoo" if chosen.ordinary else "model of the zoo"
    report = Report(
        name="blocks_against_ilp" + ("_ordinary" if chosen.ordinary else ""),
        question="How much is lost by one decision for each ParallelBlock, and how many are there?",
        bar=f"step time within {_BAR:.0%} of the integer program's for every {what}",
        method=(
            "`ShardParallel` over all logical meshes of up to two axes. Programs: combinations of"
            " options that profiling all segments would measure, on one axis of 8 devices. Outside:"
            " products that are in no block. Seconds are wall time in one process."
            if chosen.ordinary
            else "`ShardParallel` over all logical meshes of up to two axes, with 4 micro-batches,"
            " transformers scanned over their layers. Seconds are wall time in one process. Layer"
            " programs: combinations of options of a layer's blocks as in the paper, on one axis of"
            " 8 devices, counted for the model with 4 layers written out."
        ),
    )
    journal = Journal(chosen.journal)
    names = [name for name in (STEPS if chosen.ordinary else MODELS) if chosen.only in name]
    row_of = _row_of_step if chosen.ordinary else _row
    rows = [
        journal.row(name, functools.partial(row_of, name))
        for name in (names[::6] if chosen.quick else names)
    ]
    report.tables["Steps" if chosen.ordinary else "Models"] = rows
    losses = [row["blocks / ilp"] - 1 for row in rows if row["blocks / ilp"]]
    worst = max(losses)
    report.summary = {
        "steps" if chosen.ordinary else "models": len(rows),
        "worst loss": worst,
        "seconds, integer program": sum(row["ilp search s"] for row in rows),
        "seconds, blocks": sum(row["blocks search s"] for row in rows),
    }
    return report.finish(chosen, met=None if chosen.quick or chosen.only else worst <= _BAR)


def _more(parser: Any) -> None:
    parser.add_argument("--ordinary", action="store_true", help="steps outside the zoo")
    with_rows(parser)


def _row(name: str) -> dict[str, Any]:
    config = MODELS[name]
    is_text = config.examples == "sequences"
    workload = build(name, 8)
    cluster_name, batch = _CLUSTERS[workload.num_parameters >= _LARGE]
    workload = build(name, batch, scan=is_text)
    graph = capture(workload.train_step, workload.state, workload.batch)
    task = Task(
        graph=graph, cluster=Cluster.preset(cluster_name), num_micro_batches=4 if is_text else 1
    )
    row = {"model": name, "cluster": cluster_name, "global batch": batch, **_planned(task)}
    row["layer programs"] = _layer_programs(name) if is_text else ""
    say(str(row))
    return row


def _row_of_step(name: str) -> dict[str, Any]:
    graph = capture(*step_of(name))
    cluster = Cluster.preset("8xA100-40GB")
    row = {"step": name, **_planned(Task(graph=graph, cluster=cluster, num_micro_batches=1))}
    problem = make_problem(graph, cluster)
    blocks = find_blocks(graph, problem.nodes)
    row |= {"blocks": len(blocks), "outside": len(outside_blocks(problem.nodes, blocks))}
    try:
        step = segment_step(problem, (8,))
        row |= {"segments": len(step.sequence), "programs": step.num_programs}
    except AliquotError as error:
        row |= {"segments": 0, "programs": str(error).partition(":")[0]}
    return row


def _planned(task: Task) -> dict[str, Any]:
    """The step by the integer program and by blocks."""
    row: dict[str, Any] = {}
    times = {}
    for label, method in (("ilp", ShardParallel()), ("blocks", ShardParallel(intra=Blocks()))):
        start = time.perf_counter()
        try:
            decision = method.decide(task)
            times[label], status = decision.step_time_s, decision.status
        except AliquotError as error:
            times[label], status = 0.0, type(error).__name__
        row |= {
            f"{label} step s": times[label],
            f"{label} search s": time.perf_counter() - start,
            f"{label} status": status,
        }
    row["blocks / ilp"] = (
        times["blocks"] / times["ilp"] if times["ilp"] and times["blocks"] else 0.0
    )
    return row


def _layer_programs(name: str) -> list[int]:
    workload = build(name, 8, overrides={"num_layers": 4})
    problem = make_problem(
        capture(workload.train_step, workload.state, workload.batch), Cluster.preset("8xH100")
    )
    step = segment_step(problem, (8,))
    programs = []
    for kind in [kind for kind in step.kinds if kind.blocks]:
        product = 1
        for block in kind.blocks:
            product *= len(block)
        programs.append(product)
    return programs


if __name__ == "__main__":
    raise SystemExit(main())
