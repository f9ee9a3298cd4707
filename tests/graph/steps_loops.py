"""Loops and remat: scan over layers and over time, while, cond, checkpoint policies, tied
embeddings.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from graph.step_base import ROWS, WIDTH, Step, batch, mse, sgd, step
from jax.ad_checkpoint import checkpoint_name

LAYERS = 3


def _stacked() -> dict[str, jax.Array]:
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 3,
        "b": jnp.zeros((LAYERS, WIDTH)),
    }


def _layers() -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jnp.zeros(WIDTH)} for k in keys]


def _block(layer, x):
    return x + checkpoint_name(jnp.tanh(x @ layer["w"] + layer["b"]), "block")


def _train(loss_fn, params, data, *, roles, gradients=None) -> Step:
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads), loss

    results = len(jax.tree.leaves(params)) + 1
    return Step(
        fn=train_step, args=(params, data), roles=roles, gradients=gradients, results=results
    )


def _data() -> dict[str, jax.Array]:
    return {"x": batch()["x"]}


def _unrolled(block) -> Step:
    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params:
            x = block(layer, x)
        return jnp.mean(x**2)

    return _train(loss_fn, _layers(), _data(), roles={"parameter": 6, "batch": 1}, gradients=6)


@step
def loop_of_no_turns() -> Step:
    def loss_fn(params, batch):
        x = jnp.tanh(batch["x"] @ params["w"])
        return jnp.mean(jax.lax.fori_loop(0, 0, lambda k, x: jnp.sin(x) + k, x) ** 2)

    params = {"w": jnp.ones((WIDTH, WIDTH)) / 3}
    return _train(loss_fn, params, _data(), roles={"parameter": 1, "batch": 1}, gradients=1)


@step
def remat_default() -> Step:
    return _unrolled(jax.checkpoint(_block))


@step
def remat_dots_saveable() -> Step:
    return _unrolled(jax.checkpoint(_block, policy=jax.checkpoint_policies.dots_saveable))


@step
def remat_nothing_saveable() -> Step:
    return _unrolled(jax.checkpoint(_block, policy=jax.checkpoint_policies.nothing_saveable))


@step
def remat_save_names() -> Step:
    policy = jax.checkpoint_policies.save_only_these_names("block")
    return _unrolled(jax.checkpoint(_block, policy=policy))


@step
def remat_nested() -> Step:
    inner = jax.checkpoint(_block)

    @jax.checkpoint
    def outer(layer, x):
        return inner(layer, inner(layer, x))

    return _unrolled(outer)


@step
def remat_returns_operand() -> Step:
    @jax.checkpoint
    def pair(layer, x):
        return x, jnp.sin(x @ layer["w"]) + layer["b"]

    return _unrolled(lambda layer, x: sum(pair(layer, x)))


@step
def scan_layers() -> Step:
    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, layer: (_block(layer, x), None), batch["x"], params)
        return jnp.mean(x**2)

    return _train(loss_fn, _stacked(), _data(), roles={"parameter": 2, "batch": 1}, gradients=2)


@step
def scan_layers_remat() -> Step:
    block = jax.checkpoint(_block, policy=jax.checkpoint_policies.dots_saveable)

    def loss_fn(params, batch):
        x, norms = jax.lax.scan(
            lambda x, layer: (block(layer, x), (x**2).mean()), batch["x"], params, unroll=1
        )
        return jnp.mean(x**2) + norms.sum()

    return _train(loss_fn, _stacked(), _data(), roles={"parameter": 2, "batch": 1}, gradients=2)


@step
def scan_reversed_unrolled() -> Step:
    def loss_fn(params, batch):
        x, _ = jax.lax.scan(
            lambda x, layer: (_block(layer, x), None), batch["x"], params, reverse=True, unroll=2
        )
        return jnp.mean(x**2)

    return _train(loss_fn, _stacked(), _data(), roles={"parameter": 2, "batch": 1}, gradients=2)


@step
def rnn_over_time() -> Step:
    def loss_fn(params, batch):
        def cell(hidden, x):
            hidden = jnp.tanh(x @ params["wx"] + hidden @ params["wh"] + params["b"])
            return hidden, hidden @ params["out"]

        sequence = jnp.swapaxes(batch["x"], 0, 1)
        _, out = jax.lax.scan(cell, jnp.zeros((ROWS, 5)), sequence)
        return jnp.mean((jnp.swapaxes(out, 0, 1) - batch["y"]) ** 2)

    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "wx": jax.random.normal(keys[0], (4, 5)),
        "wh": jax.random.normal(keys[1], (5, 5)) / 3,
        "b": jnp.zeros(5),
        "out": jax.random.normal(keys[2], (5, 2)),
    }
    data = {
        "x": jax.random.normal(keys[3], (ROWS, 7, 4)),
        "y": jax.random.normal(keys[4], (ROWS, 7, 2)),
    }
    return _train(loss_fn, params, data, roles={"parameter": 4, "batch": 2}, gradients=4)


@step
def while_and_cond() -> Step:
    def normalised(w):
        """Newton's iteration for the inverse square root of the mean square, until it stands
        still.
        """
        target = jnp.mean(w**2) + 1.0

        def going(state):
            guess, count = state
            return (jnp.abs(guess * guess * target - 1) > 1e-4) & (count < 20)

        guess, _ = jax.lax.while_loop(
            going, lambda s: (s[0] * (1.5 - 0.5 * target * s[0] ** 2), s[1] + 1), (0.3, 0)
        )
        return w * jax.lax.stop_gradient(guess)

    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        return jax.lax.cond(
            jnp.mean(out) > 0, lambda o: jnp.mean(o**2), lambda o: jnp.mean(jnp.abs(o)), out
        )

    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: normalised(p) - 0.1 * g, params, grads), loss

    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, 4))}
    return Step(
        fn=train_step,
        args=(params, _data()),
        roles={"parameter": 1, "batch": 1},
        gradients=1,
        results=2,
    )


@step
def while_under_vmap() -> Step:
    """Each row runs its own number of turns; forward only, since JAX has no reverse mode for it."""

    def halve(x):
        return jax.lax.while_loop(
            lambda s: jnp.abs(s[0]).max() > 0.5, lambda s: (s[0] / 2, s[1] + 1), (x, 0)
        )

    def evaluate(params, batch):
        small, turns = jax.vmap(halve)(batch["x"] * 3)
        return (small @ params["w"]).sum(), turns

    params = {"w": jnp.ones((WIDTH, 4))}
    roles = {"parameter": 1, "batch": 1}
    return Step(
        fn=evaluate,
        args=(params, _data()),
        roles=roles,
        trains=False,
        results=2,
        stateless=("params.w",),
    )


@step
def switch_of_three() -> Step:
    def loss_fn(params, batch):
        out = batch["x"] @ params["w"]
        branches = [jnp.sin, jnp.tanh, lambda o: o * params["gain"]]
        return jnp.mean(jax.lax.switch(params["which"].astype(int) + 2, branches, out))

    params = {"w": jnp.ones((WIDTH, 4)), "gain": jnp.ones(4), "which": jnp.float32(0)}
    # What has no gradient and no shape is no parameter.
    return _train(loss_fn, params, _data(), roles={"parameter": 2, "state": 1, "batch": 1})


@step
def tied_embeddings() -> Step:
    def loss_fn(params, batch):
        hidden = jnp.tanh(params["embedding"][batch["tokens"]] @ params["w"])
        scores = jax.nn.log_softmax(hidden @ params["embedding"].T)
        return -jnp.take_along_axis(scores, batch["targets"][..., None], -1).mean()

    key = jax.random.key(0)
    params = {
        "embedding": jax.random.normal(key, (11, 8)) / 3,
        "w": jax.random.normal(key, (8, 8)) / 3,
    }
    tokens = jax.random.randint(key, (ROWS, 5), 0, 11)
    data = {"tokens": tokens, "targets": (tokens + 1) % 11}
    return _train(loss_fn, params, data, roles={"parameter": 2, "batch": 2}, gradients=2)


@step
def convolution() -> Step:
    def loss_fn(params, batch):
        image = jax.lax.conv_general_dilated(
            batch["image"],
            params["kernel"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        pooled = jax.lax.reduce_window(
            image, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        scores = pooled.reshape(ROWS, -1) @ params["w"]
        return -jax.nn.log_softmax(scores)[jnp.arange(ROWS), batch["label"]].mean()

    key = jax.random.key(0)
    params = {
        "kernel": jax.random.normal(key, (3, 3, 2, 4)) / 3,
        "w": jax.random.normal(key, (64, 5)) / 8,
    }
    data = {"image": jax.random.normal(key, (ROWS, 8, 8, 2)), "label": jnp.arange(ROWS) % 5}
    return _train(loss_fn, params, data, roles={"parameter": 2, "batch": 2}, gradients=2)


@step
def steps_in_a_scan() -> Step:
    """Several whole steps in one call, the training state being the carry."""

    def train_step(params, batches):
        def one(params, batch):
            loss, grads = jax.value_and_grad(mse)(params, batch)
            return sgd(params, grads), loss

        return jax.lax.scan(one, params, batches)

    from graph.step_base import mlp_params

    batches = jax.tree.map(lambda x: jnp.stack([x, x + 1]), batch())
    return Step(
        fn=train_step, args=(mlp_params(), batches), roles={"parameter": 4, "batch": 2}, results=5
    )
