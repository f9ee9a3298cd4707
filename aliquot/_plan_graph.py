"""A plan of a captured step: over the numbers of micro-batches that are open, within a time limit,
corrected by measurements, verified where that is asked for.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ._plan_options import PlanOptions
from ._time_limit import decide_in_time
from .cluster import Cluster
from .core import (
    AliquotWarning,
    CaptureError,
    InfeasibleError,
    InputError,
    TimeLimit,
    TimeLimitError,
    listing,
    nearest,
    version_of,
)
from .graph import Graph, Phase, coordination_client, is_ordered, source_line
from .planners import (
    AbstractMethod,
    Auto,
    Decision,
    Interrupted,
    PipeshardParallel,
    StageDP,
    Streaming,
    Task,
    apply_plan,
    method_by_name,
    write_plan,
)
from .plans import ModelReference, Plan, time_between_calls_s
from .sharding import inferred_rules, without_own_loop

if TYPE_CHECKING:
    from .verification import Verification

_MOST_MICRO_BATCHES = 1024

OBJECTIVES = ("latency", "throughput")
"""What can be least in a plan of a function without gradients: the time of one call from start to
end, or the time between two calls that follow one another.
"""


def plan_graph(
    graph: Graph,
    *,
    started: float,
    trace_s: float | None = None,
    like: Task | None = None,
    **options: Any,
) -> Plan:
    """As `plan`, for a captured step.

    Args:
        started: the time from which `time_limit_s` counts.
        trace_s: the seconds that tracing took; by default those since `started`.
        like: a task of the same graph, whose problems need not be made again.
        options: those of `PlanOptions`.
    """
    asked = PlanOptions(**options)
    check_objective(asked.objective, graph)
    limit = None if asked.time_limit_s is None else TimeLimit.since(started, asked.time_limit_s)
    may_stream = isinstance(asked.method or Auto(), (Auto, PipeshardParallel))

    def find(where: Cluster) -> Plan:
        make = functools.partial(_plan_once, graph, started, trace_s, like, limit)
        on_these = structs.replace(asked, cluster=where)
        if asked.objective == "throughput" and may_stream:
            return _best_stream(make, on_these)
        return make(on_these)

    where = asked.cluster or Cluster.detect()
    if asked.profiles is None:
        if asked.measure or asked.require_measured:
            raise InputError("measure and require_measured need a profile database: give profiles.")
        return find(where)
    from ._profiles import plan_measured

    return plan_measured(find, graph, structs.replace(asked, cluster=where))


def check_objective(objective: str | None, graph: Graph) -> None:
    """Refuse an objective that there is not, or that a step with gradients cannot have.

    Raises:
        InputError: says why.
    """
    if objective is None:
        return
    if objective not in OBJECTIVES:
        raise InputError(f"there is no objective {objective!r}: {nearest(objective, OBJECTIVES)}")
    if any(op.phase is Phase.BACKWARD for op in graph.ops):
        raise InputError(
            f"objective={objective!r} was asked for, and {graph.name} takes gradients: a training"
            " step needs the state that the step before it returns, so its time from start to end"
            " is also the time between two steps. Leave the objective out."
        )


def _best_stream(make: Callable[..., Plan], asked: PlanOptions) -> Plan:
    """The plan with the least time between calls that follow one another: the one with the fastest
    call, or stages that `Streaming` finds, with 1, 2, 4, ... micro-batches as long as that helps.

    Raises:
        InfeasibleError, InputError, CaptureError: as for the plan with the fastest call, if there
            are no other stages either.
    """
    method = asked.method
    tries_counts = asked.num_micro_batches == "auto"
    num_micro_batches = None if asked.num_micro_batches == "auto" else asked.num_micro_batches
    best: Plan | None = None
    refusal: InfeasibleError | InputError | CaptureError | None = None
    try:
        best = make(asked)
    except (InfeasibleError, InputError, CaptureError) as error:
        refusal = error
    known = method if isinstance(method, PipeshardParallel) else PipeshardParallel()
    intra = method.intra if isinstance(method, Auto | PipeshardParallel) else known.intra
    stages = StageDP(schedules=("1f1b",), num_stages=known.asked_stages)
    streaming = replace(known, inter=Streaming(inter=stages), intra=intra, num_stages=None)
    is_open = method is None or not getattr(method, "mesh_shape", None)
    count = num_micro_batches or 1
    while is_open and count <= _MOST_MICRO_BATCHES:
        try:
            one = structs.replace(asked, method=streaming, num_micro_batches=count)
            candidate = make(one, tries_counts=tries_counts)
        except (InfeasibleError, InputError, CaptureError, TimeLimitError):
            break
        if best is not None and time_between_calls_s(candidate) >= time_between_calls_s(best):
            break
        best, count = candidate, 2 * count
        if num_micro_batches is not None:
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def _plan_once(
    graph: Graph,
    started: float,
    trace_s: float | None,
    like: Task | None,
    limit: TimeLimit | None,
    asked: PlanOptions,
    *,
    tries_counts: bool = False,
) -> Plan:
    """The plan with the fastest call on the devices of `asked.cluster`, as these were measured."""
    if asked.recompute not in (None, "none"):
        raise InputError(
            f"recompute={asked.recompute!r}: give 'none', with which stages of pipelines recompute"
            " only what the step itself does, or leave it out, and each stage recomputes what its"
            " memory calls for."
        )
    assert asked.cluster is not None
    rules, semantics = asked.on_missing_rule, asked.micro_batch_semantics
    task = like or Task(graph=graph, cluster=asked.cluster)
    count = None if asked.num_micro_batches == "auto" else asked.num_micro_batches
    own = without_own_loop(graph, rules) if semantics == "exact" else None
    if own is not None:
        # Micro-batches of the plan take the place of the step's own.
        task = Task(graph=own.graph, cluster=asked.cluster, own_turns=own.turns)
        count = count and count * own.turns
    joined = coordination_client()
    task = replace(
        task,
        cluster=asked.cluster,
        num_micro_batches=count,
        tries_counts=tries_counts or asked.num_micro_batches == "auto",
        semantics=semantics,
        on_missing_rule=rules,
        memory_limit_bytes=asked.memory_limit_bytes,
        recomputes=asked.recompute is None,
        # Processes of idle hosts would have nothing to do in this run.
        may_idle=not (joined is not None and joined[3] > 1),
        progress=asked.progress,
    )
    method = asked.method or Auto()
    reference = asked.model or ModelReference(kind="closure", name=graph.name)
    tokens = asked.tokens_per_step
    if tokens is not None:
        if tokens < 1:
            raise InputError(f"tokens_per_step must be at least 1, got {tokens}.")
        reference = structs.replace(reference, tokens_per_step=tokens)
    _refuse_what_has_a_place(graph, task.cluster)
    if rules == "infer":
        _warn_of_inferred(graph)
    traced = time.perf_counter()

    def write(decision: Decision) -> Plan:
        return write_plan(
            decision,
            task,
            model=reference,
            version=version_of("aliquot"),
            trace_s=traced - started if trace_s is None else trace_s,
            search_s=time.perf_counter() - traced,
            layers=method.layers,
        )

    def propose(limit_bytes: float | None = None) -> Plan:
        tighter = task if limit_bytes is None else task.with_limit(limit_bytes)
        try:
            decision = decide_in_time(method, tighter, limit) if limit else method.decide(tighter)
            return write(decision)
        except Interrupted as interrupted:
            interrupted.plan = write(interrupted.decision) if interrupted.decision else None
            raise
        except (InfeasibleError, InputError) as error:
            if own is not None and "micro-batch" in str(error):
                # What methods count is what runs; what the user types is multiplied.
                error.args = (
                    f"{error}\n  The step's own loop over {own.turns} parts of its batch counts,"
                    f" too: num_micro_batches=1 (--micro-batches 1) makes {own.turns} of them, and"
                    f" each larger number {own.turns} times as many.",
                )
            raise

    return _first_that_fits(propose, task) if asked.verify else propose()


def check_kinds(*, cluster: object = None, method: object = None, plan: object = None) -> None:
    """Check that what a user gives as a cluster, method and plan is one, or None.

    Raises:
        InputError: Lists what is not, with what to write instead: texts are for the command line.
    """
    faults = []
    if not isinstance(cluster, Cluster | None):
        write = (
            "Cluster.preset({!r}), or Cluster.load of a file" if isinstance(cluster, str) else ""
        )
        faults.append(_of_wrong_kind("cluster", cluster, write or "Cluster.preset('8xH100')"))
    if not isinstance(method, AbstractMethod | None):
        faults.append(_of_wrong_kind("method", method, written(method)))
    if isinstance(plan, AbstractMethod):
        faults.append(
            f"plan is a {type(plan).__name__}, a method: write method=aliquot.{written(plan)}"
        )
    elif not isinstance(plan, Plan | None):
        write = "Plan.load({!r})" if isinstance(plan, str | Path) else "plan(step, state, batch)"
        faults.append(_of_wrong_kind("plan", plan, write))
    if faults:
        raise InputError(listing("these arguments are of another kind", faults))


def _of_wrong_kind(name: str, value: object, write: str) -> str:
    """The fault of an argument, with what to write instead; `{!r}` stands for its text."""
    what = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r:.60}"
    text = str(value)
    return f"{name} is {what}: write {name}=aliquot.{write.format(text)}"


def written(method: object) -> str:
    """How Python makes a method, or the one that a text or a class names; else an example."""
    if isinstance(method, type) and issubclass(method, AbstractMethod):
        return f"{method.__name__}()"
    if not isinstance(method, AbstractMethod):
        try:
            method = method_by_name(str(method))
        except InputError:
            method = Auto()
    given: Any = method
    settings = []
    for field in fields(given):
        value = getattr(given, field.name)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if value != usual:
            made = f"aliquot.{type(value).__name__}()" if is_dataclass(value) else repr(value)
            settings.append(f"{field.name}={made}")
    return f"{type(method).__name__}({', '.join(settings)})"


def _first_that_fits(propose: Callable[[float | None], Plan], task: Task) -> Plan:
    from .verification import first_that_fits, require_compiler, resolve_target, verify_plan

    require_compiler(resolve_target(None, task.cluster))

    def check(proposed: Plan) -> Verification:
        planned = apply_plan(proposed, task.graph, task.on_missing_rule)
        report = task.progress
        return verify_plan(planned, progress=report and (lambda line: report(line, 0, 0)))

    return first_that_fits(propose, check)


def _refuse_what_has_a_place(graph: Graph, cluster: Cluster) -> None:
    """Refuse steps that are already written for several devices, or whose ordered effects need a
    single device.

    Raises:
        CaptureError: says what to remove.
    """
    for op in graph.ops:
        if op.name in ("shard_map", "xla_pmap"):
            raise CaptureError(
                f"{graph.name} is written for several devices: it runs"
                f" `{op.name.removeprefix('xla_')}` {source_line(op)}. A plan is made from the step"
                " that one device would run on the whole batch, and decides itself what is split."
                " Take out pmap or shard_map, and the collectives inside, such as jax.lax.pmean."
            )
        if cluster.num_devices > 1 and is_ordered(op):
            raise CaptureError(
                f"{graph.name} has an ordered effect, `{op.name}` {source_line(op)}, and JAX keeps"
                " effects in order on a single device only. Leave out ordered=True, or return the"
                " value from the step and write it down outside."
            )


def _warn_of_inferred(graph: Graph) -> None:
    """Warn once of the rules that were inferred for primitives without one."""
    inferred = inferred_rules(graph)
    if inferred:
        each = ", ".join(
            f"`{r.primitive}` {r.text if r.splits else 'runs whole'}" for r in inferred
        )
        warnings.warn(
            f"Rules were inferred for primitives that have none declared: {each}. A letter is a dim"
            " that may be split, a point one that stays whole. A rule of your own"
            ' (aliquot.register_dim_rule) may allow more; on_missing_rule="replicate" runs them'
            " whole.",
            AliquotWarning,
            stacklevel=6,
        )
