"""Positions of micro-batches in the batch; cutting arrays into parts and joining them.

A dim of `n` elements is read as `(groups, shards, micro-batches, rest)`: a group of devices owns a
contiguous share, each of its shards a contiguous share of that, and micro-batches are cut from the
inside. So no example leaves its device. Where a dim holds several blocks (see `TimeSpec`), each is
cut in this way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of groups, of shards in each group, and of micro-batches."""

    groups: int = 1
    shards: int = 1
    micro_batches: int = 1

    @property
    def parts(self) -> int:
        """Number of parts of a batch."""
        return self.groups * self.micro_batches

    def cut(self, array: Any, dim: int, blocks: int = 1) -> Any:
        """All parts of an array: micro-batches first, then groups (where there are any), then the
        array's dims.
        """
        shape = array.shape
        apart = self._apart(array, dim, blocks)
        front = jnp.moveaxis(apart, (dim + 3, dim + 1), (0, 1))
        sizes = [*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]]
        return front.reshape(self.micro_batches, *self._leading(), *sizes)

    def join(self, parts: Any, dim: int, blocks: int = 1) -> Any:
        """The reverse of `cut`."""
        lead = 1 + len(self._leading())
        shape = parts.shape[lead:]
        rest = shape[dim] // (blocks * self.shards)
        sizes = (
            self.micro_batches,
            self.groups,
            *shape[:dim],
            blocks,
            self.shards,
            rest,
            *shape[dim + 1 :],
        )
        apart = jnp.moveaxis(parts.reshape(sizes), (1, 0), (dim + 1, dim + 3))
        # The moves leave (blocks, groups, shards, micro-batches, rest) at `dim`; see the module.
        return apart.reshape(*shape[:dim], shape[dim] * self.parts, *shape[dim + 1 :])

    def take(self, array: Any, dim: int, group: Any, micro_batch: Any, blocks: int = 1) -> Any:
        """One part of an array."""
        shape = array.shape
        apart = self._apart(array, dim, blocks)
        part = jax.lax.dynamic_index_in_dim(apart, micro_batch, dim + 3, keepdims=False)
        part = jax.lax.dynamic_index_in_dim(part, group, dim + 1, keepdims=False)
        return part.reshape(*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :])

    def offsets(
        self,
        shape: Sequence[int],
        dim: int,
        group: Any,
        micro_batch: Any,
        dtype: Any,
        blocks: int = 1,
    ) -> Any:
        """Offsets from an element's position in its part to its position in the batch, for a part's
        shape.
        """
        rest = shape[dim] // (blocks * self.shards)
        # A shard of a part may be empty where a dim has no elements.
        piece = jax.lax.broadcasted_iota(dtype, tuple(shape), dim) // max(rest, 1)
        block, shard = piece // self.shards, piece % self.shards
        group, micro_batch = jnp.asarray(group, dtype), jnp.asarray(micro_batch, dtype)
        share = (block * self.groups + group) * self.shards + shard
        return (share * self.micro_batches + micro_batch) * rest - piece * rest

    def _apart(self, array: Any, dim: int, blocks: int) -> Any:
        """An array whose dim is read as blocks, groups, shards, micro-batches and the rest."""
        shape = array.shape
        outer = (blocks, self.groups, self.shards, self.micro_batches)
        rest = shape[dim] // math.prod(outer)
        return array.reshape(*shape[:dim], *outer, rest, *shape[dim + 1 :])

    def _leading(self) -> tuple[int, ...]:
        return (self.groups,) if self.groups > 1 else ()


def sizes_of(dims: Sequence[Sequence[str]], axis_sizes: dict[str, int]) -> tuple[int, ...]:
    """Number of shards of each dim."""
    sizes = []
    for names in dims:
        sizes.append(math.prod(map(axis_sizes.__getitem__, names)))
    return tuple(sizes)
