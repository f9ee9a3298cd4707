"""Layers of a forward pass: where they begin, what they are called, how many there can be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.layered import INNER, ROWS, WIDTH, layered

from aliquot.core import InputError
from aliquot.graph import (
    Phase,
    Run,
    capture,
    cut_alike,
    cut_layers,
    find_repeats,
    fold,
    whole_layers,
)
from aliquot.graph._layers import _places_in_run
from aliquot.sharding import trace_part
from aliquot.zoo import build


@pytest.fixture(scope="module")
def graph():
    return layered(4)


def products(graph, layers):
    """How many products each layer holds."""
    ends = [*layers.starts[1:], len(layers.forward)]
    items = [layers.items[k] for k in layers.forward]
    return [
        sum(graph.ops[op].name == "dot_general" for item in items[a:b] for op in item.ops)
        for a, b in zip(layers.starts, ends)
    ]


def test_repeats_are_cut_at_the_same_place(graph):
    layers = cut_layers(graph)
    assert layers.names[:5] == (
        "state.params.embed",
        *(f"state.params.layers[{k}]" for k in range(4)),
    )
    assert products(graph, layers)[:6] == [0, 2, 2, 2, 2, 1]
    # Only the stream crosses, and equal layers weigh the same.
    assert set(layers.boundary_bytes[:5]) == {ROWS * WIDTH * 4.0}
    assert layers.boundary_bytes[-1] == 0.0
    assert len(set(layers.costs[1:5])) == 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_number_of_layers(graph, count):
    layers = cut_layers(graph, layers=count)
    assert len(layers) == count and layers.starts[0] == 0
    found = products(graph, layers)
    assert sum(found) == 9 and max(found) <= 9 // count + 1
    assert all(b <= 2 * ROWS * WIDTH * 4 for b in layers.boundary_bytes)


@pytest.mark.parametrize(
    "pattern", ["state.params.layers[*]", "params.layers[*]", "layers[*]", "layers[*].up"]
)
def test_a_pattern_of_parameters(graph, pattern):
    layers = cut_layers(graph, layers=pattern)
    # What comes before the first match is a layer of its own; what comes behind belongs to the
    # last.
    assert products(graph, layers) == [0, 2, 2, 2, 3]
    assert layers.names[1:] == tuple(f"state.params.layers[{k}]" for k in range(4))
    assert set(layers.boundary_bytes[:-1]) == {ROWS * WIDTH * 4.0}


def test_a_pattern_of_parameters_of_their_own():
    graph = layered(3, nested=False)
    assert products(graph, cut_layers(graph, layers="params.layers[*]")) == [0, 2, 2, 3]


def test_steps_that_cannot_be_cut_into_layers_are_refused(graph):
    with pytest.raises(InputError, match=r"at most \d+ layers, and layers=40"):
        cut_layers(graph, layers=40)
    with pytest.raises(InputError, match="layers=0"):
        cut_layers(graph, layers=0)
    with pytest.raises(
        InputError, match=r"'params.blocks\[\*\]' matches no parameter of train_step"
    ):
        cut_layers(graph, layers="params.blocks[*]")


def test_a_scalar_that_crosses_is_no_reason_to_cut_through_a_layer():
    """Four layers of two operators: four bytes less cross in the middle of each."""
    run = Run(start=0, period=2, count=4)
    crossing = np.array([0.0, *[1000.0, 1004.0] * 3, 1000.0, 0.0])
    users = [[f"params[{place // 2}].w"] for place in range(8)]
    assert _places_in_run(run, {k: k for k in range(8)}, crossing, users) == [0, 2, 4, 6]


def test_layers_of_another_batch_size_have_its_boundary_bytes():
    """The same operators in the same layers; structured ones are those of their own graph."""
    sizes = {
        "num_layers": 3,
        "hidden_size": 8,
        "num_heads": 2,
        "ffn_size": 16,
        "seq_len": 4,
        "vocab_size": 16,
    }
    work = build("gpt-125m", 8, overrides=sizes, recompute="block")
    graph = capture(work.train_step, work.state, work.batch)
    part = trace_part(graph, 4)
    layers, own = cut_layers(graph), cut_layers(part)
    alike = cut_alike(layers, part)
    assert (alike.starts, alike.forward, alike.boundary_bytes) == (
        own.starts,
        own.forward,
        own.boundary_bytes,
    )
    for item, other in zip(alike.items, own.items, strict=True):
        assert (item.op_or_call, item.inputs, item.outputs, item.ops) == (
            other.op_or_call,
            other.inputs,
            other.outputs,
            other.ops,
        )
        assert (item.phase, item.shared) == (other.phase, other.shared)


def test_quick_search_for_repeats_agrees_outside_the_update():
    graph = layered(4)
    quick, whole = find_repeats(graph), fold(graph)
    assert (
        [(r.start, r.period, r.count) for r in quick.runs]
        == [(r.start, r.period, r.count) for r in whole.runs]
        != []
    )
    passes = [op.index for op in graph.ops if op.phase is not Phase.UPDATE]
    pairs = set(zip(quick.op_class[passes].tolist(), whole.op_class[passes].tolist(), strict=True))
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) < len(passes)
    update = [op.index for op in graph.ops if op.phase is Phase.UPDATE]
    pairs = set(zip(quick.op_class[update].tolist(), whole.op_class[update].tolist(), strict=True))
    assert len({a for a, _ in pairs}) <= len({b for _, b in pairs}) == len(pairs)


def test_a_forward_pass_that_costs_nothing_is_one_layer():
    def step(params, x):
        grads = jax.grad(lambda p: sum(w.sum() for w in p.values()))(params)
        return jax.tree.map(lambda w, g: w - g * x, params, grads)

    weights = {name: jnp.ones((4, 4)) for name in "abcd"}
    assert len(cut_layers(capture(step, weights, 0.1))) == 1


def test_operators_are_products_with_what_follows_them(graph):
    layers, whole = cut_layers(graph, layers="operators"), cut_layers(graph)
    found = products(graph, layers)
    assert max(found) == 1 and sum(found) == 9
    # Layers are cut further, and not elsewhere.
    assert set(whole.starts) < set(layers.starts)
    assert whole_layers(layers).starts == whole.starts
    assert whole_layers(layers).boundary_bytes == whole.boundary_bytes
    assert whole_layers(layers).costs == pytest.approx(whole.costs)
    # The bias and tanh stay with the product before them: what crosses is the stream, and tanh's
    # result.
    up = layers.names.index("state.params.layers[1].up")
    assert layers.names[up + 1] == "state.params.layers[1].down"
    assert layers.boundary_bytes[up] == ROWS * (WIDTH + INNER) * 4.0
    before_down = {
        graph.ops[op].name
        for k in layers.forward[layers.starts[up] : layers.starts[up + 1]]
        for op in layers.items[k].ops
    }
    assert before_down >= {"dot_general", "add", "tanh"}
    # Parameters that are used twice name both operators.
    assert {"state.params.embed", "state.params.embed+1"} < set(layers.names)
    assert len(set(layers.names)) == len(layers)


def test_operators_need_no_names():
    def step(params, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.sin(x @ w)
            return (x @ x.T).sum()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads)], value

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    graph = capture(step, [square] * 3, jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32))
    layers = cut_layers(graph, layers="operators")
    assert products(graph, layers) == [1, 1, 1, 0, 1]
    # The last product has no parameter of its own.
    assert layers.names == ("params[0]", "params[1]", "params[2]", "params[2]+1", "output")


def test_light_operators_are_merged_within_their_layer():
    """Each layer has two heavy products, and one of a few rows."""

    def step(params, batch):
        def loss(params):
            x = batch
            for w, v in params:
                h = jnp.tanh(x @ w) @ w
                x = x + h + jnp.tanh(v @ h[:1].T).sum()
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def arrays(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    graph = capture(step, [(arrays(64, 64), arrays(1, 64))] * 4, arrays(256, 64))
    layers = cut_layers(graph, layers="operators")
    # The first layer also begins the step, and the last ends it.
    found = products(graph, layers)
    assert sum(found) == 12 and found.count(1) >= 3 and found.count(2) >= 3
    assert len(layers) < 12


def test_operators_are_limited_and_equal_layers_cut_alike():
    graph = layered(80)
    layers = cut_layers(graph, layers="operators")
    assert len(layers) <= 128
    per_layer = [
        sum(f"layers[{k}]." in name or name.endswith(f"layers[{k}]") for name in layers.names)
        for k in range(80)
    ]
    assert len(set(per_layer[1:-1])) == 1


def test_operators_of_a_loop_over_layers_are_refused():
    def step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params)
            return (x**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    graph = capture(
        step,
        jax.ShapeDtypeStruct((5, WIDTH, WIDTH), np.float32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),
    )
    with pytest.raises(InputError, match=r"layers='operators': step loops over 5 layers.*Write"):
        cut_layers(graph, layers="operators")
