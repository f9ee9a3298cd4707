"""How much is lost by relief of the bottleneck, against the dynamic program over stages?

Steps of the zoo are planned as pipelines by `PipeshardParallel` with `Bottleneck` and with
`StageDP`. Both search the same layers and prices; their stages are solved as wholes, and judged by
the same cost model.

    python benchmarks/bottleneck_against_stages.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

from _results import Journal, Report, options, with_rows

from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.graph import capture
from aliquot.planners import Bottleneck, PipeshardParallel, StageDP, Task

_BAR, _GOAL = 0.03, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step on a cluster; what is None is searched."""

    model: str
    cluster: str
    global_batch: int
    stages: int | None = None
    micro_batches: int | None = None
    recompute: str = "none"
    semantics: str = "exact"

    @property
    def name(self) -> str:
        """What tables call it."""
        asked = [f"{self.stages} stages"] if self.stages else []
        asked += [f"{self.micro_batches} micro-batches"] if self.micro_batches else []
        return ", ".join([f"{self.model} on {self.cluster}", *asked])


_GPT: dict[str, Any] = {"model": "gpt-2.6b", "global_batch": 1024, "recompute": "block"}
_LLAMA: dict[str, Any] = {"model": "llama-7b", "global_batch": 256, "recompute": "block"}
_RESNET: dict[str, Any] = {
    "model": "wide-resnet-2b",
    "global_batch": 1536,
    "semantics": "independent",
}
CASES = tuple(
    Case(**step, cluster=cluster, stages=stages, micro_batches=count)
    for step, cluster, stages, count in (
        (_GPT, "8xV100-16GB", 8, 128),
        (_GPT, "4x8xV100-16GB", None, 64),
        (_GPT, "4x8xV100-16GB", 8, 64),
        (_LLAMA, "2x8xA100-40GB", 4, 32),
        (_LLAMA, "4x8xV100-32GB", 8, 32),
        (_RESNET, "8xV100-16GB", 4, 96),
        (_RESNET, "2x8xV100-16GB", None, 64),
    )
)


def main() -> int:
    """Run, and write what came out; 1 if the bar is missed."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="bottleneck_against_stages",
        question="How much is lost by relief of the bottleneck, against the dynamic program?",
        bar=f"step time within {_BAR:.0%} of `StageDP`'s on every step; goal {_GOAL:.0%}",
        method=(
            "`PipeshardParallel(inter=Bottleneck())` and `(inter=StageDP())`, pipelines alone, one"
            " stage included; both price the same layers, and their stages are solved as wholes."
            " What a case does not name is searched. Step times are the cost model's. Seconds are"
            " CPU time of the main process, pricing of layers included."
        ),
    )
    journal = Journal(chosen.journal)
    cases = [case for case in CASES if chosen.only in case.name]
    rows = [
        journal.row(case.name, functools.partial(_row, case))
        for case in (cases[1:2] if chosen.quick else cases)
    ]
    report.tables["Steps"] = rows
    losses = [row["bottleneck / dp"] - 1 for row in rows]
    report.summary = {
        "cases": len(rows),
        "worst loss": max(losses),
        "best gain": -min(losses),
        "within the goal": sum(loss <= _GOAL for loss in losses),
        "seconds, dynamic program": sum(row["dp s"] for row in rows),
        "seconds, relief": sum(row["bottleneck s"] for row in rows),
    }
    partial = chosen.quick or chosen.only
    return report.finish(chosen, met=None if partial else max(losses) <= _BAR)


def _row(case: Case) -> dict[str, Any]:
    work = zoo.build(case.model, case.global_batch, recompute=case.recompute)
    task = Task(
        graph=capture(work.train_step, work.state, work.batch),
        cluster=Cluster.preset(case.cluster),
        num_micro_batches=case.micro_batches,
        semantics=case.semantics,
    )
    row: dict[str, Any] = {"step": case.name}
    times = {}
    for label, inter in (("dp", StageDP()), ("bottleneck", Bottleneck())):
        method = PipeshardParallel(
            inter=inter, num_stages=case.stages, num_micro_batches=case.micro_batches
        )
        start = time.process_time()
        found = method.decide(task)
        assert found.pipeline is not None
        times[label] = found.step_time_s
        row |= {
            f"{label} step s": found.step_time_s,
            f"{label} plan": (
                f"{len(found.stages)} stages, {found.pipeline.schedule.name},"
                f" {found.num_micro_batches} micro-batches"
            ),
            f"{label} s": round(time.process_time() - start, 1),
        }
    row["bottleneck / dp"] = times["bottleneck"] / times["dp"]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
