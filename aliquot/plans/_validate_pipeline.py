"""Faults of a pipeline's stages: their layers, devices, schedule and predicted figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..core import nearest
from ._plan import Plan, StagePlan
from ._schedule import round_robin
from ._schedules import SCHEDULES
from ._stage_text import device_range, stage_numbers

_TOLERANCE = 1e-6


def pipeline_violations(plan: Plan) -> Iterator[str]:
    """Every violation that only a pipeline can have; none for other plans."""
    if not plan.is_pipeline:
        if len(plan.stages) > 1:
            yield f"{len(plan.stages)} stages have no schedule: {nearest('', SCHEDULES)}"
        return
    if plan.schedule not in SCHEDULES:
        yield f"there is no schedule {plan.schedule!r}: {nearest(plan.schedule, SCHEDULES)}"
    if not plan.stages:
        return
    end = 0
    for index, stage in enumerate(plan.stages):
        if not stage.layer_names:
            yield f"stage {index} has no layers"
        if stage.first_layer > end:
            last = stage.first_layer - 1
            yield (
                f"layer {end} is in no stage"
                if last == end
                else f"layers {end}-{last} are in no stage"
            )
        elif stage.first_layer < end:
            yield (
                f"stage {index} begins with layer {stage.first_layer}, and the stages before it"
                f" have all up to {end - 1}"
            )
        end = max(end, stage.first_layer + len(stage.layer_names))
    if plan.num_layers is not None and end != plan.num_layers:
        yield f"the stages have {end} layers, and the plan cuts the step into {plan.layers}"
    bounds = plan.scan_bounds
    if bounds and (bounds[0] != 0 or any(a >= b for a, b in zip(bounds, bounds[1:]))):
        yield (
            f"scan_bounds are {', '.join(map(str, bounds))}, and must rise from 0 to the length of"
            " the loops"
        )
    yield from _devices(plan)
    for index, stage in enumerate(plan.stages):
        yield from _figures(plan, stage, f"stage {index}")


def process_violations(plan: Plan, num_processes: int) -> Iterator[str]:
    """Reasons why `num_processes` processes cannot share the plan's hosts.

    A process can have an equal part of one host's devices, all of them, or those of several whole
    hosts (as with virtual devices).
    """
    hosts, each = _hosts(plan)
    if not hosts or num_processes < 1:
        return
    within = num_processes % hosts == 0 and each % (num_processes // hosts) == 0
    if not within and hosts % num_processes:
        yield (
            f"the plan is for {hosts} host{'' if hosts == 1 else 's'} of {each} devices, which"
            f" {num_processes} processes cannot share equally"
        )


def _devices(plan: Plan) -> Iterator[str]:
    submeshes = plan.num_submeshes
    if not 1 <= submeshes <= len(plan.stages):
        yield f"{len(plan.stages)} stages cannot be dealt out to {submeshes} submeshes"
        submeshes = len(plan.stages)
    kind = SCHEDULES.get(plan.schedule)
    placement = (
        kind.placement(len(plan.stages), submeshes)
        if kind
        else round_robin(len(plan.stages), submeshes)
    )
    hosts, each = _hosts(plan)
    total = hosts * each
    users: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        start, stop = device_range(stage)
        where = f"stage {index} on devices {start} to {stop - 1}"
        if stop <= start:
            continue  # Its mesh is a violation of its own.
        if placement[index] != index and (start, stop) != device_range(
            plan.stages[placement[index]]
        ):
            yield (
                f"{where} should be on those of stage {placement[index]}, with which it shares a"
                " submesh"
            )
            continue
        if start < 0 or stop > total > 0:
            yield f"{where} reaches outside the cluster of {total}"
        elif each and not (
            start % each == 0 if stop - start > each else start % each + stop - start <= each
        ):
            yield f"{where} straddles hosts of {each}"
        if index < submeshes and 0 <= start and stop <= total:
            for device in range(start, stop):
                users.setdefault(device, []).append(index)
    shared: dict[tuple[int, ...], list[int]] = {}
    for device, stages in sorted(users.items()):
        if len(stages) > 1:
            shared.setdefault(tuple(stages), []).append(device)
    for owners, devices in shared.items():
        what = (
            f"device {devices[0]} is"
            if len(devices) == 1
            else f"devices {stage_numbers(devices)} are"
        )
        yield f"{what} in the submeshes of stages {stage_numbers(owners)} at once"


def _hosts(plan: Plan) -> tuple[int, int]:
    """Number of hosts, and devices of each; 0 if the description is unusable, which is a violation
    of its own.
    """
    hosts, each = plan.cluster.get("num_hosts"), plan.cluster.get("devices_per_host")
    if not (isinstance(hosts, int) and isinstance(each, int) and hosts > 0 and each > 0):
        return 0, 0
    return hosts, each


def _figures(plan: Plan, stage: StagePlan, where: str) -> Iterator[str]:
    p = stage.prediction
    if p is None:
        return
    numbers = {
        "forward_s": p.forward_s,
        "backward_s": p.backward_s,
        "weight_gradient_s": p.weight_gradient_s,
        "update_s": p.update_s,
        "transfer_s": p.transfer_s,
        "transfer_back_s": p.transfer_back_s or 0.0,
        "peak_memory_bytes": p.peak_memory_bytes,
        **{f"memory_bytes.{part}": value for part, value in p.memory_bytes.items()},
    }
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            yield f"{where} predicts {name} {value}, which must be finite and not negative"
    if p.weight_gradient_s > p.backward_s * (1 + _TOLERANCE):
        yield (
            f"{where} predicts {p.weight_gradient_s:.6g} s for gradients of weights, more than its"
            " backward pass"
        )
    if not -_TOLERANCE <= p.bubble <= 1:
        yield f"{where} predicts a bubble of {p.bubble}, which is no share of the step"
    if not 1 <= p.in_flight <= max(plan.num_micro_batches, 1):
        yield (
            f"{where} keeps {p.in_flight} micro-batches in flight, and there are"
            f" {plan.num_micro_batches}"
        )
    parts_bytes = sum(p.memory_bytes.values())
    if not math.isclose(parts_bytes, p.peak_memory_bytes, rel_tol=_TOLERANCE, abs_tol=1.0):
        yield (
            f"the parts of memory of {where} add up to {parts_bytes:.0f} bytes, not to"
            f" {p.peak_memory_bytes:.0f}"
        )
