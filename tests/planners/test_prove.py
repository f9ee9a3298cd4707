"""A few branches prove what the integer program would: never what is not so, and often what is."""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import make_problem, price
from aliquot.planners import ILP
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search, _ilp

# One host: over two, the fastest splits of this step are those that take the least memory, too.
_CLUSTER = Cluster.preset("8xH100")
_EXACT = ILP(relative_gap=0.0)


@pytest.fixture(scope="module")
def searches():
    """Searches in little memory, each with its bound and its best solution by the integer
    program.
    """
    work = zoo.build(zoo.configure("gpt-125m", num_layers=2), 8, scan=True)
    graph = aq.capture(work.train_step, work.state, work.batch)
    priced = price(make_problem(graph, _CLUSTER), LogicalMesh(shape=(8,), cluster=_CLUSTER))
    free = Search(priced, everything(priced), limit_bytes=1e15)
    free.bound()
    most, least = (picked.memory.peak_bytes for picked in (free.picked, free.least_memory()))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_nothing_below", lambda search, ceiling_s: False)
        for limit in np.linspace(least, most, 10)[1:-1]:
            search = Search(priced, everything(priced), limit_bytes=limit, planner=_EXACT)
            bound = search.bound()
            exact = Search(priced, everything(priced), limit_bytes=limit, planner=_EXACT)
            exact.bound()
            best = exact.improve()
            if best is not None and not search.integral:
                found.append((search, bound, best))
    assert len(found) >= 3
    return found


def test_no_existing_solution_is_ruled_out(searches, monkeypatch):
    monkeypatch.setattr(_ilp, "_CLOSE", 1.0)
    for search, _, best in searches:
        assert not search._nothing_below(best.step_time_s * (1 + 1e-6))


def test_most_ceilings_between_bound_and_best_are_ruled_out(searches, monkeypatch):
    monkeypatch.setattr(_ilp, "_CLOSE", 1.0)
    ruled_out = [
        search._nothing_below(bound + 0.2 * (best.step_time_s - bound))
        for search, bound, best in searches
    ]
    assert sum(ruled_out) >= 0.5 * len(ruled_out)


def test_ruling_out_leaves_the_relaxation_unchanged(searches):
    for search, bound, _ in searches:
        search._nothing_below(bound * (1 + 1e-4))
        assert search.relaxation.solve().bound_s == pytest.approx(bound, rel=1e-9)


def test_a_bound_is_raised_little_beyond_the_cutoff(searches):
    stopped = 0
    for tight, bound, _ in searches:
        search = Search(tight.priced, everything(tight.priced), limit_bytes=tight.limit_bytes)
        asked = search.start() + 0.1 * (bound - search.start())
        found = search.bound(asked)
        assert asked <= found <= bound * (1 + 1e-9)
        # Where the relaxation was not solved before, its bound is not raised further.
        if search.relaxed.status == "enough":
            stopped += 1
            assert found == pytest.approx(asked * 1.001)
    assert stopped
