"""Candidates that plans list: pipelines, programs and numbers of micro-batches that were tried."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import counted
from ..cost import ChainPlan
from ._base import Candidate, Decision


def tried_decision(decision: Decision, outcome: str) -> Candidate:
    """A plan as a candidate: its micro-batches, its stages if it is a pipeline, and its meshes."""
    meshes = dict.fromkeys(str(stage.priced.mesh) for stage in decision.stages)
    parts = counted(decision.num_micro_batches, "micro-batch")
    if decision.pipeline is None:
        name, bound_s = f"no pipeline, {parts}", decision.lower_bound_s
    else:
        schedule, stages = decision.pipeline.schedule.name, counted(len(decision.stages), "stage")
        name = f"{decision.method}, {stages}, {schedule}, {parts}"
        least_s = decision.lower_bound_s
        bound_s = least_s if least_s is not None and least_s <= decision.step_time_s else None
    return Candidate(
        name=name,
        mesh=next(iter(meshes)) if len(meshes) == 1 else f"{len(meshes)} meshes",
        lower_bound_s=bound_s,
        step_time_s=decision.step_time_s,
        outcome=outcome,
    )


def on_hosts(method: str, num_hosts: int) -> str:
    """The name of a search on a number of hosts."""
    return f"{method} on {counted(num_hosts, 'host')}"


def tried_counts(
    promised: ChainPlan | None, method: str, best_s: float, counts: Sequence[int]
) -> Candidate:
    """A candidate for numbers of micro-batches that were not solved, with the step time of their
    best stages by prices of single layers, if known.
    """
    slower = promised is not None and promised.step_time_s >= best_s
    return Candidate(
        name=f"{method}, {listed(counts)} micro-batch{'es' if counts[-1] > 1 else ''}",
        step_time_s=promised.step_time_s if promised else None,
        outcome=(
            "slower, as estimated from its layers"
            if slower
            else "not searched: limit on numbers of micro-batches"
            + ("; a rough estimate from its layers" if promised else "")
            + "; --micro-batches N searches one"
        ),
    )


def listed(counts: Sequence[int]) -> str:
    """Numbers as words: `2, 4 or 8`."""
    return " or ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))
