"""A plan's splits as JAX writes them, for people who keep their own training loop. Needs jax only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plan import Plan

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


def partition_specs(plan: Plan) -> dict[str, PartitionSpec]:
    """For each input path of the step, in order, its `PartitionSpec` over the axis names of the plan's mesh.

    An input that several stages hold has the spec of the first.
    """
    from jax.sharding import PartitionSpec

    placed: dict[str, tuple[tuple[str, ...], ...]] = {}
    for stage in reversed(plan.stages):
        placed.update(stage.shardings)
    return {array.path: PartitionSpec(*map(_entry, placed.get(array.path, ()))) for array in plan.inputs}


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) <= 1:
        return axes[0] if axes else None
    return tuple(axes)
