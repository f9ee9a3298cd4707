"""A training step that may be built in several ways, and the search for its fastest plan. All that
is asked about a step asks this search, so that the same question has one answer.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from ._plan_graph import plan_graph
from .cluster import Cluster
from .core import (
    RECOMPUTE,
    RECOMPUTE_AUTO,
    InfeasibleError,
    InputError,
    TimeLimit,
    TimeLimitError,
    collecting_seldom,
    counted,
    format_seconds,
    recompute_parts,
    unknown_recompute,
)
from .graph import Graph, capture, recompute_names, scans_over_layers, with_recomputation
from .planners import (
    AbstractMethod,
    Auto,
    Decision,
    Interrupted,
    Megatron,
    PipeshardParallel,
    Progress,
    SimplePlan,
    Task,
    WholeProgram,
    cannot_fit,
    have_equal_rows,
    least_compute_s,
    simple_plan,
)
from .plans import RECOMPUTED_BY_STAGE, ModelReference, Plan, recomputes_by_stage

Method: TypeAlias = AbstractMethod | PipeshardParallel

# On more devices pipelines of the step without recomputation, where it is planned second, are
# searched only if the first plan is one.
_MANY_DEVICES = 128
# Times that differ by less than this share are equal.
_EQUAL = 1e-9
# What products are made of takes at least this share of the memory of their results.
_INPUTS_TO_RESULTS = 0.5
# A search shortens the simple plan of one variant by up to this share more than that of another.
_MORE_BY_SEARCH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One way to build a training step.

    Attributes:
        step, args, kwargs: as for `aliquot.plan`.
        model: how to build the step again, to be written into plans.
        name: for readers of plans, such as "--recompute block".
        name_by_stage: its name where stages of its plan recompute; empty for a name made of `name`.
        recompute: as for `aliquot.plan`; with a name, `ways_to_recompute` leaves out the others.
        layers: what its layers compute again, by a name of `core.RECOMPUTE`; None if that is open.
        base: the variant whose captured step is rewritten, so that its layers do.
        for_programs: whether pipelines are not searched in it, because stages of other variants
            choose by themselves what they recompute.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: ModelReference | None = None
    name: str = ""
    name_by_stage: str = ""
    recompute: str | None = None
    for_programs: bool = False
    layers: str | None = None
    base: Variant | None = None
    _traced: list[tuple[Graph, float]] = field(default_factory=list, init=False, repr=False)
    _tasks: list[Task] = field(default_factory=list, init=False, repr=False)
    _ways: dict[str | None, Variants] = field(default_factory=dict, init=False, repr=False)

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
            started, before_s = time.perf_counter(), 0.0
            if self.base is None:
                graph = capture(self.step, *self.args, **self.kwargs)
            else:
                graph, before_s = self.base.traced()
                started = time.perf_counter()
                if self.layers not in (None, "none"):
                    graph, before_s = with_recomputation(graph, self.layers), 0.0
            self._traced.append((graph, before_s + time.perf_counter() - started))
        return self._traced[0]

    @classmethod
    def of_graph(cls, graph: Graph, trace_s: float) -> Variant:
        """A captured step, of which nothing else is known."""
        made = cls(step=graph.calling.fn, args=())
        made._traced.append((graph, trace_s))
        return made

    def ways_to_recompute(self, asked: str | None) -> Variants:
        """The step with its layers recomputing as `asked`, or in every way that they can if None or
        "auto"; made once for each.

        Raises:
            InputError: there is no such way.
        """
        asked = self.recompute or asked
        if not isinstance(asked, str | None):
            raise InputError(
                f"recompute={asked!r} is no name: give one of {', '.join(RECOMPUTE)}, or leave it"
                " out."
            )
        if self.layers is not None:
            return (self,)
        if asked not in self._ways:
            graph, _ = self.traced()
            names = recompute_names(graph)
            if asked not in (None, RECOMPUTE_AUTO):
                _refuse_recompute(graph, asked, names)
                names = (asked,)
            is_alone = names == ("none",) and asked != "none"
            self._ways[asked] = tuple(
                replace(
                    self,
                    base=self,
                    layers=name,
                    name=self.name if is_alone else f"--recompute {name}",
                    name_by_stage=RECOMPUTED_BY_STAGE if name == "none" else "",
                    recompute="none" if asked == "none" else None,
                    for_programs=len(names) > 1 and name not in ("none", "block"),
                )
                for name in names
            )
        return self._ways[asked]

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


def _refuse_recompute(graph: Graph, asked: str, names: Sequence[str]) -> None:
    """Refuse a way to recompute that the layers of a step do not have.

    Raises:
        InputError: says which they have.
    """
    name, every = recompute_parts(asked)
    if name not in RECOMPUTE:
        raise InputError(unknown_recompute(name, RECOMPUTE))
    if every is None:
        raise InputError(
            f"recompute={asked!r}: the number after the colon must be at least 1; each layer of"
            " that number recomputes."
        )
    if name == "none":
        return
    if any(op.region for op in graph.ops):
        raise InputError(
            f"recompute={asked!r} was asked for, and {graph.name} recomputes already, by"
            " jax.checkpoint or jax.remat. Take that out of the step, or leave recompute out: the"
            " step then recomputes as it is written."
        )
    if names == ("none",):
        raise InputError(
            f"recompute={asked!r} was asked for, and {graph.name} repeats no layers: neither a scan"
            " over stacked parameters, nor equal layers one after the other, with gradients. Leave"
            " recompute out, or put jax.checkpoint into the step."
        )
    if name not in names:
        raise InputError(
            f"recompute={asked!r}: the layers of {graph.name} have no attention. They have"
            f" {', '.join(names)}."
        )
    if every > 1 and scans_over_layers(graph):
        raise InputError(
            f"recompute={asked!r} does not go with a scan, in which all layers are one: leave out"
            f" the scan or ':{every}'."
        )


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

    Where one program is searched for, each variant first gets a simple plan (see `simple_plan`).
    Variants are then searched in the order of these plans, with the best plan so far as the time to
    beat. Otherwise they are planned in their order. A variant is planned only if its compute alone,
    shared evenly by all devices, takes less than the best plan so far, and if its simple plan is
    not clearly slower.

    Method `Auto` chooses by stage what its pipelines recompute, so that those of the variant that
    computes least are enough. On more than 128 devices they are searched if no variant has a simple
    plan, or if the best plan so far is a pipeline.

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
    if isinstance(how, Megatron):
        # Degrees that do not make up the devices are refused before anything is traced.
        how.on(where)
    if len(variants) == 1:
        variants = variants[0].ways_to_recompute(recompute)
    names = ("memory_limit_bytes", "on_missing_rule")
    given = {name: options[name] for name in names if name in options}
    given["semantics"] = options.get("micro_batch_semantics", "exact")
    asked = options.get("num_micro_batches") or getattr(how, "num_micro_batches", None)
    if isinstance(asked, int):
        given["num_micro_batches"] = asked

    @functools.cache
    def task(variant: Variant) -> Task:
        return variant.task(where, **given)

    may_be_program = isinstance(how, (Auto, WholeProgram)) or (
        isinstance(how, PipeshardParallel) and how.may_be_one_program and how.allows_program(where)
    )
    searches = may_be_program or (isinstance(how, PipeshardParallel) and how.inter.searches)
    if not may_be_program and isinstance(how, PipeshardParallel):
        variants = tuple(each for each in variants if not each.for_programs)
    limit = None if time_limit_s is None else TimeLimit.since(started, time_limit_s)

    def make(variant: Variant, method: Method, left_s: float | None = None) -> Plan:
        graph, trace_s = variant.traced()
        return plan_graph(
            graph,
            like=task(variant),
            started=time.perf_counter(),
            trace_s=trace_s,
            cluster=where,
            method=method,
            model=variant.model,
            recompute=variant.recompute or stages_recompute,
            time_limit_s=left_s,
            **options,
        )

    # Names are for layers, which have been rewritten.
    stages_recompute = None if variants[0].base and recompute != "none" else recompute
    simple_s: dict[Variant, float] = {}
    no_program_fits = False
    report: Progress | None = options.get("progress")
    if may_be_program and len(variants) > 1 and getattr(how, "mesh_shape", None) is None:
        try:
            for variant, seconds in _simple_times(variants, task, limit, report):
                simple_s[variant] = seconds
        except KeyboardInterrupt as stopped:
            raise _interrupted(simple_s, make) from stopped
        # Then pipelines are what is looked for. Nothing is known where the time was over, or the
        # devices cannot divide the batch.
        is_known = have_equal_rows(task(variants[0])) and not (limit and limit.is_over)
        no_program_fits = is_known and not simple_s
    ordered = _ordered(variants, simple_s, how, task)
    best, built, tried = None, ordered[0], list[dict[str, Any]]()
    too_large: Variants = ()
    refusal: InfeasibleError | TimeLimitError | None = None
    # A little more than the fastest simple plan takes, so that a search finds that plan again, with
    # a bound. Compiled, it may not fit.
    simplest_s = min(simple_s.values(), default=math.inf) * (1 + _EQUAL)
    to_beat_s = math.inf if options.get("verify") else simplest_s
    for k, variant in enumerate(ordered):
        if best is not None:
            to_beat_s = best.prediction.step_time_s
        if report and math.isfinite(to_beat_s):
            options["progress"] = _with_best(report, to_beat_s)
        if variant in too_large:
            tried.append(
                _tried(variant.name, outcome="does not fit: it keeps more than one that does not")
            )
            continue
        if variant.for_programs and no_program_fits and best is not None and len(best.stages) > 1:
            outcome = (
                "not searched: as one program it fits by no simple method, whatever is recomputed"
            )
            tried.append(_tried(variant.name, outcome=outcome))
            continue
        if simple_s.get(variant) == math.inf:
            # A promise, and no proof.
            outcome = "not searched: it would compute or keep more, without need"
            tried.append(_tried(variant.name, outcome=outcome))
            continue
        if math.isfinite(to_beat_s) and least_compute_s(task(variant).problem(1)) >= to_beat_s:
            tried.append(
                _tried(
                    variant.name,
                    outcome="slower: its compute alone takes longer than the chosen plan",
                )
            )
            continue
        has_pipelines = variant is variants[0] and not isinstance(how, WholeProgram)
        if best is not None and variant in simple_s and built in simple_s and not has_pipelines:
            gained = min(1.0, best.prediction.step_time_s / simple_s[built])
            if simple_s[variant] * gained * (1 - _MORE_BY_SEARCH) >= to_beat_s:
                outcome = "slower, as its simple plan promises"
                tried.append(_tried(variant.name, simple_s[variant], outcome))
                continue
        used = how
        if isinstance(how, (Auto, WholeProgram, PipeshardParallel)) and searches:
            # Plans that take longer than this need not be searched in full.
            used = replace(how, faster_than_s=min(how.faster_than_s, to_beat_s))
        if isinstance(used, Auto):
            wanted = used.pipelines and not variant.for_programs
            if best or simple_s:
                is_few = where.num_devices <= _MANY_DEVICES or (best and len(best.stages) > 1)
                wanted = wanted and variant is variants[0] and bool(is_few)
            used = replace(used, pipelines=wanted)
        elif isinstance(used, PipeshardParallel) and may_be_program:
            used = replace(used, pipelines=used.pipelines and not variant.for_programs)
        left_s = None
        if time_limit_s is not None:
            # The others have their share of what is left.
            left_s = time_limit_s - (time.perf_counter() - started)
            left_s = max(left_s / (len(ordered) - k), 1e-3)
        try:
            found = make(variant, used, left_s)
        except (InfeasibleError, TimeLimitError) as error:
            if isinstance(error, InfeasibleError) and error.found_with and len(variants) > 1:
                error.found_with += (variant.name,)
            # Of variants that do not fit, the last keeps least.
            if variant is variants[-1] or refusal is None:
                refusal = error
            is_beaten = searches and math.isfinite(to_beat_s)
            if best is None and not is_beaten and isinstance(error, InfeasibleError):
                too_large = variants[: variants.index(variant)]
            outcome = "no faster plan fits" if is_beaten else "does not fit"
            is_late = isinstance(error, TimeLimitError)
            tried.append(_tried(variant.name, outcome="not found in time" if is_late else outcome))
        except KeyboardInterrupt as stopped:
            later: Plan | None = getattr(stopped, "plan", None)
            if later and (best is None or later.prediction.step_time_s < to_beat_s):
                raise
            if best is None:
                raise _interrupted(simple_s, make) from None
            instead = Interrupted(None)
            tried.append(_tried(variant.name, outcome="interrupted"))
            instead.plan = _beside(best, built, tried, variants, started)
            raise instead from None
        else:
            found_s = found.prediction.step_time_s
            if best is None:
                best, built = found, variant
            elif found_s < to_beat_s:
                tried.append(_tried(built.named(best), to_beat_s, "slower", best))
                best, built = found, variant
            else:
                tried.append(_tried(variant.named(found), found_s, "slower", found))
    if best is None and simple_s:
        built = min(simple_s, key=simple_s.__getitem__)
        best = make(built, SimplePlan())
    if best is None:
        assert refusal is not None
        raise refusal
    return _beside(best, built, tried, variants, started) if len(variants) > 1 else best


def _simple_times(
    variants: Variants,
    task: Callable[[Variant], Task],
    limit: TimeLimit | None,
    report: Progress | None = None,
) -> Iterator[tuple[Variant, float]]:
    """The step times of simple plans, of the variants that have one and whose compute alone takes
    less than the fastest of them; infinite for variants that are not looked at, because they
    compute more than another and gain nothing by it, or keep more than there is memory for.
    """
    best: Decision | None = None
    fastest, fewest, num_seen = variants[0], 1, 0

    def simple(variant: Variant, fewest: int) -> Decision | None:
        nonlocal num_seen
        if report:
            report(f"simple plans, {variant.name}", num_seen, len(variants))
        num_seen += 1
        return simple_plan(task(variant), fewest=fewest)

    is_large = cannot_fit(task(variants[0]).problem(1))
    if is_large:
        # The last keeps least: the others do not fit in fewer micro-batches.
        least = simple(variants[-1], 1)
        if least is None:
            return
        fewest = least.num_micro_batches
    # A step with `fused` takes little less than with `minimal`, which is looked at first.
    between = [v for v in variants if v.layers and v.layers.startswith("fused")]
    usual = [variant for variant in variants if variant not in between]
    # Where loops copy what they keep, one that keeps less may take less and need more memory.
    copies = any(op.name == "scan_stack" for op in task(usual[0]).graph.ops)
    open_ranges = [range(len(usual))]
    while open_ranges:
        left = open_ranges.pop()
        if not left:
            continue
        if limit and limit.is_over:
            return
        # Of many that may fit in no number of micro-batches, the middle one tells of half.
        k = left[(len(left) - 1) // 2] if is_large and not copies else left[0]
        before, behind = range(left[0], k), range(k + 1, left[-1] + 1)
        variant, known = usual[k], None
        least_s = least_compute_s(task(variant).problem(1))
        is_slower = best and least_s >= best.step_time_s
        if not is_slower and (known := simple(variant, fewest)) is not None:
            if best is None or known.step_time_s < best.step_time_s:
                best, fastest = known, variant
            yield variant, known.step_time_s
        is_whole = known and known.num_micro_batches == (task(variant).num_micro_batches or 1)
        if (is_slower or is_whole) and not copies:
            # Those behind it compute more still, which pays only for fewer micro-batches.
            yield from ((each, math.inf) for each in usual[k + 1 :])
            behind = range(0)
        # Those before it keep more than one that does not fit.
        open_ranges += [behind, before if known or is_slower else range(0)]
    for variant in between:
        seconds = math.inf
        if best and variants[variants.index(variant) + 1] is fastest and _has_room(best):
            known = simple(variant, best.num_micro_batches)
            seconds = known.step_time_s if known else math.inf
        yield variant, seconds


def _has_room(decision: Decision) -> bool:
    """True if a program that keeps the results of products leaves enough memory to keep what these
    are made of, too.
    """
    stage = decision.stages[0]
    memory = stage.picked.memory
    room = stage.problem.memory_limit_bytes - memory.peak_bytes
    return room >= _INPUTS_TO_RESULTS * memory.peak_parts.get("activations", 0.0)


def _ordered(
    variants: Variants, simple_s: Mapping[Variant, float], how: Method, task: Callable[..., Task]
) -> Sequence[Variant]:
    """Variants in the order of their simple plans; without these the first whose whole batch can
    fit comes first, then the others in their order.
    """
    if simple_s:
        return sorted(variants, key=lambda each: simple_s.get(each, math.inf))
    if isinstance(how, PipeshardParallel) and how.inter.searches:
        return sorted(variants, key=lambda each: each.for_programs)

    def can_fit(variant: Variant) -> bool:
        """False if the whole batch is too large, or what all variants keep from step to step."""
        return task(variants[0]).holds_state and not cannot_fit(task(variant).problem(1))

    # Each keeps less than the one before it.
    first = variants[bisect.bisect_left(variants[:-1], True, key=can_fit)]
    others = sorted(variants, key=lambda each: each.for_programs)
    return [first, *(v for v in others if v is not first)]


def _interrupted(simple_s: Mapping[Variant, float], make: Callable[..., Plan]) -> Interrupted:
    """Ctrl-C before any search was complete, with the fastest simple plan so far."""
    error = Interrupted(None)
    if simple_s:
        error.plan = make(min(simple_s, key=simple_s.__getitem__), SimplePlan())
    return error


def _with_best(report: Progress, best_s: float) -> Progress:
    """Progress that says the best step time so far, too."""
    best = f"best so far {format_seconds(best_s)} a step"
    return lambda what, done, of: report(f"{what}, {best}", done, of)


def _tried(
    name: str, step_time_s: float | None = None, outcome: str = "", plan: Plan | None = None
) -> dict[str, Any]:
    """A variant among what a plan says was tried, with the step time of its plan if it has one, and
    its number of micro-batches until `_beside` says it.
    """
    return {
        "num_micro_batches": plan.num_micro_batches if plan else None,
        "name": name,
        "mesh": "",
        "lower_bound_s": None,
        "step_time_s": step_time_s,
        "outcome": outcome,
    }


def _beside(
    plan: Plan,
    built: Variant,
    tried: Sequence[Mapping[str, Any]],
    variants: Variants,
    started: float,
) -> Plan:
    """The plan of the variant `built`, with the others among what was tried, and the seconds that
    tracing and searching all of them took since `started`.
    """
    traced = itertools.chain(*(variant._traced for variant in variants))
    trace_s = sum(seconds for _, seconds in traced)
    search_s = time.perf_counter() - started - trace_s
    candidates = [*plan.provenance.candidates]
    for each in tried:
        candidate = dict(each)
        count = candidate.pop("num_micro_batches")
        if count not in (None, plan.num_micro_batches):
            candidate["name"] += f", {counted(count, 'micro-batch')}"
        candidates.append(candidate)
    provenance = msgspec.structs.replace(
        plan.provenance,
        candidates=tuple(candidates),
        trace_s=trace_s,
        # What was traced before is not part of the time since then.
        search_s=max(search_s, plan.provenance.search_s),
    )
    if provenance.bound_holds_for:
        # Nothing is proved of steps that are built in another way.
        scope = f"{provenance.bound_holds_for}, with {built.named(plan)}"
        provenance = msgspec.structs.replace(provenance, bound_holds_for=scope)
    return msgspec.structs.replace(plan, provenance=provenance)
