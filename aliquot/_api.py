"""The whole pipeline on one screen: capture a step, plan it, run it, explain it.

What runs or verifies plans is imported where that happens: planning is quicker without.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster import Cluster
from .core import CaptureError, InputError, collecting_seldom
from .cost import Problem, decode_interior, make_problem
from .graph import Graph, graph_fingerprint, is_ordered, source_line, split_scans
from .graph import capture as capture
from .planners import (
    AbstractMethod,
    Auto,
    Decision,
    Interrupted,
    PipelineDecision,
    PipeshardParallel,
    Progress,
    find_alternatives,
    follow,
    solve_one_program,
    solve_pipeline,
    write_pipeline,
    write_plan,
)
from .plans import ArrayInterface, ModelReference, Plan, require_match
from .report import Alternative
from .sharding import NodeGraph, StagedStep, inferred_rules, layer_step, plan_micro_batches, stage_step

if TYPE_CHECKING:
    from .runtime import ParallelStep, PipelineStep
    from .verify import Verification


@collecting_seldom()
def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: Cluster | None = None,
    method: AbstractMethod | PipeshardParallel | None = None,
    num_micro_batches: int = 1,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    model: ModelReference | None = None,
    verify: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Plan:
    """Find out how to run a training step on a cluster. Touches no device.

    Args:
        step: an ordinary training step; see `capture`.
        *args, **kwargs: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
        cluster: what to plan for; by default the devices JAX sees.
        method: how to parallelize; by default `Auto()`.
        num_micro_batches: into how many parts the batch of a step is cut.
        micro_batch_semantics: "exact", or "independent" to let what does not decompose see one micro-batch alone.
        memory_limit_bytes: per device; by default what the device's runtime leaves to programs.
        on_missing_rule: what to do for primitives without a rule: "infer" one by evaluating the operator on small arrays on
            the host, "replicate" to run it whole on every device, or "error".
        model: how to build the step again, written into the plan.
        verify: compile the best plan for the cluster's devices, which need not be here, and look on for one that fits if
            it does not. The plan then holds the compiled figures.
        progress: called as `progress(what, done, of)` during the search.

    Raises:
        CaptureError, MissingRuleError, InfeasibleError, InputError: as their names say, with what to do next.
        CompilerMissingError, CompileError: with `verify`.
        Interrupted: on Ctrl-C, with the best plan so far.
    """
    cluster = cluster or Cluster.detect()
    method = method or Auto()
    if verify:
        from .verify import require_compiler, resolve_target

        require_compiler(resolve_target(None, cluster))
    started = time.perf_counter()
    full = capture(step, *args, **kwargs)
    _refuse_what_has_a_place(full, cluster)
    if on_missing_rule == "infer":
        _warn_of_inferred(full)
    searched_s, decided = 0.0, None
    made: dict[int, tuple[Problem, dict[str, str]]] = {}
    if isinstance(method, PipeshardParallel):
        captured = time.perf_counter()
        staged = method if num_micro_batches == 1 else replace(method, num_micro_batches=num_micro_batches)

        def search(limit_bytes: float | None) -> PipelineDecision:
            return solve_pipeline(
                staged,
                full,
                cluster,
                semantics=micro_batch_semantics,
                on_missing_rule=on_missing_rule,
                memory_limit_bytes=limit_bytes,
                progress=progress,
            )

        found = search(memory_limit_bytes)

        def propose_stages(limit_bytes: float | None = None) -> Plan:
            chosen = found if limit_bytes is None else search(limit_bytes)
            return write_pipeline(
                chosen,
                full,
                cluster,
                model=model or ModelReference(kind="closure", name=full.name),
                version=version("aliquot"),
                trace_s=captured - started,
                search_s=time.perf_counter() - captured,
                memory_limit_bytes=found.chain.memory_limit_bytes,
                semantics=micro_batch_semantics,
                layers=staged.layers,
            )

        def problem_with(count: int) -> Problem:
            made[count] = _problem(full, cluster, count, micro_batch_semantics, on_missing_rule, memory_limit_bytes)
            return made[count][0]

        try:
            decided = solve_one_program(staged, found, problem_with, progress)
        except Interrupted as interrupted:
            interrupted.plan = propose_stages() if len(found.stages) > 1 else None
            raise
        if len(found.stages) > 1 and decided is None:

            def check_stages(proposed: Plan) -> Verification:
                return _verified(proposed, full, on_missing_rule, progress=_as_lines(progress))

            return _first_that_fits(propose_stages, check_stages) if verify else propose_stages()
        searched_s = time.perf_counter() - captured
        # One stage is no pipeline: the step stays one program, on the mesh that was found.
        num_micro_batches = decided.priced.repeats if decided else found.chain_plan.num_micro_batches
        method = staged.whole((decided or found.stages[0].decision).priced.mesh.shape)
    problem, combine = made.get(num_micro_batches) or _problem(
        full, cluster, num_micro_batches, micro_batch_semantics, on_missing_rule, memory_limit_bytes
    )
    traced = time.perf_counter()

    def write(decision: Decision) -> Plan:
        return write_plan(
            decision,
            problem,
            full,
            model=model or ModelReference(kind="closure", name=full.name),
            version=version("aliquot"),
            trace_s=traced - started - searched_s,
            search_s=time.perf_counter() - traced + searched_s,
            combine=combine,
            semantics=micro_batch_semantics,
        )

    def propose(limit_bytes: float | None = None) -> Plan:
        if decided is not None and limit_bytes is None:
            return write(decided)
        limited = problem if limit_bytes is None else replace(problem, memory_limit_bytes=limit_bytes)
        try:
            return write(method.solve(limited, progress))
        except Interrupted as interrupted:
            interrupted.plan = write(interrupted.decision) if interrupted.decision else None
            raise

    def check(proposed: Plan) -> Verification:
        from .verify import verify_plan

        choices = decode_interior(proposed.stages[0], problem.nodes)
        return verify_plan(proposed, full, problem.nodes, choices, progress=_as_lines(progress))

    return _first_that_fits(propose, check) if verify else propose()


def _refuse_what_has_a_place(graph: Graph, cluster: Cluster) -> None:
    """Refuse steps that say themselves on which devices they run, or whose effects only one device can keep in order.

    Raises:
        CaptureError: with what to take out.
    """
    for op in graph.ops:
        if op.name in ("shard_map", "xla_pmap"):
            raise CaptureError(
                f"{graph.name} is written for several devices: it runs `{op.name.removeprefix('xla_')}` {source_line(op)}. A plan "
                "is made from the step that one device would run on the whole batch, and decides itself what is split. Take "
                "out pmap or shard_map, and the collectives inside, such as jax.lax.pmean."
            )
        if cluster.num_devices > 1 and is_ordered(op):
            raise CaptureError(
                f"{graph.name} has an ordered effect, `{op.name}` {source_line(op)}, and JAX keeps effects in order on a single "
                "device only. Leave out ordered=True, or return the value from the step and write it down outside."
            )


def _first_that_fits(propose: Callable[[float | None], Plan], check: Callable[[Plan], Verification]) -> Plan:
    from .verify import first_that_fits

    return first_that_fits(propose, check)


def _warn_of_inferred(graph: Graph) -> None:
    """Say once what was inferred for primitives that have no rule."""
    found = inferred_rules(graph)
    if found:
        each = ", ".join(f"`{r.primitive}` {r.text if r.splits else 'runs whole'}" for r in found)
        warnings.warn(
            f"Rules were inferred for primitives that have none declared: {each}. A letter is a dim that may be split, a point "
            "one that stays whole. A rule of your own (aliquot.register_dim_rule) may allow more; "
            'on_missing_rule="replicate" runs them whole.',
            stacklevel=4,
        )


def _as_lines(progress: Progress | None) -> Callable[[str], None] | None:
    """What a compiler tells, as steps of a search."""
    return (lambda line: progress(line, 0, 0)) if progress else None


def parallelize(
    step: Callable[..., Any] | None = None,
    plan: Plan | None = None,
    *,
    method: AbstractMethod | PipeshardParallel | None = None,
    cluster: Cluster | None = None,
    devices: Sequence[Any] | None = None,
    on_missing_rule: str = "infer",
    **options: Any,
) -> Any:
    """Run a step under a plan: `parallelize(step, plan)`, or as a decorator: `@parallelize(method=Zero3Parallel())`.

    Returns a `LazyStep` with the step's own signature. Without a plan the step is planned at its first call, from that
    call's arguments, for the devices JAX sees; `options` are then those of `aliquot.plan`.

    Raises:
        InputError: `step` is no function.
        PlanMismatchError: at the first call, if the plan was made for another step, or for more devices.
    """
    if step is None:
        return functools.partial(
            parallelize,
            plan=plan,
            method=method,
            cluster=cluster,
            devices=devices,
            on_missing_rule=on_missing_rule,
            **options,
        )
    from .runtime import LazyStep

    if not callable(step):
        raise InputError(f"parallelize needs a function, got a {type(step).__name__}.")
    if plan is not None and (method is not None or options):
        raise InputError("parallelize takes a plan, or a method to plan with, not both.")

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ParallelStep | PipelineStep:
        chosen = plan
        if chosen is None:
            chosen = _plan(
                step,
                *args,
                cluster=cluster or Cluster.detect(devices),
                method=method,
                on_missing_rule=on_missing_rule,
                **options,
                **kwargs,
            )
        return _prepare(chosen, capture(step, *args, **kwargs), devices, on_missing_rule)

    return LazyStep(step, prepare, plan=plan, devices=devices)


_plan = plan


def explain(
    plan: Plan, step: Callable[..., Any], *args: Any, most: int = 5, on_missing_rule: str = "infer", **kwargs: Any
) -> list[Alternative]:
    """What the best plan would cost that splits one of the largest arrays another way, everything else free to follow.

    Args:
        step, *args, **kwargs: what the plan was made for.
        most: how many arrays to look at.

    Raises:
        PlanMismatchError: the plan was made for another step.
        InputError: the plan is a pipeline, of which each stage has splits of its own.
    """
    if len(plan.stages) > 1:
        raise InputError(
            f"The plan has {len(plan.stages)} stages, and other splits are looked for in plans of one program. `print(plan)` "
            "shows what its stages cost."
        )
    graph = capture(step, *args, **kwargs)
    problem = _problem_of(plan, graph, on_missing_rule)
    return [
        Alternative(
            subject=a.subject,
            chosen=a.chosen,
            chosen_step_time_s=plan.prediction.step_time_s,
            alternative=a.alternative,
            alternative_step_time_s=a.step_time_s,
        )
        for a in find_alternatives(problem, plan.stages[0], _choices(plan, graph, problem), most=most)
    ]


def verify(
    plan: Plan,
    step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    on_missing_rule: str = "infer",
    progress: Callable[[str], None] | None = None,
    cache: Path | None = None,
    **kwargs: Any,
) -> Verification:
    """Compile a plan with the compiler that will run it, and put what it says beside the prediction. Needs no devices.

    Args:
        step, *args, **kwargs: what the plan was made for; arrays or `jax.ShapeDtypeStruct`s.
        target: a GPU or TPU by name, `"cpu"`, or a file with a GPU's description; by default the plan's device.
        progress: called with a line about what is going on.
        cache: folder of earlier answers; by default in the user's cache folder.

    Raises:
        PlanMismatchError: the plan was made for another step.
        CompilerMissingError: the target's compiler is not installed; says how to.
        CompileError: the compiler refuses the program, or ran out of memory.
    """
    return _verified(
        plan, capture(step, *args, **kwargs), on_missing_rule, target=target, progress=progress, cache=cache
    )


def _verified(
    plan: Plan,
    graph: Graph,
    on_missing_rule: str,
    *,
    target: str | None = None,
    progress: Callable[[str], None] | None = None,
    cache: Path | None = None,
) -> Verification:
    from .verify import verify_pipeline, verify_plan

    if plan.schedule != "none":
        staged, nodes = _staged(plan, graph, on_missing_rule)
        return verify_pipeline(plan, staged, nodes, target=target, progress=progress, cache=cache)
    problem = _problem_of(plan, graph, on_missing_rule)
    choices = _choices(plan, graph, problem)
    return verify_plan(plan, graph, problem.nodes, choices, target=target, progress=progress, cache=cache)


def _problem(
    full: Graph,
    cluster: Cluster,
    num_micro_batches: int,
    semantics: str,
    on_missing_rule: str,
    memory_limit_bytes: float | None,
) -> tuple[Problem, dict[str, str]]:
    """The problem at the size of one micro-batch, and how the outputs of micro-batches combine."""
    graph, combine = full, {}
    if num_micro_batches != 1 or semantics not in ("exact", "independent"):
        cut = plan_micro_batches(full, num_micro_batches, semantics=semantics, on_missing_rule=on_missing_rule)
        graph, combine = cut.part, cut.combine
    problem = make_problem(
        graph,
        cluster,
        num_micro_batches=num_micro_batches,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
    )
    return problem, combine


def _problem_of(plan: Plan, graph: Graph, on_missing_rule: str) -> Problem:
    """The problem that a plan solves, for a step that must have the plan's interface."""
    _require_interface(plan, graph)
    problem, _ = _problem(
        graph,
        Cluster.from_dict(plan.cluster),
        plan.num_micro_batches,
        plan.micro_batch_semantics,
        on_missing_rule,
        plan.prediction.memory_limit_bytes,
    )
    return problem


def _require_interface(plan: Plan, graph: Graph) -> None:
    require_match(
        plan,
        inputs=tuple(_interface(graph, i.path, i.value, i.role.value) for i in graph.inputs),
        outputs=tuple(_interface(graph, o.path, o.value, "") for o in graph.outputs),
        asked=f"the plan was made for another step than {graph.name}",
    )


def _interface(graph: Graph, path: str, operand: Any, role: str) -> ArrayInterface:
    value = graph.values[operand] if isinstance(operand, int) else operand
    return ArrayInterface(path=path, shape=tuple(value.shape), dtype=value.dtype, role=role)


def _choices(plan: Plan, graph: Graph, problem: Problem) -> Any:
    """The plan's interior for this step; planned anew under the plan's own splits if the traced operators have drifted."""
    if graph_fingerprint(graph) == plan.graph_fingerprint:
        return decode_interior(plan.stages[0], problem.nodes)
    warnings.warn(
        f"{graph.name} is traced into other operators than the plan was made for (another release of a library, perhaps). "
        "Its inputs and outputs are the same: they are split as planned, and what lies between is planned anew.",
        stacklevel=4,
    )
    return follow(problem, plan.stages[0])


def _prepare(
    plan: Plan, graph: Graph, devices: Sequence[Any] | None, on_missing_rule: str
) -> ParallelStep | PipelineStep:
    from .runtime import ParallelStep

    if plan.schedule != "none":
        return _prepare_pipeline(plan, graph, devices, on_missing_rule)
    problem = _problem_of(plan, graph, on_missing_rule)
    return ParallelStep.build(graph, problem.nodes, _choices(plan, graph, problem), plan, devices)


def _prepare_pipeline(plan: Plan, graph: Graph, devices: Sequence[Any] | None, on_missing_rule: str) -> PipelineStep:
    from .runtime import PipelineStep, build_plan_pipeline

    staged, nodes = _staged(plan, graph, on_missing_rule)
    pipeline = build_plan_pipeline(staged, nodes, plan, devices)
    return PipelineStep(graph=staged.graph, plan=plan, pipeline=pipeline)


def _staged(plan: Plan, graph: Graph, on_missing_rule: str) -> tuple[StagedStep, list[NodeGraph]]:
    """A step, which must have the plan's interface, cut into the plan's stages, and what each stage decides."""
    _require_interface(plan, graph)
    layers: str | int | None = plan.layers or None if plan.num_layers is None else plan.num_layers
    if plan.scan_bounds:
        graph = split_scans(graph, plan.scan_bounds).graph
    layered = layer_step(
        graph,
        plan.num_micro_batches,
        layers=layers,
        semantics=plan.micro_batch_semantics,
        on_missing_rule=on_missing_rule,
    )
    first = [k if plan.scan_bounds else stage.first_layer for k, stage in enumerate(plan.stages)]
    staged = stage_step(layered, first)
    cluster = Cluster.from_dict(plan.cluster)
    nodes: list[NodeGraph] = []
    for stage, extract in zip(plan.stages, staged.extracts, strict=True):
        if stage.like is not None:
            nodes.append(nodes[stage.like])
            continue
        problem = make_problem(
            extract.graph, cluster, num_micro_batches=plan.num_micro_batches, on_missing_rule=on_missing_rule
        )
        nodes.append(problem.nodes)
    return staged, nodes
