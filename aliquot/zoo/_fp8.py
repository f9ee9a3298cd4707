"""Linear layers that multiply in 8-bit floats, with scales from the step before.

Inputs and weights are cast to e4m3, gradients of results to e5m2, each array scaled so that its
largest magnitude is the largest number of the type. For inputs and gradients that magnitude is the
one of the last step (delayed scaling): so no product waits for a maximum over all examples, and
micro-batches compute what the whole batch does. Weights are scaled by their own. What is larger
than expected is clipped.

A layer's `amax_...` leaves hold these magnitudes. They are no parameters: `split` takes them out of
a tree of parameters, and their "gradients" are the magnitudes that a step saw.

Reference: Micikevicius et al., "FP8 formats for deep learning", 2022, sections 3 and 4; delayed
scaling as in NVIDIA's Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ._precision import Precision

Tree = Any

_NARROW, _WIDE = jnp.float8_e4m3fn, jnp.float8_e5m2
# Of Micikevicius et al., table 1.
_LARGEST = {_NARROW: 448.0, _WIDE: 57344.0}
_PREFIX = "amax_"


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
        self.compute = precision.compute
        kernel = kernel_init(rngs.params(), (size_in, size_out), precision.params)
        self.kernel = nnx.Param(kernel)
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros((size_out,), precision.params))
        self.amax_inputs = nnx.Variable(jnp.zeros((), jnp.float32))
        self.amax_gradients = nnx.Variable(jnp.zeros((), jnp.float32))
        self.amax_kernel = nnx.Variable(magnitude(kernel))

    def __call__(self, x: jax.Array) -> jax.Array:
        # Parameters are cast to 16 bits first: plans keep such casts for all micro-batches.
        y = scaled_product(
            x.astype(self.compute),
            self.kernel[...].astype(self.compute),
            self.amax_inputs[...],
            self.amax_kernel[...],
            self.amax_gradients[...],
        )
        return y + self.bias[...].astype(y.dtype) if self.use_bias else y


@jax.custom_vjp
def scaled_product(
    x: jax.Array,
    kernel: jax.Array,
    amax_inputs: jax.Array,
    amax_kernel: jax.Array,
    amax_gradients: jax.Array,
) -> jax.Array:
    """`x @ kernel` over the last dim of `x`, in the dtype of `x`.

    The gradient of `kernel` still has the scales of its factors, which `unscaled` takes off: they
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
    x8 = _cast(x, amax_inputs, _NARROW)
    kernel8 = _cast(kernel, amax_kernel, _NARROW)
    y = jax.lax.dot_general(
        x8, kernel8, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=x.dtype
    )
    off = 1 / (_scale(amax_inputs, _NARROW) * _scale(amax_kernel, _NARROW))
    like_kernel = jnp.zeros((), kernel.dtype)
    return y * off.astype(x.dtype), (
        x8,
        kernel8,
        magnitude(x),
        amax_kernel,
        amax_gradients,
        like_kernel,
    )


def _backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
    x8, kernel8, amax_inputs, amax_kernel, amax_gradients, like_kernel = kept
    dy8 = _cast(dy, amax_gradients, _WIDE)
    dx = jax.lax.dot_general(
        dy8, kernel8, (((dy.ndim - 1,), (1,)), ((), ())), preferred_element_type=dy.dtype
    )
    off = 1 / (_scale(amax_gradients, _WIDE) * _scale(amax_kernel, _NARROW))
    rows = tuple(range(dy.ndim - 1))
    dkernel = jax.lax.dot_general(
        x8, dy8, ((rows, rows), ((), ())), preferred_element_type=dy.dtype
    )
    return (
        dx * off.astype(dy.dtype),
        dkernel.astype(like_kernel.dtype),
        amax_inputs,
        jnp.zeros_like(amax_kernel),
        magnitude(dy),
    )


scaled_product.defvjp(_forward, _backward)


def magnitude(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude of an array."""
    return jnp.max(jnp.abs(x), axis=axis).astype(jnp.float32)


def _scale(amax: jax.Array, dtype: Any) -> jax.Array:
    """By what arrays of such magnitudes are multiplied; 1 if nothing is known of them."""
    return jnp.where(amax > 0, _LARGEST[dtype] / amax, 1.0)


def _cast(x: jax.Array, amax: jax.Array, dtype: Any) -> jax.Array:
    top = _LARGEST[dtype]
    return jnp.clip(x * _scale(amax, dtype).astype(x.dtype), -top, top).astype(dtype)


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
        off = 1 / (_scale(own["amax_inputs"], _NARROW) * _scale(own["amax_gradients"], _WIDE))
        kernel = layer["kernel"]
        return {**layer, "kernel": kernel * _in_front(off, kernel).astype(kernel.dtype)}

    return _in_layers(of_layer, grads, amax)


def seen(amax: Tree, params: Tree) -> Tree:
    """The magnitudes for the next step: those that this one saw, and those of the new kernels."""

    def of_layer(own: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
        stacked = own["amax_inputs"].ndim
        kernel = layer["kernel"]
        return {**own, "amax_kernel": magnitude(kernel, tuple(range(stacked, kernel.ndim)))}

    return _in_layers(of_layer, amax, params)


def _in_front(x: jax.Array, like: jax.Array) -> jax.Array:
    """With dims of length one behind its own, which are those of stacked layers."""
    return x.reshape(*x.shape, *(1,) * (like.ndim - x.ndim))


def _in_layers(of_layer: Callable[..., Tree], tree: Tree, other: Tree) -> Tree:
    """`of_layer` of each linear layer that has magnitudes in either tree; all else of the first."""
    if other is None or not isinstance(tree, list | dict):
        return tree
    if isinstance(tree, list):
        return [_in_layers(of_layer, *each) for each in zip(tree, other, strict=True)]
    if "amax_inputs" in tree or "amax_inputs" in other:
        return of_layer(tree, other)
    return {key: _in_layers(of_layer, each, other.get(key)) for key, each in tree.items()}
