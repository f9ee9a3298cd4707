"""The judge: sums of what tables say, and refusals of plans for something else."""

import re

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.core import PlanMismatchError
from aliquot.cost import (
    Picked,
    PlannedStep,
    collective_uses,
    enumerate_choices,
    estimate,
    evaluate,
    make_problem,
    price,
)
from aliquot.planners import DataParallel
from aliquot.sharding import Factor, Node

CLUSTER = Cluster.preset("2x4xH100")
STEP = mlp((64, 128, 64), 32)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.fixture(scope="module")
def problem():
    return make_problem(aq.capture(*STEP), CLUSTER)


@pytest.mark.parametrize(
    "cluster", [CLUSTER, Cluster.preset("8xcpu")], ids=lambda cluster: cluster.name
)
@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_collectives_cost_what_the_judge_charges(shape, cluster):
    """The list of collectives and the sum over tables are two ways to the same seconds."""
    problem = make_problem(aq.capture(*STEP), cluster)
    priced = price(problem, LogicalMesh(shape=shape, cluster=cluster))
    rng = np.random.default_rng(1)
    for _ in range(10):
        picks = np.array([rng.integers(len(node.choices)) for node in priced.nodes])
        picked = Picked(priced=priced, picks=picks)
        time = evaluate(picked)
        listed = sum(use.seconds for use in collective_uses(picked))
        assert listed == pytest.approx(time.communication_s + time.gradient_s, rel=1e-9)


def test_what_kernels_compute_again_is_no_traffic():
    """A GPU's compiler computes the sigmoid again in the backward pass instead of storing it."""

    def step(weights, x):
        def loss(weights):
            hidden = x @ weights[0]
            return jnp.sum(hidden * jax.nn.sigmoid(hidden) @ weights[1])

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    square = struct(256, 256)
    graph = aq.capture(step, (square, square), square)
    fused_bytes, stored_bytes = (
        sum(num_bytes for works in problem.work for work in works for num_bytes, _ in work.arrays)
        for problem in (make_problem(graph, Cluster.preset(c)) for c in ("1xH100", "1xcpu"))
    )
    # One array less is written, and read by the backward pass.
    assert stored_bytes - fused_bytes >= 2 * square.size * square.dtype.itemsize


def test_equal_conversions_are_paid_once(problem):
    priced = price(problem, LogicalMesh(shape=(8,), cluster=CLUSTER))
    rng = np.random.default_rng(2)
    picks = np.array([rng.integers(len(node.choices)) for node in priced.nodes])
    seen = set()
    for edge_index, s, t in Picked(priced=priced, picks=picks).conversions:
        table = priced.edges[edge_index]
        identity = problem.nodes.edges[edge_index].share, table.sources[s], table.targets[t]
        assert identity not in seen
        seen.add(identity)


def test_data_parallel_costs_one_sum_of_gradients(problem):
    """Compute is an eighth of the batch's, and what is sent is every gradient once (and a scalar
    loss).
    """
    plan = aq.plan(*STEP, cluster=CLUSTER, method=DataParallel())
    weights = 4 * 2 * 64 * 128
    sums = [c for c in plan.prediction.collectives if c.kind == "all-reduce"]
    assert sum(c.num_bytes for c in sums) == pytest.approx(weights, abs=64)
    assert plan.prediction.collectives == tuple(sums)


def test_choices_divide():
    node = Node(
        index=0,
        label="n",
        kind="group",
        factors=(Factor(size=8, label="a"), Factor(size=6, label="b"), Factor(size=2, label="c")),
        copies=1,
    )
    found = {tuple(c) for c in enumerate_choices(node, (2, 4)).tolist()}
    # Both axes on one factor need a multiple of eight; four divides the first factor alone.
    assert found == {(a, b) for a in (-1, 0, 1, 2) for b in (-1, 0)}
    assert enumerate_choices(node, (2, 4))[0].tolist() == [-1, -1]
    assert {tuple(c) for c in enumerate_choices(node, (5,)).tolist()} == {(-1,)}


def test_picks_are_positions_of_choices(problem):
    priced = price(problem, LogicalMesh(shape=(2, 4), cluster=CLUSTER))
    rng = np.random.default_rng(3)
    picks = np.array([rng.integers(len(node.choices)) for node in priced.nodes])
    choices = Picked(priced=priced, picks=picks).choices
    assert choices == tuple(tuple(node.choices[k]) for node, k in zip(priced.nodes, picks))
    assert (Picked.of_choices(priced, choices).picks == picks).all()


def judged(problem, plan):
    return estimate(PlannedStep.of_program(plan, problem.graph, problem))


def test_a_plan_of_another_step_is_refused(problem):
    other = aq.plan(*mlp((64, 128, 128, 64), 32), cluster=CLUSTER, method=DataParallel())
    with pytest.raises(PlanMismatchError, match="decides about"):
        judged(problem, other)
    plan = aq.plan(*STEP, cluster=CLUSTER, method=DataParallel())
    odd = make_problem(aq.capture(*mlp((64, 128, 64), 30)), CLUSTER)
    with pytest.raises(PlanMismatchError, match="cannot be split") as found:
        judged(odd, plan)
    assert len(found.value.violations) > 1
    empty = msgspec.structs.replace(
        plan, stages=(msgspec.structs.replace(plan.stages[0], interior=()),)
    )
    with pytest.raises(PlanMismatchError, match="0 operators"):
        judged(problem, empty)


@pytest.mark.parametrize(
    ("dtype", "micro_batches", "wider"),
    [("float32", 1, 1), ("float32", 4, 1), ("bf16", 1, 0.5), ("bf16", 4, 1)],
)
def test_a_gradient_is_synchronised_once(dtype, micro_batches, wider):
    """A tied embedding's two terms as one sum, unless they are converted first; behind
    micro-batches as a total in float32.
    """
    config = zoo.configure(
        "gpt-125m", num_layers=2, hidden_size=256, num_heads=4, seq_len=32, vocab_size=2048
    )
    work = zoo.build(config, 32, dtype=dtype)
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=Cluster.preset("8xH100"),
        method=DataParallel(),
        num_micro_batches=micro_batches,
    )
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(work.state["params"]))
    if (dtype, micro_batches) == ("bf16", 1):
        weights += work.state["params"]["embed"]["embedding"].size * 4
    moved = sum(use.num_bytes for use in plan.prediction.collectives)
    assert moved == pytest.approx(wider * weights, rel=0.02)


def test_a_product_that_leaves_the_step_is_summed_and_that_is_priced():
    """No operator of the step reads the result, which the devices hold in parts until then."""

    def two_products(weights, rows):
        return jnp.tanh(rows @ weights["up"]) @ weights["down"]

    weights = {"up": struct(64, 256), "down": struct(256, 64)}
    plan = aq.plan(
        two_products,
        weights,
        struct(32, 64),
        cluster=Cluster.preset("8xH100"),
        method=aq.TensorParallel(degree=8),
    )
    (use,) = plan.prediction.collectives
    assert (use.kind, use.count, use.num_bytes) == ("all-reduce", 1, 32 * 64 * 4)
    assert plan.prediction.communication_s == pytest.approx(use.seconds) and use.seconds > 0


def test_a_product_that_leaves_a_stage_is_summed_and_that_is_priced():
    """The second product contracts what the first one splits, and the loss is in another stage."""

    def step(weights, rows):
        def loss(weights):
            return jnp.mean((jnp.tanh(rows @ weights["up"]) @ weights["down"] - rows) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = {"up": struct(256, 1024), "down": struct(1024, 256)}
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=1)
    # Where nothing runs beside compute, gathering the weights costs more than such a sum.
    cluster = Cluster.preset("8xV100-16GB")
    plan = aq.plan(step, weights, struct(512, 256), cluster=cluster, method=method)
    first = plan.stages[0]
    splits = {op.node: op.splits for op in first.interior}
    assert any(first.shardings["weights.down"]), splits
    sums = [use for use in first.prediction.collectives if use.label.startswith("product")]
    assert sums and all(use.seconds > 0 for use in sums)


def test_the_moment_of_most_memory_is_said_in_words():
    work = zoo.build("gpt-10m", 8, overrides={"num_layers": 1, "vocab_size": 64, "hidden_size": 64})
    cluster = aq.Cluster.preset("4xH100")
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=DataParallel())
    moment = plan.prediction.peak_moment
    assert re.fullmatch(
        r"(the product|`\w+`) .+ in the (forward pass|backward pass|update)", moment
    )
