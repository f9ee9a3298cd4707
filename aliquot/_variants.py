"""A training step that may be built in several ways, and the search for its fastest plan. All that
is asked about a step asks this search, so that the same question has one answer.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from ._plan_graph import plan_graph
from .cluster import Cluster
from .core import InfeasibleError, InputError, TimeLimitError, collecting_seldom
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
from .plans import RECOMPUTED_BY_STAGE, ModelReference, Plan, recomputes_by_stage

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
        name_by_stage: its name where stages of its plan recompute; empty for a name made of `name`.
        recompute: as for `aliquot.plan`.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: ModelReference | None = None
    name: str = ""
    name_by_stage: str = ""
    recompute: str | None = None
    _traced: list[tuple[Graph, float]] = field(default_factory=list, init=False, repr=False)
    _tasks: list[Task] = field(default_factory=list, init=False, repr=False)

    @property
    def title(self) -> str:
        """What tables call the model."""
        return self.model.name if self.model else getattr(self.step, "__name__", "step")

    def named(self, plan: Plan) -> str:
        """Its name, for readers of a plan of it."""
        if not recomputes_by_stage(plan):
            return self.name
        return self.name_by_stage or f"{self.name}, {RECOMPUTED_BY_STAGE}"

    def traced(self) -> tuple[Graph, float]:
        """The captured step and the seconds that this took. It is traced once, whoever asks."""
        if not self._traced:
            started = time.perf_counter()
            graph = capture(self.step, *self.args, **self.kwargs)
            self._traced.append((graph, time.perf_counter() - started))
        return self._traced[0]

    def task(self, cluster: Cluster, **options: Any) -> Task:
        """The task of planning it for a cluster, with other fields of `Task`. Its problems are made
        once for all such tasks.
        """
        graph, _ = self.traced()
        if not self._tasks:
            self._tasks.append(Task(graph=graph, cluster=cluster))
        return replace(self._tasks[0], cluster=cluster, **options)


Variants: TypeAlias = tuple[Variant, ...]
"""The ways to build one step. Each computes no less than the one before, and keeps less in memory.
"""


def plan_fastest(
    build: Callable[..., tuple[Callable[..., Any], Any, Any]],
    ways: Sequence[Mapping[str, Any]],
    **options: Any,
) -> Plan:
    """The fastest plan of a training step that can be built in several ways, such as with and
    without recomputation::

        plan = aq.plan_fastest(build, [{"recompute": False}, {"recompute": True}], cluster=cluster)
        train_step, state, batch = build(**plan.model.settings)

    A way is searched only if it may be faster than the best plan so far, and no further than until
    it cannot be. The others are listed among what was tried.

    Args:
        build: called with the arguments of a way, returns `(train_step, state, batch)`; state and
            batch may be arrays or `jax.ShapeDtypeStruct`s.
        ways: arguments of `build`, each of which computes no less than the one before and keeps
            less in memory.
        options: `cluster`, `method`, `time_limit_s` (for all ways together) and other options of
            `aliquot.plan`.

    Returns:
        The plan; `plan.model.settings` are the arguments of its way.

    Raises:
        InputError: no way is given.
        InfeasibleError, TimeLimitError, Interrupted: as for `aliquot.plan`, of all ways together.
    """
    if not ways:
        raise InputError(
            "plan_fastest needs at least one way to build the step: a list of arguments of `build`,"
            ' such as [{"recompute": False}, {"recompute": True}].'
        )
    module, function = getattr(build, "__module__", "__main__"), getattr(build, "__qualname__", "")
    # Nobody else can find functions of a script, or within functions.
    is_found = module != "__main__" and function.isidentifier()
    variants = []
    for way in ways:
        try:
            settings = msgspec.to_builtins(dict(way))
        except TypeError as error:
            raise InputError(
                f"plan_fastest writes the arguments of a way into the plan, and {dict(way)!r:.200}"
                f" cannot be written: {error}. Give numbers, texts, or lists of them."
            ) from None
        step, *args = build(**way)
        model = ModelReference(
            kind="factory" if is_found else "closure",
            name=f"{module}:{function}" if is_found else function or "step",
            settings=settings,
        )
        named = ", ".join(f"{key}={value}" for key, value in way.items())
        variants.append(Variant(step=step, args=tuple(args), model=model, name=named))
    return plan_variants(tuple(variants), **options)


@collecting_seldom()
def plan_variants(
    variants: Variants,
    *,
    cluster: Cluster | None = None,
    method: Method | None = None,
    time_limit_s: float | None = None,
    recompute: str | None = None,
    **options: Any,
) -> Plan:
    """The fastest plan of a step that may be built in several ways.

    The first variant whose whole batch can fit is planned first, then the others in their order.
    Where stages are searched for, they are planned in their order: pipelines need less memory, and
    choose by stage what they recompute. Each is planned only if its compute alone, shared evenly by
    all devices, takes less than the best plan so far, and searched only for plans that are faster.

    Method `Auto` chooses by stage what its pipelines recompute, so that those of the variant that
    computes least are enough. Where that comes later, on more than 128 devices its pipelines are
    searched only if the best plan so far is one.

    Args:
        time_limit_s: for all variants together.
        cluster, method, recompute, options: as for `aliquot.plan`.

    Raises:
        InfeasibleError: none fits; says what is needed by the variant that keeps least.
        TimeLimitError: no plan was complete in time.
        KeyboardInterrupt: on Ctrl-C, with the fastest plan so far.
    """
    started = time.perf_counter()
    where, how = cluster or Cluster.detect(), method or Auto()
    names = ("memory_limit_bytes", "on_missing_rule")
    given = {name: options[name] for name in names if name in options}

    @functools.cache
    def task(variant: Variant) -> Task:
        return variant.task(where, **given)

    def can_fit(variant: Variant) -> bool:
        """False if the whole batch is too large, or what all variants keep from step to step."""
        return task(variants[-1]).holds_state and not cannot_fit(task(variant).problem(1))

    searches = isinstance(how, (Auto, WholeProgram)) or (
        isinstance(how, PipeshardParallel) and how.inter.searches
    )
    if isinstance(how, PipeshardParallel) and searches:
        first = variants[0]
    else:
        first = next((v for v in variants[:-1] if can_fit(v)), variants[-1])
    ordered = [first, *(v for v in variants if v is not first)]
    best, best_name, tried = None, "", list[dict[str, Any]]()
    too_large: Variants = ()
    refusal: InfeasibleError | TimeLimitError | None = None
    for k, variant in enumerate(ordered):
        to_beat_s = best.prediction.step_time_s if best else math.inf
        if variant in too_large:
            tried.append(
                _tried(variant.name, outcome="does not fit: it keeps more than one that does not")
            )
            continue
        if best and least_compute_s(task(variant).problem(1)) >= to_beat_s:
            tried.append(
                _tried(
                    variant.name,
                    outcome="slower: its compute alone takes longer than the chosen plan",
                )
            )
            continue
        used, since = how, time.perf_counter()
        if isinstance(how, (Auto, WholeProgram, PipeshardParallel)) and searches:
            # Plans that take longer than this need not be searched in full.
            used = replace(how, faster_than_s=min(how.faster_than_s, to_beat_s))
        if isinstance(used, Auto) and best:
            is_few = len(best.stages) > 1 or where.num_devices <= _MANY_DEVICES
            used = replace(used, pipelines=used.pipelines and variant is variants[0] and is_few)
        graph, trace_s = variant.traced()
        left_s = None
        if time_limit_s is not None:
            # The others have their share of what is left.
            left_s = time_limit_s - (time.perf_counter() - started)
            left_s = max(left_s / (len(ordered) - k), 1e-3)
        try:
            found = plan_graph(
                graph,
                like=task(variant),
                started=since,
                trace_s=trace_s,
                cluster=where,
                method=used,
                model=variant.model,
                recompute=variant.recompute or recompute,
                time_limit_s=left_s,
                **options,
            )
        except (InfeasibleError, TimeLimitError) as error:
            # Of variants that do not fit, the last keeps least.
            if variant is variants[-1] or refusal is None:
                refusal = error
            if best is None and isinstance(error, InfeasibleError):
                too_large = variants[: variants.index(variant)]
            outcome = "no faster plan fits" if best and searches else "does not fit"
            if best and not searches and best.num_micro_batches == len(best.stages) == 1:
                outcome += " with the whole batch at once; --micro-batches auto tries smaller ones"
            is_late = isinstance(error, TimeLimitError)
            tried.append(_tried(variant.name, outcome="not found in time" if is_late else outcome))
        except KeyboardInterrupt as stopped:
            later: Plan | None = getattr(stopped, "plan", None)
            if best is None or (later and later.prediction.step_time_s < to_beat_s):
                raise
            instead = Interrupted(None)
            tried.append(_tried(variant.name, outcome="interrupted"))
            instead.plan = _beside(best, tried, variants, started)
            raise instead from None
        else:
            slower, slower_s = variant.named(found), found.prediction.step_time_s
            if slower_s < to_beat_s:
                slower, slower_s, best, best_name = best_name, to_beat_s, found, slower
            if math.isfinite(slower_s):
                tried.append(_tried(slower, slower_s, "slower"))
    if best is None:
        assert refusal is not None
        raise refusal
    return _beside(best, tried, variants, started) if len(variants) > 1 else best


def _tried(name: str, step_time_s: float | None = None, outcome: str = "") -> dict[str, Any]:
    """A variant among what a plan says was tried, with the step time of its plan if it has one."""
    return {
        "name": name,
        "mesh": "",
        "lower_bound_s": None,
        "step_time_s": step_time_s,
        "outcome": outcome,
    }


def _beside(
    plan: Plan, tried: Sequence[Mapping[str, Any]], variants: Variants, started: float
) -> Plan:
    """The plan, with the other variants among what was tried, and the seconds that tracing and
    searching all of them took since `started`.
    """
    trace_s = sum(seconds for variant in variants for _, seconds in variant._traced)
    search_s = time.perf_counter() - started - trace_s
    provenance = msgspec.structs.replace(
        plan.provenance,
        candidates=(*plan.provenance.candidates, *tried),
        trace_s=trace_s,
        # What was traced before is not part of the time since then.
        search_s=max(search_s, plan.provenance.search_s),
    )
    return msgspec.structs.replace(plan, provenance=provenance)
