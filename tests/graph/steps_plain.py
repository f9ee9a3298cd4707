"""Plain JAX: results in every order, keywords, donation, random keys, batch statistics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from graph.step_base import WIDTH, Step, batch, mlp, mlp_params, mse, optax_step, sgd, step

PLAIN = {"parameter": 4, "batch": 2}


@step
def plain_params_loss() -> Step:
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(mse)(params, batch)
        return sgd(params, grads), loss

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=5)


@step
def plain_loss_first() -> Step:
    tx = optax.adam(1e-2)

    def train_step(params, opt, batch):
        loss, grads = jax.value_and_grad(mse)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return loss, optax.apply_updates(params, updates), opt

    params = mlp_params()
    roles = PLAIN | {"optimizer_state": 9}
    return Step(
        fn=train_step, args=(params, tx.init(params), batch()), roles=roles, gradients=4, results=14
    )


@step
def plain_state_only() -> Step:
    def train_step(params, batch):
        return sgd(params, jax.grad(mse)(params, batch))

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=4)


@step
def plain_dict_result() -> Step:
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(mse)(state["params"], batch)
        new = {"params": sgd(state["params"], grads), "count": state["count"] + 1}
        return {"metrics": {"loss": loss, "rate": 0.1}, "state": new}

    state = {"params": mlp_params(), "count": jnp.zeros((), jnp.int32)}
    return Step(
        fn=train_step,
        args=(state, batch()),
        roles=PLAIN | {"optimizer_state": 1},
        gradients=4,
        results=6,
    )


@step
def plain_lone_arrays() -> Step:
    def train_step(w, b, x, y):
        def loss_fn(w, b):
            return jnp.mean((x @ w + b - y) ** 2)

        loss, (dw, db) = jax.value_and_grad(loss_fn, argnums=(0, 1))(w, b)
        return loss, w - 0.1 * dw, b - 0.1 * db

    data = batch()
    args = (jnp.ones((WIDTH, 3)), jnp.zeros(3), data["x"], data["y"])
    return Step(
        fn=train_step, args=args, roles={"parameter": 2, "batch": 2}, gradients=2, results=3
    )


@step
def plain_keywords() -> Step:
    def train_step(params, *, batch, rate=0.1, flag=True):
        loss, grads = jax.value_and_grad(mse)(params, batch)
        return (sgd(params, grads, rate), loss) if flag else (params, loss)

    kwargs = {"batch": batch(), "rate": 0.5, "flag": True}
    return Step(
        fn=train_step,
        args=(mlp_params(),),
        kwargs=kwargs,
        roles=PLAIN | {"other": 1},
        gradients=4,
        results=5,
    )


@step
def plain_aux() -> Step:
    def loss_fn(params, batch):
        out = mlp(params, batch["x"])
        loss = jnp.mean((out - batch["y"]) ** 2)
        return loss, {"mean": out.mean(), "largest": jnp.abs(out).max()}

    def train_step(params, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        return sgd(params, grads), {"loss": loss, **aux}

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=7)


@step
def plain_returns_labels() -> Step:
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(mse)(params, batch)
        return sgd(params, grads), {"loss": loss, "y": batch["y"]}

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=6)


@step
def plain_metrics_after() -> Step:
    def train_step(params, batch):
        params = sgd(params, jax.grad(mse)(params, batch))
        return params, {"loss_after": mse(params, batch)}

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=5)


@step
def plain_donated() -> Step:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        return inner(params, opt_state, batch)

    inner, params, opt_state = optax_step(optax.sgd(0.1, momentum=0.9))
    roles = PLAIN | {"optimizer_state": 4}
    return Step(
        fn=train_step, args=(params, opt_state, batch()), roles=roles, gradients=4, results=9
    )


@step
def plain_nested_jit() -> Step:
    @jax.jit
    def gradients(params, batch):
        return jax.value_and_grad(jax.jit(mse))(params, batch)

    @jax.jit
    def train_step(params, batch):
        loss, grads = gradients(params, batch)
        return jax.jit(sgd)(params, grads), loss

    return Step(fn=train_step, args=(mlp_params(), batch()), roles=PLAIN, gradients=4, results=5)


def _dropout_loss(params, batch, key):
    x = batch["x"]
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return mse(params, {"x": jnp.where(keep, x / 0.8, 0.0), "y": batch["y"]})


@step
def plain_key_for_each_example() -> Step:
    def loss_fn(params, batch):
        keys = jax.vmap(jax.random.wrap_key_data)(batch["keys"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys)
        return mse(params, {"x": batch["x"] + 0.1 * noise, "y": batch["y"]})

    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads), loss

    data = batch()
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), data["x"].shape[0]))
    args = (mlp_params(), {**data, "keys": keys})
    return Step(
        fn=train_step, args=args, roles={"parameter": 4, "batch": 3}, gradients=4, results=5
    )


@step
def plain_dropout_typed_key() -> Step:
    def train_step(params, key, batch):
        key, use = jax.random.split(key)
        loss, grads = jax.value_and_grad(_dropout_loss)(params, batch, use)
        return sgd(params, grads), key, loss

    args = (mlp_params(), jax.random.key(1), batch())
    return Step(fn=train_step, args=args, roles=PLAIN | {"state": 1}, gradients=4, results=6)


@step
def plain_dropout_raw_key() -> Step:
    def train_step(state, batch, key):
        use = jax.random.fold_in(key, state["step"])
        loss, grads = jax.value_and_grad(_dropout_loss)(state["params"], batch, use)
        return {"params": sgd(state["params"], grads), "step": state["step"] + 1}, loss

    state = {"params": mlp_params(), "step": jnp.zeros((), jnp.int32)}
    roles = PLAIN | {"state": 1, "other": 1}
    return Step(
        fn=train_step,
        args=(state, batch(), jax.random.PRNGKey(3)),
        roles=roles,
        gradients=4,
        results=6,
    )


@step
def plain_batchnorm() -> Step:
    def loss_fn(params, stats, batch):
        hidden = batch["x"] @ params["in"]["w"] + params["in"]["b"]
        mean, var = hidden.mean(0), hidden.var(0)
        new = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        hidden = jax.nn.relu((hidden - mean) * jax.lax.rsqrt(var + 1e-5))
        out = hidden @ params["out"]["w"] + params["out"]["b"]
        return jnp.mean((out - batch["y"]) ** 2), new

    def train_step(params, stats, batch):
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, batch)
        return sgd(params, grads), stats, loss

    stats = {"mean": jnp.zeros(16), "var": jnp.ones(16)}
    args = (mlp_params(), stats, batch())
    return Step(fn=train_step, args=args, roles=PLAIN | {"state": 2}, gradients=4, results=7)
