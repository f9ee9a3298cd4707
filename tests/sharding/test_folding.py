"""Folding ties nothing that the step does not tie: weights of one shape have a decision each,
whatever the update computes of them, and equal layers share theirs.
"""

from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest
from planners.small_steps import array

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, target_for
from aliquot.graph import Phase, fold
from aliquot.sharding import build_nodes, index_nodes

CPU = target_for(Cluster.preset("8xcpu").device)
WIDTH, ROWS = 16, 8


def together(graph, repeats=True):
    """Inputs and outputs that share a node, and the number of nodes."""
    nodes = build_nodes(index_nodes(graph, repeats=repeats), CPU)
    paths = defaultdict(set)
    for item, port in zip(graph.inputs, nodes.input_ports, strict=True):
        paths[port.node].add(item.path)
    for item, port in zip(graph.outputs, nodes.output_ports, strict=True):
        paths[port.node].add(f"new {item.path}")
    paths.pop(-1, None)
    return {frozenset(names) for names in paths.values()}, len(nodes.nodes)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))


def divided(grads, state, key):
    return jax.tree.map(lambda g: g / norm(grads), grads)


def clipped(grads, state, key):
    total = norm(grads)
    return jax.tree.map(lambda g: jnp.where(total < 1, g, g / total), grads)


def finite(grads, state, key):
    flags = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
    return jax.tree.map(lambda g: jax.lax.select(flags.all(), g, 0 * g), grads)


def masked(grads, state, key):
    total = norm(grads)
    masks = jax.tree.map(lambda g: jnp.broadcast_to(total < 1, g.shape), grads)
    return jax.tree.map(lambda m, g: jax.lax.select(m, g, g / total), masks, grads)


def by_ratio_of_norms(grads, state, key):
    """As LAMB does."""
    return jax.tree.map(lambda w, g: g * norm(w) / norm(g), state["p"], grads)


def by_old_moments(grads, state, key):
    return jax.tree.map(lambda m, g: g / jnp.abs(m).max(), state["m"], grads)


def noisy(grads, state, key):
    """Noise comes from no array: nothing but its use tells that of one weight from another's."""
    keys = jax.random.split(key, 2)
    noise = {n: jax.random.normal(k, (WIDTH, WIDTH)) for n, k in zip(grads, keys, strict=True)}
    total = norm(noise)
    return jax.tree.map(lambda g, n: g + n / total, grads, noise)


UPDATES = (divided, clipped, finite, masked, by_ratio_of_norms, by_old_moments, noisy)


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16"])
def test_weights_of_one_shape_are_split_apart(update, cast):
    """Their names differ in a number alone, as those of equal layers do."""

    def step(state, x, key):
        # Before the forward pass, so that the casts are no part of it.
        copies = {n: w.astype(jnp.bfloat16) if cast else w for n, w in state["p"].items()}
        x = x.astype(copies["w1"].dtype)

        def loss(p):
            return jnp.square(jnp.tanh(x @ p["w1"]) @ p["w2"]).astype(jnp.float32).mean()

        grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(copies))
        m = jax.tree.map(lambda m, u: 0.9 * m + u, state["m"], update(grads, state, key))
        return {"p": jax.tree.map(lambda w, m: w - m, state["p"], m), "m": m}

    weights = {"w1": array(WIDTH, WIDTH), "w2": array(WIDTH, WIDTH)}
    graph = aq.capture(step, {"p": weights, "m": weights}, array(ROWS, WIDTH), jax.random.key(0))
    groups, count = together(graph)
    assert (groups, count) == together(graph, repeats=False)
    assert not any("new .p.w1" in names and "new .p.w2" in names for names in groups)


def zoo_graph(family, num_layers, **options):
    sizes = {"num_layers": num_layers, "hidden_size": 32, "num_heads": 4, "vocab_size": 64}
    config = zoo.configure(family, **sizes, seq_len=16)
    workload = zoo.build(config, ROWS, recompute="none", **options)
    return aq.capture(workload.train_step, workload.state, workload.batch)


@pytest.mark.parametrize("family", ["gpt-125m", "llama-7b"])
@pytest.mark.parametrize("dtype", ["bf16", "float16"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_clipping_ties_no_weights(family, dtype, scan):
    plain = zoo_graph(family, 2, dtype=dtype, scan=scan)
    clipping = zoo_graph(family, 2, dtype=dtype, scan=scan, clip_norm=1.0)
    assert together(plain) == together(clipping)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_equal_layers_stay_one_class_under_clipping(optimizer):
    """Adafactor, too, takes norms, of each weight and of each update."""
    options = {"dtype": "float16", "clip_norm": 1.0, "optimizer": optimizer}
    few, many = [zoo_graph("gpt-125m", count, **options) for count in (2, 4)]
    assert together(few)[1] == together(many)[1]
    assert len(fold(few).members) == len(fold(many).members)
    folding, read = fold(many), defaultdict(set)
    for op in many.ops:
        for position, source in enumerate(op.inputs):
            if op.phase is Phase.UPDATE and isinstance(source, int) and many.values[source].shape:
                place = int(folding.op_class[op.index]), position
                read[place].add(int(folding.value_class[source]))
    assert all(len(classes) == 1 for classes in read.values())
