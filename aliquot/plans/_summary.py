"""Summary at the head of a plan: the kind of parallelism along each axis, the speed, and the
runner-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from ..cluster import (
    ReportedSteps,
    data_sheet_range,
    is_calibrated,
    reported_steps,
    said_of_data_sheet,
    said_of_reported,
    same_chip,
)
from ..core import format_seconds, recompute_parts
from ._axis_roles import axis_roles, names_experts, uses_together
from ._plan import Plan, StagePlan
from ._stage_text import stage_numbers, step_parts
from ._throughput import mfu_convention, throughput

_MOST_KINDS = 3
_HIDDEN_AS_ROUNDING = 0.0005
# Parts of the step time below this share would be told as 0%.
_TOLD = 0.005
# Fused attention of the zoo's models, by the names in their settings.
_ATTENTION = {
    "cudnn": "fused, in cuDNN's kernel: no scores in memory",
    "splash": "fused, in the splash kernel: no scores in memory",
}


_KEPT = {
    "fused": "the inputs and results of its products",
    "minimal": "its products with weights",
    "narrow": "its products with weights that are no wider than their input",
    "save_qkv": "its queries, keys and values",
    "save_attention": "the result of its attention",
}
RECOMPUTED_BY_STAGE = "recomputed by stage"
"""What plans are called whose stages choose what they recompute."""

UNKNOWN_ERROR = "expected error not known"
"""What is said where no measured step tells how far a prediction may be off."""


DATA_SHEET_ALONE = "the device is known by its data sheet alone"
"""What is said beside a range of step times."""


def summary_rows(plan: Plan) -> list[tuple[str, str]]:
    """Decisions and predicted speed, as pairs of a name and a text."""
    rows = []
    for which, roles in parallelism(plan):
        rows.append(
            ("parallelism", f"pipeline: {which}, {plan.schedule}; {roles}" if which else roles)
        )
    if how := recomputation(plan):
        rows.append(("recomputation", how))
    if attends := _ATTENTION.get(str(plan.model.settings.get("attention"))):
        rows.append(("attention", attends))
    if speed := throughput(plan):
        rows.append(("throughput", f"{speed}; {_basis(plan)}"))
    if counted := mfu_convention(plan):
        rows.append(("MFU counts", counted))
    known = expected_error(plan)
    said = [said_of_data_sheet()] if _is_data_sheet(plan) else []
    if said := [*said, *([said_of_reported(known)] if known else [])]:
        rows.append(("expected error", f"of step times: {'; '.join(said)}"))
    elif not plan.provenance.profiles:
        rows.append(("expected error", "not known: no measured step was compared"))
    # The two largest parts of the step time, and the largest collectives.
    p = plan.prediction
    largest = sorted(step_parts(plan).items(), key=lambda part: -part[1])[:2]
    said = []
    for name, seconds in largest:
        if seconds <= 0 or not p.step_time_s or seconds < _TOLD * p.step_time_s:
            continue
        behind = _dearest(plan) if name == "exposed communication" else ""
        if name == "exposed communication" and not p.hidden_s and len(plan.stages) == 1:
            name = "communication"
        most = f", most of it {behind}" if behind else ""
        said.append(f"{name} {seconds / p.step_time_s:.0%}{most}")
    if costs := "; ".join(said):
        rows.append(("largest costs", costs))
    if second := runner_up(plan):
        rows.append(("runner-up", second))
    return rows


def parallelism(plan: Plan) -> Iterator[tuple[str, str]]:
    """For each kind of mesh its stages, empty without a pipeline, and the roles of its axes."""
    if len(plan.stages) == 1:
        stage = plan.stages[0]
        yield "", "; ".join(axis_roles(plan, stage))
    kinds: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for number, stage in enumerate(plan.stages if len(plan.stages) > 1 else ()):
        kinds.setdefault((stage.mesh_shape, stage.axis_names), []).append(number)
    for numbers in list(kinds.values())[:_MOST_KINDS]:
        held = {}
        for number in numbers:
            held.update(plan.stages[number].shardings)
        together = msgspec.structs.replace(
            plan.stages[numbers[0]],
            shardings=held,
            parallelism=uses_together(plan.stages[number] for number in numbers),
        )
        which = f"{len(plan.stages)} stages"
        if len(kinds) > 1:
            named = "stage" if len(numbers) == 1 else "stages"
            which = f"{named} {stage_numbers(numbers)} of {len(plan.stages)}"
        yield which, "; ".join(axis_roles(plan, together))


def recomputation(plan: Plan) -> str:
    """What the backward pass recomputes, as an object of "recompute"; "none" for nothing, empty if
    it is not known.
    """
    counts = Counter(stage.recompute for stage in plan.stages)
    words = {"stage": "everything", "operators": "some operators"}
    told = []
    for kind, what in words.items():
        if counts[kind]:
            told.append(f"{what} in {counts[kind]} of {len(plan.stages)} stages")
    how = layers_recompute(plan)
    name, every = recompute_parts(how) if isinstance(how, str) else ("", 1)
    if name in ("", "none"):
        return " and ".join(told) or name
    which = f"one block in {every}" if every != 1 else "each block"
    if name == "block":
        layers = f"{which} ({'full activation checkpointing' if every == 1 else how})"
    else:
        layers = f"{which} except {_KEPT.get(name, 'what it keeps')} ({how})"
    return " and ".join([layers, *told])


def recomputes_by_stage(plan: Plan) -> bool:
    """Whether stages recompute more than the step itself does."""
    return any(stage.recompute != "none" for stage in plan.stages)


def layers_recompute(plan: Plan) -> Any:
    """What layers compute again in the backward pass: as the plan says, else as a setting of its
    model says; None if nothing is known.
    """
    if plan.recompute != "none":
        return plan.recompute
    return plan.model.settings.get("recompute")


def how_recomputed(plan: Plan) -> Any:
    """How a plan recomputes, as `--recompute` says it; `RECOMPUTED_BY_STAGE` where its stages
    choose. None if nothing is known.
    """
    how = layers_recompute(plan)
    if not recomputes_by_stage(plan):
        return how
    return RECOMPUTED_BY_STAGE if how in (None, False, "none") else f"{how}, {RECOMPUTED_BY_STAGE}"


def expected_error(plan: Plan) -> tuple[ReportedSteps, ...]:
    """How far predictions were from reported steps of the plan's kind of parallelism: on the plan's
    devices or, if there are none of its kind, on all. Empty if nothing is known, or if the plan
    rests on other figures than the catalogue's.
    """
    device = plan.cluster.get("device")
    if plan.provenance.profiles:
        return ()
    if not isinstance(device, dict) or device.get("calibration"):
        return ()
    return reported_steps(str(device.get("name", "")), _kind_of_report(plan))


def said_error(plan: Plan) -> str:
    """How far predictions are off in the median, in a few words. Steps on other devices are named,
    where the plan's devices have none of its kind. Plans for devices that are known by their data
    sheet alone have a range of step times instead: see `step_time_range_s`.
    """
    if step_time_range_s(plan):
        return DATA_SHEET_ALONE
    known = expected_error(plan)
    if not known:
        return UNKNOWN_ERROR
    of_jax = [steps for steps in known if steps.is_jax]
    if not of_jax:
        steps = known[0]
        how = "longer" if steps.slower >= 0 else "less time"
        return f"steps of {steps.framework} took {abs(steps.slower):.0%} {how} than predicted"
    device = str(plan.cluster["device"]["name"])
    others = [name for name in of_jax[0].device.split(", ") if not same_chip(name, device)]
    where = f" by steps on {', '.join(others)}" if others else ""
    alone = " (one step compared)" if len(of_jax[0].errors) == 1 else ""
    return f"expected error {of_jax[0].median_error:.0%}{where}{alone}"


def step_time_range_s(plan: Plan) -> tuple[float, float] | None:
    """The range of the step time, in seconds, of a plan for accelerators that are known by their
    data sheet alone: so much longer or shorter than predicted did reported steps take on such. None
    where the step time is one figure.
    """
    found = data_sheet_range() if _is_data_sheet(plan) else None
    return None if found is None else found.of(plan.prediction.step_time_s)


def said_of_step_time(plan: Plan) -> str:
    """The predicted step time in words: a range where `step_time_range_s` has one."""
    if ends := step_time_range_s(plan):
        low, high = map(format_seconds, ends)
        return f"{low} to {high}"
    return format_seconds(plan.prediction.step_time_s)


def _kind_of_report(plan: Plan) -> str:
    """The kind of parallelism, by the names of `reported_steps`."""
    dtype = plan.model.flops_dtype or str(plan.model.settings.get("dtype", ""))
    bits = ", 8 bits" if dtype.startswith(("fp8", "float8")) else ""
    if any(names_experts(array.path) for array in plan.inputs if array.role == "parameter"):
        return "experts"
    if len(plan.stages) > 1:
        interleaved = ", interleaved" if plan.num_submeshes < len(plan.stages) else ""
        return f"pipeline{interleaved}{bits}"
    if any(_splits_positions(plan, stage) for stage in plan.stages):
        return f"context{bits}"
    return f"data, FSDP{bits}"


def _splits_positions(plan: Plan, stage: StagePlan) -> bool:
    """Whether a stage splits the batch's arrays along a dim behind that of its examples."""
    if stage.parallelism is not msgspec.UNSET:
        return any("positions" in use.batch for use in stage.parallelism.values())
    batch = [array.path for array in plan.inputs if array.role == "batch"]
    return any(any(stage.shardings.get(path, ())[1:]) for path in batch)


def _is_data_sheet(plan: Plan) -> bool:
    """Whether nothing that a prediction rests on was measured on the plan's accelerators."""
    device = plan.cluster.get("device")
    return (
        isinstance(device, dict)
        and device.get("kind") != "cpu"
        and not device.get("calibration")
        and not plan.provenance.profiles
        and not is_calibrated(str(device.get("name", "")))
    )


def _basis(plan: Plan) -> str:
    device = plan.cluster.get("device")
    source = str(device.get("source", "")) if isinstance(device, dict) else ""
    short = source.partition(";")[0].partition("(")[0].strip()
    origin = f"predicted from {short}" if short else "predicted"
    if plan.provenance.profiles:
        p = plan.prediction
        shares = (
            [f"{p.measured_share:.0%} of it measured"]
            if p.measured_share or not p.measured_compute_share
            else []
        )
        if p.measured_compute_share:
            shares.append(
                f"{p.measured_compute_share:.0%} of it measured on one device alone"
                " (measured-compute)"
            )
        origin = (
            f"{' and '.join(shares)}, with a mean error of {p.measured_error:.0%}, the rest"
            f" {origin}"
        )
    return f"{origin}; compiled for {plan.compiled.target}" if plan.compiled else origin


def _dearest(plan: Plan) -> str:
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for use in plan.prediction.collectives:
        sums[use.kind, use.axes] = sums.get((use.kind, use.axes), 0.0) + use.seconds
    if not sums:
        return ""
    (kind, axes), seconds = max(sums.items(), key=lambda item: item[1])
    return f"{kind} over {', '.join(axes)}" if 2 * seconds > sum(sums.values()) else ""


def runner_up(plan: Plan) -> str:
    """The best other candidate of the search, and how much slower it is; empty if no other was
    priced. What was not searched is no plan, whatever it may promise.
    """
    chosen_s = plan.prediction.step_time_s
    chosen = chosen_candidate(plan)
    others = []
    for number, candidate in enumerate(plan.provenance.candidates):
        if number != chosen and isinstance(seconds := candidate.get("step_time_s"), int | float):
            others.append(
                (float(seconds), name_on_mesh(candidate), str(candidate.get("outcome", "")))
            )
    others = [each for each in others if not each[2].startswith("not searched")]
    if not others or not chosen_s:
        return ""
    seconds, name, outcome = min(others)
    extra_s = seconds - chosen_s
    estimated = " (estimated from its layers)" if "estimated" in outcome else ""
    if is_as_fast(plan, seconds):
        return f"{name}, as fast within {_HIDDEN_AS_ROUNDING:.2%}"
    sign = "+" if extra_s > 0 else "-"
    more = f"{sign}{format_seconds(abs(extra_s))} a step"
    return f"{name}: {format_seconds(seconds)}, {more}{estimated}"


def is_as_fast(plan: Plan, seconds: float) -> bool:
    """Whether a step time equals the plan's but for what is hidden as rounding."""
    chosen_s = plan.prediction.step_time_s
    return abs(seconds - chosen_s) <= _HIDDEN_AS_ROUNDING * chosen_s


def chosen_candidate(plan: Plan) -> int | None:
    """Position of the plan itself among the candidates of its search; None if it is not there."""
    chosen_s = plan.prediction.step_time_s
    mesh = "x".join(map(str, plan.stages[0].mesh_shape)) if plan.stages else ""
    near = []
    for number, candidate in enumerate(plan.provenance.candidates):
        seconds = candidate.get("step_time_s")
        if isinstance(seconds, int | float) and is_as_fast(plan, seconds):
            near.append((mesh_of(candidate) != mesh, abs(seconds - chosen_s), number))
    return min(near)[2] if near else None


def name_on_mesh(candidate: dict[str, Any]) -> str:
    """The method of a candidate on its mesh, then its other traits: "shard on 4x2, ..."."""
    mesh, (method, *others) = mesh_of(candidate), str(candidate.get("name", "")).split(", ")
    return ", ".join([f"{method} on {mesh}" if mesh else method, *others])


def mesh_of(candidate: dict[str, Any]) -> str:
    """The logical mesh of a candidate, as text."""
    mesh = candidate.get("mesh")
    return "x".join(map(str, mesh)) if isinstance(mesh, list | tuple) else str(mesh or "")
