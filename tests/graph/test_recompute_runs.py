"""Runs of operators that a backward pass works out again, and how many bytes of them are there at
once.
"""

import jax
import jax.numpy as jnp
import pytest

from aliquot.graph import Phase, capture, items_of, most_at_once, recomputed_runs
from aliquot.graph._recompute import items_between

LAYERS = 4


def layered(state, batch):
    """One step of gradient descent through layers of two products each."""

    def loss(weights):
        x = batch
        for first, second in weights:
            x = x + jnp.tanh(x @ first) @ second
        return jnp.sum(x * x)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


@pytest.fixture(scope="module")
def passes():
    """The forward and backward items, and the value that each layer begins with."""
    weight = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = capture(layered, [(weight, weight)] * LAYERS, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    items = [item for item in items_of(graph) if not item.shared]
    forward = [item for item in items if item.phase is Phase.FORWARD]
    backward = [item for item in items if item.phase is Phase.BACKWARD]
    sums = [
        item.outputs[0]
        for item in forward
        if graph.ops[item.ops[0]].name == "add" and graph.values[item.outputs[0]].shape == (4, 8)
    ]
    return graph, forward, backward, sums


def again(passes, kept):
    """The forward items that make what the backward pass reads out of what is kept."""
    _, forward, backward, _ = passes
    made = {o for item in forward for o in item.outputs}
    wanted = [i for item in backward for i in item.inputs if i in made]
    return items_between(forward, wanted, frozenset(kept))


def test_each_layer_waits_for_its_own_gradient(passes):
    _, _, backward, sums = passes
    runs = recomputed_runs(again(passes, sums), backward)
    # The last layer begins with the gradient of the loss, which is there before it.
    waiting = [run for run in runs if run.gradient is not None]
    assert len(waiting) >= LAYERS - 1
    made_at = {o: k for k, item in enumerate(backward) for o in item.outputs}
    first_read = {}
    for k, item in enumerate(backward):
        for i in item.inputs:
            first_read.setdefault(i, k)
    for run in waiting:
        assert run.after == made_at[run.gradient] + 1
        for item in run.items:
            assert all(first_read[o] >= run.after for o in item.outputs if o in first_read)
            assert not {*item.inputs} & made_at.keys()


def test_runs_are_complete_and_in_an_order_in_which_they_can_run(passes):
    _, _, backward, sums = passes
    for kept in ([], sums[:2], sums):
        wanted = again(passes, kept)
        runs = recomputed_runs(wanted, backward)
        listed = [item for run in runs for item in run.items]
        assert {id(item) for item in listed} == {id(item) for item in wanted}
        assert [run.after for run in runs] == sorted({run.after for run in runs})
        recomputed = {o for item in wanted for o in item.outputs}
        known = set()
        for item in listed:
            assert recomputed & {*item.inputs} <= known
            known.update(item.outputs)


def test_recomputed_layers_are_alive_one_at_a_time(passes):
    graph, _, backward, sums = passes
    num_bytes = {value.index: float(value.num_bytes) for value in graph.values}

    def at_once(kept):
        wanted = again(passes, kept)
        total = sum(num_bytes[o] for item in wanted for o in item.outputs)
        return most_at_once(recomputed_runs(wanted, backward), backward, num_bytes), total

    most, total = at_once(sums)
    assert 0 < most <= 1.5 * total / LAYERS
    # From the batch alone all layers are worked out before the last one's gradient goes on.
    most, total = at_once([])
    assert most > 0.7 * total
