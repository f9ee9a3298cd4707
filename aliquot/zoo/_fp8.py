"""Linear layers that multiply in 8-bit floats.

Arrays are scaled by their largest magnitudes (`graph/_eight_bits.py`). For inputs and gradients
that is the one of the last step (delayed scaling): so no product waits for a maximum over all
examples, and micro-batches compute what the whole batch does. Weights are scaled by their own. With
dynamic scales all arrays are scaled by their own, which reads each of them once more, and waits for
maxima over all examples.

A layer's `amax_...` leaves hold these magnitudes: of one kernel, or, with the kernel's name at
their end, of each of several. They are no parameters: `split` takes them out of a tree of
parameters, and their "gradients" are the magnitudes that a step saw.

Reference: delayed scaling as in NVIDIA's Transformer Engine; dynamic scales as in torchao's
`tensorwise` and `rowwise`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..graph import NARROW, WIDE, magnitude, to_eight_bits, unscaling
from ._precision import Precision
from ._recompute import MULTIPLIED

Tree = Any

_PREFIX = "amax_"
AMAX = ("amax_inputs", "amax_kernel", "amax_gradients")
"""The magnitudes of a layer's product."""


class Fp8Linear(nnx.Module):
    """`y = x @ kernel + bias` as in `nnx.Linear`, with all three products of a training step in
    8-bit floats.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        precision: Precision,
        rngs: nnx.Rngs,
        *,
        use_bias: bool,
        kernel_init: Callable[..., jax.Array],
    ) -> None:
        self.compute, self.scales = precision.compute, precision.scales
        kernel = kernel_init(rngs.params(), (size_in, size_out), precision.params)
        self.kernel = nnx.Param(kernel)
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((size_out,), precision.params))
        if self.scales == "delayed":
            for name, amax in magnitudes(kernel).items():
                setattr(self, name, amax)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Parameters are cast to 16 bits first: plans keep such casts for all micro-batches.
        x, kernel = x.astype(self.compute), self.kernel[...].astype(self.compute)
        if self.scales == "delayed":
            y = scaled_product(x, kernel, *(getattr(self, name)[...] for name in AMAX))
        else:
            y = dynamic_product(x, kernel, self.scales == "rows")
        return y + self.bias[...].astype(y.dtype) if self.use_bias else y


def magnitudes(kernel: jax.Array) -> dict[str, nnx.Variable[jax.Array]]:
    """Those of a new kernel, by the names in `AMAX`; of all else nothing is known."""
    known = jnp.zeros((), jnp.float32), magnitude(kernel), jnp.zeros((), jnp.float32)
    return {name: nnx.Variable(amax) for name, amax in zip(AMAX, known, strict=True)}


@jax.custom_vjp
def scaled_product(
    x: jax.Array,
    kernel: jax.Array,
    amax_inputs: jax.Array,
    amax_kernel: jax.Array,
    amax_gradients: jax.Array,
) -> jax.Array:
    """`x @ kernel` over the last dim of `x`, in the dtype of `x`; or, of a stack of kernels
    `(n, in, out)`, each with its part of `x`, `(n, ..., in)`.

    The gradient of one kernel still has the scales of its factors, which `unscaled` takes off: they
    are the same for all micro-batches, so sums may come first. The gradients of `amax_inputs` and
    `amax_gradients` are the largest magnitudes of `x` and of the result's gradient.
    """
    return _forward(x, kernel, amax_inputs, amax_kernel, amax_gradients)[0]


def _forward(
    x: jax.Array,
    kernel: jax.Array,
    amax_inputs: jax.Array,
    amax_kernel: jax.Array,
    amax_gradients: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x8 = checkpoint_name(to_eight_bits(x, amax_inputs, NARROW), MULTIPLIED)
    kernel8 = to_eight_bits(kernel, amax_kernel, NARROW)
    y = _product(x8, kernel8, x.ndim - 1, kernel.ndim - 2, x.dtype)
    off = unscaling((amax_inputs, NARROW), (amax_kernel, NARROW))
    like_kernel = jnp.zeros((), kernel.dtype)
    kept = x8, kernel8, magnitude(x), amax_inputs, amax_kernel, amax_gradients, like_kernel
    return y * off.astype(x.dtype), kept


def _backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    x8, kernel8, seen, amax_inputs, amax_kernel, amax_gradients, like_kernel = kept
    dy8 = to_eight_bits(dy, amax_gradients, WIDE)
    dx = _product(dy8, kernel8, dy.ndim - 1, kernel8.ndim - 1, dy.dtype)
    off = unscaling((amax_gradients, WIDE), (amax_kernel, NARROW))
    stacked = tuple(range(kernel8.ndim - 2))
    rows = tuple(range(len(stacked), dy.ndim - 1))
    dkernel = jax.lax.dot_general(
        x8, dy8, ((rows, rows), (stacked, stacked)), preferred_element_type=dy.dtype
    )
    if stacked:
        dkernel *= unscaling((amax_inputs, NARROW), (amax_gradients, WIDE)).astype(dy.dtype)
    return (
        dx * off.astype(dy.dtype),
        dkernel.astype(like_kernel.dtype),
        seen,
        jnp.zeros_like(amax_kernel),
        magnitude(dy),
    )


def _product(x: jax.Array, kernel: jax.Array, dim: int, of_kernel: int, dtype: Any) -> jax.Array:
    """Summed over a dim of `x` and one of the kernel, which may be stacked."""
    stacked = tuple(range(kernel.ndim - 2))
    made: jax.Array = jax.lax.dot_general(
        x, kernel, (((dim,), (of_kernel,)), (stacked, stacked)), preferred_element_type=dtype
    )
    return made


scaled_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dynamic_product(x: jax.Array, kernel: jax.Array, by_rows: bool) -> jax.Array:
    """`x @ kernel` over the last dim of `x`, in the dtype of `x`. Each of the three products of a
    training step scales its operands by their own largest magnitudes: of whole arrays, or of each
    part that is multiplied and summed.
    """
    return _dynamic_forward(x, kernel, by_rows)[0]


def _dynamic_forward(
    x: jax.Array, kernel: jax.Array, by_rows: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = _dynamic((x, (x.ndim - 1,), NARROW), (kernel, (0,), NARROW), by_rows)
    return y, (x, kernel)


def _dynamic_backward(
    by_rows: bool, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    rows = tuple(range(x.ndim - 1))
    dx = _dynamic((dy, (dy.ndim - 1,), WIDE), (kernel, (1,), NARROW), by_rows)
    return dx, _dynamic((x, rows, NARROW), (dy, rows, WIDE), by_rows)


def _dynamic(
    left: tuple[jax.Array, tuple[int, ...], Any],
    right: tuple[jax.Array, tuple[int, ...], Any],
    by_rows: bool,
) -> jax.Array:
    """A product of two arrays in 8 bits; each with the dims that are summed over, and its type."""
    narrow, factors = [], []
    for array, summed, dtype in (left, right):
        if by_rows:
            amax = jnp.max(jnp.abs(array), axis=summed, keepdims=True).astype(jnp.float32)
            factors.append((jnp.squeeze(amax, summed), dtype))
        else:
            amax = magnitude(array)
            factors.append((amax, dtype))
        narrow.append(to_eight_bits(array, amax, dtype))
    dims = ((left[1], right[1]), ((), ()))
    y: jax.Array = jax.lax.dot_general(
        narrow[0], narrow[1], dims, preferred_element_type=left[0].dtype
    )
    (of_left, narrow_left), of_right = factors
    # A factor for each row, and one for each column.
    of_left = of_left[..., None] if by_rows else of_left
    return y * unscaling((of_left, narrow_left), of_right).astype(y.dtype)


dynamic_product.defvjp(_dynamic_forward, _dynamic_backward)


def split(tree: Tree) -> tuple[Tree, Tree]:
    """A tree of parameters without the magnitudes, and the magnitudes; None if there are none."""
    if isinstance(tree, list):
        layers = [split(each) for each in tree]
        of_layers = [part for _, part in layers]
        return [rest for rest, _ in layers], of_layers if any(of_layers) else None
    if not isinstance(tree, dict):
        return tree, None
    parts = {key: split(each) for key, each in tree.items() if not key.startswith(_PREFIX)}
    amax = {key: each for key, each in tree.items() if key.startswith(_PREFIX)}
    amax |= {key: part for key, (_, part) in parts.items() if part}
    return {key: rest for key, (rest, _) in parts.items()}, amax or None


def joined(params: Tree, amax: Tree) -> Tree:
    """The tree that `split` took apart."""
    if amax is None:
        return params
    if isinstance(params, list):
        return [joined(*each) for each in zip(params, amax, strict=True)]
    whole = {key: joined(each, amax.get(key)) for key, each in params.items()}
    return whole | {key: each for key, each in amax.items() if key.startswith(_PREFIX)}


def unscaled(grads: Tree, amax: Tree) -> Tree:
    """Gradients of parameters without the scales that those of kernels have."""

    def of_layer(layer: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        if "amax_kernel" not in own:
            return layer
        off = unscaling((own["amax_inputs"], NARROW), (own["amax_gradients"], WIDE))
        kernel = layer["kernel"]
        # With dims of length one behind its own, which are those of stacked layers.
        off = off.reshape(*off.shape, *(1,) * (kernel.ndim - off.ndim))
        return {**layer, "kernel": kernel * off.astype(kernel.dtype)}

    return _in_layers(of_layer, grads, amax)


def seen(amax: Tree, params: Tree) -> Tree:
    """The magnitudes for the next step: those that this one saw, and those of the new kernels."""

    def of_layer(own: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
        new = {}
        for name in own:
            if name.startswith("amax_kernel"):
                kernel = layer[name.removeprefix("amax_kernel").lstrip("_") or "kernel"]
                new[name] = magnitude(kernel, tuple(range(own[name].ndim, kernel.ndim)))
        return own | new

    return _in_layers(of_layer, amax, params)


def _in_layers(of_layer: Callable[..., Tree], tree: Tree, other: Tree) -> Tree:
    """`of_layer` of each layer that has magnitudes of its own in either tree; all else of the
    first.
    """
    if other is None or not isinstance(tree, list | dict):
        return tree
    if isinstance(tree, list):
        return [_in_layers(of_layer, *each) for each in zip(tree, other, strict=True)]
    below = {key: _in_layers(of_layer, each, other.get(key)) for key, each in tree.items()}
    has_own = any(key.startswith(_PREFIX) for key in (*tree, *other))
    return of_layer(below, other) if has_own else below
