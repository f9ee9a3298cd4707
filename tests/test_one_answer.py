"""One question has one answer, whoever is asked."""

from __future__ import annotations

import sys

import pytest
from planners.small_steps import mlp
from verify.verdicts import verified

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import InfeasibleError, InputError
from aliquot.planners import Auto, DataParallel, WholeProgram, Zero2Parallel, Zero3Parallel

CLUSTER = Cluster.preset("1x4xH100")
SIZES = (64, 128, 64)
METHODS = {"auto": Auto(), "dp": DataParallel(), "zero2": Zero2Parallel(), "zero3": Zero3Parallel()}


def planned(batch, cluster=CLUSTER, **asked):
    """The step time of a plan; None if none fits."""
    try:
        plan = aq.plan(*mlp(SIZES, batch), cluster=cluster, **asked)
    except InfeasibleError:
        return None
    return plan.prediction.step_time_s


@pytest.mark.parametrize(
    ("limit", "parts"),
    [
        (None, "auto"),
        (400_000, None),
        (400_000, 2),
        pytest.param(None, None, marks=pytest.mark.slow),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param(400_000, "auto", marks=pytest.mark.slow),
    ],
)
def test_each_row_of_a_comparison_is_the_plan_of_its_method(parts, limit):
    asked = {"num_micro_batches": parts, "memory_limit_bytes": limit}
    found = aq.compare(*mlp(SIZES, 2048), clusters=CLUSTER, methods=METHODS, **asked)
    assert {each.method: each.step_time_s for each in found.candidates} == {
        name: planned(2048, method=method, **asked) for name, method in METHODS.items()
    }


def test_methods_may_be_given_without_names():
    methods = ["dp", aq.Zero3Parallel(), aq.Megatron(data=2, tensor=2)]
    found = aq.compare(*mlp(SIZES, 2048), clusters=CLUSTER, methods=methods)
    names = {candidate.method for candidate in found.candidates}
    assert names == {"dp", "Zero3Parallel()", "Megatron(data=2, tensor=2)"}
    with pytest.raises(InputError, match=r"the class .*write method=aliquot.DataParallel\(\)"):
        aq.compare(*mlp(SIZES, 2048), clusters=CLUSTER, methods=[aq.DataParallel])


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        (DataParallel(), None),
        (Zero3Parallel(), 2),
        (Zero2Parallel(), "auto"),
        pytest.param(Auto(), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_largest_batch_has_a_plan_and_the_next_has_none(method, parts):
    asked = {"method": method, "num_micro_batches": parts, "memory_limit_bytes": 600_000}

    def make(batch):
        return mlp(SIZES, batch)

    found = aq.largest_batch(make, cluster=CLUSTER, unit=512, most=1 << 12, **asked)
    # Of a method by name the largest batch of one pass is asked.
    asked["num_micro_batches"] = parts or 1
    for trial in found.trials:
        assert (trial.plan and trial.plan.prediction.step_time_s) == planned(
            trial.global_batch, **asked
        )
    largest = found.largest.global_batch if found.largest else 0
    assert found.is_limited == (largest + 512 in [each.global_batch for each in found.trials])


def test_the_largest_batch_can_be_split_evenly():
    found = aq.largest_batch(
        lambda batch: mlp(SIZES, batch),
        cluster=CLUSTER,
        most=64,
        method=DataParallel(),
        num_micro_batches=2,
    )
    assert [trial.global_batch for trial in found.trials] == [8, 16, 32, 64]


def test_a_batch_that_fits_in_micro_batches_fits():
    """Where the number of micro-batches is searched, memory limits these and not the batch."""
    one = planned(1024, method=DataParallel(), num_micro_batches=1)
    limit = next(
        limit
        for limit in range(2 * 10**5, 10**6, 10**4)
        if planned(1024, method=DataParallel(), memory_limit_bytes=limit, num_micro_batches=1)
    )
    whole = {"method": WholeProgram(), "memory_limit_bytes": limit, "num_micro_batches": 1}
    assert one and planned(4096, **whole) is None
    found = aq.largest_batch(
        lambda batch: mlp(SIZES, batch),
        cluster=CLUSTER,
        unit=1024,
        most=4096,
        method=DataParallel(),
        num_micro_batches="auto",
        memory_limit_bytes=limit,
    )
    assert found.largest.num_micro_batches > 1 and not found.is_limited
    assert found.largest.global_batch > found.largest.micro_batch >= 1024
    assert f"micro-batches of {found.largest.micro_batch};" in str(found)


@pytest.mark.parametrize("needed_more", [0.6, 1.0, 1.3, 100.0])
def test_compiled_answers(monkeypatch, needed_more):
    """A compiler that needs more memory than is predicted refuses the largest batches; one that
    needs less allows larger ones, of which the largest is the answer.
    """

    def verdict(step, **options):
        prediction = step.plan.prediction
        needed, limit = needed_more * prediction.peak_memory_bytes, prediction.memory_limit_bytes
        return verified(step.plan, int(needed), limit)

    monkeypatch.setattr(sys.modules["aliquot.verification"], "verify_plan", verdict)
    asked = {"cluster": Cluster.preset("4xcpu"), "unit": 512, "most": 1 << 13}
    asked |= {"method": DataParallel()}
    asked |= {"num_micro_batches": 1, "memory_limit_bytes": 900_000}
    predicted = aq.largest_batch(lambda batch: mlp(SIZES, batch), **asked)
    found = aq.largest_batch(lambda batch: mlp(SIZES, batch), verify=True, **asked)
    if needed_more == 100:
        assert found.largest is None and found.fastest is None
        return
    more = found.largest.global_batch - predicted.largest.global_batch
    assert (more > 0, more < 0) == (needed_more < 1, needed_more > 1)
    for trial in (found.largest, found.fastest):
        assert trial.plan.compiled.fits and trial.plan.compiled.peak_memory_bytes <= 900_000
    assert found.is_limited and found.largest.global_batch + 512 in [
        trial.global_batch for trial in found.trials
    ]


@pytest.mark.parametrize("limit", [None, 300_000])
def test_each_size_is_the_plan_of_its_cluster(limit):
    found = aq.size(
        *mlp(SIZES, 2048),
        hosts=[("H100", 2)],
        tokens=1e12,
        by_s=1.0,
        max_hosts=4,
        memory_limit_bytes=limit,
        method=Zero3Parallel(),
    )
    assert found.options
    for option in found.options:
        cluster = Cluster.preset(option.cluster)
        again = planned(2048, cluster, method=Zero3Parallel(), memory_limit_bytes=limit)
        assert (option.plan and option.plan.prediction.step_time_s) == again
