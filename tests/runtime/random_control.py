"""Operators of random steps with control flow, and those in which examples meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from runtime.random_base import Apply, Draw, Inputs, operator


@operator()
def _cond(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    name = draw.weight(draw.shape[-1], draw.shape[-1])

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        w = given.params[name]
        return lax.cond(given.count % 2 == parity, lambda x: jnp.tanh(x @ w), lambda x: x * 0.5, h)

    parity = draw.pick(0, 1)
    return apply


@operator()
def _switch(draw: Draw) -> Apply:
    branches = [jnp.sin, lambda x: x * 2.0, lambda x: x - x.mean() if x.ndim == 0 else -x]
    return lambda h, given: lax.switch(given.count % 3, branches, h)


@operator()
def _layers(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    width = draw.shape[-1]
    name = draw.weight(draw.pick(1, 2, 3), width, width)
    checkpoint = draw.rng.random() < 0.4

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w), None

        return lax.scan(jax.checkpoint(body) if checkpoint else body, h, given.params[name])[0]

    return apply


@operator()
def _recurrence(draw: Draw) -> Apply | None:
    """Over positions, with the state of each example carried and all of them kept."""
    if len(draw.shape) != 3:
        return None
    name = draw.weight(draw.shape[2])
    backwards = draw.rng.random() < 0.3

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = jnp.tanh(carry * given.params[name] + x)
            return carry, carry * 0.5

        last, every = lax.scan(body, h[:, 0] * 0, jnp.moveaxis(h, 1, 0), reverse=backwards)
        return jnp.moveaxis(every, 0, 1) + last[:, None]

    return apply if draw.shape[1] else None


@operator()
def _loop(draw: Draw) -> Apply:
    trips = draw.pick(0, 1, 3)
    return lambda h, given: lax.fori_loop(0, trips, lambda k, x: jnp.sin(x) + 0.1 * k, h)


@operator()
def _while(draw: Draw) -> Apply:
    def halved(h: jax.Array, given: Inputs) -> jax.Array:
        size = jax.tree.reduce(
            jnp.add, [jnp.sum(jnp.abs(w)) for w in given.params.values()], jnp.zeros(())
        )
        scale = lax.while_loop(lambda s: s > 1.0, lambda s: s / 2, lax.stop_gradient(size) + 1.0)
        return h * scale

    return halved


@operator()
def _inner_map(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    return lambda h, given: jax.vmap(lambda x: jnp.sin(x) * x.sum())(h)


@operator()
def _checkpointed(draw: Draw) -> Apply | None:
    if len(draw.shape) < 2:
        return None
    name = draw.weight(draw.shape[-1], draw.shape[-1])
    policy = draw.pick(None, jax.checkpoint_policies.dots_saveable)

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        def block(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sin(jnp.tanh(x @ w) @ w)

        return h + jax.checkpoint(block, policy=policy)(h, given.params[name])

    return apply


@operator()
def _jitted(draw: Draw) -> Apply:
    inner = jax.jit(lambda x: jnp.exp(-x * x), inline=draw.rng.random() < 0.3)
    return lambda h, given: inner(h) + inner(0.5 * h)


@operator(mixes=True)
def _batch_norm(draw: Draw) -> Apply:
    return lambda h, given: (h - h.mean(0)) * lax.rsqrt(h.var(0) + 0.1)


@operator(mixes=True)
def _over_rows(draw: Draw) -> Apply:
    fn = draw.pick(
        lambda h: lax.cumsum(h, axis=0) * 0.3,
        lambda h: jnp.sort(h, axis=0),
        lambda h: h - h.max(0),
        lambda h: jax.nn.softmax(h, axis=0),
        lambda h: jnp.roll(h, 1, 0) * 0.5 + h,
        lambda h: jnp.flip(h, 0) - h,
    )
    return lambda h, given: fn(h)


@operator(mixes=True)
def _contrast(draw: Draw) -> Apply | None:
    if len(draw.shape) != 2:
        return None
    return lambda h, given: jax.nn.softmax(h @ h.T, axis=-1) @ h


@operator(mixes=True)
def _fewer_rows(draw: Draw) -> Apply | None:
    if draw.shape[0] % 2:
        return None
    return draw.pick(
        lambda h, given: h[: h.shape[0] // 2].repeat(2, axis=0),
        lambda h, given: h[::2].repeat(2, axis=0) * h,
        lambda h, given: h.reshape(2, h.shape[0] // 2, *h.shape[1:]).sum(0).repeat(2, axis=0),
        lambda h, given: h.reshape(h.shape[0] // 2, 2, *h.shape[1:])[:, ::-1].reshape(h.shape),
    )


@operator(mixes=True)
def _loop_over_rows(draw: Draw) -> Apply:
    return lambda h, given: lax.map(lambda x: jnp.sin(x) * x.sum(), h)


@operator(mixes=True)
def _grouped_rows(draw: Draw) -> Apply | None:
    """Tokens decide which examples are summed."""
    if len(draw.shape) < 2:
        return None

    def apply(h: jax.Array, given: Inputs) -> jax.Array:
        sums = jax.ops.segment_sum(h, given.batch["tokens"], num_segments=7)
        return h + 0.1 * sums[given.batch["tokens"]]

    return apply
