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
# On more devices pipelines of the model without recomputation, where it is planned second, are
# searched only if the first plan is one.
_MANY_DEVICES = 128


class Make(Protocol):
    """Function that plans a model within so many seconds. Method auto then searches only plans that
    take less than `faster_than_s`, with `pipelines` or without.
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
    """The faster of two plans: of the plain model, and of the one that recomputes each block.

    The plain model is planned first. Blocks are then planned only if their compute alone, shared
    evenly by all devices, takes less than the plain plan. Where the whole batch cannot fit without
    recomputation, blocks come first. Ctrl-C hands over the faster so far.

    With method auto, pipelines choose by stage what they recompute, so that those of the plain
    model are enough. Where it comes second, on more than 128 devices its pipelines are searched
    only if the plan with blocks is one.

    Args:
        name: of the model, as `resolve` takes it.
        where: the cluster.
        make: plans a model.
        time_limit_s: for both plans together.

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

    # Half of the time is kept for the second plan.
    first_s = None if time_limit_s is None else time_limit_s / 2
    plain = resolve(name, replace(options, recompute="none"), where)
    blocks = resolve(name, replace(options, recompute="block"), where)
    first, second = plain, blocks
    if cannot_fit(_problem(plain, where, memory_limit_bytes)):
        first, second = blocks, plain
    plan: Plan | None = None
    try:
        plan = make(first, first_s)
    except InfeasibleError:
        # Without recomputation even more is kept in memory.
        if first is blocks:
            raise
    except TimeLimitError:
        pass
    first_name, second_name = "recompute none", "recompute block"
    if second is plain:
        first_name, second_name = second_name, first_name
    if plan is not None and second is blocks:
        compute_s = least_compute_s(_problem(blocks, where, memory_limit_bytes))
        if compute_s >= plan.prediction.step_time_s:
            return _with_tried(plan, second_name, None)
    to_beat_s = plan.prediction.step_time_s if plan else math.inf
    pipelines = plan is None or (
        second is plain and (len(plan.stages) > 1 or where.num_devices <= _MANY_DEVICES)
    )
    try:
        found = make(second, left_s(), faster_than_s=to_beat_s, pipelines=pipelines)
    except (InfeasibleError, TimeLimitError):
        if plan is None:
            raise
        return _with_tried(plan, second_name, None)
    except KeyboardInterrupt as stopped:
        raise _with_faster(stopped, plan, second_name) from None
    if plan is None:
        return found
    if found.prediction.step_time_s < plan.prediction.step_time_s:
        return _with_tried(found, first_name, plan.prediction.step_time_s)
    return _with_tried(plan, second_name, found.prediction.step_time_s)


def plans_both_ways(
    name: str, options: ZooOptions, method: AbstractMethod | PipeshardParallel
) -> bool:
    """True if both ways of recomputing are planned: that is asked for, or left to a method that
    decides everything else, too.
    """
    from ..planners import Auto

    is_left_open = options.recompute is None and isinstance(method, Auto)
    return ":" not in name and (options.recompute == AUTO or is_left_open)


def refuse_auto(options: ZooOptions, model: str, option: str) -> None:
    """Refuse `--recompute auto` where it cannot be followed.

    Args:
        model, option: what it does not go with: the option, or if that is empty the model.

    Raises:
        InputError: with what to give instead.
    """
    if options.recompute == AUTO:
        raise InputError(
            f"--recompute auto does not go with {option or model}: give --recompute none or"
            " --recompute block."
        )


def _problem(model: Model, where: Cluster, memory_limit_bytes: float | None) -> Problem:
    """The step of a model on its whole batch."""
    from ..cost import make_problem
    from ..graph import capture

    with user_code(model.name):
        graph = capture(model.step, model.state, model.batch)
    return make_problem(graph, where, memory_limit_bytes=memory_limit_bytes)


def _with_faster(stopped: KeyboardInterrupt, plan: Plan | None, searched: str) -> KeyboardInterrupt:
    """The interruption of the second plan, with the faster of both plans.

    Args:
        plan: the first, if there is one.
        searched: the name of the second way of recomputing.
    """
    from ..planners import Interrupted

    later: Plan | None = getattr(stopped, "plan", None)
    if plan is None or (
        later is not None and later.prediction.step_time_s < plan.prediction.step_time_s
    ):
        return stopped
    instead = Interrupted(None)
    instead.plan = _with_tried(plan, searched, None, "interrupted")
    return instead


def _with_tried(
    plan: Plan,
    name: str,
    step_time_s: float | None,
    outcome: str = "no faster, or not found in time",
) -> Plan:
    """The plan, with the other way of recomputing among what was tried.

    Args:
        name: of that other way.
        step_time_s: of its plan; None if it has none, and then `outcome` says why.
    """
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
