"""Functions of the state and a batch, computed where the state of a training step lies."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import InputError

ROWS, WIDTH = 32, 16


class State(NamedTuple):
    params: Any
    average: Any
    key: Any


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def update(params, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def train_named(state, batch):
    """One argument with keys, and an average of the weights that only the evaluation reads."""
    params, loss = update(state.params, batch["x"], batch["y"])
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, params)
    return State(params, average, jax.random.split(state.key)[0]), {"loss": loss}


def evaluate_named(weights, data):
    return {"loss": loss_of(weights.average, data["x"], data["y"]), "largest": jnp.max(data["x"])}


def train_several(params, count, x, y):
    params, loss = update(params, x, y)
    return params, count + 1, {"loss": loss}


def evaluate_several(state, batch):
    params, count = state
    return {"loss": loss_of(params, *batch), "count": count}


def given():
    draw = np.random.default_rng(0).normal
    params = {"up": draw(size=(WIDTH, 4 * WIDTH)), "down": draw(size=(4 * WIDTH, WIDTH))}
    average = jax.tree.map(lambda p: p / 2, params)
    return params, average, draw(size=(ROWS, WIDTH)), draw(size=(ROWS, WIDTH))


def alike(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12)


def test_a_state_of_any_structure(x64):
    params, average, x, y = given()
    state, batch = State(params, average, jax.random.key(0)), {"x": x, "y": y}
    plan = aq.plan(
        train_named, state, batch, cluster=aq.Cluster.preset("4xcpu"), method=aq.Zero3Parallel()
    )
    devices = jax.devices()[4:8]
    step = aq.parallelize(train_named, plan, devices=devices)
    placed, _ = step.place(state, batch)
    evaluate = aq.evaluator(step, evaluate_named, placed, batch)
    alike(evaluate(placed, batch), evaluate_named(state, batch))
    assert evaluate.shardings["weights.average.up"] == step.shardings["state.average.up"]
    assert evaluate.shardings["data.x"] == step.shardings["batch.x"]
    assert evaluate.mesh.devices.flat[0] == devices[0]
    step(placed, batch)


def train_normed(state, batch):
    """Batch normalization, whose running variance training only updates."""
    x, y = batch

    def loss_of(params):
        hidden = x @ params["up"]
        variance = jnp.mean(hidden**2, axis=0)
        hidden = hidden * jax.lax.rsqrt(variance + 1e-5) * params["scale"]
        return jnp.mean((hidden @ params["down"] - y) ** 2), variance

    params = state["params"]
    (loss, variance), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return {"params": params, "variance": 0.9 * state["variance"] + 0.1 * variance}, loss


def evaluate_normed(state, batch):
    params, (x, y) = state["params"], batch
    scale = jax.lax.rsqrt(state["variance"] + 1e-5) * params["scale"]
    return {"loss": jnp.mean(((x @ params["up"] * scale) @ params["down"] - y) ** 2)}


def test_arrays_that_only_the_evaluation_combines(x64):
    """The step may split them otherwise."""
    params, _, x, y = given()
    params["scale"], variance = np.full(4 * WIDTH, 2.0), np.linspace(0.5, 1.5, 4 * WIDTH)
    state, batch = {"params": params, "variance": variance}, (x, y)
    step = aq.parallelize(train_normed, method=aq.Zero3Parallel()).prepare(state, batch)
    assert step.shardings["state.params.scale"] != step.shardings["state.variance"]
    evaluate = aq.evaluator(step, evaluate_normed, state, batch)
    alike(evaluate(state, batch), evaluate_normed(state, batch))


def test_several_arguments_and_another_batch(x64):
    params, _, x, y = given()
    step = aq.parallelize(train_several, method=aq.Zero3Parallel(), num_micro_batches=2)
    step.prepare(params, jnp.int32(3), x, y)
    state, half = (params, jnp.int32(3)), (x[:16], y[:16])
    evaluate = aq.evaluator(step, evaluate_several, state, half)
    alike(evaluate(state, half), evaluate_several(state, half))
    assert evaluate.shardings["state[0].up"] == step.shardings["params.up"]


def test_a_pipeline_returns_metrics_of_the_step_alone(x64):
    params, _, x, y = given()
    method = aq.Megatron(pipeline=2)
    step = aq.parallelize(train_several, method=method, num_micro_batches=2)
    step.prepare(params, jnp.int32(3), x, y)
    state = (params, jnp.int32(3))
    with pytest.raises(InputError, match=r"that step does not return count\..*WholeProgram"):
        aq.evaluator(step, evaluate_several, state, (x, y))(state, (x, y))

    def loss_alone(state, batch):
        return {"loss": loss_of(state[0], *batch)}

    evaluate = aq.evaluator(step, loss_alone, state, (x, y))
    alike(evaluate(state, (x, y)), loss_alone(state, (x, y)))
