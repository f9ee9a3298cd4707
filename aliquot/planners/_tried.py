"""Pipelines among what was tried in a search."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import counted
from ..cost import ChainPlan
from ._base import Candidate, Decision
from ._one_program import OneProgram


def tried_pipeline(decision: Decision, outcome: str = "simulated") -> Candidate:
    """A pipeline as plans list it: its stages, its micro-batches, and the meshes of its stages."""
    assert decision.pipeline is not None
    meshes = dict.fromkeys("x".join(map(str, stage.priced.mesh.shape)) for stage in decision.stages)
    count = len(decision.stages)
    schedule = decision.pipeline.schedule.name
    return Candidate(
        name=(
            f"{decision.method}, {count} stages, {schedule}, {decision.num_micro_batches}"
            " micro-batches"
        ),
        mesh=next(iter(meshes)) if len(meshes) == 1 else f"{len(meshes)} meshes",
        lower_bound_s=_bound_of_steps_s(decision),
        step_time_s=decision.step_time_s,
        outcome=outcome,
    )


def on_hosts(method: str, num_hosts: int) -> str:
    """The name of a search on so many hosts."""
    return f"{method} on {counted(num_hosts, 'host')}"


def _bound_of_steps_s(decision: Decision) -> float | None:
    """The bound, unless the pipeline itself takes less: it holds for closed forms of single layers,
    and a step of stages solved as wholes may be faster than these.
    """
    bound_s = decision.lower_bound_s
    return bound_s if bound_s is not None and bound_s <= decision.step_time_s else None


def tried_program(program: OneProgram | None) -> tuple[Candidate, ...]:
    """One program that was not faster, of which a bound is known."""
    if program is None:
        return ()
    mesh = "x".join(map(str, program.mesh_shape))
    bound_s = program.least_s
    outcome = "no faster"
    return (
        Candidate(
            name="one program", mesh=mesh, lower_bound_s=bound_s, step_time_s=None, outcome=outcome
        ),
    )


def tried_counts(
    promised: ChainPlan | None, method: str, best_s: float, counts: Sequence[int]
) -> Candidate:
    """Numbers of micro-batches that were not searched on their own, with the step time of their
    best stages by prices of single layers where these are known.
    """
    slower = promised is not None and promised.step_time_s >= best_s
    listed = " or ".join(filter(None, [", ".join(map(str, counts[:-1])), str(counts[-1])]))
    return Candidate(
        name=f"{method}, {listed} micro-batches",
        mesh="",
        lower_bound_s=None,
        step_time_s=promised.step_time_s if promised else None,
        outcome=(
            "no faster by its layers"
            if slower
            else "not searched: limit on numbers of micro-batches"
        ),
    )
