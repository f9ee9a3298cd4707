"""A training step of two products, for tests that look at single operators."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def two_products(params, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


STEP = (
    two_products,
    {
        "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    },
    jax.ShapeDtypeStruct((128, 64), jnp.float32),
)
