"""Validation of a plan: its own consistency, and whether it fits a step and devices. All faults are
reported at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from ..cluster import MOST_DEVICES, Cluster
from ..core import RECOMPUTE, ClusterError, PlanMismatchError, counted, nearest, recompute_parts
from ._arrays import unranged
from ._idle_hosts import idle_devices, plan_devices
from ._plan import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    PREDICTED_FIGURES,
    RECOMPUTE_OF_STAGES,
    ArrayInterface,
    Plan,
    Prediction,
    StagePlan,
)
from ._validate_pipeline import pipeline_violations, process_violations

_LISTED = 8
_FIRST = 2
_TOLERANCE = 1e-6
_MOST_ELEMENTS = 2**63
_MOST_MICRO_BATCHES = 100_000


def violations(
    plan: Plan,
    *,
    inputs: Sequence[ArrayInterface] | None = None,
    outputs: Sequence[ArrayInterface] | None = None,
    num_devices: int | None = None,
    num_processes: int | None = None,
) -> list[str]:
    """Every violation, one sentence each, the most telling first; empty if there is none.

    Args:
        plan: The plan to check. Its own consistency is always checked: meshes, splits, stages,
            schedule, micro-batches, sums of its predictions.
        inputs, outputs: The interface of the step that is to run, in the step's order. The first
            path that differs is named first.
        num_devices: How many devices there are.
        num_processes: How many processes run it.
    """
    faults: list[str] = []
    if inputs is not None:
        faults += _interface("input", plan.inputs, inputs)
    if outputs is not None:
        faults += _interface("output", plan.outputs, outputs)
    if num_devices is not None and num_devices not in _device_counts(plan):
        faults.append(
            f"the plan is for {counted(plan_devices(plan), 'device')} ({plan.cluster.get('name')}),"
            f" and there are {num_devices}"
        )
    if num_processes is not None:
        faults += process_violations(plan, num_processes)
    faults += _interface_and_cluster(plan)
    faults += _stages(plan)
    faults += pipeline_violations(plan)
    faults += _micro_batches(plan)
    for array in (*plan.inputs, *plan.outputs):
        if array.memory not in (DEVICE_MEMORY, HOST_MEMORY):
            faults.append(
                f"`{array.path}` lies in the memory {array.memory!r}, and can lie in"
                f" {DEVICE_MEMORY!r} or {HOST_MEMORY!r}"
            )
    faults += _sums(plan)
    return faults


def require_match(
    plan: Plan,
    *,
    inputs: Sequence[ArrayInterface] | None = None,
    outputs: Sequence[ArrayInterface] | None = None,
    num_devices: int | None = None,
    num_processes: int | None = None,
    asked: str = "",
) -> None:
    """Refuse a plan that does not fit. The message cuts long lists short; `violations` gives all.

    Raises:
        PlanMismatchError: There is any violation. `asked` opens the message.
    """
    faults = violations(
        plan, inputs=inputs, outputs=outputs, num_devices=num_devices, num_processes=num_processes
    )
    if faults:
        shown = faults
        if len(faults) > _LISTED:
            shown = [f"{'; '.join(faults[:_FIRST])}; and {len(faults) - _FIRST} more problems"]
        if num_processes is not None and list(process_violations(plan, num_processes)):
            advice = (
                "Start one process on each host of the plan's cluster, or make a plan for these"
                " processes."
            )
        elif num_devices is not None and num_devices not in _device_counts(plan):
            advice = (
                "Run it on the devices it was made for, or make a plan for these (--cluster"
                " detect)."
            )
        else:
            advice = "Make a plan for this step, or run the step that the plan was made for."
        raise PlanMismatchError(shown, asked=asked, advice=advice)


def _device_counts(plan: Plan) -> tuple[int, ...]:
    """Numbers of devices that the plan can run on: with its idle hosts or without."""
    used = plan_devices(plan)
    return used, used + idle_devices(plan)


def _interface(
    what: str, planned: Sequence[ArrayInterface], given: Sequence[ArrayInterface]
) -> Iterator[str]:
    before, now = {array.path: array for array in planned}, {array.path: array for array in given}
    for array in given:
        known = before.get(array.path)
        if known is None:
            yield f"{what} `{array.path}` {_form(array)} is not in the plan"
        elif (known.shape, known.dtype) != (array.shape, array.dtype):
            yield f"{what} `{array.path}` is {_form(array)}, planned as {_form(known)}"
        elif known.memory != array.memory:
            yield (
                f"{what} `{array.path}` lies in {array.memory} memory, planned in"
                f" {known.memory} memory (jax.device_put(tree, plan.shardings(tree)) moves it)"
            )
    for array in planned:
        if array.path not in now:
            yield f"{what} `{array.path}` {_form(array)} is planned, and the step has none"


def _form(array: ArrayInterface) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _interface_and_cluster(plan: Plan) -> Iterator[str]:
    for what, arrays in (("input", plan.inputs), ("output", plan.outputs)):
        for path, count in Counter(array.path for array in arrays).items():
            if count > 1:
                yield f"{what} `{path}` is listed {count} times"
        for array in arrays:
            if any(size < 0 for size in array.shape) or math.prod(array.shape) > _MOST_ELEMENTS:
                yield f"{what} `{array.path}` has the impossible shape {array.shape}"
    if not 0 <= plan.idle_hosts <= MOST_DEVICES:
        yield f"{plan.idle_hosts} idle hosts; there can be 0 to {MOST_DEVICES:,}"
    try:
        Cluster.from_dict(plan.cluster)
    except ClusterError as error:
        for each in error.violations:
            yield f"cluster: {each}"


def _stages(plan: Plan) -> Iterator[str]:
    if not plan.stages:
        yield "the plan has no stages; it needs at least one"
    name, every = recompute_parts(plan.recompute)
    if name not in RECOMPUTE:
        yield f"the plan's layers recompute {name!r}: {nearest(name, RECOMPUTE)}"
    elif every is None:
        yield f"the plan's layers recompute {plan.recompute!r}: the number must be at least 1"
    total = plan_devices(plan)
    for index, stage in enumerate(plan.stages):
        where = f"stage {index}" if len(plan.stages) > 1 else "the stage"
        yield from _mesh(stage, where, total, alone=len(plan.stages) == 1)
        yield from _splits("input", stage, where, plan.inputs, stage.shardings)
        yield from _splits("output", stage, where, plan.outputs, stage.outputs)
        named = [entry.node for entry in stage.interior if entry.recompute]
        if stage.recompute not in RECOMPUTE_OF_STAGES:
            known = nearest(stage.recompute, RECOMPUTE_OF_STAGES)
            yield f"{where} recomputes {stage.recompute!r}: {known}"
        elif stage.recompute == "operators" and not named and stage.like is None:
            yield f"{where} recomputes operators, and its interior names none"
        elif stage.recompute != "operators" and named:
            yield (
                f"{where} names operators to recompute, such as `{named[0]}`, and says"
                f" {stage.recompute!r}"
            )
    split_inputs: set[str] = set()
    split_outputs: set[str] = set()
    for stage in plan.stages:
        split_inputs.update(map(unranged, stage.shardings))
        split_outputs.update(map(unranged, stage.outputs))
    for what, arrays, placed in (
        ("input", plan.inputs, split_inputs),
        ("output", plan.outputs, split_outputs),
    ):
        missing = [array.path for array in arrays if array.path not in placed]
        if missing and plan.stages:
            yield f"{what}s without a split: {_list(missing)}"


def _mesh(stage: StagePlan, where: str, total: int, *, alone: bool) -> Iterator[str]:
    shape = "x".join(map(str, stage.mesh_shape)) or "()"
    size = math.prod(stage.mesh_shape)
    if not stage.mesh_shape or any(axis < 1 for axis in stage.mesh_shape):
        yield f"{where} has mesh {shape}, and every axis needs at least one device"
    elif (size != total) if alone else (size > total):
        yield (
            f"{where} has mesh {shape} of {counted(size, 'device')}, and the plan's cluster has"
            f" {total}"
        )
    if len(stage.axis_names) != len(stage.mesh_shape):
        yield f"{where} has {len(stage.mesh_shape)} mesh axes with {len(stage.axis_names)} names"
    for name, count in Counter(stage.axis_names).items():
        if count > 1:
            yield f"{where} names {count} axes {name!r}"
    described = () if stage.parallelism is msgspec.UNSET else tuple(stage.parallelism)
    for kind, names in (
        ("data", stage.data_axes),
        ("context", stage.context_axes),
        ("described", described),
    ):
        for name in names:
            if name not in stage.axis_names:
                yield (
                    f"{where} has the {kind} axis {name!r}, no axis of its mesh:"
                    f" {nearest(name, stage.axis_names)}"
                )
    # Totals of groups of devices have one dim for both.
    order = [name for name in stage.axis_names if name in (*stage.data_axes, *stage.context_axes)]
    if len(stage.context_axes) > 1 or not set(stage.context_axes) <= set(order[-1:]):
        yield (
            f"{where} has the context axes {', '.join(stage.context_axes)}, and there may be one,"
            " behind the data axes"
        )


def _splits(
    what: str,
    stage: StagePlan,
    where: str,
    arrays: Sequence[ArrayInterface],
    shardings: Mapping[str, tuple[tuple[str, ...], ...]],
) -> Iterator[str]:
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=False))
    known = {array.path: array for array in arrays}
    for path, dims in shardings.items():
        array = known.get(unranged(path))
        if array is None:
            yield f"{where} splits {what} `{path}`, which the step does not have"
            continue
        named = list(itertools.chain(*dims))
        for axis in dict.fromkeys(named):
            if axis not in sizes:
                yield (
                    f"{what} `{path}` is split by {axis!r}, no axis of the mesh:"
                    f" {nearest(axis, sizes)}"
                )
            elif named.count(axis) > 1:
                yield f"{what} `{path}` uses axis {axis!r} {named.count(axis)} times"
        if len(dims) != len(array.shape):
            yield (
                f"{what} `{path}` has {counted(len(array.shape), 'dim')}, and its split names"
                f" {len(dims)}"
            )
            continue
        for dim, (length, axes) in enumerate(zip(array.shape, dims, strict=True)):
            pieces = math.prod(sizes.get(axis, 1) for axis in axes)
            if pieces > 0 and length % pieces:
                yield (
                    f"{what} `{path}` has {length} in dim {dim}, which {'x'.join(axes)} = {pieces}"
                    " does not divide"
                )


def _micro_batches(plan: Plan) -> Iterator[str]:
    count = plan.num_micro_batches
    if count < 1:
        yield f"num_micro_batches is {count}, and must be at least 1"
    elif count > _MOST_MICRO_BATCHES:
        yield f"num_micro_batches is {count}, and may be {_MOST_MICRO_BATCHES} at most"
    elif count > 1:
        batch = [array for array in plan.inputs if array.role == "batch" and array.shape]
        if batch and all(array.shape[0] % count for array in batch):
            yield (
                f"{count} micro-batches do not divide the batch of {batch[0].shape[0]}"
                f" (`{batch[0].path}`)"
            )
    if plan.micro_batch_semantics not in ("exact", "independent"):
        yield (
            f"micro_batch_semantics is {plan.micro_batch_semantics!r}, and must be 'exact' or"
            " 'independent'"
        )
    known = {array.path for array in plan.outputs}
    strangers = [path for path in plan.combine if path not in known]
    if strangers:
        yield f"combine names outputs that the step does not have: {_list(strangers)}"


def _sums(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    numbers = {
        **{name: getattr(p, name) for name in PREDICTED_FIGURES},
        **{f"memory_bytes.{part}": value for part, value in p.memory_bytes.items()},
        **{f"host_memory_bytes.{part}": value for part, value in p.host_memory_bytes.items()},
    }
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            yield f"prediction.{name} is {value}, and must be finite and not negative"
    parts_bytes = sum(p.memory_bytes.values())
    if not math.isclose(parts_bytes, p.peak_memory_bytes, rel_tol=_TOLERANCE, abs_tol=1.0):
        yield (
            f"the parts of memory add up to {parts_bytes:.0f} bytes, not to the peak of"
            f" {p.peak_memory_bytes:.0f}"
        )
    yield from _memory_over_time(p)
    parts_s = p.compute_s + p.communication_s + p.gradient_s - p.hidden_s + p.bubble_s
    parts_s += p.host_transfer_s - p.host_hidden_s
    if not math.isclose(parts_s, p.step_time_s, rel_tol=_TOLERANCE, abs_tol=1e-12):
        yield f"the parts of the step time add up to {parts_s:.6g} s, not to {p.step_time_s:.6g} s"


def _memory_over_time(prediction: Prediction) -> Iterator[str]:
    curve = prediction.memory_over_time
    if curve is None:
        return
    uneven = [part for part, values in curve.parts.items() if len(values) != len(curve.phases)]
    if uneven:
        yield (
            f"memory_over_time has {len(curve.phases)} moments, and another number of them for"
            f" {_list(uneven)}"
        )
        return
    if not _are_sizes(itertools.chain(*curve.parts.values())):
        yield "memory_over_time holds bytes that are not finite or are negative"
        return
    places = curve.seconds
    ascend = _are_sizes(places) and list(places) == sorted(places)
    if places and not (ascend and len(places) == len(curve.phases)):
        yield (
            f"memory_over_time has {len(curve.phases)} moments, and needs as many ascending seconds"
        )
    most_bytes = max(map(sum, zip(*curve.parts.values(), strict=True)), default=0.0)
    if not math.isclose(most_bytes, prediction.peak_memory_bytes, rel_tol=_TOLERANCE, abs_tol=1.0):
        yield (
            f"memory_over_time rises to {most_bytes:.0f} bytes, and the peak is"
            f" {prediction.peak_memory_bytes:.0f} bytes"
        )


def _are_sizes(values: Iterable[float]) -> bool:
    """Whether no value is negative, and all are finite."""
    return all(0 <= value < math.inf for value in values)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
