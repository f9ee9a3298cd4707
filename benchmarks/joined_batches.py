"""Does a batch stay a batch where a step joins two, cuts them apart, or regroups rows?

Steps with preference pairs, two views, real and generated examples, stacks, tiled labels, rolled
negatives, grouped rewards, patches, beams and losses in chunks, at real size and from shapes alone,
under data parallelism, ZeRO, the integer program and pipelines of two stages, on 8 and on 64 H100s:
the share of the computing that every device does alike. On 64 the batch is eight times as large.

    python benchmarks/joined_batches.py [--quick] [--cluster 8xH100] [--journal FILE]
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.joined_batches import LOSSES, real_size

import aliquot as aq
from aliquot.cost import make_problem, work_alike
from aliquot.cost._alike import UPDATE
from aliquot.graph import capture
from aliquot.planners import Task

METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
    "pipeline": aq.PipeshardParallel(num_stages=2),
}
CLUSTERS = {"8xH100": 1, "8x8xH100": 8}
LARGEST = 0.02


def row(name: str, method: str, cluster: str) -> dict[str, Any]:
    """One step under one method: what is replicated, the update of whole state apart."""
    graph = capture(*real_size(name, times=CLUSTERS[cluster]))
    devices = aq.Cluster.preset(cluster)
    found: dict[str, Any] = {"step": name, "method": method, "cluster": cluster}
    try:
        if isinstance(how := METHODS[method], aq.PipeshardParallel):
            decision = how.decide(Task(graph=graph, cluster=devices, num_micro_batches=1))
        else:
            decision = how.solve(make_problem(graph, devices))
    except aq.AliquotError as error:
        return {**found, "replicated": None, "step ms": None, "refused": str(error).split("\n")[0]}
    alike = total = 0.0
    for stage in decision.stages:
        work = work_alike(stage.picked)
        alike += sum(s for why, s in work.alike_s.items() if why != UPDATE)
        total += work.total_s
    return {
        **found,
        "replicated": round(alike / total, 4),
        "step ms": round(1e3 * decision.step_time_s, 2),
        "refused": "",
    }


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more_options)
    journal = Journal(chosen.journal)
    report = Report(
        name="joined_batches",
        question="Work that is replicated where a step joins or regroups its batch",
        bar=f"at most {LARGEST:.0%} of the predicted computing in every plan; no refusal",
        method=(
            "Plans from shapes alone, one micro-batch. Replicated is computing that no axis of the"
            " mesh divides, by predicted seconds; the update of state that a method keeps whole is"
            " left out. Deterministic: one run each."
        ),
    )
    names = list(LOSSES)[:2] if chosen.quick else list(LOSSES)
    rows = []
    for cluster in chosen.cluster or CLUSTERS:
        for name in names:
            for method in METHODS:
                key = f"{cluster} {name} {method}"
                rows.append(journal.row(key, functools.partial(row, name, method, cluster)))
    planned = [r for r in rows if r["replicated"] is not None]
    report.summary["plans"] = len(rows)
    report.summary["refused"] = len(rows) - len(planned)
    report.summary["largest share"] = max(r["replicated"] for r in planned)
    report.summary["above the bar"] = sum(r["replicated"] > LARGEST for r in planned)
    report.tables["Plans"] = rows
    met = len(planned) == len(rows) and report.summary["above the bar"] == 0
    return report.finish(chosen, met=met)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", action="append", choices=list(CLUSTERS), help="only this one")
    parser.add_argument(
        "--journal", type=Path, help="keeps rows, so that a run that was cut off can go on"
    )


if __name__ == "__main__":
    sys.exit(main())
