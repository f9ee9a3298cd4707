"""Meshes on which nothing fits, or nothing is fast enough, are passed over before they are priced
or searched, and the answers stay those of a search of all.
"""

import pytest
from sharding.analyses import record_analyses

import aliquot as aq
from aliquot import zoo
from aliquot._variants import Variant, plan_variants
from aliquot.cluster import Cluster
from aliquot.planners import Task, WholeProgram, _methods, _race
from aliquot.planners._base import TooSlowError

# Six devices divide no array of weights, and two and three of them some.
_CLUSTER = Cluster.preset("2x3xH100")


def built(layers=2, batch=12):
    sizes = {"num_layers": layers, "hidden_size": 64, "num_heads": 2, "vocab_size": 256}
    config = zoo.configure("gpt-125m", seq_len=64, **sizes)
    work = zoo.build(config, batch, scan=True)
    return work.train_step, (work.state, work.batch)


@pytest.fixture(scope="module")
def task():
    step, args = built()
    return Task(graph=aq.capture(step, *args), cluster=_CLUSTER)


@pytest.fixture(scope="module")
def least_bytes(task):
    """The memory of the smallest plan on the mesh of one axis."""
    with pytest.raises(aq.InfeasibleError) as refused:
        WholeProgram().solve(task.with_limit(1e3).problem(1))
    return refused.value.required_bytes


@pytest.fixture
def searches_all(monkeypatch):
    """Switches the shortcuts off."""

    def switch():
        monkeypatch.setattr(_methods, "never_fits", lambda *_, **__: False)
        monkeypatch.setattr(_race, "_least_s", lambda space: 0.0)

    return switch


def told(decision):
    outcomes = [(c.name, c.mesh, c.outcome, c.step_time_s) for c in decision.candidates]
    return decision.step_time_s, decision.lower_bound_s, decision.status, outcomes


@pytest.mark.parametrize("count", [1, 2])
def test_meshes_on_which_nothing_fits_are_not_priced(
    task, least_bytes, count, monkeypatch, searches_all
):
    problem = task.with_limit(0.95 * least_bytes).problem(count)
    priced, price = [], _methods.price

    def counted(problem, use, **options):
        priced.append(use.mesh.shape)
        return price(problem, use, **options)

    monkeypatch.setattr(_methods, "price", counted)
    quick = WholeProgram().solve(problem)
    few = len(priced)
    searches_all()
    whole = WholeProgram().solve(problem)
    assert told(quick) == told(whole)
    assert 0 < few < len(priced) - few
    assert "does not fit" in {c.outcome for c in quick.candidates}


def test_a_refusal_says_the_same_of_meshes_without_prices(task, searches_all):
    problem = task.with_limit(1e3).problem(1)
    with pytest.raises(aq.InfeasibleError) as quick:
        WholeProgram().solve(problem)
    searches_all()
    with pytest.raises(aq.InfeasibleError) as whole:
        WholeProgram().solve(problem)
    assert str(quick.value) == str(whole.value)
    assert quick.value.required_bytes == whole.value.required_bytes


def test_spaces_that_cannot_be_fast_enough_are_not_searched(task, monkeypatch):
    problem = task.problem(1)
    best = WholeProgram().solve(problem)
    begun, begin = [], _race._Runner.start.__func__

    def started(cls, *args, **options):
        runner = begin(cls, *args, **options)
        begun.append(runner.search)
        return runner

    monkeypatch.setattr(_race._Runner, "start", classmethod(started))
    impossible_s = 1e-3 * best.step_time_s
    slow = WholeProgram(faster_than_s=impossible_s).solve(problem)
    assert slow.step_time_s > impossible_s
    searched = [s for s in begun if not isinstance(s, _race.NotSearched)]
    # One tells by how much it is too slow.
    assert len(searched) == 1 < len(begun)
    equal = WholeProgram(faster_than_s=best.step_time_s * (1 + 1e-9)).solve(problem)
    assert equal.step_time_s == best.step_time_s


def test_nothing_fast_enough_that_fits_is_too_slow(task, least_bytes):
    problem = task.with_limit(0.5 * least_bytes).problem(1)
    with pytest.raises((TooSlowError, aq.InfeasibleError)):
        WholeProgram(faster_than_s=1e-9).solve(problem)


@pytest.mark.parametrize("limit", [None, pytest.param(3.0e6, marks=pytest.mark.slow)])
def test_the_fastest_way_to_recompute_is_that_of_a_search_of_all(limit, searches_all):
    step, args = built(layers=3, batch=48)

    def found():
        return plan_variants(
            (Variant(step=step, args=args),),
            cluster=_CLUSTER,
            method=WholeProgram(),
            memory_limit_bytes=limit,
        )

    quick = found()
    searches_all()
    whole = found()
    assert quick.prediction.step_time_s == pytest.approx(whole.prediction.step_time_s, rel=1e-9)
    assert (quick.recompute, quick.num_micro_batches) == (whole.recompute, whole.num_micro_batches)
    assert quick.stages[0].mesh_shape == whole.stages[0].mesh_shape
    assert quick.stages[0].shardings == whole.stages[0].shardings


def test_steps_that_recompute_share_what_micro_batches_leave_open(monkeypatch):
    analysed = record_analyses(monkeypatch)
    step, args = built()
    for way in Variant(step=step, args=args).ways_to_recompute(None):
        problem = way.task(_CLUSTER).problem(2)
        assert problem.runs_in_groups(2) == problem.runs_in_groups(2)
    # The micro-batches themselves, and their shares, once for all ways to recompute.
    assert analysed == [2, 4]


def test_a_layout_of_other_devices_is_refused_before_the_step_is_traced():
    def step(state, batch):
        raise AssertionError("traced")

    with pytest.raises(aq.InputError, match="tp8 x pp4 makes 32 devices, and 2x3xH100 has 6"):
        plan_variants(
            (Variant(step=step, args=()),),
            cluster=_CLUSTER,
            method=aq.Megatron(tensor=8, pipeline=4),
        )
