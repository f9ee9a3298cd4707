"""One judge prices every plan from its file alone, and says what the planner said."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import msgspec
import pytest

import aliquot as aq
from aliquot.core import PlanMismatchError
from aliquot.cost import estimate_stages
from aliquot.graph import capture
from aliquot.planners import apply_plan
from aliquot.plans import Plan

# Arrays are large enough that one host would compute for longer than both take: steps that may be
# faster on fewer hosts are searched twice, and figures take no longer for larger arrays.
SIZES = {"num_layers": 4, "hidden_size": 1024, "num_heads": 4, "vocab_size": 2048, "seq_len": 512}
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
# Each schedule, layers in a loop and written out.
QUICK = [
    ("gpipe", "block", True),
    ("1f1b", "block", False),
    ("interleaved-1f1b", "block", False),
    ("zero-bubble", "block", True),
]


@functools.cache
def workload(scan: bool, recompute: str = "block"):
    return aq.zoo.build(aq.zoo.configure("gpt-125m", **SIZES), 32, scan=scan, recompute=recompute)


@functools.cache
def traced(scan: bool, recompute: str):
    work = workload(scan, recompute)
    return capture(work.train_step, work.state, work.batch)


def planned(work, method, cluster="2x2xV100-16GB", **options):
    cluster = aq.Cluster.preset(cluster)
    plan = aq.plan(
        work.train_step, work.state, work.batch, cluster=cluster, method=method, **options
    )
    return Plan.from_json(plan.to_json())


@pytest.mark.parametrize(
    ("method", "micro_batches"),
    [
        pytest.param(method, count, marks=() if count == quick else pytest.mark.slow)
        for method, quick in (
            (aq.DataParallel(), 1),
            (aq.Zero2Parallel(), 4),
            (aq.Zero3Parallel(), 1),
            (aq.ShardParallel(mesh_shape=(2, 2)), 4),
            (aq.Auto(), 1),
        )
        for count in (1, 4)
    ],
)
def test_one_program(method, micro_batches):
    work = workload(scan=True)
    plan = planned(work, method, num_micro_batches=micro_batches)
    assert aq.estimate(plan, work.train_step, work.state, work.batch) == plan.prediction


@pytest.mark.parametrize(
    ("schedule", "recompute", "scan"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(SCHEDULES, ("none", "block"), (True, False))
    ],
)
def test_pipelines(schedule, recompute, scan):
    work = workload(scan, recompute)
    # Two stages to a submesh where they are interleaved.
    stages = 4 if schedule.startswith("interleaved") else 3
    method = aq.PipeshardParallel(num_stages=stages, schedule=schedule, num_micro_batches=4)
    plan = planned(work, method)
    assert plan.schedule == schedule and len(plan.stages) == stages and not plan.idle_hosts
    assert aq.estimate(plan, work.train_step, work.state, work.batch) == plan.prediction
    found = estimate_stages(apply_plan(plan, traced(scan, recompute)))
    assert found.stages == tuple(stage.prediction for stage in plan.stages)


@pytest.fixture(scope="module")
def pipeline():
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule="1f1b")
    return planned(workload(scan=False), method)


def test_an_edited_plan_is_judged_as_it_is(pipeline):
    work, plan = workload(scan=False), pipeline
    other = msgspec.structs.replace(plan, schedule="gpipe")
    found = aq.estimate(other, work.train_step, work.state, work.batch)
    assert found.peak_memory_bytes > plan.prediction.peak_memory_bytes
    beside = aq.estimate(
        msgspec.structs.replace(plan, overlaps_transfers=True),
        work.train_step,
        work.state,
        work.batch,
    )
    assert beside.step_time_s <= plan.prediction.step_time_s


@pytest.mark.parametrize("device", ["H100", "V100-16GB"])
def test_stages_compute_during_transfers_where_the_target_can(device):
    work, method = workload(scan=True), aq.PipeshardParallel(num_stages=2, schedule="1f1b")
    plan = planned(work, method, f"1x2x{device}", num_micro_batches=4)
    beside = device == "H100"
    assert plan.overlaps_transfers is beside
    assert aq.estimate(plan, work.train_step, work.state, work.batch) == plan.prediction
    other = msgspec.structs.replace(plan, overlaps_transfers=not beside)
    judged = aq.estimate(other, work.train_step, work.state, work.batch)
    assert (judged.step_time_s > plan.prediction.step_time_s) is beside


def test_another_step_is_refused(pipeline):
    other = aq.zoo.build(aq.zoo.configure("gpt-125m", **SIZES), 16)
    with pytest.raises(PlanMismatchError, match="another step"):
        aq.estimate(pipeline, other.train_step, other.state, other.batch)


def trained(method, **options):
    """How often a step is traced from `parallelize` to its first result."""
    traces = []

    @jax.checkpoint
    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    def step(weights, x):
        traces.append(1)
        grads = jax.grad(lambda weights: jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2))(weights)
        return weights - 0.1 * grads

    run = aq.parallelize(step, method=method, cluster=aq.Cluster.preset("4xcpu"), **options)
    run(jnp.ones((2, 16, 16)), jnp.ones((32, 16)))
    return len(traces)


@pytest.mark.parametrize(
    ("method", "micro_batches", "most"),
    [
        (aq.ShardParallel(), 1, 1),
        (aq.DataParallel(), 4, 2),
        (aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule="1f1b"), 1, 2),
    ],
)
def test_a_step_is_traced_twice_at_most(method, micro_batches, most):
    assert trained(method, num_micro_batches=micro_batches) <= most
