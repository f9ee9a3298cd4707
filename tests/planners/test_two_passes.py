"""Gradients end where they are summed over the batch: what biases and position tables cost where a
network meets two batches in one step, and that nothing else than gradients travels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from graph.steps import STEPS, shapes
from ordinary_steps import STEPS as ORDINARY
from ordinary_steps import step_of
from planners.growing_collectives import growing_collectives
from runtime.random_passes import random_passes
from runtime.random_steps import random_step
from runtime.two_passes import LOSSES, two_passes

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.cost import make_problem
from aliquot.graph import capture

METHODS = {
    "dp": aq.DataParallel(),
    "zero2": aq.Zero2Parallel(),
    "zero3": aq.Zero3Parallel(),
    "shard": aq.ShardParallel(),
}
# Of a gradient for each example there are as many as there are examples.
ROWS = {"gradients of examples": 512, "two lengths, scanned": 512}
TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_size": 64,
    "vocab_size": 64,
    "seq_len": 8,
}


@functools.cache
def step_time_s(name, method, cluster, vectors):
    devices = Cluster.preset(cluster)
    rows = ROWS.get(name, 16384) * devices.num_devices // 8
    step = two_passes(
        name, vectors=vectors, rows=rows, d=4096, length=64, dtype=jnp.float32, arrays=False
    )
    return METHODS[method].solve(make_problem(capture(*step), devices)).step_time_s


@pytest.mark.parametrize(
    ("name", "method", "cluster"),
    [
        *((name, method, "8xH100") for name in LOSSES for method in METHODS),
        # Across hosts each step under one method.
        *(
            pytest.param(name, [*METHODS][k % 4], "4x8xH100", marks=pytest.mark.slow)
            for k, name in enumerate(LOSSES)
        ),
    ],
)
def test_biases_and_tables_cost_little(name, method, cluster):
    ratio = step_time_s(name, method, cluster, True) / step_time_s(name, method, cluster, False)
    assert 1 <= ratio < 1.05


@pytest.mark.parametrize("method", ["zero2", "zero3"])
@pytest.mark.parametrize("vectors", [True, False])
def test_moments_are_split_where_the_update_sums_over_examples(method, vectors, x64):
    step = two_passes("gradients of examples", vectors=vectors, arrays=False)
    plan = aq.plan(*step, cluster=Cluster.preset("8xH100"), method=METHODS[method])
    moments = {k: spec for k, spec in plan.partition_specs().items() if "mu" in k or "nu" in k}
    assert len(moments) == (16 if vectors else 8)
    assert all(any(spec) for spec in moments.values()), moments


def per_example_losses(fn):
    """A step whose update weights the gradient of each example in a product of its own."""

    def step(w, batch):
        grads = jax.vmap(jax.grad(fn), (None, 0))(w, batch["x"])
        share = 1 / jnp.maximum(jnp.sqrt((grads**2).sum((1, 2))), 1.0)
        return w - jnp.einsum("b,bij->ij", share, grads)

    return step, jnp.zeros((16, 16)), {"x": jnp.zeros((8, 16))}


def evaluated_after(params, batch):
    """A step that reports the loss of its new parameters."""

    def loss(p):
        return ((jnp.tanh(batch["x"] @ p["w"] + p["b"]) - batch["x"]) ** 2).mean()

    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    return new, loss(new)


OF_THE_UPDATE = {
    "a product weights gradients": lambda: per_example_losses(
        lambda w, x: (jnp.tanh(x @ w) ** 2).sum()
    ),
    "evaluated after": lambda: (
        evaluated_after,
        {"w": jnp.zeros((16, 16)), "b": jnp.zeros(16)},
        {"x": jnp.zeros((8, 16))},
    ),
}


@pytest.mark.parametrize("name", list(OF_THE_UPDATE))
def test_examples_in_the_update_are_split(name):
    plan = aq.plan(
        *OF_THE_UPDATE[name](), cluster=Cluster.preset("8xH100"), method=aq.DataParallel()
    )
    assert {use.kind for use in plan.prediction.collectives} == {"all-reduce"}
    assert max(use.num_bytes for use in plan.prediction.collectives) == 16 * 16 * 4


def offenders(graphs):
    """The steps of which a collective grows with the batch, and how many steps were looked at."""
    found = {name: growing_collectives(graph()) for name, graph in graphs.items()}
    return {k: v for k, v in found.items() if v}, sum(v is not None for v in found.values())


def test_no_collective_of_a_network_with_biases_grows_with_the_batch(x64):
    graphs = {
        name: lambda name=name: capture(*two_passes(name, vectors=True, arrays=False))
        for name in LOSSES
    }
    assert offenders(graphs) == ({}, len(LOSSES))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([*STEPS][k::3], id=f"part {k}", marks=pytest.mark.slow if k else ())
        for k in range(3)
    ],
)
def test_no_collective_of_a_step_grows_with_the_batch(steps):
    def graph(name):
        step = STEPS[name]()
        return capture(step.fn, *shapes(step.args), **shapes(step.kwargs))

    grow, looked_at = offenders({name: functools.partial(graph, name) for name in steps})
    assert not grow
    # In the others examples depend on one another, or four devices do not divide them.
    assert looked_at >= 0.8 * len(steps)


@pytest.mark.slow
def test_no_collective_of_an_ordinary_step_grows_with_the_batch():
    grow, looked_at = offenders({k: lambda k=k: capture(*step_of(k)) for k in ORDINARY})
    assert not grow
    assert looked_at >= 0.9 * len(ORDINARY)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(20), id="first"),
        pytest.param(range(20, 60), id="rest", marks=pytest.mark.slow),
    ],
)
def test_no_collective_of_a_random_step_grows_with_the_batch(seeds, x64):
    def graph(step):
        return capture(step.fn, step.state, step.batches[0])

    steps = {step.text: step for step in map(random_step, seeds) if not step.mixes}
    grow, looked_at = offenders({k: functools.partial(graph, v) for k, v in steps.items()})
    assert not grow
    assert looked_at >= 0.7 * len(steps)


# Among them are scans with norms over batches of several lengths, and new parameters that are
# evaluated.
@pytest.mark.parametrize("seeds", [(8, 27), pytest.param((3, 5, 9, 18), marks=pytest.mark.slow)])
def test_no_collective_of_random_passes_grows_with_the_batch(seeds):
    steps = {text: made for text, *made in map(random_passes, seeds)}
    graphs = {k: functools.partial(capture, *v) for k, v in steps.items()}
    assert offenders(graphs) == ({}, len(seeds))


@pytest.mark.parametrize("model", ["gpt-125m", "llama-7b", "bert-base"])
def test_no_collective_of_a_model_grows_with_the_batch(model):
    fields = zoo.as_fields(zoo.configure(model))
    sizes = {k: v for k, v in TINY.items() if k in fields}
    work = zoo.build(zoo.configure(model, **sizes), 16, clip_norm=1.0, scan=True)
    assert growing_collectives(capture(work.train_step, work.state, work.batch)) == []
