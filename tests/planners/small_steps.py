"""Training steps small enough to plan in a moment, with sizes to choose."""

from typing import Any

import jax
import jax.numpy as jnp

F32 = jnp.float32


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    """An array that is only a shape."""
    return jax.ShapeDtypeStruct(shape, dtype)


@jax.custom_jvp
def tanh(x):
    """The hyperbolic tangent, with the same derivative in every release of JAX: limits of memory in
    tests depend on it.
    """
    return jnp.tanh(x)


@tanh.defjvp
def _tanh_jvp(primals, tangents):
    y, g = tanh(*primals), tangents[0]
    return y, (g + g * y) * (1 - y)


def momentum_step(loss_fn, params, batch):
    """`(step, state, batch)` of training with momentum: `step(state, batch)` returns the new state
    and the loss.
    """

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
        return {"params": params, "moments": moments}, loss

    return step, {"params": params, "moments": params}, batch


def mlp(sizes: tuple[int, ...], rows: int):
    """A multi-layer perceptron with a squared error."""

    def loss(params, batch):
        h = batch["x"]
        for k, w in enumerate(params):
            h = h @ w if k + 1 == len(params) else tanh(h @ w)
        return jnp.mean((h - batch["y"]) ** 2)

    params = [array(a, b) for a, b in zip(sizes, sizes[1:])]
    return momentum_step(loss, params, {"x": array(rows, sizes[0]), "y": array(rows, sizes[-1])})


def classifier(rows: int, width: int, classes: int):
    """One projection onto many classes, and the cross-entropy behind it."""

    def loss(params, batch):
        logits = batch["x"] @ params["head"]
        picked = jnp.take_along_axis(logits, batch["label"][:, None], axis=-1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    batch = {"x": array(rows, width), "label": array(rows, dtype=jnp.int32)}
    return momentum_step(loss, {"head": array(width, classes)}, batch)


def experts(count: int, rows: int, width: int, hidden: int):
    """Two batched products: each expert has its own weights and its own rows."""

    def loss(params, batch):
        h = jnp.tanh(jnp.einsum("erd,edf->erf", batch["x"], params["up"]))
        return jnp.mean(jnp.einsum("erf,efd->erd", h, params["down"]) ** 2)

    params = {"up": array(count, width, hidden), "down": array(count, hidden, width)}
    return momentum_step(loss, params, {"x": array(count, rows, width)})
