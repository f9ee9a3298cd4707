"""Searches in little memory take few programs, and prove without seconds that nothing fits."""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import make_problem, price, takes_turns
from aliquot.planners import ILP
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search
from aliquot.planners.intra.ilp._least import LeastPeak

_CLUSTER = Cluster.preset("2x4xV100-16GB")


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
    most, least = (picked.memory.peak_bytes for picked in (free.picked, free.least_memory()))
    return [float(limit) for limit in np.linspace(least, most, count + 2)[1:-1]]


def searched(priced, limit, **options):
    search = Search(priced, everything(priced), limit_bytes=limit, **options)
    search.bound()
    return search


@pytest.mark.slow
def test_a_tight_search_takes_few_relaxations_and_integer_programs(graph):
    priced = priced_on(graph, (8,))
    search = searched(priced, between(priced, 4)[0], planner=ILP(work_limit=1e8))
    solves = search.num_solves
    best = search.improve()
    assert best is not None and best.step_time_s <= 1.02 * search.lower_bound_s
    assert search.num_solves - solves < 100


def test_too_little_memory_is_proved_without_seconds(graph):
    priced = priced_on(graph, (8,))
    free = Search(priced, everything(priced), limit_bytes=1e15)
    picked = free.least_memory()
    moment, peak = picked.memory.peak_moment, picked.memory.peak_bytes
    for share, expected in ((0.5, True), (1.01, False)):
        least = LeastPeak(priced, everything(priced), share * peak)
        least.add(free.model_in_turn(takes_turns(picked)), moment)
        assert least.exceeds_limit() is expected
    search = Search(priced, everything(priced), limit_bytes=0.5 * peak)
    assert search.bound() is None and not search.gave_up
