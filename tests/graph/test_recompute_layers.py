"""Layers that recompute by a rewrite of the captured step: the same numbers, and the operators that
`jax.checkpoint` would repeat.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph.random_layers import random_layers

from aliquot.core import RECOMPUTE, recompute_ways
from aliquot.graph import (
    _capture,
    capture,
    evaluate,
    recompute_names,
    with_recomputation,
)
from aliquot.sharding import plan_micro_batches
from aliquot.sharding.micro_batches import _micro_batches
from aliquot.zoo import build


def largest_difference(graph, other, leaves):
    """Of the results of two graphs, relative to the largest element of each."""
    both = [jax.jit(lambda arrays, g=g: evaluate(g, arrays))(leaves) for g in (graph, other)]
    worst = 0.0
    for a, b in zip(*both, strict=True):
        want, got = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.max(np.abs(want - got)) / (np.max(np.abs(want)) + 1e-30)))
    return worst


def captured(seed):
    """A random step, with arrays for its inputs."""
    _, step, state, batch = random_layers(seed)
    graph = capture(step, state, batch)
    return graph, [jnp.asarray(x) for x in graph.calling.flatten((state, batch), {}).leaves]


SEEDS = [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(24)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_compute_the_same_under_every_way(seed):
    with jax.enable_x64(True):
        graph, leaves = captured(seed)
        names = recompute_names(graph)
        assert names[0] == "none" and "block" in names
        for name in names[1:]:
            again = with_recomputation(graph, name)
            assert largest_difference(graph, again, leaves) < 1e-12, name
            # Inputs and outputs keep their paths, roles and successors.
            assert [(i.path, i.role, i.output) for i in again.inputs] == [
                (i.path, i.role, i.output) for i in graph.inputs
            ]
            effects = [sum(bool(op.eqn and op.eqn.effects) for op in g.ops) for g in (graph, again)]
            assert effects[0] == effects[1], name


SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}


def of_zoo(model, recompute, scan):
    made = build(model, 8, overrides=SIZES, dtype="float32", recompute=recompute, scan=scan)
    return capture(made.train_step, made.state, made.batch)


def products(graph):
    """How often products run, by phase and by the shape of their result."""
    count = Counter()
    for op in graph.ops:
        if op.name == "dot_general":
            count[op.phase, graph.values[op.outputs[0]].shape] += op.trips
    return count


@pytest.mark.parametrize(
    ("model", "scan"),
    [
        ("gpt-125m", True),
        ("llama-7b", False),
        ("t5-770m", True),
        pytest.param("gpt-125m", False, marks=pytest.mark.slow),
        pytest.param("llama-7b", True, marks=pytest.mark.slow),
        pytest.param("t5-770m", False, marks=pytest.mark.slow),
    ],
)
def test_the_same_products_are_repeated_as_by_checkpoint(model, scan):
    plain = of_zoo(model, "none", scan)
    assert recompute_names(plain) == recompute_ways(has_attention=True)
    for name in RECOMPUTE:
        assert products(with_recomputation(plain, name)) == products(of_zoo(model, name, scan)), (
            name
        )


def as_plain_data(graph):
    """All of a graph that planners read; literals by their number in their dtype."""

    def plain(operands):
        return [i if isinstance(i, int) else (str(np.asarray(i.value, i.dtype))) for i in operands]

    def block(of):
        inner = [item if isinstance(item, int) else call(item) for item in of.items]
        return plain(of.inputs), inner, plain(of.outputs)

    def call(item):
        return item.kind, plain(item.inputs), item.outputs, [block(each) for each in item.blocks]

    ops = [
        (op.index, op.name, plain(op.inputs), op.outputs, op.phase, op.scope, op.trips, op.region)
        for op in graph.ops
    ]
    ends = [(i.path, i.value, i.role, i.output) for i in graph.inputs]
    ends += [(o.path, *plain([o.value])) for o in graph.outputs]
    return graph.values, ops, block(graph.body), ends, list(graph.constants)


@pytest.mark.parametrize("model", ["gpt-125m", "llama-7b", "t5-770m", "qwen3-30b-a3b"])
def test_written_out_layers_are_numbered_as_a_trace_numbers_them(model, monkeypatch):
    plain = of_zoo(model, "none", False)
    for name in recompute_names(plain)[1:]:
        numbered = with_recomputation(plain, name)
        with monkeypatch.context() as patch:
            patch.setattr(_capture, "_is_plain_region", lambda call: False)
            traced = with_recomputation(plain, name)
        assert as_plain_data(numbered) == as_plain_data(traced), name
        # Layers share their equations, so that what is asked of one is known of all.
        assert len({id(op.eqn) for op in numbered.ops}) < len({id(op.eqn) for op in traced.ops})


def of_every_fourth_row():
    def step(params, x):
        def loss(params):
            h = x[::4]
            for w in params:
                h = h + jnp.tanh(h @ w)
            return jnp.mean(h**2)

        return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)]

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    return capture(step, params, jax.ShapeDtypeStruct((16, 8), jnp.float32))


@pytest.mark.parametrize(
    ("model", "num_groups"),
    [
        ("gpt-125m", 2),
        ("t5-770m", 1),
        ("qwen3-30b-a3b", 2),
        ("every fourth row", 1),
        ("every fourth row", 2),
        pytest.param("gpt-125m", 1, marks=pytest.mark.slow),
        pytest.param("t5-770m", 2, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", 1, marks=pytest.mark.slow),
    ],
)
def test_operators_that_are_repeated_run_on_micro_batches_as_those_of_the_step_as_written(
    model, num_groups, monkeypatch
):
    plain = of_every_fourth_row() if " " in model else of_zoo(model, "none", False)
    for name in recompute_names(plain)[1:]:
        graph = with_recomputation(plain, name)
        known = plan_micro_batches(graph, 4, num_groups=num_groups)
        with monkeypatch.context() as patch:
            patch.setattr(_micro_batches, "_repeats_written_layers", lambda graph: False)
            again = with_recomputation(plain, name)
            analysed = plan_micro_batches(again, 4, num_groups=num_groups)
        assert known.specs == analysed.specs and known.actions == analysed.actions, name
        assert known.conversions == analysed.conversions and known.combine == analysed.combine
        assert as_plain_data(known.part) == as_plain_data(analysed.part), name
        assert len(known.part_eqns) == len(analysed.part_eqns)
        # Of every fourth row, parts of two rows have none: all runs once, after the last part.
        assert len(known.late_calls) == len(analysed.late_calls)
        assert bool(known.late_calls) == (" " in model and num_groups == 2)


def test_what_is_kept_decreases_from_way_to_way():
    """Bytes that a scan stacks for its backward pass."""
    plain = of_zoo("llama-7b", "none", True)
    kept = []
    for name in ("none", "fused", "minimal", "save_qkv", "save_attention", "block"):
        graph = with_recomputation(plain, name)
        stacks = [op for op in graph.ops if op.name == "scan_stack" and op.phase.name == "FORWARD"]
        kept.append(sum(graph.values[op.outputs[0]].num_bytes for op in stacks))
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_weights_in_8_bits_are_weights():
    """They are made anew for the backward pass, as by `jax.checkpoint`, and no stack holds them."""

    def kept(recompute, name):
        made = build("llama-7b", 8, overrides=SIZES, dtype="fp8", recompute=recompute, scan=True)
        graph = with_recomputation(capture(made.train_step, made.state, made.batch), name)
        stacks = [op for op in graph.ops if op.name == "scan_stack" and op.phase.name == "FORWARD"]
        return sum(graph.values[op.outputs[0]].num_bytes for op in stacks)

    for name in ("save_qkv", "save_attention", "block"):
        assert kept("none", name) == kept(name, "none"), name


def test_every_second_layer():
    plain = of_zoo("llama-7b", "none", False)
    none, block, second = (
        sum(products(with_recomputation(plain, name)).values())
        for name in ("none", "block", "block:2")
    )
    # Of three layers the first and the last.
    assert 3 * (second - none) == 2 * (block - none)


def test_steps_without_layers_or_with_recomputation_of_their_own_have_no_choice():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert recompute_names(capture(step, shape, shape)) == ("none",)
    assert recompute_names(of_zoo("gpt-125m", "block", True)) == ("none",)
    assert recompute_names(capture(lambda w, x: jnp.tanh(x @ w), shape, shape)) == ("none",)


def test_a_step_that_recomputes_is_not_traced_again_for_its_micro_batches():
    calls = []

    def step(params, x):
        calls.append(x.shape)

        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w) @ w.T
            return jnp.mean(h**2)

        grads = jax.grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)]

    params = [jax.ShapeDtypeStruct((16, 32), jnp.float32)] * 4
    graph = capture(step, params, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    plan_micro_batches(graph, 2)
    as_written = len(calls)
    for name in ("minimal", "block"):
        for count in (2, 4):
            cut = plan_micro_batches(with_recomputation(graph, name), count)
            assert cut.num_micro_batches == count and any(op.region for op in cut.part.ops)
    assert len(calls) == as_written


@pytest.mark.parametrize("scan", [False, True])
def test_the_step_on_another_batch_recomputes_alike(scan):
    """As micro-batches do it, where the layers of a smaller batch look otherwise."""
    # Of the small batch activations have fewer elements than weights, of the large one more.
    large, small = (
        build("llama-7b", rows, overrides=SIZES, dtype="float32", recompute="none", scan=scan)
        for rows in (64, 2)
    )
    graph = capture(large.train_step, large.state, large.batch)
    for name in recompute_names(graph)[1:]:
        again = with_recomputation(graph, name)
        part = capture(small.train_step, small.state, small.batch)
        traced = with_recomputation(part, name, like=again)
        assert [op.name for op in traced.ops] == [op.name for op in again.ops], name
        assert [op.region for op in traced.ops] == [op.region for op in again.ops], name
