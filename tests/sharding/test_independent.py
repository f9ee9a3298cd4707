"""Which results of independent micro-batches are averaged, summed, put together or handed on, and
which steps are refused.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runtime.random_steps import random_step

from aliquot.core import CaptureError, InputError
from aliquot.graph import capture, evaluate
from aliquot.sharding import plan_micro_batches

W = jax.ShapeDtypeStruct((6, 3), jnp.float32)
BATCH = {
    "x": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    "y": jax.ShapeDtypeStruct((8,), jnp.int32),
}


def train_on(loss_fn):
    def train_step(w, batch):
        value, grads = jax.value_and_grad(loss_fn, has_aux=True)(w, batch)
        return w - 0.1 * grads, value

    return train_step


def plan(loss_fn, count=4, batch=None):
    graph = capture(train_on(loss_fn), W, batch or BATCH)
    return plan_micro_batches(graph, count, semantics="independent")


def combined(metric, count=4):
    """How micro-batches combine a function of the activations."""
    found = plan(lambda w, b: (jnp.mean((b["x"] @ w) ** 2), metric(b["x"] @ w, b)), count)
    return found.combine["[1][1]"]


@pytest.mark.parametrize(
    ("metric", "how"),
    [
        (lambda h, b: h.mean(), "mean"),
        (lambda h, b: h.sum(), "sum"),
        (lambda h, b: 2 * h.sum() / 3, "sum"),
        (lambda h, b: h.sum() / h.shape[0], "mean"),
        (lambda h, b: jnp.sum(h / h.shape[0]), "mean"),
        (lambda h, b: h.sum() / jnp.maximum(jnp.sum(b["y"]), 1), "mean"),
        (lambda h, b: jnp.sum(h / jnp.maximum(jnp.sum(b["y"]), 1)), "mean"),
        (lambda h, b: jnp.sqrt(h.sum()), "mean"),
        (lambda h, b: h.sum() + 1.0, "mean"),
        (lambda h, b: h.max(), "mean"),
        (lambda h, b: jnp.sum(jnp.diagonal(h @ h.T)), "mean"),
        (lambda h, b: jnp.sum(jnp.where(jnp.arange(h.shape[0]) == 0, h[:, 0], 0)), "sum"),
        (lambda h, b: jnp.sum(jax.lax.map(jnp.sin, h)), "sum"),
        (lambda h, b: jnp.sum((h[:, 0] > 0).astype(jnp.int32)), "sum"),
        (lambda h, b: jnp.any(h > 1), "or"),
        (lambda h, b: jnp.max(b["y"]), "max"),
        (lambda h, b: jnp.isfinite(h.mean()), "equal"),
        (lambda h, b: h, "concatenate 0"),
        (lambda h, b: b["y"] + 1, "concatenate 0"),
    ],
)
def test_results_are_combined_as_what_they_are(metric, how):
    assert combined(metric) == how


def test_sums_over_examples_in_a_loop_over_them_are_sums():
    def metric(h, b):
        return jax.lax.scan(lambda total, row: (total + jnp.sum(row), None), 0.0, h)[0]

    assert combined(metric) == "sum"
    assert combined(lambda h, b: metric(h, b) / h.shape[0]) == "mean"


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (lambda h, b: h @ h.T, r"\[1\]\[1\] is \[8, 8\] for the batch and \[2, 2\]"),
        (lambda h, b: jnp.sort(h, axis=0), "not known to hold one row for each example"),
        (lambda h, b: jnp.concatenate([h, h]), "not known to hold one row for each example"),
        (lambda h, b: h[b["y"]], "looks up examples by numbers that come with the batch"),
        (lambda h, b: h.reshape(8, 3), "cannot be traced on a micro-batch"),
        (lambda h, b: h.sum() if h.shape[0] > 4 else h[0, 0], "another program on a micro-batch"),
    ],
)
def test_what_does_not_follow_the_batch_is_refused(metric, reason):
    with pytest.raises(CaptureError, match=reason):
        combined(metric)


def test_nodes_that_edges_name_are_refused():
    """Which edges belong to which micro-batch is not known."""
    batch = {**BATCH, "senders": jax.ShapeDtypeStruct((20,), jnp.int32)}
    with pytest.raises(CaptureError, match="looks up examples by numbers"):
        plan(lambda w, b: (jnp.mean((b["x"] @ w)[b["senders"]] ** 2), 0.0), batch=batch)


def test_gradients_are_averaged_together():
    """One gradient alone is a sum over examples: summing it would change the proportions."""

    def step(params, batch):
        def loss(p):
            return jnp.sum((batch["x"] @ p["w"] + p["b"]) ** 2) + jnp.sum(p["w"] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"w": W, "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    found = plan_micro_batches(capture(step, params, BATCH), 4, semantics="independent")
    kinds = {found.specs[v].kind for v in found.phased.crossing}
    assert kinds == {"mean"}


def step_with_state(change):
    def step(state, batch):
        w, kept = state

        def loss(w):
            h = batch["x"] @ w
            return jnp.mean((h - h.mean(0)) ** 4), h

        (value, h), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return (w - 0.1 * grads, change(kept, h, grads)), value

    return step


@pytest.mark.parametrize(
    ("change", "handed_on"),
    [
        (lambda kept, h, g: 0.9 * kept + 0.1 * h.mean(0), True),
        (lambda kept, h, g: 0.9 * kept + 0.1 * g.mean(0), False),
        (lambda kept, h, g: kept + 1, False),
    ],
    ids=["statistics", "moments", "count"],
)
def test_what_the_forward_pass_writes_is_handed_on(change, handed_on):
    state = W, jax.ShapeDtypeStruct((3,), jnp.float32)
    graph = capture(step_with_state(change), state, BATCH)
    found = plan_micro_batches(graph, 4, semantics="independent")
    assert (found.combine["[0][1]"] == "handed on") == handed_on
    assert bool(found.phased.handed_on) == handed_on


def test_a_gradient_by_hand_is_refused():
    def step(state, batch):
        w, moment = state
        h = batch["x"] @ w
        moment = 0.9 * moment + batch["x"].T @ jnp.tanh(h - h.mean(0))
        return (w - 0.1 * moment, moment), h.mean()

    with pytest.raises(CaptureError, match="its forward pass and its update cannot be told apart"):
        plan_micro_batches(capture(step, (W, W), BATCH), 4, semantics="independent")


def test_training_in_a_loop_is_refused():
    def step(w, batch):
        def once(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None

        return jax.lax.scan(once, w, batch["x"].reshape(2, -1, 6))[0]

    with pytest.raises(CaptureError, match="would train on the result of the one before"):
        plan_micro_batches(capture(step, W, BATCH), 4, semantics="independent")


def test_a_second_training_in_the_same_step_is_refused():
    def step(params, batch):
        one, other = params
        one = one - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(one)
        other = other - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"] @ one * w) ** 2))(other)
        return one, other

    params = W, jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(CaptureError, match="trains a second time in the same step"):
        plan_micro_batches(capture(step, params, BATCH), 4, semantics="independent")


def test_groups_of_devices_share_each_micro_batch():
    graph = capture(train_on(lambda w, b: (jnp.mean(b["x"] @ w), 0.0)), W, BATCH)
    with pytest.raises(InputError, match="all devices share"):
        plan_micro_batches(graph, 2, num_groups=2, semantics="independent")


def normalised(layers):
    def loss(w, b):
        x = b["x"]
        for _ in range(layers):
            h = x @ w @ w.T
            x = (h - h.mean(axis=0)) / jnp.sqrt(h.var(axis=0) + 1e-5)
        return (x**2).mean(), 0.0

    return loss


def test_statistics_of_many_layers_take_one_walk():
    found = plan(normalised(24))
    assert found.combine["[1][0]"] == "mean"


def test_checks_and_loops_of_libraries():
    def loss(w, b):
        h = eqx.error_if(b["x"] @ w, jnp.any(b["x"] > 9), "too large")

        def turn(carry):
            return carry[0] + 1, 0.5 * carry[1]

        _, h = jax.lax.while_loop(lambda c: jnp.max(c[1]) > 1, turn, (0, jax.lax.stop_gradient(h)))
        return jnp.mean((b["x"] @ w) * h), np.float32(1)

    assert plan(loss).combine["[1][0]"] == "mean"


def test_arrays_of_fewer_dims_on_a_micro_batch_are_refused(x64):
    """JAX differentiates the sort of a single example with a gather of fewer dims."""
    step = random_step(230)
    graph = capture(step.fn, step.state, step.batches[0])
    with pytest.raises(CaptureError, match=r"result of `reshape` .* becomes \(8, 8, 1\)"):
        plan_micro_batches(graph, 2, semantics="independent")


def labelled(params, batch):
    logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    # A mean, a sum over all but one, and a share of the examples.
    return (
        losses.mean()
        + losses.sum() / (1 + losses.shape[0])
        + logits.sum() * losses.shape[0] ** -0.5
    )


def test_one_labelled_example_in_each_micro_batch(x64):
    """JAX writes a lookup in another way for one example, and its numbers are those of one."""
    batch = {
        "x": jax.random.normal(jax.random.key(0), (4, 6)),
        "y": jnp.array([0, 2, 1, 1], jnp.int32),
    }
    params = {name: jax.random.normal(jax.random.key(ord(name)), (6, 6)) for name in "ab"}

    def train_step(params, batch):
        value, grads = jax.value_and_grad(labelled)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    graph = capture(train_step, params, batch)
    plan = plan_micro_batches(graph, 4, semantics="independent")
    parts = [jax.tree.map(lambda a, k=k: a[k : k + 1], batch) for k in range(4)]
    for part in parts:
        found = evaluate(plan.part, jax.tree.leaves((params, part)))
        wanted = jax.tree.leaves(train_step(params, part))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_branch_for_one_example_is_refused():
    """That is the user's own program, and no other stands for it."""

    def loss(w, b):
        h = b["x"] @ w
        if h.shape[0] > 1:
            h = h / jnp.std(h, axis=0)
        losses = optax.softmax_cross_entropy_with_integer_labels(h, b["y"])
        return losses.mean(), losses.sum()

    with pytest.raises(CaptureError, match="looks at the size of the batch"):
        plan(loss, 8)


@pytest.mark.parametrize("is_refused", [True, False], ids=["once a step", "with each micro-batch"])
def test_a_queue_whose_place_changes_once_a_step_is_refused(is_refused):
    """Every micro-batch would write its rows to the same place, and leave old ones behind it."""

    def train_step(state, batch):
        def loss(w):
            hidden = batch["x"] @ w
            return jnp.mean((hidden @ state["queue"].T) ** 2), hidden

        (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(state["w"])
        place = state["place"]
        queue = jax.lax.dynamic_update_slice_in_dim(state["queue"], hidden, place, 0)
        written = hidden.shape[0] if is_refused else (hidden[:, 0] < jnp.inf).sum()
        new = {"w": state["w"] - 0.1 * grads, "queue": queue, "place": (place + written) % 32}
        return new, value

    place = jax.ShapeDtypeStruct((), jnp.int32)
    state = {"w": W, "queue": jax.ShapeDtypeStruct((32, 3), jnp.float32), "place": place}
    graph = capture(train_step, state, BATCH)
    if is_refused:
        with pytest.raises(CaptureError, match="a place that state.place gives"):
            plan_micro_batches(graph, 2, semantics="independent")
    else:
        found = plan_micro_batches(graph, 2, semantics="independent")
        assert found.combine["[0].place"] == "handed on"
