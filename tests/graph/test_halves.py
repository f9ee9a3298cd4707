"""Loops over layers and remat regions of backward passes, run as two."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aliquot.graph import Call, Phase, capture, evaluate, halve, items_of
from aliquot.graph._first_half import first_half

WIDTH, ROWS, LAYERS = 8, 16, 3


def layer(x, w):
    """A feed-forward block with a norm whose scale is learnt."""
    h = x / jnp.sqrt(1 + jnp.mean(x**2, -1, keepdims=True)) * w["scale"]
    return x + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"]


def tied(x, w, shared):
    """The same with a weight that all layers share: its gradient is a sum that the loop carries."""
    return layer(x, w) + jnp.sin(x @ shared)


def dropout(x, w, key):
    return layer(jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0), w)


def written_out(x, ws, shared):
    for w in ws:
        x = jax.checkpoint(tied)(x, w, shared)
    return x


def scanned(body, reverse=False):
    def run(x, ws, shared):
        return jax.lax.scan(lambda x, w: (body(x, w, shared), None), x, ws, reverse=reverse)[0]

    return run


def random_masks(x, ws, shared):
    keys = jax.random.split(jax.random.key(0), LAYERS)
    body = jax.checkpoint(lambda x, row: (dropout(x, *row), None))
    return jax.lax.scan(body, x, (ws, keys))[0] @ shared


def nested(x, ws, shared):
    """A region inside a loop inside a loop."""

    def twice(x, w):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(tied)(x, w, shared), None), x, length=2)[0]

    return jax.lax.scan(lambda x, w: (twice(x, w), None), x, ws)[0]


def two_regions(x, ws, shared):
    first, second = (
        jax.checkpoint(lambda x, w: layer(x, w)),
        jax.checkpoint(lambda x: jnp.sin(x @ shared)),
    )
    return jax.lax.scan(lambda x, w: (x + second(first(x, w)), None), x, ws)[0]


MODELS = {
    "scanned": scanned(tied),
    "scanned backwards": scanned(tied, reverse=True),
    "scanned with regions": scanned(jax.checkpoint(tied)),
    "scanned, saving products": scanned(
        jax.checkpoint(tied, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "scanned with two regions": two_regions,
    "random masks": random_masks,
    "nested loops": nested,
}


def weights(random, count):
    shapes = {
        "up": (WIDTH, 2 * WIDTH),
        "down": (2 * WIDTH, WIDTH),
        "scale": (WIDTH,),
        "bias": (2 * WIDTH,),
    }
    return {name: random.normal(size=(count, *shape)) / 4 for name, shape in shapes.items()}


def captured(model, ws):
    """Graph and arrays of the gradients by inputs and weights."""
    random = np.random.default_rng(1)
    x, shared = random.normal(size=(ROWS, WIDTH)), random.normal(size=(WIDTH, WIDTH)) / 4

    def gradients(x, ws, shared):
        return jax.grad(
            lambda x, ws, shared: jnp.sum(model(x, ws, shared) ** 2), argnums=(0, 1, 2)
        )(x, ws, shared)

    return capture(gradients, x, ws, shared), jax.tree.leaves((x, ws, shared))


def backward_calls(graph):
    """Loops and regions of the backward pass that take part in the gradient by x."""
    needed = {graph.outputs[0].value}
    for item in reversed(items_of(graph)):
        if not needed.isdisjoint(item.outputs):
            if isinstance(item.op_or_call, Call) and item.phase is Phase.BACKWARD:
                yield item.op_or_call, needed.intersection(item.outputs)
            needed.update(item.inputs)


def in_halves(graph):
    """The graph with every such call as two, all second halves after everything else; and the
    halves.
    """
    pairs = []
    free = {i.value for i in graph.inputs}
    for call, needed in backward_calls(graph):
        half = first_half(graph, call, needed)
        if half is None:
            continue
        halves = halve(graph, call, half, free)
        place = graph.body.items.index(call)
        items = (
            *graph.body.items[:place],
            halves.first,
            halves.second,
            *graph.body.items[place + 1 :],
        )
        graph = replace(graph, values=halves.values, body=replace(graph.body, items=items))
        pairs.append((half, halves))
    return graph, pairs


def products(graph, call):
    """Operators of products inside a call, as often as they stand there."""

    def inside(items):
        for item in items:
            if isinstance(item, Call):
                for block in item.blocks:
                    yield from inside(block.items)
            elif graph.ops[item].name == "dot_general":
                yield item

    return list(inside((call,)))


@pytest.mark.parametrize("model", MODELS)
def test_a_loop_in_halves_computes_the_same(model):
    with jax.enable_x64(True):
        graph, arrays = captured(MODELS[model], weights(np.random.default_rng(0), LAYERS))
        halved, pairs = in_halves(graph)
        assert len(pairs) == 1
        # The compiler fuses other operators where some are worked out again.
        for a, b in zip(evaluate(graph, arrays), evaluate(halved, arrays), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_regions_of_written_out_layers_in_halves_compute_the_same():
    with jax.enable_x64(True):
        stacked = weights(np.random.default_rng(0), LAYERS)
        graph, arrays = captured(
            written_out, [jax.tree.map(lambda a, k=k: a[k], stacked) for k in range(LAYERS)]
        )
        halved, pairs = in_halves(graph)
        assert len(pairs) == LAYERS
        assert {h.kind for _, halves in pairs for h in (halves.first, halves.second)} == {"remat"}
        for a, b in zip(evaluate(graph, arrays), evaluate(halved, arrays), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_each_product_stands_in_one_half_and_those_of_weights_in_the_second(model):
    graph, _ = captured(MODELS[model], weights(np.random.default_rng(0), LAYERS))
    whole = {id(call): sorted(products(graph, call)) for call, _ in backward_calls(graph)}
    halved, ((half, halves),) = in_halves(graph)
    now, late = products(halved, halves.first), products(halved, halves.second)
    assert sorted(now + late) in whole.values()
    assert late and half.ops.isdisjoint(late) and half.ops.issuperset(now)


@pytest.mark.parametrize("model", ["scanned", "scanned with regions"])
def test_only_operands_of_products_are_handed_on_and_cheap_results_recomputed(model):
    graph, _ = captured(MODELS[model], weights(np.random.default_rng(0), LAYERS))
    halved, ((_, halves),) = in_halves(graph)
    handed = {halved.values[v].shape for v in halves.handed}
    # Activations and cotangents, one row for each layer; no weights.
    assert handed <= {(LAYERS, ROWS, WIDTH), (LAYERS, ROWS, 2 * WIDTH), (LAYERS, ROWS, 1)}
    assert halves.handed and not set(halves.handed) & set(halves.first.inputs)
    # Three products need three cotangents, of which the one behind the sine is made anew.
    wide = [v for v in halves.handed if halved.values[v].shape[-1] > 1]
    assert len(wide) <= 5


def test_a_loop_without_products_of_weights_stays_whole():
    def model(x, ws, shared):
        return (
            jax.lax.scan(lambda x, w: (jnp.tanh(x * w["scale"]) @ jnp.eye(WIDTH), None), x, ws)[0]
            * shared.sum()
        )

    graph, _ = captured(model, weights(np.random.default_rng(0), LAYERS))
    call, needed = next(iter(backward_calls(graph)))
    assert call.kind == "scan" and first_half(graph, call, needed) is None


def test_a_loop_that_prints_stays_whole():
    def model(x, ws, shared):
        def body(x, w):
            jax.debug.print("{}", x[0, 0])
            return tied(x, w, shared), None

        return jax.lax.scan(jax.checkpoint(body), x, ws)[0]

    graph, _ = captured(model, weights(np.random.default_rng(0), LAYERS))
    call, needed = next(iter(backward_calls(graph)))
    assert first_half(graph, call, needed) is None
