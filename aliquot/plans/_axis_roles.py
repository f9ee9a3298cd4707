"""Role of each mesh axis in the field's words: data, FSDP, ZeRO-2, tensor, sequence, expert.

The splits of stored arrays alone cannot distinguish FSDP from tensor parallelism. What matters is
whether a weight is gathered over an axis before it is used, and whether its gradient is summed over
the axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ._arrays import item_bytes, placed_arrays, unindexed, unranged
from ._plan import ArrayInterface, CollectiveUse, Plan, StagePlan

_MOST = 0.5
_NOTHING = 0.005
_GRADIENT_OF = "gradient of "


def axis_roles(plan: Plan, stage: StagePlan, uses: Sequence[CollectiveUse]) -> Iterator[str]:
    """Name, size and role of each axis that has more than one device.

    Args:
        uses: the collectives of the stage.
    """
    axes = [
        (axis, size)
        for axis, size in zip(stage.axis_names, stage.mesh_shape, strict=False)
        if size > 1
    ]
    if not axes:
        yield "nothing: one device"
    for axis, size in axes:
        role = _role_of(_Axis.of(plan, stage, uses, axis))
        yield f"{axis} ({size}{_where(plan, stage, axis)}): {role}"


def _where(plan: Plan, stage: StagePlan, axis: str) -> str:
    """Whether an axis stays within hosts, in clusters of several."""
    cluster = plan.cluster
    hosts, each = cluster.get("num_hosts"), cluster.get("devices_per_host")
    if not isinstance(hosts, int) or not isinstance(each, int) or hosts < 2 or each < 2:
        return ""
    # Devices are numbered host by host, and the last axis of a mesh counts fastest.
    inner = math.prod(stage.mesh_shape[stage.axis_names.index(axis) :])
    aligned = each % inner == 0 and stage.first_device % inner == 0
    return ", within a host" if aligned else ", across hosts"


def uses_of_stage(plan: Plan, stage: StagePlan) -> tuple[CollectiveUse, ...]:
    """The collectives of a stage, or of a plan without a pipeline."""
    return stage.prediction.collectives if stage.prediction else plan.prediction.collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """An axis of a stage's mesh, with the collectives over it.

    Attributes:
        gathered: paths of parameters, with `*` for indices, that are gathered over it.
        summed: paths of parameters, likewise, whose gradients are summed over it.
    """

    plan: Plan
    stage: StagePlan
    name: str
    gathered: frozenset[str]
    summed: frozenset[str]

    @staticmethod
    def of(plan: Plan, stage: StagePlan, uses: Sequence[CollectiveUse], axis: str) -> _Axis:
        """The axis of a stage, with the collectives over it read from `uses`."""
        over = [use for use in uses if axis in use.axes]
        gathers = [use.label for use in over if use.kind == "all-gather"]
        sums = [
            use.label.removeprefix(_GRADIENT_OF).partition(" ")[0]
            for use in over
            if use.label.startswith(_GRADIENT_OF)
        ]
        return _Axis(
            plan=plan,
            stage=stage,
            name=axis,
            gathered=frozenset(unindexed(label) for label in gathers),
            summed=frozenset(unindexed(label) for label in sums),
        )

    def splits(self, array: ArrayInterface) -> bool:
        """True if the axis splits the array as it is stored."""
        return any(self.name in axes for axes in self.stage.shardings[array.path])

    def splits_products_with(self, array: ArrayInterface) -> bool:
        """True if each device computes with its own piece of the array only."""
        return self.splits(array) and unindexed(unranged(array.path)) not in self.gathered

    def sums_gradient_of(self, array: ArrayInterface) -> bool:
        """True if the array's gradient is summed over the axis, whose devices have different
        examples.
        """
        return unindexed(unranged(array.path)) in self.summed

    def share(
        self,
        role: str,
        what: Callable[[ArrayInterface], bool],
        among: Callable[[ArrayInterface], bool] = lambda array: True,
    ) -> float:
        """The share of arrays, by bytes, for which `what` is true, among those of a role for which
        `among` is true.
        """
        chosen = total = 0.0
        for array in placed_arrays(self.plan.inputs, self.stage.shardings):
            if array.role == role and among(array):
                size = math.prod(array.shape) * item_bytes(array.dtype)
                total += size
                chosen += size * what(array)
        return chosen / total if total else 0.0

    @property
    def of_batch(self) -> list[str]:
        """What the axis splits of the batch's arrays: rows ("data"), their dims behind, as the
        sequence ("context"), both or neither.
        """
        found = {
            "data" if dim == 0 else "context"
            for array in self.plan.inputs
            if array.role == "batch"
            for dim, axes in enumerate(self.stage.shardings.get(array.path, ()))
            if self.name in axes
        }
        return [name for name in ("data", "context") if name in found]


def _role_of(axis: _Axis) -> str:
    """Text of an axis's role, derived from the arrays that it splits, gathers and sums."""
    names = axis.of_batch
    stored = axis.share("parameter", axis.splits)
    computed = axis.share("parameter", axis.splits_products_with)
    expert = axis.share("parameter", axis.splits_products_with, is_expert)
    dense = axis.share("parameter", axis.splits_products_with, _is_dense)
    sums_gradients = axis.share("parameter", axis.sums_gradient_of, _is_dense) > _MOST
    of_experts = expert > _MOST and dense <= _MOST
    splits_batch_alone = axis.name in axis.stage.data_axes and bool(names or stored)
    if sums_gradients or splits_batch_alone or ("data" in names and dense <= _MOST):
        words = f"{' and '.join(names or ['data'])} parallel"
        role = _role_of_data(axis, words, stored, expert if of_experts else 0.0)
        # The step slices the batch itself, so that an axis may be one of data all the same.
        later = f"the inputs are replicated over {axis.name}, and split inside the step"
        return role if names else f"{role}; {later}"
    if computed > _MOST:
        what = "expert" if of_experts else "tensor"
        also = f", experts {_sharded(expert)}" if expert else ""
        split = f"the batch is split over {axis.name}, too, outside of products with them"
        batch = f"; {split}" if names else ", batch replicated"
        return f"{what} parallel: parameters {_sharded(computed)}{also}{batch}"
    if axis.name in axis.stage.data_axes and not names:
        return "data parallel"
    state = axis.share("optimizer_state", axis.splits)
    if names or stored or state:
        words = f"{' and '.join(names)} parallel: " if names else ""
        return f"{words}parameters {_sharded(stored)}, optimizer state {_sharded(state)}"
    stage = axis.stage
    interior = (axis.plan.stages[stage.like] if stage.like is not None else stage).interior
    inside_ops = any(axis.name in op.splits for op in interior)
    return "operators inside the step" if inside_ops else "nothing"


def _role_of_data(axis: _Axis, words: str, stored: float, expert: float) -> str:
    """Role of an axis that splits the batch.

    Args:
        words: what it splits of the batch.
        stored: share of the parameters that it splits where they are stored.
        expert: share of the experts' parameters that it splits, if it splits mainly these; else 0.
    """
    if expert:
        return f"{words}, expert parallel: experts {_sharded(expert)}"
    state = axis.share("optimizer_state", axis.splits)
    # Where gradients are summed once, after the last micro-batch, stages 1 and 2 are the same.
    stage = 1 if "zero1" in axis.plan.method else 2
    asked = any(name in axis.plan.method for name in ("zero1", "zero2"))
    if stored > _MOST and (axis.stage.gathers_once or asked):
        # Without micro-batches, what the backward pass recomputes gathers again.
        once = "once a step, " if axis.stage.gathers_once else ""
        return (
            f"{words}, ZeRO-{stage}: optimizer state and parameters {_sharded(stored)}, parameters"
            f" gathered {once}after they are cast"
        )
    if stored > _MOST:
        return f"{words}, FSDP (ZeRO-3): parameters {_sharded(stored)}"
    if state > _MOST:
        return (
            f"{words}, ZeRO-{stage}: optimizer state {_sharded(state)}, parameters"
            f" {_sharded(stored)}"
        )
    return f"{words}: parameters {_sharded(stored)}"


def _sharded(share: float) -> str:
    if share < _NOTHING:
        return "replicated"
    return "sharded" if share > 1 - _NOTHING else f"sharded ({share:.0%} of bytes)"


def is_expert(array: ArrayInterface) -> bool:
    """Whether an array holds experts, by its path."""
    return "expert" in array.path or "moe" in array.path


def _is_dense(array: ArrayInterface) -> bool:
    return not is_expert(array)
