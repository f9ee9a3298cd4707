"""Operators of random steps: element by element, products, and reductions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from runtime.random_base import Apply, Draw, Inputs, along_rows, operator


@operator()
def _activation(draw: Draw) -> Apply:
    fn = draw.pick(
        jnp.tanh,
        jax.nn.gelu,
        jax.nn.relu,
        jnp.sin,
        jax.nn.sigmoid,
        jax.nn.softplus,
        jnp.arctan,
        lax.erf,
    )
    return lambda h, given: fn(h)


@operator()
def _bias(draw: Draw) -> Apply:
    name = draw.weight(*draw.shape[-1:]) if len(draw.shape) > 1 else draw.weight()
    return lambda h, given: h + given.params[name]


@operator()
def _gate(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    name = draw.weight(*draw.shape[1:])
    return lambda h, given: (
        h * jax.nn.sigmoid(given.params[name]) + jnp.where(h > 0, h, 0.1 * given.params[name])
    )


@operator()
def _masked(draw: Draw) -> Apply:
    return lambda h, given: jnp.where(along_rows(given.batch["mask"], h), h, 0.5 * h * h)


@operator(rounds=1e-5)
def _single(draw: Draw) -> Apply:
    return lambda h, given: jnp.tanh(h.astype(jnp.float32)).astype(h.dtype)


@operator(rounds=5e-2)
def _half(draw: Draw) -> Apply:
    dtype = draw.pick(jnp.bfloat16, jnp.float16)
    return lambda h, given: h + 0.1 * jnp.tanh(h).astype(dtype).astype(h.dtype)


@operator()
def _whole_numbers(draw: Draw) -> Apply:
    dtype = draw.pick(jnp.int32, jnp.uint8, jnp.int16)

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        numbers = given.batch["tokens"].astype(dtype)
        other = (numbers * 3 + 1) % 5 ^ (numbers >> 1) | (numbers & 2)
        return h * (1 + 0.1 * along_rows(other, h).astype(h.dtype))

    return apply


@operator()
def _custom_gradient(draw: Draw) -> Apply:
    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1, 1),))
    return lambda h, given: clipped(h)


@operator()
def _custom_tangent(draw: Draw) -> Apply:
    @jax.custom_jvp
    def root(x: jax.Array) -> jax.Array:
        return jnp.sqrt(1 + x * x)

    @root.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        y = root(x)
        return y, t * x / y

    return lambda h, given: root(h)


@operator()
def _dropout(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        kept = jax.random.bernoulli(given.key, 0.7, h.shape[1:])
        return jnp.where(kept, h / 0.7, 0)

    return apply


@operator()
def _linear(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    name = draw.weight(draw.shape[-1], draw.size())
    return lambda h, given: h @ given.params[name]


@operator()
def _contraction(draw: Draw) -> Apply | None:
    """Over a dim in the middle, or over all but the first."""
    if len(draw.shape) != 3:
        return None
    a, b = draw.shape[1:]
    equation, shape = draw.pick(
        ("rab,ac->rcb", (a, 4)), ("rab,abc->rc", (a, b, 5)), ("rab,acb->rac", (a, 3, b))
    )
    name = draw.weight(*shape)
    return lambda h, given: jnp.einsum(equation, h, given.params[name])


@operator()
def _attention(draw: Draw) -> Apply | None:
    if len(draw.shape) != 3:
        return None
    width = draw.shape[2]
    name = draw.weight(width, width)

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        scores = jnp.einsum("rqd,rkd->rqk", h @ given.params[name], h)
        if causal:
            scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), scores, -1e9)
        return jnp.einsum("rqk,rkd->rqd", jax.nn.softmax(scores, axis=-1), h)

    causal = draw.rng.random() < 0.5
    return apply


@operator()
def _convolution(draw: Draw) -> Apply | None:
    if len(draw.shape) != 3:
        return None
    width, features = draw.pick(1, 2, 3), draw.size()
    name = draw.weight(width, draw.shape[2], features)
    stride, padding = (
        draw.pick(1, 2),
        draw.pick("SAME", "VALID") if draw.shape[1] >= width else "SAME",
    )
    order = ("NHC", "HIO", "NHC")
    return lambda h, given: lax.conv_general_dilated(
        h, given.params[name], (stride,), padding, dimension_numbers=order
    )


@operator()
def _outer(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2 or draw.shape[1] > 6:
        return None
    return lambda h, given: h[:, :, None] * jnp.tanh(h)[:, None, :]


@operator()
def _reduce(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or len(draw.shape) < 3 or not draw.shape[dim]:
        return None
    fn = draw.pick(jnp.sum, jnp.mean, jnp.max, jnp.min, jax.nn.logsumexp, jnp.var)
    return lambda h, given: fn(h, axis=dim)


@operator()
def _normalize(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        centred = h - h.mean(dim, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, dim, keepdims=True) + 0.1)

    return apply if draw.shape[dim] else None


@operator()
def _softmax(draw: Draw) -> Apply | None:
    dim = draw.dim()
    return None if dim is None else lambda h, given: jax.nn.softmax(h, axis=dim)


@operator()
def _running(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None:
        return None
    fn = draw.pick(lax.cumsum, lax.cummax, lax.cumlogsumexp, lax.cumprod)
    backwards = draw.rng.random() < 0.5
    return lambda h, given: jnp.tanh(fn(h, axis=dim, reverse=backwards))


@operator()
def _pool(draw: Draw) -> Apply | None:
    if len(draw.shape) != 3 or draw.shape[1] < 2:
        return None
    stride = draw.pick(1, 2)
    window: Any = {
        "window_dimensions": (1, 2, 1),
        "window_strides": (1, stride, 1),
        "padding": "VALID",
    }
    if draw.rng.random() < 0.5:
        return lambda h, given: lax.reduce_window(h, 0.0, lax.add, **window)
    return lambda h, given: lax.reduce_window(h, -jnp.inf, lax.max, **window)


@operator()
def _associative_scan(draw: Draw) -> Apply | None:
    dim = draw.dim()
    if dim is None or not draw.shape[dim]:
        return None

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return lambda h, given: lax.associative_scan(combine, (jax.nn.sigmoid(h), h), axis=dim)[1]
