"""Positions of micro-batches in the batch; cutting arrays into parts and joining them.

A dim of `n` elements is read as `(groups, shards, micro-batches, rest)`: a group of devices owns a
contiguous share, each of its shards a contiguous share of that, and micro-batches are cut from the
inside. So no example leaves its device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Counts of groups, of shards in each group, and of micro-batches."""

    groups: int = 1
    shards: int = 1
    micro_batches: int = 1

    @property
    def parts(self) -> int:
        """Number of parts of a batch."""
        return self.groups * self.micro_batches

    def cut(self, array: Any, dim: int) -> Any:
        """All parts of an array: micro-batches first, then groups (where there are any), then the
        array's dims.
        """
        shape = array.shape
        rest = shape[dim] // (self.parts * self.shards)
        inner = (self.groups, self.shards, self.micro_batches, rest)
        apart = array.reshape(*shape[:dim], *inner, *shape[dim + 1 :])
        front = jnp.moveaxis(apart, (dim + 2, dim), (0, 1))
        sizes = [*shape[:dim], self.shards * rest, *shape[dim + 1 :]]
        return front.reshape(self.micro_batches, *self._leading(), *sizes)

    def join(self, parts: Any, dim: int) -> Any:
        """The reverse of `cut`."""
        lead = 1 + len(self._leading())
        shape = parts.shape[lead:]
        rest = shape[dim] // self.shards
        sizes = (
            self.micro_batches,
            self.groups,
            *shape[:dim],
            self.shards,
            rest,
            *shape[dim + 1 :],
        )
        apart = jnp.moveaxis(parts.reshape(sizes), (1, 0), (dim, dim + 2))
        # The moves leave (groups, shards, micro-batches, rest) at `dim`; see the module.
        return apart.reshape(*shape[:dim], shape[dim] * self.parts, *shape[dim + 1 :])

    def take(self, array: Any, dim: int, group: Any, micro_batch: Any) -> Any:
        """One part of an array."""
        shape = array.shape
        rest = shape[dim] // (self.parts * self.shards)
        apart = array.reshape(
            *shape[:dim], self.groups, self.shards, self.micro_batches, rest, *shape[dim + 1 :]
        )
        part = jax.lax.dynamic_index_in_dim(apart, micro_batch, dim + 2, keepdims=False)
        part = jax.lax.dynamic_index_in_dim(part, group, dim, keepdims=False)
        return part.reshape(*shape[:dim], self.shards * rest, *shape[dim + 1 :])

    def offsets(
        self, shape: Sequence[int], dim: int, group: Any, micro_batch: Any, dtype: Any
    ) -> Any:
        """Offsets from an element's position in its part to its position in the batch, for a part's
        shape.
        """
        rest = shape[dim] // self.shards
        # A shard of a part may be empty where a dim has no elements.
        shard = jax.lax.broadcasted_iota(dtype, tuple(shape), dim) // max(rest, 1)
        group, micro_batch = jnp.asarray(group, dtype), jnp.asarray(micro_batch, dtype)
        count = self.micro_batches
        return ((group * self.shards + shard) * count + micro_batch) * rest - shard * rest

    def _leading(self) -> tuple[int, ...]:
        return (self.groups,) if self.groups > 1 else ()


def sizes_of(dims: Sequence[Sequence[str]], axis_sizes: dict[str, int]) -> tuple[int, ...]:
    """Number of shards of each dim."""
    return tuple(math.prod(axis_sizes[name] for name in names) for names in dims)
