"""Text about the stages of a pipeline: their layers, devices and predicted figures. Equal stages
share a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..core import format_bytes, format_seconds, format_share_of_limit
from ._arrays import ArrayGroup, grouped_arrays
from ._plan import Plan, StagePlan, StagePrediction
from ._schedules import SCHEDULES
from ._section import Section, SectionKind

# `params.layers[3]`, `params.layers[4:8]` (rows of stacked layers), `layer 3` (what has no
# parameters of its own).
_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<first>\d{1,9})(?::(?P<stop>\d{1,9}))?(?P<rest>\D*)$")
_DIGITS = re.compile(r"\d+")
# An operator's parameter, from its numbered module on.
_IN_LAYER = re.compile(r"[^.]*\d[^.]*\..*")
_FEW = 3
_ROUNDING = 1e-6


def stage_table(plan: Plan) -> Section:
    """Table of stages with their layers and predicted times: for one micro-batch, the update for a
    step.
    """
    recomputes = any(stage.recompute != "none" for stage in plan.stages)
    header = ["stage", "layers", "host", "devices", "mesh", *(["recompute"] if recomputes else [])]
    first = len(header)
    header += ["forward", "backward", "update", "to next", "memory", "in flight", "bubble"]
    rows = []
    for index, stage in enumerate(plan.stages):
        # Host and devices of a stage as text, numbered over the whole cluster.
        start, stop = device_range(stage)
        each = plan.cluster.get("devices_per_host")
        host = ""
        if isinstance(each, int) and each > 0:
            begin, last = start // each, (stop - 1) // each
            host = str(begin) if begin == last else f"{begin}-{last}"
        devices = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        row = [str(index), short_layers(stage.layer_names), host, devices, _shape(stage)]
        row += [stage.recompute if stage.recompute != "none" else "-"] if recomputes else []
        rows.append(
            (
                *row,
                *_figures(
                    stage.prediction,
                    plan.prediction.memory_limit_bytes,
                    index + 1 < len(plan.stages),
                ),
            )
        )
    # Legend of the table of stages.
    p = plan.prediction
    lines = [
        "forward, backward, to next: for one micro-batch; update, its gradient synchronisation"
        " included: for a step"
    ]
    if p.memory_limit_bytes:
        share = f"and its share of the limit of {format_bytes(p.memory_limit_bytes)}"
        whose, together = "on each device", ""
        if plan.num_submeshes < len(plan.stages):
            whose = "of this stage on each device"
            together = (
                "; a device holds several stages, which do not reach their peaks at the same time:"
                f" together they need {format_bytes(p.peak_memory_bytes)} at most"
            )
        lines.append(f"memory: {whose}, {share}{together}")
    lines.append(
        "in flight: micro-batches kept at once, at most; bubble: share of the step in which the"
        " devices wait"
    )
    return Section(
        kind=SectionKind.STAGES,
        title="Stages (predicted)",
        header=tuple(header),
        rows=tuple(rows),
        right=(0, *range(first, len(header))),
        parts=(
            ("Stages", tuple(range(first))),
            ("Time and memory of each stage (predicted)", (0, *range(first, len(header)))),
        ),
        remarks=tuple(lines),
    )


def idle_parts(plan: Plan) -> tuple[float, float]:
    """The two parts of `bubble_s`: seconds in which the busiest submesh sends and receives, and
    seconds in which it waits.
    """
    p = plan.prediction
    shares = [stage.prediction.bubble for stage in plan.stages if stage.prediction]
    waits_s = min(shares, default=1.0) * p.step_time_s
    transfers_s = p.bubble_s - waits_s
    # Without such transfers, the two differ only by rounding.
    return (transfers_s, waits_s) if transfers_s > _ROUNDING * p.step_time_s else (0.0, p.bubble_s)


def step_parts(plan: Plan) -> dict[str, float]:
    """Seconds of the parts of a step, which add up to its time."""
    p = plan.prediction
    transfers_s, waits_s = idle_parts(plan)
    return {
        "compute": p.compute_s,
        # What overlaps may be sums of gradients or gathers of parameters.
        "exposed communication": p.communication_s + p.gradient_s - p.hidden_s,
        "copies to and from host memory": p.host_transfer_s - p.host_hidden_s,
        "transfers between stages": transfers_s,
        "pipeline bubble": waits_s,
    }


def short_layers(names: Sequence[str]) -> str:
    """Names of layers without the common part of their paths, consecutive numbers as a range.

    >>> short_layers(["params.layers[0]", "params.layers[1]", "params.layers[2]", "output"])
    'layers[0..2], output'
    >>> short_layers(["layers[0:4]", "layers[4:8]"])
    'layers[0:8]'
    >>> short_layers(["params.layers[0].up", "params.layers[0].down"])
    'layers[0].up, layers[0].down'
    """
    stretches: list[tuple[str, int, int, str, bool]] = []
    shown: list[str] = []
    for name in names:
        match = _NUMBERED.match(name.rpartition(".")[2])
        if match is None:
            in_layer = _IN_LAYER.search(name)
            stretches.append((in_layer[0] if in_layer else name, -1, -1, "", False))
            continue
        start = int(match["first"])
        stop = int(match["stop"]) if match["stop"] else start + 1
        parts = (match["stem"], start, stop, match["rest"], bool(match["stop"]))
        last = stretches[-1] if stretches else None
        if last and (last[0], last[2], last[3], last[4]) == (
            parts[0],
            parts[1],
            parts[3],
            parts[4],
        ):
            stretches[-1] = (last[0], last[1], stop, last[3], last[4])
        else:
            stretches.append(parts)
    for stem, start, stop, rest, rows in stretches:
        if start < 0:
            shown.append(stem)
        elif rows:
            shown.append(f"{stem}{start}:{stop}{rest}")
        else:
            shown.append(
                f"{stem}{start}{rest}" if stop == start + 1 else f"{stem}{start}..{stop - 1}{rest}"
            )
    if len(shown) > _FEW:
        return f"{shown[0]} .. {shown[-1]} ({len(names)})"
    return ", ".join(shown)


def stage_numbers(numbers: Sequence[int]) -> str:
    """Numbers of stages, consecutive ones as a range.

    >>> stage_numbers([0, 1, 2, 5])
    '0-2, 5'
    """
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches)


def meshes(plan: Plan) -> str:
    """The meshes: `mesh 4x2 (x, y)`, or for a pipeline how many stages there are on how many
    devices.
    """
    stages = plan.stages
    if len(stages) == 1:
        return f"mesh {_shape(stages[0])} ({', '.join(stages[0].axis_names)})"
    if not stages:
        return "no stages"
    counts: dict[str, int] = {}
    submeshes = stages[: plan.num_submeshes] if 0 < plan.num_submeshes < len(stages) else stages
    for stage in submeshes:
        counts[_devices(stage)] = counts.get(_devices(stage), 0) + 1
    if len(submeshes) < len(stages):
        what = f"{len(stages)} stages on {len(submeshes)} submeshes of"
        return (
            f"{what} {next(iter(counts))} each"
            if len(counts) == 1
            else f"{what} {', '.join(counts)}"
        )
    if len(counts) == 1:
        return f"{len(stages)} stages on {next(iter(counts))} each"
    if len(counts) <= _FEW:
        listed = ", ".join(
            f"{count} on {devices}{' each' if count > 1 else ''}"
            for devices, count in counts.items()
        )
        return f"{len(stages)} stages, {listed}"
    sizes = sorted(math.prod(stage.mesh_shape) for stage in stages)
    return f"{len(stages)} stages on {sizes[0]} to {sizes[-1]} devices"


def equal_stages(plan: Plan) -> Iterator[tuple[tuple[int, ...], list[ArrayGroup]]]:
    """Sets of stages that hold equal arrays, split alike on equal meshes; each with the arrays of
    its first stage.
    """
    alike: dict[object, list[int]] = {}
    arrays: dict[int, list[ArrayGroup]] = {}
    for index, stage in enumerate(plan.stages):
        groups = grouped_arrays(plan.inputs, stage, stage.shardings)
        arrays[index] = groups
        forms = []
        for g in groups:
            forms.append((_DIGITS.sub("*", g.pattern), g.count, g.shape, g.dtype, g.dims))
        signature = (stage.mesh_shape, stage.axis_names, tuple(sorted(forms)))
        alike.setdefault(signature, []).append(index)
    for numbers in alike.values():
        # Groups of equal patterns but for numbers stand in the same place.
        first, *others = (
            sorted(arrays[number], key=lambda g: (_DIGITS.sub("*", g.pattern), g.pattern))
            for number in numbers
        )
        shown = []
        for group, *same in zip(first, *others):
            patterns = [group.pattern, *(other.pattern for other in same)]
            shown.append(replace(group, pattern=_common(patterns)))
        shown.sort(key=lambda g: (-g.local_bytes, -g.total_bytes, g.pattern))
        yield tuple(numbers), shown


def _common(patterns: Sequence[str]) -> str:
    """One pattern for several that differ only in numbers, with `*` for the numbers that differ;
    the first pattern if they differ otherwise.
    """
    numbers = zip(*map(_DIGITS.findall, patterns))
    shown = iter(["*" if len(set(each)) > 1 else each[0] for each in numbers])
    alike = len({_DIGITS.sub("*", pattern) for pattern in patterns}) == 1
    return _DIGITS.sub(lambda _: next(shown), patterns[0]) if alike else patterns[0]


def device_range(stage: StagePlan) -> tuple[int, int]:
    """The first device of a stage's submesh, and one past its last."""
    return stage.first_device, stage.first_device + math.prod(stage.mesh_shape)


def stage_data(stage: StagePlan) -> dict[str, Any]:
    """Layers, devices and predicted figures of a stage, as plain values ready for JSON."""
    return {
        "mesh": list(stage.mesh_shape),
        "axis_names": list(stage.axis_names),
        "data_axes": list(stage.data_axes),
        "context_axes": list(stage.context_axes),
        "devices": list(range(*device_range(stage))),
        "layers": list(stage.layer_names),
        "recompute": stage.recompute,
        "predicted": msgspec.to_builtins(stage.prediction),
    }


def submesh_name(submesh: int, stages: Sequence[int], first_device: int, last_device: int) -> str:
    """Name of a submesh: its stages and its devices.

    >>> submesh_name(0, [0, 2], 0, 3)
    'submesh 0: stages 0, 2 on devices 0-3'
    """
    devices = (
        f"device {first_device}"
        if first_device == last_device
        else f"devices {first_device}-{last_device}"
    )
    return (
        f"submesh {submesh}: stage{'s' if len(stages) > 1 else ''} {stage_numbers(stages)} on"
        f" {devices}"
    )


def submesh_names(plan: Plan) -> tuple[str, ...]:
    """Names of a plan's submeshes."""
    names = []
    placement = SCHEDULES[plan.schedule].placement(len(plan.stages), plan.num_submeshes)
    for submesh in range(plan.num_submeshes):
        start, stop = device_range(plan.stages[submesh])
        stages = [stage for stage, place in enumerate(placement) if place == submesh]
        names.append(submesh_name(submesh, stages, start, stop - 1))
    return tuple(names)


def _shape(stage: StagePlan) -> str:
    return "x".join(map(str, stage.mesh_shape))


def _devices(stage: StagePlan) -> str:
    return f"{_shape(stage)} device{'' if math.prod(stage.mesh_shape) == 1 else 's'}"


def _figures(p: StagePrediction | None, limit_bytes: float, sends: bool) -> tuple[str, ...]:
    if p is None:
        return ("",) * 7
    share = f" {format_share_of_limit(p.peak_memory_bytes, limit_bytes)}" if limit_bytes else ""
    return (
        format_seconds(p.forward_s),
        format_seconds(p.backward_s),
        format_seconds(p.update_s),
        format_seconds(p.transfer_s) if sends else "",
        f"{format_bytes(p.peak_memory_bytes)}{share}",
        str(p.in_flight),
        f"{p.bubble:.1%}",
    )
