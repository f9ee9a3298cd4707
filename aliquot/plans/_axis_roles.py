"""Role of each mesh axis in the field's words: data, FSDP, ZeRO-2, tensor, sequence, expert.

Each word stands for something that was looked at: what the axis splits of stored parameters,
optimizer state and other state, of gradients, of the batch's arrays, and of the products that read
parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from ..core import format_bytes
from ._arrays import ArrayGroup, grouped_arrays
from ._plan import AxisUse, Plan, StagePlan

_MOST = 0.5
_NOTHING = 0.005
# What stays whole beside split state is named above this share of a stage's state.
_NAMED = 0.01
_MOST_NAMED = 2
# What holds for all but this share of bytes gives an axis its name; the rest is named beside it.
_LITTLE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """What a mesh axis of more than one device splits.

    Attributes:
        name, size: of the axis.
        where: whether it stays within hosts, in clusters of several; empty otherwise.
        text: its role in the field's words, with what it splits and what stays whole.
        parameters: the share of the stored parameters, by bytes, that it splits; None if there are
            none.
    """

    name: str
    size: int
    where: str
    text: str
    parameters: float | None

    @property
    def kind(self) -> str:
        """The name of the role alone, such as "data parallel, FSDP (ZeRO-3)"."""
        return self.text.partition(":")[0].partition(";")[0]


def roles_of_axes(plan: Plan, stage: StagePlan) -> Iterator[AxisRole]:
    """The role of each axis that has more than one device, in the mesh's order."""
    for name, size in zip(stage.axis_names, stage.mesh_shape, strict=False):
        if size > 1:
            axis = _Axis(plan=plan, stage=stage, name=name)
            yield AxisRole(
                name=name,
                size=size,
                where=axis.where,
                text=_role_of(axis),
                parameters=axis.share("parameter"),
            )


def axis_roles(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """Name, size and role of each axis that has more than one device."""
    roles = list(roles_of_axes(plan, stage))
    if not roles:
        yield "nothing: one device"
    for role in roles:
        yield f"{role.name} ({role.size}{role.where}): {role.text}"


def uses_together(stages: Iterable[StagePlan]) -> dict[str, AxisUse] | msgspec.UnsetType:
    """What the axes split of the work of several stages with equal meshes."""
    together: dict[str, AxisUse] = {}
    for stage in stages:
        if stage.parallelism is msgspec.UNSET:
            return msgspec.UNSET
        for axis, use in stage.parallelism.items():
            known = together.get(axis, AxisUse())
            together[axis] = AxisUse(
                reads=_added(known.reads, use.reads),
                expert_reads=_added(known.expert_reads, use.expert_reads),
                gradients=_added(known.gradients, use.gradients),
                batch=tuple(sorted({*known.batch, *use.batch})),
                exchanges=known.exchanges or use.exchanges,
            )
    return together


def _added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in sorted({*a, *b})}


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """An axis of a stage's mesh."""

    plan: Plan
    stage: StagePlan
    name: str

    @cached_property
    def use(self) -> AxisUse | None:
        """What the axis splits of the work; None in files that do not tell."""
        known = self.stage.parallelism
        return None if known is msgspec.UNSET else known.get(self.name, AxisUse())

    @property
    def where(self) -> str:
        """Whether it stays within hosts, in clusters of several."""
        cluster, stage = self.plan.cluster, self.stage
        hosts, each = cluster.get("num_hosts"), cluster.get("devices_per_host")
        if not isinstance(hosts, int) or not isinstance(each, int) or hosts < 2 or each < 2:
            return ""
        # Devices are numbered host by host, and the last axis of a mesh counts fastest.
        inner = math.prod(stage.mesh_shape[stage.axis_names.index(self.name) :])
        aligned = each % inner == 0 and stage.first_device % inner == 0
        return ", within a host" if aligned else ", across hosts"

    @cached_property
    def state(self) -> list[tuple[ArrayGroup, bool]]:
        """The arrays that stay on a device from step to step, and whether the axis splits them."""
        groups = grouped_arrays(self.plan.inputs, self.stage, self.stage.shardings)
        found = []
        for group in groups:
            if group.role != "batch":
                found.append((group, any(self.name in axes for axes in group.dims)))
        return found

    def share(self, role: str, among: Callable[[str], bool] = lambda path: True) -> float | None:
        """The share of the arrays of a role, by bytes, that the axis splits as they are stored, of
        those for whose path `among` is true; None if there are none.
        """
        split = {True: 0.0, False: 0.0}
        for group, is_split in self.state:
            if group.role == role and among(group.pattern):
                split[is_split] += group.total_bytes
        total = sum(split.values())
        return split[True] / total if total else None

    def whole(self) -> str:
        """The state that the axis does not split, where that is more than a little and the roles'
        shares do not say so in a word.
        """
        told = []
        for role in ("parameter", "optimizer_state"):
            if (self.share(role) or 0.0) < _NOTHING:
                told.append(role)
        least = _NAMED * sum(group.total_bytes for group, _ in self.state)
        large = []
        for group, is_split in self.state:
            if not is_split and group.role not in told and group.total_bytes > least:
                large.append(group)
        large.sort(key=lambda group: -group.total_bytes)
        texts = []
        for group in large[:_MOST_NAMED]:
            texts.append(f"{group.pattern} ({format_bytes(group.total_bytes)})")
        if len(large) > _MOST_NAMED:
            rest = sum(group.total_bytes for group in large[_MOST_NAMED:])
            texts.append(f"{len(large) - _MOST_NAMED} more ({format_bytes(rest)})")
        return f"; whole over {self.name}: {', '.join(texts)}" if texts else ""

    @property
    def of_batch(self) -> tuple[str, ...]:
        """What the axis splits of the batch's arrays: "examples", "positions" or, in files that do
        not tell, "dims".
        """
        if self.use is not None:
            return self.use.batch
        for array in self.plan.inputs:
            dims = self.stage.shardings.get(array.path, ()) if array.role == "batch" else ()
            if self.name in itertools.chain(*dims):
                return ("dims",)
        return ()


def _role_of(axis: _Axis) -> str:
    """Text of an axis's role."""
    use = axis.use
    if use is None:
        return _splits_alone(axis)
    every = _added(use.reads, use.expert_reads)
    in_pieces = _part(every, "pieces", "models")
    if in_pieces > _MOST and not use.exchanges:
        batch = "sharded" if use.batch else "replicated"
        return f"independent models: {_stored(axis)}, batch {batch}{axis.whole()}"
    dense = use.reads or use.expert_reads
    examples, positions = _part(dense, "examples"), _part(dense, "positions")
    dense_in_pieces = _part(use.reads, "pieces", "models")
    of_experts = _part(use.expert_reads, "pieces", "models") > _MOST and dense_in_pieces <= _MOST
    if examples + positions > _MOST:
        parts = (("data", examples), ("context", positions))
        names = [name for name, part in parts if part > _LITTLE * (examples + positions)]
        words = f"{' and '.join(names)} parallel"
        role = _role_of_data(axis, words, use.gradients, expert=of_experts)
        if not use.batch:
            # The step slices or draws the batch itself: an axis may be one of data all the same.
            inside = f"the inputs are replicated over {axis.name}, and split inside the step"
            takes_batch = any(array.role == "batch" for array in axis.plan.inputs)
            role += f"; {inside if takes_batch else 'the step makes its batch itself'}"
        in_pieces = dense_in_pieces if of_experts else in_pieces
        return f"{role}{_in_pieces(in_pieces)}"
    if in_pieces > _MOST:
        what = "expert" if of_experts else "tensor"
        split = f"between products with them, activations are split over {axis.name}, too"
        batch = f"; {split}" if use.batch else ", batch replicated"
        others = _in_pieces(in_pieces) if in_pieces <= 1 - _NOTHING else ""
        return f"{what} parallel: {_stored(axis)}{batch}{others}{axis.whole()}"
    return f"{_splits_alone(axis)}{_in_pieces(in_pieces)}"


def _in_pieces(share: float) -> str:
    used = (
        f"; {share:.0%} of the parameters are not gathered: each device computes with its own shard"
        " (tensor parallelism)"
    )
    return used if share >= _NOTHING else ""


def _splits_alone(axis: _Axis) -> str:
    """What an axis splits that has no role of its own, or whose work is not known."""
    stage, batch = axis.stage, "sharded" if axis.of_batch else "replicated"
    stored, state = axis.share("parameter") or 0.0, axis.share("optimizer_state")
    if stored or state or axis.of_batch:
        moments = "" if state is None else f", optimizer state {_sharded(state)}"
        return f"parameters {_sharded(stored)}{moments}, batch {batch}{axis.whole()}"
    interior = (axis.plan.stages[stage.like] if stage.like is not None else stage).interior
    inside_ops = any(axis.name in op.splits for op in interior)
    return "operators inside the step" if inside_ops else "nothing"


def _role_of_data(axis: _Axis, words: str, gradients: Mapping[str, float], *, expert: bool) -> str:
    """Role of an axis that splits the batch.

    Args:
        words: what it splits of the batch.
        gradients: see `AxisUse`.
        expert: whether it splits mainly experts' parameters in the products that read them.
    """
    among = (lambda path: not names_experts(path)) if expert else (lambda path: True)
    stored, state = axis.share("parameter", among) or 0.0, axis.share("optimizer_state", among)
    named, plain = f"{words}, ", f"{words}: "
    if expert:
        experts = _sharded(axis.share("parameter", names_experts) or 0.0)
        words = f"{words}, expert parallel: experts {experts}"
        named = plain = f"{words}; of the others "
    if not stored and not state:
        return words if expert else f"{plain}parameters replicated"
    whole, at_last = _part(gradients, "whole"), _part(gradients, "split at last")
    are = "gradients are" if whole <= _LITTLE else "split gradients are"
    later = f"; {are} whole until they are summed after the last micro-batch"
    later = later if at_last > _LITTLE else ""
    method, has_state = axis.plan.method, state is None or state > 1 - _LITTLE
    asked = next((number for number in (1, 2) if f"zero{number}" in method), None)
    if stored > 1 - _LITTLE and has_state and whole <= _LITTLE:
        also = "" if state is None else "optimizer state and "
        if axis.stage.gathers_once or asked:
            # Without micro-batches, what the backward pass recomputes gathers again.
            once = "once a step, " if axis.stage.gathers_once else ""
            role = (
                f"ZeRO-{asked or 2}: {also}parameters {_sharded(stored)}, parameters gathered"
                f" {once}after they are cast"
            )
        elif later:
            role = f"FSDP: {also}parameters {_sharded(stored)}"
        else:
            role = f"FSDP (ZeRO-3): parameters {_sharded(stored)}"
        text = f"{named}{role}{later}"
    elif stored < (_LITTLE if asked else _NOTHING) and state is not None and has_state:
        # Where gradients are summed once, after the last micro-batch, stages 1 and 2 are the same.
        number = 1 if whole > _LITTLE else asked or 2
        held = _sharded(stored) if stored >= _NOTHING else "replicated"
        role = f"ZeRO-{number}: optimizer state {_sharded(state)}, parameters {held}"
        text = f"{named}{role}{later}"
    else:
        text = f"{plain}parameters {_sharded(stored)}"
        text += f", gradients {_sharded(1 - whole)}" if gradients else ""
        text += "" if state is None else f", optimizer state {_sharded(state)}"
        text += later
    return f"{text}{axis.whole()}"


def _stored(axis: _Axis) -> str:
    """What an axis splits of the stored parameters, and of optimizer state where that differs."""
    stored, state = axis.share("parameter") or 0.0, axis.share("optimizer_state")
    text = f"parameters {_sharded(stored)}"
    differs = state is not None and _sharded(state) != _sharded(stored)
    return f"{text}, optimizer state {_sharded(state or 0.0)}" if differs else text


def _part(amounts: Mapping[str, float], *keys: str) -> float:
    """The part of all amounts that is under some keys; 0 if there are none."""
    total = sum(amounts.values())
    return sum(amounts.get(key, 0.0) for key in keys) / total if total else 0.0


def _sharded(share: float) -> str:
    if share < _NOTHING:
        return "replicated"
    return "sharded" if share > 1 - _NOTHING else f"sharded ({share:.0%} of bytes)"


def names_experts(path: str) -> bool:
    """Whether a path is that of experts."""
    return "expert" in path or "moe" in path
