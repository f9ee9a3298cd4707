"""Primitives that libraries bring along: Equinox's checks and loops, functions with rules of their
own, sparse arrays.
"""

from __future__ import annotations

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from graph.step_base import Step, batch, mlp, mlp_params, sgd, step
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import sparse


def _trained(loss_fn, params=None) -> Step:
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads), loss

    params = mlp_params() if params is None else params
    count = len(jax.tree.leaves(params))
    roles = {"parameter": count, "batch": 2}
    return Step(
        fn=train_step, args=(params, batch()), roles=roles, gradients=None, results=count + 1
    )


def _mse(out, batch):
    return jnp.mean((out - batch["y"]) ** 2)


@step
def equinox_checked() -> Step:
    """A check of all arrays, and one of each example under `vmap`."""

    def loss_fn(params, batch):
        x = eqx.error_if(batch["x"], jnp.any(batch["x"] > 1e3), "too large")
        x = jax.vmap(lambda x: eqx.error_if(x, x.sum() > 1e3, "sums to too much"))(x)
        return _mse(mlp(params, x), batch)

    return _trained(loss_fn)


@step
def equinox_checkpointed_loop() -> Step:
    """What differential equations are solved with: steps into a buffer, of which a few are kept for
    the way back.
    """

    def loss_fn(params, batch):
        def one(x):
            def turn(carry):
                number, x, seen = carry
                x = x + 0.1 * jnp.tanh(x @ params["w"])
                return number + 1, x, seen.at[number].set(x.sum())

            init = (0, x, jnp.zeros(4))
            _, x, seen = eqxi.while_loop(
                lambda c: c[0] < 4,
                turn,
                init,
                max_steps=4,
                buffers=lambda c: c[2],
                kind="checkpointed",
                checkpoints=2,
            )
            return x[:3] + seen.sum()

        return _mse(jax.vmap(one)(batch["x"]), batch)

    return _trained(loss_fn, {"w": jax.random.normal(jax.random.key(3), (6, 6)) / 3})


@step
def equinox_bounded_loop() -> Step:
    def loss_fn(params, batch):
        def one(x):
            def turn(carry):
                return carry[0] + 1, carry[1] + 0.1 * jnp.tanh(carry[1] @ params["w"])

            return eqxi.while_loop(lambda c: c[0] < 3, turn, (0, x), max_steps=4, kind="bounded")[
                1
            ][:3]

        return _mse(jax.vmap(one)(eqxi.nondifferentiable_backward(batch["x"])), batch)

    return _trained(loss_fn, {"w": jax.random.normal(jax.random.key(3), (6, 6)) / 3})


@step
def functions_with_rules_of_their_own() -> Step:
    """`custom_vmap`, `linear_call`, a composite, and an order in memory."""

    @custom_vmap
    def double(x):
        return 2.0 * x

    @double.def_vmap
    def _double(axis_size, in_batched, x):
        return double(x), in_batched[0]

    @jax.jit
    def scaled(scale, x):
        return linear_call(lambda s, x: s * x, lambda s, y: s * y, scale, x)

    @jax.custom_jvp
    def activation(x):
        return jax.lax.composite(lambda x: jnp.tanh(x) * x, "aliquot.activation")(x)

    @activation.defjvp
    def _activation(primals, tangents):
        (x,), (t,) = primals, tangents
        y = jnp.tanh(x)
        return activation(x), t * (y + x * (1 - y**2))

    def loss_fn(params, batch):
        x = jax.vmap(double)(batch["x"])
        return _mse(mlp(params, activation(scaled(3.0, x))), batch)

    return _trained(loss_fn)


@step
def sparse_weights() -> Step:
    indices = jnp.array([[0, 1], [1, 0], [2, 2], [3, 1], [5, 0]])

    def loss_fn(params, batch):
        weights = sparse.BCOO((params["data"], indices), shape=(6, 3))
        return _mse(batch["x"] @ weights + (weights.T @ batch["x"].T).T, batch)

    return _trained(loss_fn, {"data": jnp.arange(1.0, 6.0)})
