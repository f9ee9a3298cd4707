"""How much is lost by one decision for each ParallelBlock, and how many are there?

Every model of the zoo is planned by `ShardParallel` with the integer program and with `Blocks`;
both are judged by the same cost model. Beside them stand the blocks of a layer and the programs
that profiling them would take.

    python benchmarks/blocks_against_ilp.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, say

from aliquot.cluster import Cluster
from aliquot.core import AliquotError
from aliquot.cost import make_problem
from aliquot.graph import capture
from aliquot.planners import Blocks, ShardParallel, Task
from aliquot.profiling import segment_step
from aliquot.zoo import MODELS, build

_BAR = 0.02
# Models of at least so many parameters are planned on the larger cluster.
_LARGE = 5e9
_CLUSTERS = {False: ("8xH100", 64), True: ("8x8xH100", 256)}


def main() -> int:
    """Run, and write what came out; 1 if a bar is missed."""
    chosen = options(__doc__, _more)
    report = Report(
        name="blocks_against_ilp",
        question="How much is lost by one decision for each ParallelBlock, and how many are there?",
        bar=f"step time within {_BAR:.0%} of the integer program's for every model of the zoo",
        method=(
            "`ShardParallel` over all logical meshes of up to two axes, with 4 micro-batches,"
            " transformers scanned over their layers. Seconds are wall time in one process. Layer"
            " programs: combinations of options of a layer's blocks as in the paper, on one axis of"
            " 8 devices, counted for the model with 4 layers written out."
        ),
    )
    journal = Journal(chosen.journal)
    names = [name for name in MODELS if (chosen.only or "") in name]
    rows = [
        journal.row(name, functools.partial(_row, name))
        for name in (names[::6] if chosen.quick else names)
    ]
    report.tables["Models"] = rows
    losses = [row["blocks / ilp"] - 1 for row in rows if row["blocks / ilp"]]
    worst = max(losses)
    report.summary = {
        "models": len(rows),
        "worst loss": worst,
        "seconds, integer program": sum(row["ilp search s"] for row in rows),
        "seconds, blocks": sum(row["blocks search s"] for row in rows),
    }
    return report.finish(chosen, met=None if chosen.quick or chosen.only else worst <= _BAR)


def _more(parser: Any) -> None:
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--journal", type=Path, help="file of the rows so far")


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
    row: dict[str, Any] = {"model": name, "cluster": cluster_name, "global batch": batch}
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
    row["layer programs"] = _layer_programs(name) if is_text else ""
    say(str(row))
    return row


def _layer_programs(name: str) -> list[int]:
    workload = build(name, 8, overrides={"num_layers": 4})
    problem = make_problem(
        capture(workload.train_step, workload.state, workload.batch), Cluster.preset("8xH100")
    )
    step = segment_step(problem, (8,))
    programs = []
    for kind in step.kinds[1:]:
        product = 1
        for block in kind.blocks:
            product *= len(block)
        programs.append(product)
    return programs


if __name__ == "__main__":
    raise SystemExit(main())
