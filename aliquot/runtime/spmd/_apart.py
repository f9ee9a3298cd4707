"""Sums over tokens of which each device keeps the summand of its own part of the sequence until the
last micro-batch.

Other operators of the loop's body may need the whole sequence, as attention does, so that the body
cannot be mapped over parts of it as it is over groups of devices. Instead a `vmap` around the body
gives it nothing but the number of a part. A sum takes that part of its operands; it, and all that
is made of it, then has a dim for the parts, split over the axis, and the rest of the body has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...graph import Graph, Op, OpId, ValueId
from ...sharding import Pins, axes_of, sums_that_wait


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept apart.

    Attributes:
        axis, size: the mesh axis that splits the sequence, and its devices.
        ops: the sums.
        values: those that hold summands.
    """

    axis: str
    size: int
    ops: frozenset[OpId]
    values: frozenset[ValueId]


def kept_apart(
    pins: Pins,
    mesh: Mesh,
    context_axes: Sequence[str],
    bodies: Iterable[tuple[Graph, Collection[ValueId]]],
) -> Apart | None:
    """What is kept apart in the bodies of a loop over micro-batches; None for nothing.

    Args:
        context_axes: the mesh axis that splits the sequence, if there is one.
        bodies: the graphs that run in each micro-batch, each with its results that are added up.
    """
    ops: set[OpId] = set()
    values: set[ValueId] = set()
    for graph, crossing in bodies if pins.token_sums else ():
        for op, held in sums_that_wait(graph, crossing).items():
            if op < len(pins.op_class) and pins.op_class[op] in pins.token_sums:
                ops.add(op)
                values |= held
    if not ops:
        return None
    (axis,) = context_axes
    return Apart(
        axis=axis, size=int(mesh.shape[axis]), ops=frozenset(ops), values=frozenset(values)
    )


class OwnPart(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One part of the sequence, of number `number`, in a replay; `mesh` as for the lowering."""

    apart: Apart
    mesh: Mesh
    number: Any

    def operands(
        self, op: Op, arrays: Sequence[Any], splits: Sequence[PartitionSpec | None]
    ) -> list[Any]:
        """The part's share of a sum's operands; arrays that are not summed count in the first.

        Args:
            splits: how the operands are split; None where that does not matter.
        """
        shares: list[Any] = []
        for array, spec in zip(arrays, splits, strict=True):
            shares.append(None if spec is None else self._share(array, spec))
        if all(share is None for share in shares):
            # The axis does not divide what is summed.
            shares[-1] = self.once(arrays[-1])
        if op.name == "scatter-add":
            # What is added to counts once.
            shares[0] = self.once(arrays[0])
        return [a if s is None else s for a, s in zip(arrays, shares, strict=True)]

    def once(self, array: Any) -> Any:
        """An array in the first part, and zeros in the others."""
        return jnp.where(self.number == 0, array, jnp.zeros_like(array))

    def _share(self, array: Any, split: PartitionSpec) -> Any | None:
        """The part of an array along the dim that the axis splits; None if it splits none."""
        dims = [axes_of(dim) for dim in split]
        dim = next((k for k, axes in enumerate(dims) if self.apart.axis in axes), None)
        if dim is None:
            return None
        place = dims[dim].index(self.apart.axis)
        before = math.prod(self.mesh.shape[axis] for axis in dims[dim][:place])
        rest = [*dims[:dim], tuple(a for a in dims[dim] if a != self.apart.axis), *dims[dim + 1 :]]
        split_parts = NamedSharding(self.mesh, PartitionSpec(self.apart.axis, *rest))

        def parts(array: Any) -> Any:
            """All parts, each on the devices that have it, so that nothing moves."""
            shape = array.shape
            cut = array.reshape(*shape[:dim], before, self.apart.size, -1, *shape[dim + 1 :])
            own = (*shape[:dim], shape[dim] // self.apart.size, *shape[dim + 1 :])
            stacked = jnp.moveaxis(cut, dim + 1, 0).reshape(self.apart.size, *own)
            return jax.lax.with_sharding_constraint(stacked, split_parts)

        @custom_vmap
        def part(array: Any, number: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(parts(array), number, keepdims=False)

        @part.def_vmap
        def _all_parts(size: int, batched: Any, array: Any, number: Any) -> tuple[Any, bool]:
            return parts(array), True

        return part(array, self.number)
