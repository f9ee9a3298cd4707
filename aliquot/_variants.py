"""A training step that may be built in several ways, and the search for its fastest plan. All that
is asked about a step asks this search, so that the same question has one answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from ._plan_graph import plan_graph
from .cluster import Cluster
from .core import InfeasibleError, TimeLimitError, collecting_seldom
from .cost import Problem
from .graph import Graph, capture
from .planners import (
    AbstractMethod,
    Auto,
    Interrupted,
    PipeshardParallel,
    Task,
    WholeProgram,
    cannot_fit,
    least_compute_s,
)
from .plans import ModelReference, Plan

Method: TypeAlias = AbstractMethod | PipeshardParallel

# On more devices pipelines of the step without recomputation, where it is planned second, are
# searched only if the first plan is one.
_MANY_DEVICES = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One way to build a training step.

    Attributes:
        step, args, kwargs: as for `aliquot.plan`.
        model: how to build the step again, to be written into plans.
        name: for readers of plans, such as "--recompute block".
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: ModelReference | None = None
    name: str = ""
    _traced: list[tuple[Graph, float]] = field(default_factory=list, init=False, repr=False)

    @property
    def title(self) -> str:
        """What tables call the model."""
        return self.model.name if self.model else getattr(self.step, "__name__", "step")

    def traced(self) -> tuple[Graph, float]:
        """The captured step and the seconds that this took. It is traced once, whoever asks."""
        if not self._traced:
            started = time.perf_counter()
            graph = capture(self.step, *self.args, **self.kwargs)
            self._traced.append((graph, time.perf_counter() - started))
        return self._traced[0]


Variants: TypeAlias = tuple[Variant] | tuple[Variant, Variant]
"""A step as it is, or two ways to build it: the second computes more and keeps less in memory."""


@collecting_seldom()
def plan_variants(
    variants: Variants,
    *,
    cluster: Cluster | None = None,
    method: Method | None = None,
    time_limit_s: float | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan of a step that may be built in several ways.

    The variant that computes less is planned first. The other is then planned only if its compute
    alone, shared evenly by all devices, takes less than the plan of the first. Where the whole
    batch of the first cannot fit, the other is planned first.

    Method `Auto` chooses by stage what its pipelines recompute, so that those of the variant that
    computes less are enough. Where that comes second, on more than 128 devices its pipelines are
    searched only if the plan of the other is one.

    Args:
        time_limit_s: for all variants together.
        cluster, method, options: as for `aliquot.plan`.

    Raises:
        InfeasibleError: none fits; says what is needed by the variant that keeps less.
        TimeLimitError: no plan was complete in time.
        KeyboardInterrupt: on Ctrl-C, with the fastest plan so far.
    """
    started = time.perf_counter()
    where, how = cluster or Cluster.detect(), method or Auto()

    def left_s() -> float | None:
        if time_limit_s is None:
            return None
        return max(time_limit_s - (time.perf_counter() - started), 1e-3)

    def make(
        variant: Variant,
        within_s: float | None,
        *,
        faster_than_s: float = math.inf,
        pipelines: bool = True,
    ) -> Plan:
        used, since = how, time.perf_counter()
        if isinstance(how, (Auto, WholeProgram)):
            # Plans that take longer than this need not be searched in full.
            used = replace(how, faster_than_s=min(how.faster_than_s, faster_than_s))
        if isinstance(used, Auto):
            used = replace(used, pipelines=used.pipelines and pipelines)
        graph, trace_s = variant.traced()
        return plan_graph(
            graph,
            started=since,
            trace_s=trace_s,
            cluster=where,
            method=used,
            model=variant.model,
            time_limit_s=within_s,
            **options,
        )

    if len(variants) == 1:
        return make(variants[0], time_limit_s)
    limit_bytes = options.get("memory_limit_bytes")
    light, heavy = variants
    first, second = (heavy, light) if _cannot_fit(light, where, limit_bytes) else (light, heavy)
    plan: Plan | None = None
    try:
        # Half of the time is kept for the second plan.
        plan = make(first, None if time_limit_s is None else time_limit_s / 2)
    except InfeasibleError:
        # The lighter one keeps even more in memory.
        if first is heavy:
            raise
    except TimeLimitError:
        pass
    if plan is not None and second is heavy:
        if least_compute_s(_problem(heavy, where, limit_bytes)) >= plan.prediction.step_time_s:
            return _with_tried(plan, second, None)
    pipelines = plan is None or (
        second is light and (len(plan.stages) > 1 or where.num_devices <= _MANY_DEVICES)
    )
    to_beat_s = plan.prediction.step_time_s if plan else math.inf
    try:
        found = make(second, left_s(), faster_than_s=to_beat_s, pipelines=pipelines)
    except (InfeasibleError, TimeLimitError):
        if plan is None:
            raise
        return _with_tried(plan, second, None)
    except KeyboardInterrupt as stopped:
        raise _with_faster(stopped, plan, second) from None
    if plan is None:
        return found
    if found.prediction.step_time_s < plan.prediction.step_time_s:
        return _with_tried(found, first, plan.prediction.step_time_s)
    return _with_tried(plan, second, found.prediction.step_time_s)


def _cannot_fit(variant: Variant, where: Cluster, memory_limit_bytes: float | None) -> bool:
    return cannot_fit(_problem(variant, where, memory_limit_bytes))


def _problem(variant: Variant, where: Cluster, memory_limit_bytes: float | None) -> Problem:
    """The step on its whole batch."""
    graph, _ = variant.traced()
    return Task(graph=graph, cluster=where, memory_limit_bytes=memory_limit_bytes).problem(1)


def _with_faster(
    stopped: KeyboardInterrupt, plan: Plan | None, searched: Variant
) -> KeyboardInterrupt:
    """The interruption of the second plan, with the faster of both plans.

    Args:
        plan: the first, if there is one.
        searched: the second variant.
    """
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
    variant: Variant,
    step_time_s: float | None,
    outcome: str = "no faster, or not found in time",
) -> Plan:
    """The plan, with the other variant among what was tried.

    Args:
        step_time_s: of the other's plan; None if it has none, and then `outcome` says why.
    """
    tried = {
        "name": variant.name,
        "mesh": "",
        "lower_bound_s": None,
        "step_time_s": step_time_s,
        "outcome": outcome if step_time_s is None else "slower",
    }
    provenance = msgspec.structs.replace(
        plan.provenance, candidates=(*plan.provenance.candidates, tried)
    )
    return msgspec.structs.replace(plan, provenance=provenance)
