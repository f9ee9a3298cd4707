"""A plan as a person would say it aloud: what to do, what it takes, and how sure that is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from ..core import counted, format_bytes
from ._axis_roles import AxisRole, roles_of_axes, uses_together
from ._plan import Plan, StagePlan
from ._summary import (
    recomputation,
    said_error,
    said_of_step_time,
    step_time_range_s,
)
from ._throughput import mfu

_NOUNS = {"gpu": "GPU", "tpu": "TPU chip", "cpu": "CPU device"}
# From this share on, all of it.
_ALL = 0.95
_NOTHING = 0.005
_ZERO = re.compile(r"ZeRO-([12])")
# Kinds of roles by how they begin, and what they do.
_INSTRUCTIONS = {
    "data and context parallel": "split batch and sequence",
    "data parallel, expert parallel": "split the batch and the experts",
    "data parallel": "split the batch",
    "context parallel": "split the sequence",
    "tensor parallel": "split each layer's matrix products",
    "expert parallel": "split the experts",
    "independent models": "spread independent models",
}
_SIZE = re.compile(r"^(?P<figure>\S+) (?P<unit>\S+)$")


def spoken(plan: Plan) -> tuple[str, str, str]:
    """A plan in three lines, without markup:

    * the model, the cluster and the method;
    * what is split over which devices, the micro-batches and what is recomputed;
    * predicted step time, memory on each device and its limit, MFU and the expected error.
    """
    model, cluster = plan.model.name or "step", plan.cluster.get("name", "a cluster")
    count, how = plan.num_micro_batches, recomputation(plan)
    parts = f"{count} micro-batches" if count != 1 else "the whole batch at once"
    again = "no recomputation" if how in ("", "none") else f"recompute {how}"
    done = ", ".join([_split(plan), parts, again])
    p = plan.prediction
    used, limit = format_bytes(p.peak_memory_bytes), format_bytes(p.memory_limit_bytes)
    if p.memory_limit_bytes:
        sizes = [_SIZE.match(used), _SIZE.match(limit)]
        if sizes[0] and sizes[1] and sizes[0]["unit"] == sizes[1]["unit"]:
            used = sizes[0]["figure"]
        used = f"{used} of {limit}"
    figures = [f"{said_of_step_time(plan)} a step", f"{used} on each {device_noun(plan)}"]
    share, ends = mfu(plan), step_time_range_s(plan)
    if share is not None:
        shares = [share * p.step_time_s / each for each in reversed(ends or (p.step_time_s,))]
        form = "{:.0%}" if share >= 0.1 else "{:.1%}"
        figures.append(f"MFU {' to '.join(map(form.format, shares))}")
    if plan.provenance.profiles:
        figures.append(f"mean error of the measurements {p.measured_error:.0%}")
    else:
        figures.append(said_error(plan))
    return (
        f"{model} on {cluster}, by method {plan.method}",
        f"{done[:1].upper()}{done[1:]}:",
        f"{', '.join(figures)}.",
    )


def device_noun(plan: Plan) -> str:
    """What one device of the plan's cluster is called: "GPU", "TPU chip", "CPU device"."""
    device = plan.cluster.get("device")
    kind = str(device.get("kind", "")) if isinstance(device, dict) else ""
    return _NOUNS.get(kind, "device")


def _split(plan: Plan) -> str:
    """What is split over which devices; of a pipeline also its stages."""
    noun = device_noun(plan)
    if not plan.stages:
        return "run nothing: the plan has no stages"
    if len(plan.stages) == 1:
        stage = plan.stages[0]
        everywhere = f"all {math.prod(stage.mesh_shape)} {noun}s"
        roles = list(roles_of_axes(plan, stage))
        if not roles:
            return f"run everything on one {noun}"
        kind = roles[0].kind
        if any(role.kind != kind for role in roles):
            return f"combine {' and '.join(_ways(plan, stage))} on {everywhere}"
        if "FSDP" in kind and not kind.startswith("context"):
            return f"shard parameters and optimizer state over {everywhere} (FSDP)"
        if zero := _ZERO.search(kind):
            also = "gradients and optimizer state" if zero[1] == "2" else "optimizer state"
            return f"split the batch and shard {also} over {everywhere} (ZeRO-{zero[1]})"
        for words, said in _INSTRUCTIONS.items():
            if kind.startswith(words):
                return f"{said} over {everywhere} ({words}{_shares(roles)})"
        return f"split the arrays over {everywhere}{_shares(roles).replace(', ', ': ')}"
    sizes = sorted({math.prod(stage.mesh_shape) for stage in plan.stages})
    each = counted(sizes[0], noun)
    if len(sizes) > 1:
        each = f"{sizes[0]} to {counted(sizes[-1], noun)}"
    kinds: dict[object, list[StagePlan]] = {}
    for stage in plan.stages:
        kinds.setdefault((stage.mesh_shape, stage.axis_names), []).append(stage)
    # The kind of stage that most stages are of stands for all.
    most = max(kinds.values(), key=len)
    held = {}
    for stage in most:
        held.update(stage.shardings)
    together = msgspec.structs.replace(most[0], shardings=held, parallelism=uses_together(most))
    run = f"run {counted(len(plan.stages), 'stage')} of {each} each ({plan.schedule})"
    if plan.num_submeshes != len(plan.stages):
        run = (
            f"run {len(plan.stages)} stages on {plan.num_submeshes} submeshes of {each} each"
            f" ({plan.schedule})"
        )
    if math.prod(together.mesh_shape) == 1:
        return run
    who = "each" if len(kinds) == 1 else "most"
    return f"{run}, {who} with {' and '.join(_ways(plan, together))}"


def _ways(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """Each kind of parallelism of a stage with its degree, such as "4-way tensor parallelism"."""
    by_kind: dict[str, list[AxisRole]] = {}
    for role in roles_of_axes(plan, stage):
        by_kind.setdefault(role.kind, []).append(role)
    for kind, roles in by_kind.items():
        degree = f"{math.prod(role.size for role in roles)}-way"
        words = next(filter(kind.startswith, _INSTRUCTIONS), "")
        named = words.replace("parallel", "parallelism") or "sharding of arrays"
        zero = _ZERO.search(kind)
        if "FSDP" in kind:
            yield f"{degree} FSDP" if words == "data parallel" else f"{degree} {named} (FSDP)"
        elif zero:
            yield f"{degree} {named} (ZeRO-{zero[1]})"
        elif words == "data parallel" and (shares := _shares(roles)):
            yield f"{degree} {named} ({shares.removeprefix(', ')})"
        else:
            yield f"{degree} {named}"


def _shares(roles: Sequence[AxisRole]) -> str:
    """How much of the parameters is stored in pieces, where that is more than nothing."""
    share = max((role.parameters or 0.0 for role in roles), default=0.0)
    if share <= _NOTHING:
        return ""
    return ", parameters sharded" if share > _ALL else f", {share:.0%} of the parameters sharded"
