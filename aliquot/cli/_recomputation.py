"""`--recompute auto`: a model of the zoo with and without recomputation, whichever is faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ..core import InfeasibleError, InputError, TimeLimitError
from ._model import Model, ZooOptions, resolve, user_code

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan

AUTO = "auto"


def with_either_recomputation(
    name: str,
    options: ZooOptions,
    where: Cluster,
    make: Callable[[Model, float | None], Plan],
    time_limit_s: float | None,
) -> Plan:
    """The faster of the plans without recomputation and with that of each block. Blocks are not
    tried where computing them again takes longer than the plan without. Ctrl-C hands over the
    faster so far.

    Args:
        make: plans a model within so many seconds.
        time_limit_s: over both plans.

    Raises:
        InfeasibleError: neither fits; says what is needed with recomputation.
        TimeLimitError: no plan was complete in time.
    """
    started = time.perf_counter()

    def left_s() -> float | None:
        return (
            None
            if time_limit_s is None
            else max(time_limit_s - (time.perf_counter() - started), 1e-3)
        )

    whole = resolve(name, replace(options, recompute="none"), where)
    plan: Plan | None = None
    try:
        # Half of the time is kept for the other.
        plan = make(whole, None if time_limit_s is None else time_limit_s / 2)
    except (InfeasibleError, TimeLimitError):
        pass
    blocks = resolve(name, replace(options, recompute="block"), where)
    if plan is not None and _least_s(blocks, where) >= plan.prediction.step_time_s:
        return _beside(plan, "recompute block", None)
    try:
        other = make(blocks, left_s())
    except (InfeasibleError, TimeLimitError):
        if plan is None:
            raise
        return _beside(plan, "recompute block", None)
    except KeyboardInterrupt as stopped:
        raise _with_faster(stopped, plan) from None
    if plan is None:
        return other
    if other.prediction.step_time_s < plan.prediction.step_time_s:
        return _beside(other, "recompute none", plan.prediction.step_time_s)
    return _beside(plan, "recompute block", other.prediction.step_time_s)


def is_searched(name: str, options: ZooOptions, method: AbstractMethod | PipeshardParallel) -> bool:
    """Whether both ways of recomputing are planned: where that is asked for, or left to a method
    that decides everything else, too.
    """
    from ..planners import Auto

    is_left_open = options.recompute is None and isinstance(method, Auto)
    return ":" not in name and (options.recompute == AUTO or is_left_open)


def refuse_auto(options: ZooOptions, model: str, option: str) -> None:
    """Refuse `--recompute auto` where it cannot be followed.

    Raises:
        InputError: with what to give instead.
    """
    if options.recompute == AUTO:
        raise InputError(
            f"--recompute auto does not go with {option or model}: give --recompute none or"
            " --recompute block."
        )


def _least_s(model: Model, where: Cluster) -> float:
    """Seconds of compute that no plan of a model undercuts."""
    from ..cost import make_problem
    from ..graph import capture
    from ..planners import least_compute_s

    with user_code(model.name):
        return least_compute_s(make_problem(capture(model.step, model.state, model.batch), where))


def _with_faster(stopped: KeyboardInterrupt, plan: Plan | None) -> KeyboardInterrupt:
    """The interruption with the faster of its plan and another."""
    from ..planners import Interrupted

    later: Plan | None = getattr(stopped, "plan", None)
    if plan is None or (
        later is not None and later.prediction.step_time_s < plan.prediction.step_time_s
    ):
        return stopped
    instead = Interrupted(None)
    instead.plan = _beside(plan, "recompute block", None, "interrupted")
    return instead


def _beside(
    plan: Plan,
    name: str,
    step_time_s: float | None,
    outcome: str = "slower by its compute alone, or not found in time",
) -> Plan:
    """The plan, with the other way of recomputing among what was tried."""
    tried = {
        "name": name,
        "mesh": "",
        "lower_bound_s": None,
        "step_time_s": step_time_s,
        "outcome": outcome if step_time_s is None else "slower",
    }
    provenance = msgspec.structs.replace(
        plan.provenance, candidates=(*plan.provenance.candidates, tried)
    )
    return msgspec.structs.replace(plan, provenance=provenance)
