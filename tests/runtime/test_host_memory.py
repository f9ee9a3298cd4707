"""Steps that keep arrays in host memory run as they did: the numbers of one device, and every array
in the memory in which the step leaves it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offloaded import batch_of, offloaded_step, shapes_of

import aliquot as aq
from aliquot.core import PlanMismatchError

MICRO_BATCHES = 2
CASES = {
    "data": ("names", True, aq.DataParallel(), None),
    "written out, zero3": ("names", False, aq.Zero3Parallel(), None),
    "tensor, dots, micro-batches": ("dots", True, aq.TensorParallel(degree=2), MICRO_BATCHES),
    "groups": ("names", True, aq.DataParallel(), MICRO_BATCHES),
    "pipeline": ("names", True, aq.Megatron(data=2, tensor=2, pipeline=2), MICRO_BATCHES),
    "pipeline, written out": (
        "names",
        False,
        aq.Megatron(data=4, tensor=1, pipeline=2),
        MICRO_BATCHES,
    ),
}


SLOW = {"written out, zero3", "groups", "pipeline, written out"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES],
)
def test_steps_give_the_numbers_of_one_device(case):
    policy, scan, method, count = CASES[case]
    with jax.enable_x64(True):
        step, init = offloaded_step(policy, scan=scan, moments="host")
        plain, _ = offloaded_step(policy, scan=scan)
        state, batch = init(jax.random.key(0)), batch_of(jnp.float64)
        plan = aq.plan(
            step,
            shapes_of(state, "host"),
            batch,
            cluster=aq.Cluster.preset("8xcpu"),
            method=method,
            num_micro_batches=count,
        )
        run = aq.parallelize(step, plan)
        held = run.init(lambda: state)
        want = state
        for _ in range(2):
            want, metrics = jax.jit(plain)(want, batch)
            held, got = run(held, batch)
            np.testing.assert_allclose(got["loss"], metrics["loss"], rtol=1e-9)
        for mine, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-9, atol=1e-12)
        kinds = {path: sharding.memory_kind for path, sharding in run.shardings.items()}
        assert {kind for path, kind in kinds.items() if "momentum" in path} == {"pinned_host"}
        assert {kind for path, kind in kinds.items() if "momentum" not in path} == {"device"}


def test_a_plan_s_shardings_say_which_memory():
    step, init = offloaded_step("save", moments="host")
    state = init(jax.random.key(0))
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(
        step, shapes_of(state, "host"), batch_of(), cluster=cluster, method=aq.DataParallel()
    )
    placed = jax.device_put(state, plan.shardings(state))
    assert {a.sharding.memory_kind for a in jax.tree.leaves(placed["momentum"])} == {"pinned_host"}
    run = aq.parallelize(step, plan)
    after, _ = run(placed, batch_of())
    assert {a.sharding.memory_kind for a in jax.tree.leaves(after["momentum"])} == {"pinned_host"}
    assert {a.sharding.memory_kind for a in jax.tree.leaves(after["params"])} == {"device"}
    with pytest.raises(PlanMismatchError, match="lies in device memory, planned in host memory"):
        aq.parallelize(step, plan)(state, batch_of())
