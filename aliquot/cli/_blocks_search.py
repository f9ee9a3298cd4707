"""Parts of `aliquot blocks search`: composing measured segments, and running what was found."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InfeasibleError, InputError
from ._session import Session

if TYPE_CHECKING:
    from ..planners import IntraSolution
    from ..profiling import CompiledPart, SegmentedStep
    from ._blocks import Asked

# How often the plan that a search found is timed anew.
_ROUNDS = 3


def composed_rows(
    asked: Asked,
    database: Path,
    limit_bytes: float,
    most: int,
    require_measured: float,
    say: Session,
) -> list[dict[str, Any]]:
    """The fastest combinations that fit, as rows.

    Raises:
        InputError: there is no such database, or too little of the best was measured.
        InfeasibleError: none fits.
    """
    from ..profiling import ProfileDatabase, compose, measured_step, priced_combinations

    step = asked.step
    combinations = priced_combinations(step)
    with ProfileDatabase(database, must_exist=True) as known:
        measured = measured_step(step, combinations, known)
    if not any(measured.kinds):
        say.show(
            f"{database} holds none of this step's segments, measured on these devices with"
            " this release of JAX: all times are modelled. Measure them, with the same options"
            f" of the model: aliquot blocks profile {asked.model.name} --database {database}"
        )
    best = compose(step, combinations, measured, memory_limit_bytes=limit_bytes, most=most)
    if not best:
        least = min(c.memory_bytes for c in compose(step, combinations, measured, most=10**6))
        raise InfeasibleError(
            f"No combination fits in {limit_bytes / 2**30:.2f} GiB on each device; the smallest"
            f" needs {least / 2**30:.2f} GiB. Use a smaller batch, more devices, or --recompute"
            " block."
        )
    if best[0].measured_share < require_measured:
        raise InputError(
            f"{best[0].measured_share:.0%} of the best plan's time was measured, and"
            f" --require-measured asks for {require_measured:.0%}. Measure more: aliquot blocks"
            f" profile {asked.model.name} --database {database}"
        )
    return [
        {
            "options": list(map(list, c.options)),
            "step_time_s": c.seconds,
            "peak_memory_bytes": c.memory_bytes,
            "measured_share": c.measured_share,
            "combinations": sum(map(len, combinations)),
            "measured_combinations": sum(map(len, measured.kinds)),
        }
        for c in best
    ]


def run_best(
    step: SegmentedStep, found: list[dict[str, Any]], run: int, report: Any
) -> list[dict[str, Any]]:
    """The rows of a search, of which the first ones ran as whole steps; these first, the fastest
    before the others.
    """
    from ..profiling import time_part

    timed = []
    for done, row in enumerate(found[:run]):
        report("running whole steps", done, run)
        solution = step.whole(row["options"])
        if solution is not None:
            whole = time_part(compile_whole(step, solution))
            timed.append({**row, "measured_s": whole.seconds, "compiled_bytes": whole.memory_bytes})
    ran = sorted(
        (row for row in timed if row["measured_s"] is not None), key=lambda row: row["measured_s"]
    )
    return [*ran, *[row for row in timed if row["measured_s"] is None], *found[run:]]


def costs(asked: Asked, best: dict[str, Any]) -> dict[str, Any]:
    """The best of a search timed in three rounds more, with what it computes in a step and a
    second; nothing if it did not run.
    """
    from ..profiling import time_part

    if best.get("measured_s") is None:
        return {}
    solution = asked.step.whole(best["options"])
    assert solution is not None
    part = compile_whole(asked.step, solution)
    costs_s = [seconds for _ in range(_ROUNDS) if (seconds := time_part(part).seconds)]
    # The zoo knows what its models compute; of other steps the products are counted.
    works = itertools.chain(*asked.step.problem.work)
    flops = asked.model.reference.flops_per_step or sum(work.flops for work in works)
    rate = flops / statistics.median(costs_s) if costs_s else None
    return {"costs_s": costs_s, "flops": flops, "flops_per_s": rate}


def compile_whole(step: SegmentedStep, solution: IntraSolution) -> CompiledPart:
    """A whole step for the devices of this process."""
    from ..profiling import compile_part

    choices = solution.picked.choices
    return compile_part(step.problem, choices, step.mesh.shape, step.mesh.axis_names)


def write_plan(
    asked: Asked, options: Sequence[Sequence[int]], factors: str, limit_bytes: float, out: Path
) -> None:
    from .._api import plan
    from ..planners import Blocks, ShardParallel

    step = asked.step
    only = {}
    for k, chosen in enumerate(options):
        for b, o in zip(step.blocks_of(k), chosen, strict=True):
            only[b] = o
    intra = Blocks(factors=factors, only=tuple(only[b] for b in range(len(step.blocks))))
    composed = plan(
        asked.model.step,
        asked.model.state,
        asked.model.batch,
        cluster=step.problem.cluster,
        method=ShardParallel(intra=intra, mesh_shape=step.mesh.shape),
        memory_limit_bytes=limit_bytes,
        # The blocks that were profiled are those of the step as it is.
        recompute="none",
        model=asked.model.reference,
    )
    composed.save(out)
