"""Which loops over micro-batches that people write can be left out, with equal numbers, and which
must stay.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aliquot.graph import capture, evaluate
from aliquot.sharding import without_own_loop

ROWS, WIDTH, LAYERS, TURNS = 12, 4, 3, 3


def layers(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["w"] + w["b"]), None

    return jax.lax.scan(jax.checkpoint(layer), x, params)[0]


def mean_loss(params, part):
    return jnp.mean((layers(params, part["x"]) - part["y"]) ** 2)


def step_of(loss=mean_loss, turn=None, xs=None, stacked=False):
    """A step that adds up gradients; `turn` changes the totals and gradients of one turn, `xs` is
    what a turn gets beside its rows.
    """

    def train_step(params, batch):
        parts = jax.tree.map(lambda a: a.reshape(TURNS, -1, *a.shape[1:]), batch)

        def body(totals, given):
            part, other = given
            extra = () if other is None else (other,)
            value, grads = jax.value_and_grad(loss)(params, part, *extra)
            if turn is not None:
                return turn(totals, (value, grads)), None
            if stacked:
                return (totals[0], jax.tree.map(jnp.add, totals[1], grads)), value
            return jax.tree.map(jnp.add, totals, (value, grads)), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (value, grads), values = jax.lax.scan(body, start, (parts, xs))
        value = values.mean() if stacked else value / TURNS
        return jax.tree.map(lambda p, g: p - 0.1 * g / TURNS, params, grads), value

    return train_step


def arrays(rows=ROWS):
    random = np.random.default_rng(0)
    params = {
        "w": random.normal(size=(LAYERS, WIDTH, WIDTH)),
        "b": random.normal(size=(LAYERS, WIDTH)),
    }
    return params, {name: random.normal(size=(rows, WIDTH)) for name in "xy"}


def sum_loss(params, part):
    return jnp.sum((layers(params, part["x"]) - part["y"]) ** 2)


def auxiliary_loss(params, part):
    """The loss of each layer is added up in the loop over layers."""

    def layer(carry, w):
        h, total = carry
        h = jnp.tanh(h @ w["w"] + w["b"])
        return (h, total + jnp.mean(h**2)), None

    (h, total), _ = jax.lax.scan(layer, (part["x"], 0.0), params)
    return total + jnp.mean((h - part["y"]) ** 2)


@pytest.mark.parametrize(
    "step",
    [step_of(), step_of(stacked=True), step_of(sum_loss), step_of(auxiliary_loss)],
    ids=["mean", "stacked", "sum", "auxiliary"],
)
def test_left_out(step, x64):
    given = arrays()
    graph = capture(step, *given)
    found = without_own_loop(graph)
    assert found is not None and found.turns == TURNS
    assert max(op.trips for op in found.graph.ops) == LAYERS
    leaves = jax.tree.leaves(given)
    for a, b in zip(evaluate(found.graph, leaves), evaluate(graph, leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [2 * TURNS, 3 * TURNS])
def test_steps_on_other_batches_are_known_whatever_the_batch(rows, x64):
    found = without_own_loop(capture(step_of(), *arrays(rows)))
    assert found is not None
    assert {*found.graph.calling.traces} - {rows}


def dropped_out(params, part):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, part["x"].shape)
    return mean_loss(params, {**part, "x": jnp.where(kept, part["x"], 0)})


def weighted_by_place(params, part):
    places = jnp.arange(part["x"].shape[0])[:, None]
    return jnp.mean((layers(params, part["x"]) - part["y"]) ** 2 * places)


def less_the_mean(params, part):
    return mean_loss(params, {**part, "x": part["x"] - part["x"].mean(axis=0)})


def decayed(params, part):
    return mean_loss(params, part) + jnp.sum(params["w"] ** 2)


def auxiliary_from_one(params, part):
    def layer(carry, w):
        h, total = carry
        h = jnp.tanh(h @ w["w"] + w["b"])
        return (h, total + jnp.mean(h**2)), None

    (h, total), _ = jax.lax.scan(layer, (part["x"], 1.0), params)
    return total + jnp.mean((h - part["y"]) ** 2)


def in_halves(params, part):
    h = layers(params, part["x"]).reshape(2, -1, WIDTH)
    return jnp.sum((h[0] - h[1]) ** 2)


def contrastive(params, part):
    h = layers(params, part["x"])
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ part["y"].T)))


def clipped(totals, new):
    value, grads = new
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
    return jax.tree.map(jnp.add, totals, (value, grads))


def averaged(totals, new):
    return jax.tree.map(lambda t, g: 0.9 * t + g, totals, new)


def scaled(params, part, scale):
    return scale * mean_loss(params, part)


@pytest.mark.parametrize(
    "step",
    [
        *map(step_of, (dropped_out, weighted_by_place, less_the_mean, decayed)),
        *map(step_of, (auxiliary_from_one, in_halves, contrastive)),
        step_of(turn=clipped),
        step_of(turn=averaged),
        step_of(scaled, xs=np.arange(TURNS) + 1.0),
    ],
    ids=[
        *("dropout", "places", "normalised", "decay", "starts at one", "halves"),
        *("contrastive", "clipped", "moving average", "weighted turns"),
    ],
)
def test_stays(step):
    """One turn over the whole batch would compute something else."""
    assert without_own_loop(capture(step, *arrays())) is None


def test_steps_without_such_a_loop():
    params, batch = arrays()

    def plain(params, batch):
        value, grads = jax.value_and_grad(mean_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    assert without_own_loop(capture(plain, params, batch)) is None
