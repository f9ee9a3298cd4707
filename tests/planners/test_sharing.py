"""Edges that share conversions pay for each once, though programs learn so only where a solution
needs it.
"""

import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster, LogicalMesh
from aliquot.cost import evaluate, make_problem, price
from aliquot.planners.intra.fixed import everything
from aliquot.planners.intra.ilp import Search
from aliquot.planners.intra.ilp._highs import Relaxation, solve_integers
from aliquot.planners.intra.ilp._program import add_memory_row, build_program


@pytest.fixture(
    scope="module", params=[pytest.param("2x4xV100-16GB", marks=pytest.mark.slow), "8xH100"]
)
def priced(request):
    """On H100s gradient communication hides behind the backward pass; on V100s nothing overlaps."""
    work = zoo.build(zoo.configure("gpt-125m", num_layers=1), 8)
    graph = aq.capture(work.train_step, work.state, work.batch)
    cluster = Cluster.preset(request.param)
    return price(make_problem(graph, cluster), LogicalMesh(shape=(2, 4), cluster=cluster))


@pytest.fixture(scope="module")
def limits(priced):
    """Limits on memory between the least that choices need and what the fastest take."""
    free = Search(priced, everything(priced), limit_bytes=1e15)
    free.bound()
    most, least = (picked.memory.peak_bytes for picked in (free.picked, free.least_memory()))
    return [float(limit) for limit in np.linspace(least, most, 6)[1:-1]]


def all_paid(search):
    """The program of a search, its memory rows included, with the excess of every shared
    conversion.
    """
    program, choices = build_program(search.priced, everything(search.priced))
    for time in search.times:
        model = search.model_in_turn(search.in_turn)
        add_memory_row(program, choices, search.priced, model, time, search.limit_bytes)
    program.add_excess(np.arange(len(program.groups.counts)))
    return program, choices


def test_the_relaxation_is_that_of_all_shared_conversions(priced, limits):
    search = Search(priced, everything(priced), limit_bytes=limits[2])
    bound = search.bound()
    program, _ = all_paid(search)
    assert bound == pytest.approx(Relaxation(program).solve().bound_s, rel=1e-6)
    assert search.relaxation.is_exact


def test_few_shared_conversions_matter(priced, limits):
    search = Search(priced, everything(priced), limit_bytes=limits[1])
    search.bound()
    # Where most conversions run beside compute, it may be none.
    least = 0 if priced.target.overlap_fraction else 1
    assert least <= len(search.program.excess) < 0.1 * len(search.program.groups.counts)
    assert len(search.program.lower) < 0.5 * len(all_paid(search)[0].lower)


def test_a_relaxation_takes_few_pivots(priced, limits):
    """A relaxation with all rows from the start takes more than twice the work."""
    search = Search(priced, everything(priced), limit_bytes=limits[1])
    lazily = search.relaxation.solve().work
    program, _ = all_paid(search)
    assert lazily < 0.4 * Relaxation(program).solve().work


@pytest.mark.slow
@pytest.mark.parametrize(
    "priced",
    [pytest.param("2x4xV100-16GB", marks=pytest.mark.slow), "8xH100"],
    indirect=True,
)
def test_branching_finds_what_it_finds_with_all_shared_conversions(priced, limits):
    search = Search(priced, everything(priced), limit_bytes=limits[2])
    search.bound()
    best = search.improve()
    program, choices = all_paid(search)
    outcome = solve_integers(
        program, choices, node_limit=100, relative_gap=1e-3, ceiling_s=best.step_time_s * 1.01
    )
    assert not search.assumes_deferred and not search.gave_up
    assert search.lower_bound_s <= best.step_time_s <= search.lower_bound_s * 1.001
    assert outcome.bound_s * (1 - 1e-6) <= best.step_time_s


def test_a_program_with_all_shared_conversions_prices_choices_as_the_judge_does(priced):
    search = Search(priced, everything(priced), limit_bytes=1e15)
    search.bound()
    for picked in (search.picked, search.least_memory()):
        masks = [np.zeros_like(mask) for mask in everything(priced)]
        for mask, pick in zip(masks, picked.picks, strict=True):
            mask[pick] = True
        program, _ = build_program(priced, masks)
        assert Relaxation(program).solve().bound_s == pytest.approx(
            evaluate(picked).total_s, rel=1e-6
        )


def test_programs_charge_every_shared_conversion_once_a_solution_paid_too_little(priced, limits):
    search = Search(priced, everything(priced), limit_bytes=limits[1])
    search.bound()
    ceiling_s = 1.5 * search.lower_bound_s
    few, _ = search.without_costly_choices(ceiling_s)
    search.is_undercharged = True
    every, _ = search.without_costly_choices(ceiling_s)
    complete, _ = search.without_costly_choices(ceiling_s)
    # What is left costs nothing, and need not be counted.
    assert not complete.add_excess(np.arange(len(complete.groups.counts)))
    assert len(few.excess) < len(every.excess)
