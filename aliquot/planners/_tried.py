"""Candidates that plans list: pipelines, programs and numbers of micro-batches that were tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core import counted
from ..cost import ChainPlan
from ._base import Candidate, Decision

if TYPE_CHECKING:
    from ._one_program import OneProgram


def tried_pipeline(decision: Decision, outcome: str = "simulated") -> Candidate:
    """A pipeline as a candidate: its stages, its micro-batches, and the meshes of its stages."""
    assert decision.pipeline is not None
    meshes = dict.fromkeys("x".join(map(str, stage.priced.mesh.shape)) for stage in decision.stages)
    schedule = decision.pipeline.schedule.name
    stages = counted(len(decision.stages), "stage")
    parts = counted(decision.num_micro_batches, "micro-batch")
    return Candidate(
        name=f"{decision.method}, {stages}, {schedule}, {parts}",
        mesh=next(iter(meshes)) if len(meshes) == 1 else f"{len(meshes)} meshes",
        lower_bound_s=_bound_of_steps_s(decision),
        step_time_s=decision.step_time_s,
        outcome=outcome,
    )


def on_hosts(method: str, num_hosts: int) -> str:
    """The name of a search on a number of hosts."""
    return f"{method} on {counted(num_hosts, 'host')}"


def _bound_of_steps_s(decision: Decision) -> float | None:
    """The lower bound; None if the pipeline itself takes less. The bound holds for closed forms of
    layers priced one by one, and stages that are solved as a whole may be faster.
    """
    bound_s = decision.lower_bound_s
    return bound_s if bound_s is not None and bound_s <= decision.step_time_s else None


def tried_programs(
    solved: Sequence[Decision], estimated: OneProgram | None
) -> tuple[Candidate, ...]:
    """Programs that are slower than a pipeline: those that were solved, or else the estimate of one
    from its layers.
    """
    if solved:
        return tuple(
            Candidate(
                name=_name_of_program(each.num_micro_batches),
                mesh="x".join(map(str, each.stages[0].priced.mesh.shape)),
                lower_bound_s=each.lower_bound_s,
                step_time_s=each.step_time_s,
                outcome="slower",
            )
            for each in solved
        )
    if estimated is None:
        return ()
    return (
        Candidate(
            name=_name_of_program(estimated.num_micro_batches),
            mesh="x".join(map(str, estimated.mesh_shape)),
            # The estimate is a sum over layers, not a bound: the whole step may take less.
            lower_bound_s=None,
            step_time_s=estimated.least_s,
            outcome="slower, as estimated from its layers",
        ),
    )


def _name_of_program(num_micro_batches: int) -> str:
    return f"program, {counted(num_micro_batches, 'micro-batch')}"


def tried_counts(
    promised: ChainPlan | None, method: str, best_s: float, counts: Sequence[int]
) -> Candidate:
    """A candidate for numbers of micro-batches that were not solved, with the step time of their
    best stages by prices of single layers, if known.
    """
    slower = promised is not None and promised.step_time_s >= best_s
    return Candidate(
        name=f"{method}, {listed(counts)} micro-batch{'es' if counts[-1] > 1 else ''}",
        mesh="",
        lower_bound_s=None,
        step_time_s=promised.step_time_s if promised else None,
        outcome=(
            "slower, as estimated from its layers"
            if slower
            else "not searched: limit on numbers of micro-batches"
        ),
    )


def listed(counts: Sequence[int]) -> str:
    """Numbers as words: `2, 4 or 8`."""
    return " or ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))
