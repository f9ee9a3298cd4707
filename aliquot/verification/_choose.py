"""Search for a plan that fits by its compiler's account."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec

from ..core import InfeasibleError, format_bytes
from ..plans import CompiledFigures, Plan
from ._verify import Verification

_TRIES = 3
# Predictions are rarely too high by more than this factor.
_WORTH_COMPILING = 1.5


def first_that_fits(
    propose: Callable[[float | None], Plan],
    check: Callable[[Plan], Verification],
    *,
    tries: int = _TRIES,
) -> Plan:
    """The best plan that fits by its compiler's account, with the compiled figures in it.

    After a plan that does not fit, the next is planned with a memory limit that is lowered in the
    ratio by which the prediction fell short. The notes of the chosen plan name the plans that did
    not fit. If nothing is predicted to fit, the plan that is predicted to need the least is
    compiled, unless that is far more than there is.

    Args:
        propose: makes the best plan within a memory limit in bytes; None for the usual one, which
            is also that of the plans' predictions.
        check: compiles a plan.
        tries: how many plans to compile at most.

    Raises:
        InfeasibleError: none of them fits; lists what each needs.
    """
    failed: list[tuple[Plan, Verification]] = []
    limit: float | None = None
    for _ in range(tries):
        try:
            plan = propose(limit)
        except InfeasibleError as error:
            if not failed:
                return _smallest_if_it_fits(propose, check, error)
            raise _none(
                failed,
                f"With a limit corrected by that, none is left: {str(error).partition(chr(10))[0]}",
            ) from None
        verified = check(plan)
        if verified.fits:
            return _noted(plan, verified, failed)
        failed.append((plan, verified))
        compiled = verified.compiled_bytes
        available = verified.limit_bytes or plan.prediction.memory_limit_bytes
        # Below this plan's own prediction, so that it is not proposed again.
        limit = plan.prediction.peak_memory_bytes * min(available / compiled, 0.99)
    raise _none(failed, f"No more than {tries} were compiled.")


def _smallest_if_it_fits(
    propose: Callable[[float | None], Plan],
    check: Callable[[Plan], Verification],
    refusal: InfeasibleError,
) -> Plan:
    """The plan that is predicted to need the least, if it fits by its compiler's account although
    it was predicted not to. Raises the refusal otherwise, with what the compiler said.
    """
    needed, limit = refusal.required_bytes, refusal.available_bytes
    if not needed or not limit or needed > _WORTH_COMPILING * limit:
        raise refusal
    try:
        # Room for rounding in the search.
        plan = propose(needed * (1 + 1e-6) + 1)
    except InfeasibleError:
        raise refusal from None
    verified = check(plan)
    if not verified.fits:
        raise refusal.reworded(
            f"{refusal.message}\n  Compiled for {verified.target.name}, the smallest needs"
            f" {format_bytes(verified.compiled_bytes)}.",
            refusal.advice,
        )
    noted = _noted(plan, verified, [])
    note = "It was predicted not to fit, and fits by its compiler's account."
    return msgspec.structs.replace(noted, notes=(note, *noted.notes))


def compiled_figures(verified: Verification) -> CompiledFigures:
    """The figures of a compilation, in the form in which a plan keeps them."""
    worst = max(verified.stages, key=lambda stage: stage.compiled_bytes)
    c = worst.compiled
    return CompiledFigures(
        target=verified.target.name,
        fits=verified.fits,
        peak_memory_bytes=verified.compiled_bytes,
        memory_bytes={
            "arguments": float(c.argument_bytes),
            "outputs": float(c.output_bytes),
            "temporaries": float(c.temp_bytes),
            "aliases": float(c.alias_bytes),
        },
        unintended=tuple(map(str, itertools.chain(*(s.unintended for s in verified.stages)))),
        compile_s=sum(stage.compiled.compile_s for stage in verified.stages),
    )


def _noted(plan: Plan, verified: Verification, failed: Sequence[tuple[Plan, Verification]]) -> Plan:
    figures = compiled_figures(verified)
    notes = [
        f"Compiled for {figures.target}: {format_bytes(figures.peak_memory_bytes)} on each device, "
        f"{format_bytes(plan.prediction.peak_memory_bytes)} were predicted."
    ]
    notes += [f"Not in the plan, but in its program: {each}." for each in figures.unintended]
    notes += [
        f"A plan that was predicted to be faster does not fit: {_line(*each)}." for each in failed
    ]
    return msgspec.structs.replace(plan, compiled=figures, notes=(*notes, *plan.notes))


def _none(failed: Sequence[tuple[Plan, Verification]], why: str) -> InfeasibleError:
    best_plan, best = min(failed, key=lambda each: each[1].compiled_bytes)
    listed = "".join(f"\n  - {_line(*each)}" for each in failed)
    return InfeasibleError(
        f"no plan fits {best.num_devices} x {best.target.name} by its compiler's account:{listed}\n"
        f"  {why}",
        required_bytes=best.compiled_bytes,
        available_bytes=best.limit_bytes,
        parts=best_plan.prediction.memory_bytes,
    )


def _line(plan: Plan, verified: Verification) -> str:
    mesh = "x".join(map(str, plan.stages[0].mesh_shape))
    where = f"on a mesh {mesh}" if len(plan.stages) == 1 else f"in {len(plan.stages)} stages"
    compiled = verified.compiled_bytes
    limit = f" of {format_bytes(verified.limit_bytes)}" if verified.limit_bytes is not None else ""
    return (
        f"{plan.method} {where} needs {format_bytes(compiled)}{limit}, "
        f"{format_bytes(plan.prediction.peak_memory_bytes)} were predicted"
    )
