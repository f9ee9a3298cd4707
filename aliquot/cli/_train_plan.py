"""The plan of a training run: given, kept from an earlier attempt, or made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..core import InputError, PlanFileError, PlanMismatchError, counted
from ._model_options import ModelOptions
from ._options import read_cluster, read_plan, with_network
from ._plan_options import MethodOptions
from ._progress import search_progress
from ._session import Session

if TYPE_CHECKING:
    from ..plans import Plan
    from ..zoo import Workload
    from ._model import Model, ZooOptions


def given_plan(
    name: str,
    path: Path,
    model_options: ModelOptions,
    method_options: MethodOptions,
    update: Mapping[str, Any],
) -> tuple[Plan, Workload]:
    """The plan in a file, and its model with the settings that it was made with. What the optimizer
    is given instead may change numbers and the learning rate's schedule, but no operators on
    arrays.

    Raises:
        InputError, PlanMismatchError: the plan is not for a model of the zoo, or for another step
            than the options describe; all differences are listed.
    """
    from ._model import named_model, workload_of

    plan = read_plan(path)
    if plan.model.kind != "zoo":
        raise InputError(
            f"this plan is for {plan.model.name or 'a function'}, which is not of the zoo, so its"
            " first state and data are not known here. Run it from Python:"
            " aliquot.parallelize(train_step, plan)."
        )
    reference = plan.model if name == plan.model.name else named_model(plan.model, name)
    faults = _contradictions(reference.settings, model_options, method_options)
    if faults:
        raise InputError(
            f"--plan {path} decides how the step is built and run, and {'; '.join(faults)}. Leave"
            " these options out, or leave --plan out: then a plan is made with them."
        )
    workload = workload_of(reference)
    if name != plan.model.name:
        _require_same_inputs(workload, plan)
    changed = {key: value for key, value in update.items() if workload.settings.get(key) != value}
    if not changed:
        return plan, workload
    other = workload_of(structs.replace(reference, settings={**reference.settings, **changed}))
    return _with_numbers(plan, path, workload, other, changed), other


def _contradictions(
    settings: Mapping[str, Any], model_options: ModelOptions, method_options: MethodOptions
) -> list[str]:
    from ..zoo import precision_name

    asked = {
        "global_batch": model_options.global_batch,
        "dtype": model_options.dtype and precision_name(model_options.dtype),
        "recompute": model_options.recompute,
        "attention": model_options.attention,
        "scan": model_options.scan or None,
    }
    faults = []
    for key, value in asked.items():
        if value is not None and settings.get(key) != value:
            name = key.replace("_", "-")
            faults.append(f"--{name} says {value}, the plan {settings.get(key)}")
    overrides = settings.get("overrides") or {}
    sizes = dict(pair.split("=", 1) for pair in model_options.settings or () if "=" in pair)
    if model_options.seq_len is not None:
        sizes["seq_len"] = str(model_options.seq_len)
    for key, value in sizes.items():
        if str(overrides.get(key)) != value:
            usual = overrides.get(key, "the usual value")
            faults.append(f"{key}={value} is asked for, the plan has {usual}")
    for field in dataclasses.fields(method_options):
        if getattr(method_options, field.name) != field.default:
            faults.append(f"--{field.name.replace('_', '-')} says how to plan")
    return faults


def _with_numbers(
    plan: Plan, path: Path, planned: Workload, asked: Workload, changed: Mapping[str, Any]
) -> Plan:
    """The plan for a step that differs only in numbers, or in the schedule of the learning rate.

    Raises:
        PlanMismatchError: it differs in more.
    """
    from .._captured import remember_captured
    from ..graph import capture
    from ..planners import apply_plan, carried_over

    before, after = (capture(w.train_step, w.state, w.batch) for w in (planned, asked))
    step = apply_plan(plan, before)
    # Every plan takes every learning rate, so the others are to blame.
    differing = [
        f"{key} is {_shown(value)}, in the plan {_shown(planned.settings.get(key))}"
        for key, value in changed.items()
        if key != "learning_rate"
    ]
    try:
        carried = carried_over(step, after)
    except PlanMismatchError as error:
        raise PlanMismatchError(
            differing or error.violations,
            asked=f"{path} is for a step with another update",
            advice=(
                "A plan is for one step, and these options give it other operators. Make the plan"
                " with them (aliquot plan takes the same ones), or leave --plan out: then a plan is"
                " made first."
            ),
        ) from None
    carried = structs.replace(carried, model=structs.replace(plan.model, settings=asked.settings))
    # Whoever runs it need not trace the step again.
    remember_captured(carried, after)
    return carried


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be planned: a model, a cluster and a method, as options name them."""

    name: str
    cluster: str
    network_gbps: str | None
    model: ZooOptions
    method: MethodOptions
    memory_limit_bytes: float | None


def find_plan(
    wanted: Wanted,
    run: Path | None,
    here: Sequence[Any],
    check: Callable[[Workload], Any],
    say: Session,
) -> tuple[Plan, Workload]:
    """A plan for the model on the devices that are here: that of an earlier attempt, if it is for
    the same, or a new one.

    Args:
        check: refuses a model before the search.

    Raises:
        InputError: the model or an option is unknown, or the model is not of the zoo.
        InfeasibleError: no plan fits.
        PlanMismatchError: the cluster is not here.
    """
    from .._variants import plan_variants
    from ..cluster import Cluster
    from ..plans import headline
    from ._model import tell_attention, tell_model, user_code
    from ._recomputation import model_to_plan, variants_of

    name = wanted.name
    if ":" in name:
        raise InputError(
            f"{name} is a function, and `aliquot train` needs to know its first state and data."
            " Train it from Python: step = aliquot.parallelize(train_step, plan)."
        )
    where = Cluster.detect(here) if wanted.cluster == "detect" else read_cluster(wanted.cluster)
    where = with_network(where, wanted.network_gbps)
    model = model_to_plan(name, wanted.model, where)
    workload = model.workload
    assert workload is not None, "no model of the zoo"
    check(workload)
    if run is not None and (kept := _kept(run, model, len(here))) is not None:
        say.note(f"under the plan of {run / 'plan.json'}, which was made for the same.")
        return kept, workload
    if where.num_devices != len(here):
        raise PlanMismatchError(
            f"--cluster {wanted.cluster} has {counted(where.num_devices, 'device')}, and there"
            f" {'is' if len(here) == 1 else 'are'} {len(here)}",
            asked="what is planned cannot be trained here",
            advice=(
                f"Leave --cluster out to plan for what is here, or add --devices"
                f" {where.num_devices} for virtual CPU devices."
            ),
        )
    say.note(f"no --plan: planning {name} for {where.name} first.")
    tell_model(name, workload.config, say)
    tell_attention(model, where, say)
    with user_code(name), search_progress(say) as report:
        plan = plan_variants(
            variants_of(model),
            cluster=where,
            method=wanted.method.read(),
            num_micro_batches=wanted.method.wanted_micro_batches,
            micro_batch_semantics=wanted.method.micro_batch_semantics,
            memory_limit_bytes=wanted.memory_limit_bytes,
            progress=report,
        )
    say.note(headline(plan))
    return plan, workload


def _kept(run: Path, model: Model, num_devices: int) -> Plan | None:
    """The plan of an earlier run of the same model on as many devices, whatever its learning rate;
    None if there is none.
    """
    from ..plans import idle_devices, plan_devices
    from ._model import workload_of

    path, asked = run / "plan.json", model.workload
    if not path.exists() or asked is None:
        return None
    try:
        plan = read_plan(path)
        used = plan_devices(plan)
        if num_devices not in (used, used + idle_devices(plan)):
            return None
        of_plan, settings = plan.model.settings, asked.settings
        changed = {key: v for key, v in settings.items() if of_plan.get(key) != v}
        is_same = changed.keys() <= {"learning_rate"} and settings.keys() == of_plan.keys()
        if not is_same or model.recompute not in (None, plan.recompute):
            return None
        return (
            _with_numbers(plan, path, workload_of(plan.model), asked, changed) if changed else plan
        )
    except (InputError, PlanFileError, PlanMismatchError):
        return None


def check_devices(plan: Plan, num_devices: int) -> None:
    """Refuse a plan for other devices than are here.

    Raises:
        PlanMismatchError: says what to type.
    """
    from ..plans import idle_devices, plan_devices

    needed = plan_devices(plan)
    if num_devices not in (needed, needed + idle_devices(plan)):
        raise PlanMismatchError(
            f"it is for {needed} devices ({plan.cluster.get('name')}), and there are {num_devices}",
            asked="the plan does not fit these devices",
            advice=(
                f"Add --devices {needed} for virtual CPU devices, or leave --plan out: then a plan"
                " is made for what is here."
            ),
        )


def _require_same_inputs(workload: Workload, plan: Plan) -> None:
    """Refuse another model than the plan's, unless it has the same inputs."""
    from ..graph import capture
    from ..plans import ArrayInterface, require_match

    graph = capture(workload.train_step, workload.state, workload.batch)
    inputs = [
        ArrayInterface(
            path=item.path,
            shape=graph.values[item.value].shape,
            dtype=graph.values[item.value].dtype,
        )
        for item in graph.inputs
    ]
    require_match(
        plan,
        inputs=inputs,
        asked=f"the plan is for {plan.model.name}, not for {workload.config.name}",
    )
