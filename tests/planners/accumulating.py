"""A step, and the same step with a loop of its own over micro-batches, as people write it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def make(count, *, rows, width, layers, dtype="float32"):
    """A step as `(step, state, batch)` in shapes.

    Args:
        count: micro-batches of the step's own loop; 1 for none.
        dtype: in which the layers compute.
    """

    def loss(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(dtype)), None

        y, _ = jax.lax.scan(layer, batch["x"].astype(dtype), params)
        return jnp.sum((y.astype("float32") - batch["y"]) ** 2)

    def train_step(state, batch):
        value, grads = (own if count > 1 else jax.value_and_grad(loss))(state["params"], batch)
        moments = 0.9 * state["moments"] + grads
        params = state["params"] - 0.1 * moments
        return {"params": params, "moments": moments}, value

    def own(params, batch):
        def turn(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        parts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)
        return jax.lax.scan(turn, (jnp.zeros(()), jnp.zeros_like(params)), parts)[0]

    stack = jax.ShapeDtypeStruct((layers, width, width), "float32")
    examples = jax.ShapeDtypeStruct((rows, width), "float32")
    return (
        train_step,
        {"params": stack, "moments": stack},
        {"x": examples, "y": examples},
    )
