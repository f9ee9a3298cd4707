"""Loops over micro-batches that people write, beside `num_micro_batches`."""

import pytest
from planners.accumulating import make

import aliquot as aq
from aliquot.planners import DataParallel, Zero2Parallel, Zero3Parallel

CLUSTER = aq.Cluster.preset("8xH100")
PARTS = 16


def costs(method, own, rows, dtype):
    step = make(PARTS if own else 1, rows=rows, width=2048, layers=4, dtype=dtype)
    plan = aq.plan(*step, cluster=CLUSTER, method=method, num_micro_batches=1 if own else PARTS)
    return plan, plan.prediction.step_time_s, plan.prediction.peak_memory_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [256, 1 << 16])
@pytest.mark.parametrize("method", [DataParallel(), Zero2Parallel(), Zero3Parallel()])
def test_micro_batches_are_as_good_as_a_loop_of_ones_own(method, rows, dtype):
    """They take no longer, and no quarter more memory unless that makes them faster."""
    _, own_s, own_bytes = costs(method, True, rows, dtype)
    _, step_s, peak_bytes = costs(method, False, rows, dtype)
    assert step_s <= own_s * (1 + 1e-9)
    assert peak_bytes <= 1.25 * own_bytes or step_s <= 0.98 * own_s


def test_much_memory_must_save_much_time():
    """Whole gradients wait for the last micro-batch only where that makes the step faster."""
    few, *_ = costs(Zero2Parallel(), False, 256, "float32")
    many, *_ = costs(Zero2Parallel(), False, 1 << 18, "float32")
    assert few.stages[0].data_axes
    assert not many.stages[0].data_axes
    outcomes = [row["outcome"] for row in many.provenance.candidates]
    assert any("hardly faster, and needs" in outcome for outcome in outcomes)


def test_a_refusal_says_how_turns_of_the_loop_count():
    """Advice names micro-batches as they run, of which the loop makes several of each typed one."""
    step = make(4, rows=32, width=16, layers=2)
    wanted = r"4 micro-batches, .*\n  The step's own loop over 4 parts .* num_micro_batches=1 "
    with pytest.raises(aq.InputError, match=wanted):
        aq.plan(*step, cluster=CLUSTER, method=Zero3Parallel(), num_micro_batches=4)
    plan = aq.plan(*step, cluster=CLUSTER, method=Zero3Parallel(), num_micro_batches=1)
    assert plan.num_micro_batches == 4
