"""The public functions for one plan: capture a step, plan it, run it, price, explain or verify the
plan.

The modules that run or verify plans are imported only when they are used, so that planning starts
faster.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ._captured import captured, planned_for, remember_captured
from ._plan_graph import check_kinds
from ._variants import Variant, plan_variants
from .cluster import AbstractMeasured, Cluster
from .core import InputError, collecting_seldom, refuse_arguments
from .cost import PlannedStep
from .cost import estimate as estimate_planned
from .graph import capture as capture
from .planners import AbstractMethod, Progress, apply_plan, find_alternatives
from .plans import ModelReference, Plan, Prediction

if TYPE_CHECKING:
    from .report import Alternative
    from .verification import Verification


@collecting_seldom()
def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: Cluster | None = None,
    method: AbstractMethod | None = None,
    num_micro_batches: int | Literal["auto"] | None = None,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    recompute: str | None = None,
    model: ModelReference | None = None,
    tokens_per_step: int | None = None,
    verify: bool = False,
    profiles: str | Path | None = None,
    profiles_of_any: bool = False,
    require_measured: float = 0.0,
    require_grade: str = "measured",
    measure: bool = False,
    time_limit_s: float | None = None,
    objective: str | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan how to run a training step on a cluster. Touches no device, unless `measure` is set.

    Args:
        step: an ordinary training step; see `capture`.
        *args, **kwargs: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
        cluster: the devices to plan for; by default those JAX sees. `Auto` and pipelines may leave
            hosts idle if the step is faster that way, unless this is a run of several processes.
        method: how to parallelize; by default `Auto()`.
        num_micro_batches: number of micro-batches in a step. By default `Auto` and pipelines search
            for it, and other methods use the fewest in which the step fits. With "auto" these, too,
            go on to more as long as that helps, and the fastest plan is kept.
        micro_batch_semantics: "exact": micro-batches give the step's own numbers. "independent":
            each is a step of its own, as by gradient accumulation, which gives other numbers where
            examples depend on one another; see `docs/questions.md`.
        memory_limit_bytes: per device; by default what the device's runtime leaves for programs.
        on_missing_rule: what to do for primitives without a rule: "infer" one by evaluating the
            operator on small arrays on the host, "replicate" to run it whole on every device, or
            "error".
        recompute: what the layers that the step repeats compute again in their backward pass, by a
            name: "fused", "minimal", "narrow", "save_qkv", "save_attention", "block", or "none",
            with which stages of pipelines recompute nothing either. "block:2" is for every second
            layer. By default, or with "auto", the fastest, unless the step recomputes itself, by
            `jax.checkpoint`. See `docs/questions.md`.
        model: how to build the step again, to be written into the plan.
        tokens_per_step: the tokens of the whole batch, for tokens/s, where they cannot be seen in
            it; by default its integer arrays of two dims are counted.
        verify: compile the best plan for the cluster's devices, which need not be present, and
            search on until a plan fits. The plan then holds the compiled figures.
        profiles: a profile database; its measurements of the cluster's devices correct all prices.
            See `aliquot profile run`.
        profiles_of_any: also use measurements on other kinds of devices, or with other releases of
            JAX.
        require_measured: the least share, 0 to 1, of the plan's compute and communication that must
            have been measured; other plans are refused.
        require_grade: what `require_measured` counts: "measured", measurements of all devices
            running together; "measured-compute", also compute that was measured on one device
            alone.
        measure: measure the operators of the best plan that the database lacks on the devices of
            this process, store them, and plan again, until the best plan lacks none.
        time_limit_s: seconds, tracing included, after which the best plan so far is returned, with
            its gap. It then depends on the speed of the machine; without a limit, plans do not.
        objective: what is least in the plan of a function without gradients: "latency", the time
            of one call from start to end, which is the default; or "throughput", the time between
            two calls that follow one another, of which a pipeline takes the next while the one
            before is under way. Refused for steps with gradients.
        progress: called as `progress(what, done, of)` during the search.

    Raises:
        CaptureError, MissingRuleError, InfeasibleError, InputError: as their names say, with what
            to do next.
        CompilerMissingError, CompileError: with `verify`.
        TimeLimitError: no plan was complete within `time_limit_s`.
        Interrupted: on Ctrl-C, with the best plan so far.
    """
    check_kinds(cluster=cluster, method=method)
    variant = Variant(step=step, args=args, kwargs=kwargs, model=model)
    made = plan_variants(
        (variant,),
        cluster=cluster,
        method=method,
        num_micro_batches=num_micro_batches,
        micro_batch_semantics=micro_batch_semantics,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
        recompute=recompute,
        tokens_per_step=tokens_per_step,
        verify=verify,
        profiles=profiles,
        profiles_of_any=profiles_of_any,
        require_measured=require_measured,
        require_grade=require_grade,
        measure=measure,
        time_limit_s=time_limit_s,
        objective=objective,
        progress=progress,
    )
    remember_captured(made, variant.traced()[0])
    return made


# `parallelize` has an argument of this name.
_plan = plan


def parallelize(
    step: Callable[..., Any] | None = None,
    plan: Plan | None = None,
    *,
    method: AbstractMethod | None = None,
    cluster: Cluster | None = None,
    devices: Sequence[Any] | None = None,
    on_missing_rule: str = "infer",
    **options: Any,
) -> Any:
    """Run a step under a plan: `parallelize(step, plan)`, or as a decorator:
    `@parallelize(method=Zero3Parallel())`.

    Returns a `Step` with the step's own signature. A step that `aliquot.plan` traced for this plan
    is not traced again. Without a plan the step is planned at its first
    call, from that call's arguments, for the devices JAX sees; `options` are then those of
    `aliquot.plan`. A method that is decorated in its class is planned for each object by itself.

    Raises:
        InputError: `step` is no function, or another argument is of the wrong kind.
        PlanMismatchError: at the first call, if the plan was made for another step, or for more
            devices.
    """
    check_kinds(cluster=cluster, method=method, plan=plan)
    refuse_arguments("parallelize", _plan, options)
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
    from .runtime import Step

    if not callable(step):
        raise InputError(f"parallelize needs a function, got a {type(step).__name__}.")
    if plan is not None and (method is not None or options):
        raise InputError("parallelize takes a plan, or a method to plan with, not both.")

    def prepare(
        fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PlannedStep:
        if plan is not None:
            return apply_plan(plan, captured(plan, fn, args, kwargs), on_missing_rule)
        started = time.perf_counter()
        graph = capture(fn, *args, **kwargs)
        chosen = plan_variants(
            (Variant.of_graph(graph, time.perf_counter() - started),),
            cluster=cluster or Cluster.detect(devices),
            method=method,
            on_missing_rule=on_missing_rule,
            **options,
        )
        return apply_plan(chosen, graph, on_missing_rule)

    traced = None if plan is None else planned_for(plan, step)
    return Step(step, prepare, plan=plan, devices=devices, traced=traced)


def constrain(
    step: Callable[..., Any],
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    on_missing_rule: str = "infer",
) -> Callable[..., Any]:
    """The step with the plan's splits and micro-batches written into it: a pure function of the
    same signature for `jax.jit`, in a training loop of one's own.

    With `plan.shardings` alone, the compiler splits everything between the inputs and the results
    as it likes, and does not cut the batch into micro-batches: collectives and memory are then not
    those of the plan.

        train_step = jax.jit(aliquot.constrain(train_step, plan), donate_argnums=0)

    Args:
        step: what the plan was made for.
        plan: of one program.
        devices: in the mesh's order, row by row; by default the first of `jax.devices()`.
        on_missing_rule: as in `plan`.

    Raises:
        InputError: the plan is a pipeline.
        PlanMismatchError: when it is traced, if the plan was made for another step, or for more
            devices.
    """
    from .runtime import constrain as constrain_step

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStep:
        return apply_plan(plan, captured(plan, step, args, kwargs), on_missing_rule)

    return constrain_step(step, plan, prepare, devices)


def estimate(
    plan: Plan,
    step: Callable[..., Any],
    *args: Any,
    on_missing_rule: str = "infer",
    profiles: str | Path | None = None,
    profiles_of_any: bool = False,
    **kwargs: Any,
) -> Prediction:
    """Price a plan: one program or a pipeline, whoever made or edited it. Touches no device.

    Args:
        step, *args, **kwargs: what the plan was made for; arrays or `jax.ShapeDtypeStruct`s.
        profiles, profiles_of_any: as in `plan`. With the database that a plan was made from, this
            is the plan's own prediction.

    Raises:
        PlanMismatchError: the plan was made for another step, or cannot be run.
    """
    measured = _read_profiles(plan, profiles, profiles_of_any)
    return estimate_planned(
        apply_plan(plan, captured(plan, step, args, kwargs), on_missing_rule, measured)
    )


def _read_profiles(
    plan: Plan, profiles: str | Path | None, of_any: bool
) -> AbstractMeasured | None:
    if profiles is None:
        return None
    from ._profiles import with_profiles

    return with_profiles(Cluster.from_dict(plan.cluster), profiles, of_any=of_any).measured


def explain(
    plan: Plan,
    step: Callable[..., Any],
    *args: Any,
    most: int = 5,
    on_missing_rule: str = "infer",
    profiles: str | Path | None = None,
    profiles_of_any: bool = False,
    **kwargs: Any,
) -> list[Alternative]:
    """Price alternatives: for each of the largest arrays, the best plan that splits it differently.

    Args:
        step, *args, **kwargs: what the plan was made for.
        most: the number of arrays.
        profiles, profiles_of_any: as in `plan`; those that the plan was made from.

    Raises:
        PlanMismatchError: the plan was made for another step.
        InputError: the plan is a pipeline, in which each stage has splits of its own; or it was
            made from measurements, and none are given.
    """
    from .report import Alternative

    if len(plan.stages) > 1:
        raise InputError(
            f"The plan has {len(plan.stages)} stages, and other splits are looked for in plans of"
            " one program. `print(plan)` shows what its stages cost."
        )
    if plan.provenance.profiles and profiles is None:
        raise InputError(
            f"The plan was made from measurements ({plan.provenance.profiles}), and others would be"
            " priced without. Give the same database: profiles=..., or --profiles FILE."
        )
    measured = _read_profiles(plan, profiles, profiles_of_any)
    planned = apply_plan(plan, captured(plan, step, args, kwargs), on_missing_rule, measured)
    (stage,) = planned.stages
    return [
        Alternative(
            subject=a.subject,
            chosen=a.chosen,
            chosen_step_time_s=plan.prediction.step_time_s,
            alternative=a.alternative,
            alternative_step_time_s=a.step_time_s,
        )
        for a in find_alternatives(stage.problem, plan.stages[0], stage.choices, most=most)
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
    """Compile a plan's programs for its devices, and compare the compiler's figures with the
    predicted ones. Needs no devices.

    Args:
        step, *args, **kwargs: what the plan was made for; arrays or `jax.ShapeDtypeStruct`s.
        target: a GPU or TPU by name, `"cpu"`, or a file with a GPU's description; by default the
            plan's device.
        progress: called with a line about what is going on.
        cache: folder of earlier answers; by default in the user's cache folder.

    Raises:
        PlanMismatchError: the plan was made for another step.
        CompilerMissingError: the target's compiler is not installed; says how to install it.
        CompileError: the compiler refuses the program, or ran out of memory.
    """
    from .verification import verify_plan

    planned = apply_plan(plan, captured(plan, step, args, kwargs), on_missing_rule)
    return verify_plan(planned, target=target, progress=progress, cache=cache)
