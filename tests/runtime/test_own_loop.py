"""Steps with a loop of their own over micro-batches run as micro-batches of the plan."""

import jax
import numpy as np
import pytest
from planners.accumulating import make

import aliquot as aq
from aliquot.planners import DataParallel, PipeshardParallel, Zero2Parallel, Zero3Parallel
from aliquot.runtime.compiled import find_collectives

TURNS = 4


def planned(method, **options):
    step, *shapes = make(TURNS, rows=64, width=16, layers=4, dtype="float64")
    random = np.random.default_rng(0)
    given = jax.tree.map(lambda x: random.normal(size=x.shape) / 4, shapes)
    wanted = jax.jit(step)(*given)
    plan = aq.plan(step, *given, cluster=aq.Cluster.detect(), method=method, **options)
    return plan, aq.parallelize(step, plan), given, wanted


@pytest.mark.parametrize(
    "method",
    [DataParallel(), Zero2Parallel(), Zero3Parallel(), PipeshardParallel(num_stages=2)],
    ids=["dp", "zero2", "zero3", "pipeshard"],
)
def test_same_numbers(method, x64):
    plan, step, given, wanted = planned(method)
    assert plan.is_pipeline or plan.num_micro_batches == TURNS
    assert any(f"own loop over {TURNS} parts" in note for note in plan.notes)
    found = step(*given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_gradients_are_summed_over_devices_once(x64):
    """Not in each turn of the loop, as the step is written: in the program and in the prices."""
    plan, step, given, _ = planned(DataParallel())
    step(*given)
    names, sizes = plan.stages[0].axis_names, plan.stages[0].mesh_shape
    gradient_bytes = 4 * 16 * 16 * 8
    sums = [c for c in find_collectives(step.as_text(), names, sizes) if c.kind == "all-reduce"]
    assert sum(c.num_bytes for c in sums if c.in_loop) < gradient_bytes / 10
    once = sum(c.num_bytes for c in sums if not c.in_loop)
    assert once == pytest.approx(gradient_bytes, rel=0.05)
    priced = [use for use in plan.prediction.collectives if "gradient" in use.label]
    assert sum(use.count for use in priced) == 4


def test_micro_batches_come_on_top(x64):
    """Each micro-batch that is asked for holds the turns of the loop."""
    plan, step, given, wanted = planned(DataParallel(), num_micro_batches=2)
    assert plan.num_micro_batches == 2 * TURNS
    np.testing.assert_allclose(step(*given)[1], wanted[1], rtol=1e-11)
