"""Recomputation by name: the same numbers, and the arrays that each policy keeps."""

import jax
import numpy as np
import pytest

import aliquot as aq
from aliquot.core import RECOMPUTE, InputError
from aliquot.cost import make_problem
from aliquot.graph import with_recomputation
from aliquot.zoo import build

SIZES = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}
WAYS = [*RECOMPUTE, "block:2", "minimal:3"]
QUICK = {"minimal:3"}


def tiny(recompute, *, scan=False, **options):
    settings = {"overrides": SIZES, "dtype": "float32", "optimizer": "sgd"} | options
    return build("llama-7b", 8, recompute=recompute, scan=scan, **settings)


def after_a_step(workload):
    state = jax.jit(workload.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)
    state, metrics = jax.jit(workload.train_step)(state, {"inputs": tokens, "targets": tokens})
    return [np.asarray(x) for x in jax.tree.leaves((state["params"], metrics))]


@pytest.mark.parametrize(
    "recompute",
    [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS],
)
def test_every_way_gives_the_same_numbers(recompute):
    wanted = after_a_step(tiny("none"))
    for got, want in zip(after_a_step(tiny(recompute)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def products(recompute, **options):
    work = tiny(recompute, **options)
    graph = aq.capture(work.train_step, work.state, work.batch)
    return sum(op.trips for op in graph.ops if op.name == "dot_general")


@pytest.mark.parametrize("scan", [False, True])
def test_policies_keep_what_they_say(scan):
    """Products of a step: a block has nine, of which its backward pass repeats all that it needs
    and that were not kept.
    """
    counts = {way: products(way, scan=scan) for way in RECOMPUTE}
    assert counts["none"] < counts["fused"] < counts["minimal"]
    assert counts["minimal"] < counts["save_qkv"] < counts["block"]
    assert counts["none"] < counts["save_attention"] < counts["block"]


@pytest.mark.parametrize("model", ["llama-7b", "gpt-1.3b"])
def test_each_array_is_kept_once_as_where_layers_of_any_step_recompute(model):
    """Several products of a block read one array."""
    kept = []
    for way in ("none", "fused"):
        sizes = {"num_layers": 2, "seq_len": 64}
        work = build(model, 2, overrides=sizes, dtype="bf16", recompute=way, scan=True)
        graph = aq.capture(work.train_step, work.state, work.batch)
        graph = with_recomputation(graph, "fused") if way == "none" else graph
        stacks = [op for op in graph.ops if op.name == "scan_stack" and op.phase.name == "FORWARD"]
        kept.append(sum(graph.values[op.outputs[0]].num_bytes for op in stacks))
    assert kept[0] == kept[1] > 0


def test_only_every_second_layer_recomputes():
    none, block, second = (products(way) for way in ("none", "block", "block:2"))
    assert second - none == (block - none) // 2


def test_names_of_kept_arrays_leave_no_operators():
    work = tiny("none")
    graph = aq.capture(work.train_step, work.state, work.batch)
    assert "name" not in {op.name for op in graph.ops}


def test_what_is_kept_costs_memory_and_saves_compute():
    cluster = aq.Cluster.preset("4xH100")

    def prediction(recompute):
        big = {"num_layers": 4, "hidden_size": 1024, "num_heads": 8, "seq_len": 1024}
        work = tiny(recompute, scan=True, overrides=big, dtype="bf16")
        return aq.plan(
            work.train_step, work.state, work.batch, cluster=cluster, method=aq.Zero3Parallel()
        ).prediction

    block, minimal = prediction("block"), prediction("minimal")
    assert minimal.compute_s < block.compute_s
    assert minimal.peak_memory_bytes > block.peak_memory_bytes


@pytest.mark.parametrize(
    ("recompute", "options", "words"),
    [
        ("blocks", {}, "did you mean 'block'"),
        ("block:0", {}, "must be at least 1"),
        ("block:x", {}, "must be at least 1"),
        ("block:2", {"scan": True}, "does not go with scan"),
    ],
)
def test_impossible_ways_are_refused(recompute, options, words):
    with pytest.raises(InputError, match=words):
        tiny(recompute, **options)


def test_a_policy_that_keeps_attention_needs_attention():
    with pytest.raises(InputError, match="no recompute 'save_qkv'"):
        build("wide-resnet-250m", 8, recompute="save_qkv")


def test_plans_with_a_policy_run():
    work = tiny("minimal", scan=True)
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.detect(),
        method=aq.Zero3Parallel(),
    )
    step = aq.parallelize(work.train_step, plan)
    state = step.init(work.init, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)
    plain = after_a_step(work)
    state, metrics = step(state, {"inputs": tokens, "targets": tokens})
    got = [np.asarray(x) for x in jax.tree.leaves((state["params"], metrics))]
    for one, want in zip(got, plain, strict=True):
        np.testing.assert_allclose(one, want, rtol=2e-5, atol=1e-6)


def test_the_problem_counts_what_is_repeated():
    cluster = aq.Cluster.preset("4xH100")

    def flops(recompute):
        work = tiny(recompute)
        problem = make_problem(aq.capture(work.train_step, work.state, work.batch), cluster)
        return sum(w.flops for node in problem.work for w in node)

    assert flops("none") < flops("minimal") < flops("block")
