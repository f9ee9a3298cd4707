"""Plain JAX: several sets of parameters, evaluation, precision, loss scales, the user's own
accumulation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from graph.step_base import ROWS, WIDTH, Step, batch, mlp, mlp_params, mse, optax_step, sgd, step

PLAIN = {"parameter": 4, "batch": 2}


@step
def plain_frozen_teacher() -> Step:
    def train_step(params, teacher, batch):
        def loss_fn(params):
            return jnp.mean((mlp(params, batch["x"]) - mlp(teacher, batch["x"])) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return sgd(params, grads), loss

    paths = tuple(f"teacher.{a}.{b}" for a in ("in", "out") for b in ("w", "b"))
    roles = {"parameter": 8, "batch": 2}
    args = (mlp_params(), mlp_params(), batch())
    return Step(fn=train_step, args=args, roles=roles, gradients=4, results=5, stateless=paths)


@step
def plain_moving_average() -> Step:
    def train_step(params, average, batch):
        loss, grads = jax.value_and_grad(mse)(params, batch)
        params = sgd(params, grads)
        average = jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params)
        return loss, average, params

    args = (mlp_params(), mlp_params(), batch())
    return Step(
        fn=train_step, args=args, roles=PLAIN | {"optimizer_state": 4}, gradients=4, results=9
    )


@step
def plain_gradients_only() -> Step:
    def gradients(params, batch):
        return jax.value_and_grad(mse)(params, batch)

    paths = tuple(f"params.{a}.{b}" for a in ("in", "out") for b in ("w", "b"))
    args = (mlp_params(), batch())
    return Step(fn=gradients, args=args, roles=PLAIN, gradients=0, results=5, stateless=paths)


@step
def plain_evaluation() -> Step:
    def evaluate(params, batch):
        out = mlp(params, batch["x"])
        return {"loss": jnp.mean((out - batch["y"]) ** 2), "out": out}

    paths = tuple(f"params.{a}.{b}" for a in ("in", "out") for b in ("w", "b"))
    return Step(
        fn=evaluate,
        args=(mlp_params(), batch()),
        roles=PLAIN,
        trains=False,
        results=2,
        stateless=paths,
    )


@step
def plain_bf16() -> Step:
    def loss_fn(params, batch):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        out = mlp(half, batch["x"].astype(jnp.bfloat16))
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    train_step, params, opt_state = optax_step(optax.adamw(1e-2), loss_fn=loss_fn)
    roles = PLAIN | {"optimizer_state": 9}
    return Step(
        fn=train_step, args=(params, opt_state, batch()), roles=roles, gradients=4, results=14
    )


def _scaled(params, scale, batch):
    loss, grads = jax.value_and_grad(lambda p: mse(p, batch) * scale["scale"])(params)
    grads = jax.tree.map(lambda g: g / scale["scale"], grads)
    finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    good = jnp.where(finite, scale["good"] + 1, 0)
    grown = jnp.where(good >= 2, scale["scale"] * 2, scale["scale"])
    scale = {"scale": jnp.where(finite, grown, scale["scale"] / 2), "good": good % 2}
    return loss, grads, finite, scale


@step
def plain_loss_scale_where() -> Step:
    def train_step(params, scale, batch):
        loss, grads, finite, scale = _scaled(params, scale, batch)
        new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), sgd(params, grads), params)
        return new, scale, loss

    scale = {"scale": jnp.float32(1024.0), "good": jnp.int32(0)}
    roles = PLAIN | {"state": 1, "optimizer_state": 1}
    return Step(
        fn=train_step, args=(mlp_params(), scale, batch()), roles=roles, gradients=4, results=7
    )


@step
def plain_loss_scale_cond() -> Step:
    def train_step(params, scale, batch):
        loss, grads, finite, scale = _scaled(params, scale, batch)
        params = jax.lax.cond(finite, lambda: sgd(params, grads), lambda: params)
        return params, scale, loss

    scale = {"scale": jnp.float32(1024.0), "good": jnp.int32(0)}
    roles = PLAIN | {"state": 1, "optimizer_state": 1}
    return Step(
        fn=train_step, args=(mlp_params(), scale, batch()), roles=roles, gradients=4, results=7
    )


@step
def plain_accumulation() -> Step:
    def train_step(params, batch):
        micro = jax.tree.map(lambda x: x.reshape(4, ROWS // 4, *x.shape[1:]), batch)

        def body(carry, part):
            total, grads = carry
            loss, new = jax.value_and_grad(mse)(params, part)
            return (total + loss, jax.tree.map(jnp.add, grads, new)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(body, (0.0, zeros), micro)
        return sgd(params, grads, 0.025), loss / 4

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=5)


@step
def plain_gan() -> Step:
    def critic(d, x):
        return jnp.mean(jax.nn.tanh(x @ d["w"]) @ d["v"])

    def train_step(gen, critic_params, batch):
        def critic_loss(d):
            return critic(d, batch["noise"] @ gen["g"]) - critic(d, batch["x"])

        d_loss, d_grads = jax.value_and_grad(critic_loss)(critic_params)
        critic_params = sgd(critic_params, d_grads)

        def gen_loss(g):
            return -critic(critic_params, batch["noise"] @ g["g"])

        g_loss, g_grads = jax.value_and_grad(gen_loss)(gen)
        return sgd(gen, g_grads), critic_params, {"d": d_loss, "g": g_loss}

    key = jax.random.key(0)
    gen = {"g": jax.random.normal(key, (4, WIDTH))}
    discriminator = {"w": jax.random.normal(key, (WIDTH, 8)), "v": jax.random.normal(key, (8,))}
    data = {"x": batch()["x"], "noise": jax.random.normal(key, (ROWS, 4))}
    roles = {"parameter": 3, "batch": 2}
    return Step(fn=train_step, args=(gen, discriminator, data), roles=roles, gradients=3, results=5)
