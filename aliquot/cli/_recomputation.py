"""`--recompute auto`: a model of the zoo with and without recomputation, whichever is faster."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from ..core import InfeasibleError, InputError, TimeLimitError
from ._model import Model, ZooOptions, resolve, user_code

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..cost import Problem
    from ..planners import AbstractMethod, PipeshardParallel
    from ..plans import Plan

AUTO = "auto"
# On more devices, what one way of recomputing does not gain from stages the other is not asked for.
_MANY_DEVICES = 128


class Make(Protocol):
    """Plans a model within so many seconds: of method auto only what is faster than
    `faster_than_s`, and with `pipelines` or without.
    """

    def __call__(
        self,
        model: Model,
        within_s: float | None,
        *,
        faster_than_s: float = math.inf,
        pipelines: bool = True,
    ) -> Plan: ...


def with_either_recomputation(
    name: str,
    options: ZooOptions,
    where: Cluster,
    make: Make,
    time_limit_s: float | None,
    memory_limit_bytes: float | None = None,
) -> Plan:
    """The faster of the plans without recomputation and with that of each block. Blocks are not
    tried where computing them again takes longer than the plan without. Where the whole batch does
    not fit without recomputation, blocks come first. Ctrl-C hands over the faster so far. Pipelines
    choose by stage what they recompute, so that with method auto those without blocks are enough,
    and on more than 128 devices none where one program of blocks is faster than their pipelines.

    Args:
        time_limit_s: over both plans.

    Raises:
        InfeasibleError: neither fits; says what is needed with recomputation.
        TimeLimitError: no plan was complete in time.
    """
    from ..planners import cannot_fit, least_compute_s

    started = time.perf_counter()

    def left_s() -> float | None:
        if time_limit_s is None:
            return None
        return max(time_limit_s - (time.perf_counter() - started), 1e-3)

    # Half of the time is kept for the second.
    first_s = None if time_limit_s is None else time_limit_s / 2
    whole = resolve(name, replace(options, recompute="none"), where)
    blocks = resolve(name, replace(options, recompute="block"), where)
    first, second = whole, blocks
    if cannot_fit(_problem(whole, where, memory_limit_bytes)):
        first, second = blocks, whole
    plan: Plan | None = None
    try:
        plan = make(first, first_s)
    except InfeasibleError:
        # Without recomputation more is kept.
        if first is blocks:
            raise
    except TimeLimitError:
        pass
    other = "recompute block" if second is blocks else "recompute none"
    if plan is not None and second is blocks:
        compute_s = least_compute_s(_problem(blocks, where, memory_limit_bytes))
        if compute_s >= plan.prediction.step_time_s:
            return _beside(plan, other, None)
    least_s = plan.prediction.step_time_s if plan else math.inf
    pipelines = plan is None or (
        second is whole and (len(plan.stages) > 1 or where.num_devices <= _MANY_DEVICES)
    )
    try:
        found = make(second, left_s(), faster_than_s=least_s, pipelines=pipelines)
    except (InfeasibleError, TimeLimitError):
        if plan is None:
            raise
        return _beside(plan, other, None)
    except KeyboardInterrupt as stopped:
        raise _with_faster(stopped, plan, other) from None
    if plan is None:
        return found
    if found.prediction.step_time_s < plan.prediction.step_time_s:
        before = "recompute none" if second is blocks else "recompute block"
        return _beside(found, before, plan.prediction.step_time_s)
    return _beside(plan, other, found.prediction.step_time_s)


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


def _problem(model: Model, where: Cluster, memory_limit_bytes: float | None) -> Problem:
    from ..cost import make_problem
    from ..graph import capture

    with user_code(model.name):
        graph = capture(model.step, model.state, model.batch)
    return make_problem(graph, where, memory_limit_bytes=memory_limit_bytes)


def _with_faster(stopped: KeyboardInterrupt, plan: Plan | None, searched: str) -> KeyboardInterrupt:
    """The interruption with the faster of its plan and another.

    Args:
        searched: what the search that was interrupted is called.
    """
    from ..planners import Interrupted

    later: Plan | None = getattr(stopped, "plan", None)
    if plan is None or (
        later is not None and later.prediction.step_time_s < plan.prediction.step_time_s
    ):
        return stopped
    instead = Interrupted(None)
    instead.plan = _beside(plan, searched, None, "interrupted")
    return instead


def _beside(
    plan: Plan,
    name: str,
    step_time_s: float | None,
    outcome: str = "no faster, or not found in time",
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
