"""The splits that textbooks know fall out of one search, each where it should."""

import numpy as np
import pytest
from planners.small_steps import classifier, experts, mlp

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.planners import Auto, DataParallel, ShardParallel
from aliquot.planners.intra.ilp._highs import Relaxation
from aliquot.planners.intra.ilp._highs import _load as load
from aliquot.planners.intra.ilp._program import Program

CLUSTER = Cluster.preset("8xH100")


def best(step, **options):
    return aq.plan(*step, cluster=CLUSTER, method=ShardParallel(mesh_shape=(8,)), **options)


def splits(plan):
    return {
        path: tuple("".join(axes) for axes in dims)
        for path, dims in plan.stages[0].shardings.items()
    }


def test_megatron_splits_columns_then_rows():
    """A huge hidden layer and few rows: the first weight by columns, the second by rows, one sum
    behind it.
    """
    plan = best(mlp((1024, 65536, 1024), 8))
    found = splits(plan)
    assert found["state.params[0]"] == found["state.moments[0]"] == ("", "x")
    assert found["state.params[1]"] == found["state.moments[1]"] == ("x", "")
    assert found["batch.x"] == found["batch.y"] == ("", "")
    sums = [c for c in plan.prediction.collectives if c.num_bytes > 1000]
    assert {c.kind for c in sums} <= {"all-reduce", "reduce-scatter", "all-gather"}
    assert sum(c.num_bytes for c in sums) <= 4 * 2 * 8 * 1024 * 2


def test_many_rows_are_split_by_rows():
    """Nothing is sent but gradients, parameters and the loss."""
    plan = best(mlp((512, 512, 512), 65536))
    found = splits(plan)
    assert found["batch.x"] == found["batch.y"] == ("x", "")
    labels = {c.label for c in plan.prediction.collectives if c.num_bytes > 1000}
    assert labels <= {"gradient of state.params[*]", "state.params[0]", "state.params[1]"}
    dp = aq.plan(*mlp((512, 512, 512), 65536), cluster=CLUSTER, method=DataParallel())
    assert 0.95 < plan.prediction.step_time_s / dp.prediction.step_time_s < 1


def test_a_large_vocabulary_is_split():
    """Logits are never gathered: the loss over split classes needs sums of one number a row."""
    plan = best(classifier(64, 256, 131072))
    assert splits(plan)["state.params.head"] == ("", "x")
    assert max(c.num_bytes / c.count for c in plan.prediction.collectives) <= 4 * 64 * 256


def test_experts_are_split_by_expert():
    """With so many rows that each expert's products fill a device."""
    plan = best(experts(8, 1024, 512, 2048))
    found = splits(plan)
    assert (
        found["state.params.up"] == found["state.params.down"] == found["batch.x"] == ("x", "", "")
    )
    assert max((c.num_bytes for c in plan.prediction.collectives), default=0) < 1000


def test_zero_emerges_where_updates_take_longer_than_gathers():
    """Parameters and moments are split as ZeRO-3 splits them: most of their gathers run beside
    compute, and each device updates an eighth. The least memory that fits takes no more time.
    """
    step = mlp((1024, 1024, 1024, 1024), 32768)
    whole = 4 * 3 * 1024 * 1024
    dp = aq.plan(*step, cluster=CLUSTER, method=DataParallel()).prediction
    free = best(step)
    tight = best(step, memory_limit_bytes=free.prediction.peak_memory_bytes)
    for plan in (free, tight):
        parts = plan.prediction.memory_bytes
        assert splits(plan)["batch.x"] == ("x", "")
        assert parts["optimizer state"] == whole / 8 and parts["parameters"] < whole
        # Compiled for H100, 116 and 134 MB.
        assert plan.prediction.peak_memory_bytes < dp.peak_memory_bytes - whole
        assert plan.prediction.step_time_s < dp.step_time_s
    assert tight.prediction.step_time_s == pytest.approx(free.prediction.step_time_s, rel=1e-3)


def test_one_device_needs_no_communication():
    plan = aq.plan(*mlp((64, 64, 64), 64), cluster=Cluster.preset("1xH100"), method=Auto())
    assert plan.prediction.collectives == () and plan.prediction.communication_s == 0
    assert plan.prediction.step_time_s == plan.prediction.compute_s


def test_less_is_communicated_over_slow_links_between_hosts():
    """On two hosts, what crosses between them is no more than what stays inside."""
    step = mlp((2048, 8192, 2048), 4096)
    plan = aq.plan(
        *step, cluster=Cluster.preset("2x8xA100-80GB"), method=ShardParallel(mesh_shape=(2, 8))
    )
    crossing = sum(c.num_bytes for c in plan.prediction.collectives if "x" in c.axes)
    inside = sum(c.num_bytes for c in plan.prediction.collectives if c.axes == ("y",))
    assert crossing <= inside


def test_duplicate_entries_of_a_program_are_summed():
    """`x <= 3` written as `0.5 x + 0.5 x <= 3`: the solver would keep both entries."""
    program = Program()
    (column,) = program.add_columns(np.array([-1.0]))
    row = program.add_rows(1, -np.inf, 3.0)
    for _ in range(2):
        program.add_entries(np.array([row]), np.array([column]), 0.5)
    assert Relaxation(program).solve().values == pytest.approx([3.0])
    solver, _ = load(program, num_integer=0)
    assert solver.getNumNz() == 1


def test_a_relaxation_on_which_plain_pivots_fail_is_solved_otherwise(monkeypatch):
    """Costs that are far apart call for plain pivots; too few of them end early, and the optimum is
    the same.
    """
    rng = np.random.default_rng(0)
    program = Program()
    columns = program.add_columns(10.0 ** rng.uniform(-6, 0, 60))
    first = program.add_rows(30, 1.0, np.inf)
    for row in range(30):
        program.add_entries(
            np.full(8, first + row), rng.choice(columns, 8, replace=False), rng.uniform(0.5, 2.0, 8)
        )
    plain, limited = Relaxation(program), Relaxation(program)
    assert plain.pivots_plainly
    found = plain.solve()
    assert plain.pivots_plainly and found.status == "optimal"
    monkeypatch.setattr("aliquot.planners.intra.ilp._highs._PIVOTS_PER_ROW", 0.1)
    assert limited.solve().bound_s == pytest.approx(found.bound_s, rel=1e-9)
    assert not limited.pivots_plainly


def test_similar_costs_are_solved_without_plain_pivots():
    program = Program()
    columns = program.add_columns(np.linspace(1.0, 2.0, 5))
    program.add_entries(np.full(5, program.add_rows(1, 1.0, np.inf)), columns, 1.0)
    relaxation = Relaxation(program)
    assert not relaxation.pivots_plainly
    assert relaxation.solve().bound_s == pytest.approx(1.0)
