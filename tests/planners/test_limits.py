"""Every search ends at its limits, says so, and keeps a bound that holds: what was not found is
never called infeasible.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.core import InfeasibleError
from aliquot.cost import make_problem, price
from aliquot.planners._race import Entry, Race
from aliquot.planners.intra import ILP, Space
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search, _highs, _ilp
from aliquot.planners.intra.ilp._highs import LIMIT, Relaxation, solve_integers
from aliquot.planners.intra.ilp._ilp import Work
from aliquot.planners.intra.ilp._program import alive_bytes, build_program
from aliquot.planners.intra.ilp._prove import rules_out

_CLUSTER = Cluster.preset("8xH100")
_EXACT = ILP(relative_gap=0.0, work_limit=np.inf)


@pytest.fixture(scope="module")
def graph():
    work = zoo.build(zoo.configure("gpt-125m", num_layers=2), 8, scan=True)
    return aq.capture(work.train_step, work.state, work.batch)


@pytest.fixture(scope="module")
def priced(graph):
    return price(make_problem(graph, _CLUSTER), LogicalMesh(shape=(8,), cluster=_CLUSTER))


@pytest.fixture(scope="module")
def tight_bytes(priced):
    """Limits on memory under which relaxations mix choices."""
    free = Search(priced, everything(priced), limit_bytes=1e15)
    free.bound()
    most, least = (picked.memory.peak_bytes for picked in (free.picked, free.least_memory()))
    return list(np.linspace(least, most, 7)[1:-1])


@pytest.fixture(scope="module")
def solved(priced, tight_bytes):
    """The best solution for each limit, where there is one to be found by branching."""
    found = {}
    for limit in tight_bytes:
        search = searched(priced, limit)
        best = search.improve()
        if best is not None and not search.integral:
            found[limit] = best
    assert len(found) >= 3
    return found


def searched(priced, limit, **options):
    search = Search(priced, everything(priced), limit_bytes=limit, planner=_EXACT, **options)
    search.bound()
    return search


@pytest.fixture
def hasty(monkeypatch):
    """Relaxations that are given up after one pivot."""

    def begin():
        for name in (
            "_PIVOTS_PER_ROW",
            "_PIVOTS_PER_ROW_AGAIN",
            "_FEWEST_PIVOTS",
            "_BARRIER_STEPS",
        ):
            monkeypatch.setattr(_highs, name, 0)

    return begin


def test_a_relaxation_at_its_limit_says_so(priced, hasty):
    program, _ = build_program(priced, everything(priced))
    hasty()
    found = Relaxation(program).solve()
    assert found.status == LIMIT and found.values is None and found.bound_s == -np.inf


def test_a_relaxation_that_does_not_end_by_pivots_is_solved_from_the_inside(priced, monkeypatch):
    program, _ = build_program(priced, everything(priced))
    pivoted = Relaxation(program).solve()
    monkeypatch.setattr(_highs, "_PIVOTS_PER_ROW", 0.1)
    monkeypatch.setattr(_highs, "_FEWEST_PIVOTS", 10_000_000)
    monkeypatch.setattr(Relaxation, "_pivot", lambda relaxation, **_: 0)
    found = Relaxation(program).solve()
    assert found.status == "optimal" and found.bound_s == pytest.approx(pivoted.bound_s, rel=1e-9)


def test_a_bound_stays_where_a_relaxation_is_given_up(priced, solved, hasty):
    limit, best = next(iter(solved.items()))
    search = Search(priced, everything(priced), limit_bytes=limit, planner=_EXACT)
    first = search.start()
    hasty()
    # Rows for memory are solved in vain; the bound without them holds.
    bound = search.bound()
    assert bound == pytest.approx(first) and bound <= best.step_time_s
    assert search.gave_up and not search.integral
    # The integer program is solved by itself.
    assert search.improve().step_time_s == pytest.approx(best.step_time_s, rel=1e-6)
    assert search.lower_bound_s <= best.step_time_s * (1 + 1e-9)


def test_branching_without_work_keeps_what_is_known(priced, solved):
    for limit, best in solved.items():
        search = searched(priced, limit, notes={_ilp._WORK: Work(0.0)})
        known, found = search.incumbent(), search.improve()
        assert search.lower_bound_s <= best.step_time_s * (1 + 1e-9)
        if known is None:
            # What needs the least memory is better than nothing.
            assert search.gave_up and found.status == LIMIT
            assert found.peak_bytes <= limit * (1 + 1e-9)
        elif found is not None and found.status != "optimal":
            assert found.status == LIMIT and search.gave_up
            assert (
                found.lower_bound_s
                <= best.step_time_s * (1 + 1e-9)
                <= found.step_time_s * (1 + 1e-6)
            )


def test_all_spaces_share_their_work(priced, solved):
    limit = next(iter(solved))
    work = Work(1e12)
    searched(priced, limit, notes={_ilp._WORK: work}).improve()
    assert work.left < 1e12


def test_an_integer_program_at_its_limit_is_neither_optimal_nor_infeasible(priced, solved):
    limit, best = next(iter(solved.items()))
    search = searched(priced, limit)
    outcome = solve_integers(
        search.program, search.choices, node_limit=2000, relative_gap=0.0, work_limit=1.0
    )
    assert outcome.status == LIMIT
    assert outcome.bound_s <= best.step_time_s * (1 + 1e-6)


def test_a_relaxation_that_is_given_up_rules_nothing_out(priced, solved, hasty):
    limit = next(iter(solved))
    search = searched(priced, limit)
    use = [
        alive_bytes(search.choices, search.model_in_turn(search.in_turn), time)[1]
        for time in search.times
    ]
    hasty()
    values = search.values
    proved, solves, _ = rules_out(search.relaxation, search.choices.columns, use, values, 1e9)
    assert not proved and solves == 1


@pytest.mark.slow
def test_choices_near_the_relaxation_hold_a_good_solution(priced, solved, monkeypatch):
    """As programs of many rows are searched first."""
    monkeypatch.setattr(_ilp, "_MANY_ROWS", 0)
    near = 0
    for limit, best in solved.items():
        search = searched(priced, limit)
        found = search._search_taken(np.inf)
        assert search.lower_bound_s <= best.step_time_s * (1 + 1e-9)
        if found is not None:
            near += 1
            assert found.peak_bytes <= limit * (1 + 1e-9)
            assert best.step_time_s * (1 - 1e-9) <= found.step_time_s <= 1.1 * best.step_time_s
        assert searched(priced, limit).improve().step_time_s == pytest.approx(
            best.step_time_s, rel=1e-6
        )
    assert near >= len(solved) / 2


def test_a_race_that_gave_up_does_not_say_that_nothing_fits(graph, priced, tight_bytes, hasty):
    problem = make_problem(graph, _CLUSTER, memory_limit_bytes=tight_bytes[0])
    method = aq.ShardParallel(mesh_shape=(8,), intra=aq.ILP(work_limit=0))
    assert method.solve(problem).step_time_s > 0
    with pytest.raises(InfeasibleError, match="^No plan"):
        method.solve(replace(problem, memory_limit_bytes=tight_bytes[0] / 10))
    hasty()
    with pytest.raises(InfeasibleError, match="Within the limits of the search no plan"):
        method.solve(problem)


def test_a_race_in_which_one_mesh_gave_up_is_not_called_optimal(graph, solved):
    """Nor does it claim a bound above what a longer search finds."""
    gave_up = 0
    for limit in solved:
        problem = make_problem(graph, _CLUSTER, memory_limit_bytes=limit)
        found = aq.WholeProgram(intra=aq.ILP(work_limit=0), max_meshes=1).solve(problem)
        assert found.lower_bound_s <= solved[limit].step_time_s * (1 + 1e-9)
        if found.step_time_s > 1.0011 * found.lower_bound_s:
            gave_up += 1
            assert found.status == LIMIT
    assert gave_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivesUp(ILP):
    """A planner that knows half of the least step time as a bound, and finds nothing."""

    def begin(self, *args, **kwargs):
        search = ILP.begin(self, *args, **kwargs)
        bound = search.start() / 2
        search.bound = lambda cutoff_s=np.inf: bound
        search.lower_bound_s, search.gave_up = bound, True
        search.incumbent = search.improve = lambda *_: None
        return search


def test_the_best_of_one_mesh_is_not_optimal_where_another_search_gave_up(graph, priced):
    space = Space(name="all", priced=priced, allowed=everything(priced))
    problem = make_problem(graph, _CLUSTER, memory_limit_bytes=1e15)
    race = Race(problem=problem, method="test", intra=ILP(), states_bound=True)
    alone = race.best([Entry(space=space, intra=ILP())])
    both = race.best([Entry(space=space, intra=planner) for planner in (ILP(), _GivesUp())])
    assert alone.status == "optimal" and both.step_time_s == alone.step_time_s
    assert both.status == LIMIT and both.lower_bound_s == pytest.approx(alone.lower_bound_s / 2)
    assert both.candidates[-1].outcome == LIMIT


def test_a_relaxation_that_stalls_is_given_up(priced, monkeypatch):
    """As if its first pivot took longer than any solve may."""
    monkeypatch.setattr(_highs, "_STALLED_S", 0.0)
    program, _ = build_program(priced, everything(priced))
    assert Relaxation(program).solve().status == LIMIT
