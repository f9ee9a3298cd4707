"""What zero-bubble schedules put off: planners price the same operators that the runtime cuts
off.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.cluster import LogicalMesh
from aliquot.cost import Picked, make_problem, phase_costs, price
from aliquot.graph import SHARED, Phase, capture, deferrable_items, items_of, split_scans
from aliquot.sharding import (
    Layout,
    Part,
    cut_graph,
    layer_step,
    plan_micro_batches,
    split_stages,
    stage_step,
)
from aliquot.zoo import build, configure

# A loop over layers and layers written out, recomputed and not, two stages and four.
QUICK = [(False, "none", 2), (True, "block", 4), (False, "block", 2)]
SIZES = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "seq_len": 8}


def staged(scan, recompute, stages, sizes=SIZES):
    work = build(configure("gpt-125m", **sizes), 4, scan=scan, recompute=recompute)
    graph = capture(work.train_step, work.state, work.batch)
    if scan:
        graph = split_scans(graph, range(5)).graph
    layered = layer_step(graph, 2)
    return graph, stage_step(layered, [k * len(layered.layers) // stages for k in range(stages)])


@functools.cache
def halved(scan, recompute, stages):
    """A graph, its stages, and the programs that run them with backward passes in two halves."""
    graph, step = staged(scan, recompute, stages)
    plan = plan_micro_batches(graph, 2)
    parts = cut_graph(plan, Layout(groups=1, shards=1, micro_batches=2))
    return graph, step, split_stages(parts, plan, step.staging, split_backward=True).programs


@pytest.mark.parametrize(
    ("scan", "recompute", "stages"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product((False, True), ("none", "block"), (2, 4))
    ],
)
def test_the_runtime_runs_what_is_priced(scan, recompute, stages):
    graph, step, programs = halved(scan, recompute, stages)
    for k, extract in enumerate(step.extracts):
        priced = {
            extract.ops[op.index] for op in extract.graph.ops if op.deferrable and not op.is_link
        }
        run = {
            op
            for program in programs
            if program.stage == k and program.part is Part.BACKWARD_WEIGHT
            for item in items_of(program.graph)
            for op in item.ops
        }
        # The runtime may work cheap operators out once more, and adds conversions of its own.
        missing = {
            op for op in priced - run if graph.ops[op].name in ("dot_general", "scan", "reduce_sum")
        }
        assert not missing
        own = {op for op in run if op < len(graph.ops) and graph.ops[op].phase is Phase.BACKWARD}
        products = {op for op in own if graph.ops[op].name == "dot_general"}
        assert products <= priced


def product_flops(graph, ops):
    """Operations of products among operators, in all trips of the loops around them."""
    total = 0
    for op in (graph.ops[k] for k in ops if graph.ops[k].name == "dot_general"):
        (contracted, _), _ = op.params["dimension_numbers"]
        shape = graph.values[op.inputs[0]].shape
        result = math.prod(graph.values[op.outputs[0]].shape)
        total += 2 * result * math.prod(shape[d] for d in contracted) * op.trips
    return total


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("scan", [False, True])
def test_deferrable_operators_are_priced_as_they_run(scan, recompute, stages):
    graph, step, programs = halved(scan, recompute, stages)
    for k, extract in enumerate(step.extracts):
        backward = [op.index for op in extract.graph.ops if op.phase is Phase.BACKWARD]
        deferrable = [op.index for op in extract.graph.ops if op.deferrable]
        total = product_flops(extract.graph, backward)
        flops = dict.fromkeys((Part.BACKWARD_INPUT, Part.BACKWARD_WEIGHT), 0)
        for program in programs:
            if program.stage == k and program.part in flops:
                ops = {o for item in items_of(program.graph) for o in item.ops}
                flops[program.part] += product_flops(program.graph, ops)
        assert sum(flops.values()) == pytest.approx(total, rel=0.01)
        if total:  # A stage of embeddings alone has no products.
            priced = product_flops(extract.graph, deferrable) / total
            assert abs(priced - flops[Part.BACKWARD_WEIGHT] / sum(flops.values())) < 0.01
            # Middle stages put off about a third, as their blocks' products with weights are worked
            # out again or not, and the first stage everything.
            assert priced > (0.3 if k else 0.99)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("scan", [False, True])
def test_arrays_kept_for_weight_gradients_are_priced_as_the_runtime_keeps_them(scan, recompute):
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 2, "vocab_size": 64, "seq_len": 32}
    graph, step = staged(scan, recompute, 4, sizes)
    plan = plan_micro_batches(graph, 2)
    parts = cut_graph(plan, Layout(groups=1, shards=1, micro_batches=2))
    programs = split_stages(parts, plan, step.staging, split_backward=True).programs
    cluster = aq.Cluster.preset("1xV100-16GB")
    mesh = LogicalMesh(shape=(1,), axis_names=("x",), cluster=cluster)
    # The first stage makes no gradients for others.
    for k, extract in enumerate(step.extracts[1:], 1):
        problem = make_problem(extract.graph, cluster, num_micro_batches=2)
        priced = price(problem, mesh, repeats=2)
        costs = phase_costs(Picked.first(priced), extract.graph)
        halves = {p.part: p for p in programs if p.stage == k}
        late = halves[Part.BACKWARD_WEIGHT]
        read = {v: late.graph.values[v].num_bytes for v in late.imports}
        assert costs.deferred_bytes == pytest.approx(sum(read.values()), rel=0.05)
        handed = sum(read[v] for v in read.keys() & set(halves[Part.BACKWARD_INPUT].exports))
        # The runtime also hands on some forward values that the first half works out again.
        assert 0.6 * handed <= costs.handed_bytes <= 1.2 * handed


@pytest.mark.parametrize(
    ("stages", "cluster", "scan", "recompute"),
    [
        (2, "2xcpu", False, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (4, "4xcpu", True, "block"),
                # Data-parallel groups in each stage.
                (2, "4xcpu", False, "block"),
                (2, "2xcpu", True, "none"),
                (2, "4xcpu", True, "block"),
            )
        ),
    ],
)
def test_zero_bubble_computes_what_the_plain_step_computes(stages, cluster, scan, recompute):
    with jax.enable_x64(True):
        # A layer for each stage.
        config = configure("gpt-125m", **{**SIZES, "num_layers": stages})
        work = build(config, 8, dtype="float64", learning_rate=1e-3, scan=scan, recompute=recompute)
        random = np.random.default_rng(0)
        batch = jax.tree.map(lambda x: random.integers(0, 32, x.shape).astype(x.dtype), work.batch)
        method = aq.PipeshardParallel(
            num_stages=stages, num_micro_batches=4, schedule="zero-bubble"
        )
        step = aq.parallelize(work.train_step, method=method, cluster=aq.Cluster.preset(cluster))
        state = work.init(jax.random.key(0))
        expected = work.train_step(state, batch)
        found = step(state, batch)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def test_everything_of_the_first_stage_is_deferrable():
    graph, step = staged(False, "none", 2)
    staging = step.staging
    deferrable = deferrable_items(graph, staging.items, staging.stage).items
    backward = {
        k
        for k, (item, stage) in enumerate(zip(staging.items, staging.stage, strict=True))
        if item.phase is Phase.BACKWARD and stage == 0
    }
    assert backward and backward <= deferrable
    last = {k for k in deferrable if staging.stage[k] == 1}
    assert last and all(staging.stage[k] != SHARED for k in deferrable)


def test_a_stage_that_recomputes_everything_defers_nothing():
    graph, step = staged(False, "none", 2)
    plan = plan_micro_batches(graph, 2)
    parts = cut_graph(plan, Layout(groups=1, shards=1, micro_batches=2))
    programs = split_stages(
        parts, plan, step.staging, split_backward=True, recompute={1: None}
    ).programs
    assert not any(p.totals for p in programs if p.stage == 1 and p.part is Part.BACKWARD_WEIGHT)


def test_gradients_cast_on_their_way_to_another_stage_are_not_deferrable():
    """Statistics of a micro-batch alone are scaled on their way into the backward pass, wherever
    that is wanted.
    """

    def train_step(layers, x):
        def loss(layers):
            y = x
            for w in layers:
                y = y + jnp.tanh(y @ w)
                y = y / jnp.sqrt(1 + jnp.mean(y**2, 0))
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))

    layers, x = [jnp.eye(8)] * 4, jnp.ones((16, 8))
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="zero-bubble")
    cluster = aq.Cluster.preset("2xcpu")
    step = aq.parallelize(
        train_step, method=method, cluster=cluster, micro_batch_semantics="independent"
    )
    new = step(layers, x)
    # The plain step on each half of the batch, averaged; both halves are equal here.
    expected = train_step(layers, x)
    np.testing.assert_allclose(new[0], expected[0], rtol=1e-5)
