"""Branch and bound on the relaxation agrees with the general solver, keeps valid bounds, and takes few relaxations."""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import make_problem, price, timeline
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search, _solve
from aliquot.planners.intra.ilp._least import LeastPeak
from aliquot.planners.intra.ilp._tree import splits

_CLUSTER = Cluster.preset("8xV100-16GB")


@pytest.fixture(scope="module")
def graph():
    work = zoo.build(zoo.configure("gpt-125m", num_layers=2), 8, scan=True)
    return aq.capture(work.train_step, work.state, work.batch)


def priced_on(graph, shape):
    return price(make_problem(graph, _CLUSTER), LogicalMesh(shape=shape, cluster=_CLUSTER))


def between(priced, count):
    """Limits on memory between the least that choices need and what the fastest take."""
    free = Search(priced, everything(priced), limit_bytes=1e15)
    free.bound()
    most, least = (
        float(timeline(free.model(picks), priced, picks).max()) for picks in (free.picks, free.least_memory())
    )
    return [float(limit) for limit in np.linspace(least, most, count + 2)[1:-1]]


def searched(priced, limit, **options):
    search = Search(priced, everything(priced), limit_bytes=limit, **options)
    search.bound()
    return search


def test_it_finds_what_the_general_solver_finds(graph, monkeypatch):
    priced = priced_on(graph, (8,))
    for limit in between(priced, 6):
        general = searched(priced, limit, relative_gap=1e-6)
        expected = general.improve()
        monkeypatch.setattr(_solve, "_MANY_ROWS", 0)
        monkeypatch.setattr(_solve, "_TREE_SHARE", 1.0)
        search = searched(priced, limit, relative_gap=1e-6, work=_solve.Work(1e10))
        found = search.improve()
        monkeypatch.undo()
        assert (found is None) == (expected is None)
        if found is not None and not general._narrowed and not search._narrowed:
            assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-5)
            assert search.lower_bound_s <= expected.step_time_s * (1 + 1e-6)


def test_its_bound_holds_whatever_work_is_left(graph, monkeypatch):
    priced = priced_on(graph, (8,))
    limit = between(priced, 4)[1]
    best = searched(priced, limit, relative_gap=1e-6).improve()
    monkeypatch.setattr(_solve, "_MANY_ROWS", 0)
    for work in (1e6, 1e7, 1e8):
        search = searched(priced, limit, relative_gap=1e-6, work=_solve.Work(work))
        relaxed_s = search.lower_bound_s
        search.improve()
        assert relaxed_s <= search.lower_bound_s <= best.step_time_s * (1 + 1e-6)


def test_a_tight_search_takes_few_relaxations_and_integer_programs(graph):
    """The work of a search in little memory, whose branches decide factors."""
    priced = priced_on(graph, (2, 4))
    search = searched(priced, between(priced, 4)[0], work=_solve.Work(1e8))
    solves = search.num_solves
    best = search.improve()
    assert best is not None and best.step_time_s <= 1.02 * search.lower_bound_s
    assert search.num_solves - solves < 100


def test_splits_halve_the_choices_of_mixed_nodes():
    columns = [np.arange(4), np.arange(4, 6)]
    choices = [np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), np.array([[0, 0], [1, 1]])]
    found = list(splits(columns, choices, np.array([0.25, 0.0, 0.0, 0.75, 1.0, 0.0])))
    assert [(split.node, split.axis, split.share) for split in found] == [(0, 0, 0.25), (0, 1, 0.25)]
    assert [[half.tolist() for half in split.halves] for split in found] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


def test_too_little_memory_is_proved_without_seconds(graph):
    priced = priced_on(graph, (2, 4))
    free = Search(priced, everything(priced), limit_bytes=1e15)
    picks = free.least_memory()
    use = timeline(free.model(picks), priced, picks)
    moment, peak = int(np.argmax(use)), float(use.max())
    for share, expected in ((0.5, True), (1.01, False)):
        least = LeastPeak(priced, everything(priced), share * peak)
        least.add(free.model(picks), moment)
        assert least.exceeds_limit() is expected
    search = Search(priced, everything(priced), limit_bytes=0.5 * peak)
    assert search.bound() is None and not search.gave_up
