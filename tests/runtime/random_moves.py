"""Operators of random steps that move numbers: shapes, slices, indices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from runtime.random_base import Apply, Draw, Inputs, operator, row_index


@operator()
def _flatten(draw: Draw) -> Apply:
    return lambda h, given: h.reshape(h.shape[0], math.prod(h.shape[1:]))


@operator()
def _unflatten(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2 or not draw.shape[-1]:
        return None
    factor = draw.pick(*[k for k in range(1, draw.shape[-1] + 1) if draw.shape[-1] % k == 0])
    return lambda h, given: h.reshape(*h.shape[:-1], factor, h.shape[-1] // factor)


@operator()
def _turn(draw: Draw) -> Apply | None:
    """A transposition that leaves the examples first, written with them last on the way."""
    if len(draw.shape) != 3:
        return None
    return lambda h, given: jnp.tanh(h.transpose(2, 1, 0) * 1.5).transpose(2, 0, 1)


@operator()
def _merge_rows(draw: Draw) -> Apply | None:
    """Examples and positions as one dim, a product, and back."""
    if len(draw.shape) != 3:
        return None
    name = draw.weight(draw.shape[2], draw.shape[2])

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        rows, middle, width = h.shape
        return (h.reshape(rows * middle, width) @ given.params[name]).reshape(rows, middle, width)

    return apply


@operator()
def _pad(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None:
        return None
    low, high, inner = draw.pick(0, 1, 2, -1), draw.pick(0, 1, 3), draw.pick(0, 0, 1)
    if draw.shape[dim] + low + high < 1:
        return None
    return lambda h, given: lax.pad(
        h, jnp.zeros((), h.dtype), _one_dim(h.ndim, dim, (low, high, inner), (0, 0, 0))
    )


@operator()
def _slice(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or draw.shape[dim] < 2:
        return None
    size = draw.shape[dim]
    start, stride = int(draw.rng.integers(0, size - 1)), draw.pick(1, 1, 2, 3)
    stop = int(draw.rng.integers(start + 1, size + 1))
    return lambda h, given: lax.slice_in_dim(h, start, stop, stride, dim)


@operator()
def _reverse_and_roll(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None:
        return None
    return draw.pick(
        lambda h, given: jnp.flip(h, dim) + 0.5 * h, lambda h, given: jnp.roll(h, 2, dim) - h
    )


@operator()
def _concatenate(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or draw.shape[dim] > 8:
        return None
    empty = draw.rng.random() < 0.3

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        parts = [h, jnp.cos(h)]
        if empty:
            parts.insert(1, lax.slice_in_dim(h, 0, 0, axis=dim))
        return jnp.concatenate(parts, dim)

    return apply


@operator()
def _stack(draw: Draw) -> Apply | None:
    if len(draw.shape) > 2:
        return None
    return lambda h, given: jnp.stack([h, 0.5 * h, h * h], axis=1)


@operator()
def _tile(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2 or draw.shape[1] > 4:
        return None
    return draw.pick(
        lambda h, given: jnp.tile(h, (1, 2)), lambda h, given: jnp.repeat(h, 3, axis=1)
    )


@operator()
def _split_and_swap(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or draw.shape[dim] % 2 or not draw.shape[dim]:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        a, b = jnp.split(h, 2, axis=dim)
        return jnp.concatenate([-b, a], axis=dim) + h

    return apply


@operator()
def _lookup(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    name = draw.weight(draw.tokens, draw.shape[-1])
    return lambda h, given: h + given.params[name][row_index(given, h)]


@operator()
def _take(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or not draw.shape[dim]:
        return None
    index = draw.rng.integers(0, draw.shape[dim], draw.size())
    return lambda h, given: jnp.take(h, jnp.asarray(index, jnp.int32), axis=dim)


@operator()
def _take_along(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2 or not draw.shape[1]:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        index = given.batch["tokens"][:, None] % h.shape[1]
        return h + jnp.take_along_axis(h, index, axis=1)

    return apply


@operator()
def _sort(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or not draw.shape[dim]:
        return None
    if draw.rng.random() < 0.5:
        return lambda h, given: jnp.sort(h, axis=dim)
    return lambda h, given: jnp.take_along_axis(h, jnp.argsort(-h, axis=dim), axis=dim) * 0.5


@operator()
def _top(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2 or draw.shape[-1] < 2:
        return None
    k = draw.pick(1, 2)
    return lambda h, given: lax.top_k(h, k)[0]


@operator()
def _one_hot(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2:
        return None
    name = draw.weight(draw.shape[1], draw.tokens)
    return lambda h, given: (
        h @ given.params[name] * jax.nn.one_hot(given.batch["tokens"], 7, dtype=h.dtype)
    )


@operator()
def _moving_slice(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or draw.shape[dim] < 2:
        return None
    size = draw.shape[dim] - 1
    return lambda h, given: lax.dynamic_slice_in_dim(h, given.count % 2, size, axis=dim)


@operator()
def _update_slice(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or draw.shape[dim] < 2:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        part = lax.slice_in_dim(h, 0, 1, axis=dim)
        return lax.dynamic_update_slice_in_dim(h, part * 2, given.count % 2, axis=dim)

    return apply


@operator()
def _scatter(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2 or draw.shape[1] < 2:
        return None
    index = np.asarray(draw.rng.integers(0, draw.shape[1], 3))
    how = draw.pick("set", "add", "max")
    if how == "set":
        index = np.unique(index)
    return lambda h, given: (
        getattr(h.at[:, index], how)(jnp.tanh(h[:, : len(index)])) if h.shape[1] >= 3 else -h
    )


@operator()
def _segments(draw: Draw) -> Apply | None:
    """Into a table by token, summed over examples: given back to each through a parameter, a sum
    over the batch.
    """
    if len(draw.shape) != 2:
        return None
    ids = np.asarray(draw.rng.integers(0, 3, draw.shape[1]), np.int32)
    return lambda h, given: jax.ops.segment_sum(h.T, jnp.asarray(ids), num_segments=3).T


def _one_dim(ndim: int, dim: int, here: Any, elsewhere: Any) -> list[Any]:
    return [here if k == dim else elsewhere for k in range(ndim)]
