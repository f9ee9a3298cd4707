"""Searches over measured databases: bounds that need no tables, cuts of the grid, and budgets."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import refused, run
from interop.aceso_files import write_chain, write_database
from interop.test_aceso_search import (
    all_configurations,
    judged_by_stage,
    options,
    random_problem,
    toy_problem,
)

from aliquot.core import TimeLimit, _time_limit
from aliquot.interop.aceso import StageConfiguration
from aliquot.interop.aceso.search import BUDGET_SPENT, PLANNERS, Auto, Exact, Grid
from aliquot.interop.aceso.search._evenly import spread_evenly_us
from aliquot.interop.aceso.search._problem import MOST_OPERATORS
from aliquot.interop.aceso.search._quotes import recompute_levels
from aliquot.interop.aceso.search._reach import least_step_us

SEARCHES = os.path.join("interop", "aceso", "search")


@pytest.fixture
def toy(tmp_path):
    return write_database(tmp_path / "measured"), write_chain(tmp_path / "chain.toml")


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_faster_than_the_bound_without_tables(seed):
    problem, rng = random_problem(seed, judge="aceso" if seed % 3 else "aliquot")
    sizes = [configuration.micro_batch for configuration in all_configurations(problem)]
    times, memory = judged_by_stage(problem).T
    limit = float(np.quantile(memory, rng.uniform(0.02, 0.5)))
    problem = replace(problem, memory_limit_mb=limit)
    for size in problem.micro_batches:
        fitting = times[(memory <= limit + 1e-6) & (np.array(sizes) == size)]
        wanted_us = 1000 * fitting.min() if len(fitting) else np.inf
        if not np.isfinite(wanted_us):
            continue
        spaces = problem.spaces(size)
        even_us = (
            problem.num_micro_batches(size)
            / 2
            * spread_evenly_us(spaces, num_devices=2, memory_limit_mb=limit)
        )
        for enough in (1.001, 2.0):
            bound_us = least_step_us(problem, size, spaces, enough * wanted_us)
            assert even_us <= bound_us <= wanted_us * (1 + 1e-9), (size, enough)


def test_the_bound_of_a_long_chain_holds_for_cuts_at_any_operator(toy):
    problem = toy_problem(toy, gpus_per_node=2, num_layers=501, memory_limit_mb=80_000)
    assert len(problem.chain.operators) > MOST_OPERATORS
    result = Auto().search(problem)
    found, estimate = result.best[0]
    assert "cut at any operator" in result.space
    assert 0.9 * estimate.iteration_time_ms < result.lower_bound_ms
    moved = [
        problem.evaluate(problem.configuration(found.micro_batch, stages))
        for by in range(-6, 7)
        for stages in [with_cut_moved(found.stages, by)]
    ]
    fitting = [
        each.iteration_time_ms
        for each in moved
        if max(stage.memory_mb for stage in each.stages) <= problem.memory_limit_mb
    ]
    assert result.lower_bound_ms <= min(fitting)


def with_cut_moved(stages, by):
    """Two stages of which one gives some operators to the other."""
    first, second = stages
    fields = ("tensor", "data", "algorithm", "recompute")
    cut = len(first.tensor) + by
    joined = {name: getattr(first, name) + getattr(second, name) for name in fields}
    return (
        replace(first, **{name: values[:cut] for name, values in joined.items()}),
        replace(second, **{name: values[cut:] for name, values in joined.items()}),
    )


def uniform_configurations(problem, recompute):
    """Every way to cut a chain into one or two uniform stages that all recompute the same."""
    num = len(problem.chain.operators)
    cuts = [(2, [(0, num)], [(1, 2), (2, 1)])]
    cuts += [(1, [(0, cut), (cut, num)], [(1, 1)]) for cut in range(1, num)]
    for devices, parts, degrees in cuts:
        for tensor, data in degrees:
            yield problem.configuration(
                2,
                tuple(
                    StageConfiguration(
                        num_devices=devices,
                        tensor=(tensor,) * (b - a),
                        data=(data,) * (b - a),
                        algorithm=(0,) * (b - a),
                        recompute=tuple(recompute[a:b]),
                    )
                    for a, b in parts
                ),
            )


def test_the_grid_cuts_where_every_stage_fits(toy):
    whole = toy_problem(toy, gpus_per_node=2, num_layers=10, memory_limit_mb=1e9)
    problem = replace(whole, micro_batches=(2,))
    space = problem.spaces(2)[1]
    judged = [
        (max(stage.memory_mb for stage in estimate.stages), estimate.iteration_time_ms)
        for recompute in recompute_levels(space, 0, 7)
        for configuration in uniform_configurations(problem, recompute.tolist())
        for estimate in [problem.evaluate(configuration)]
    ]
    memory, times = np.array(judged).T
    for limit in np.linspace(memory.min() + 1, memory.max(), 25):
        result = Grid().search(replace(problem, memory_limit_mb=float(limit)))
        best = times[memory <= limit].min()
        assert best * (1 - 1e-9) <= result.best[0][1].iteration_time_ms <= best * 1.02, limit


@pytest.fixture
def calls(monkeypatch):
    """A clock that goes on by a second whenever a function of the searches is called, and rings
    there.
    """
    clock = SimpleNamespace(seconds=0.0)

    @contextlib.contextmanager
    def ringing(limit):
        def count(frame, event, arg):
            if event == "call" and SEARCHES in frame.f_code.co_filename:
                clock.seconds += 1.0
                limit.check()

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(_time_limit, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    monkeypatch.setattr(TimeLimit, "ringing", ringing)
    return clock


@pytest.mark.parametrize("name", PLANNERS)
def test_a_budget_ends_every_planner_wherever_it_is(calls, name):
    problem, _ = random_problem(5)
    # Spaces are made once, by the first search.
    PLANNERS[name]().search(problem)
    calls.seconds = 0.0
    whole = PLANNERS[name](budget_s=1e9).search(problem)
    needed_s, best_ms = int(calls.seconds), whole.best[0][1].iteration_time_ms
    assert whole.ended != BUDGET_SPENT and needed_s > 20
    answered = 0
    for budget_s in (*range(1, needed_s, max(needed_s // 20, 1)), 2 * needed_s):
        result = PLANNERS[name](budget_s=budget_s).search(problem)
        assert (result.ended == BUDGET_SPENT) == (budget_s < needed_s)
        answered += bool(result.best)
        assert result.lower_bound_ms <= best_ms * (1 + 1e-9)
        times = [estimate.iteration_time_ms for _, estimate in result.best]
        assert all(time_ms >= best_ms * (1 - 1e-9) for time_ms in times)
        assert len(times) <= 1
    assert answered
    assert PLANNERS[name](budget_s=0).search(problem).ended == BUDGET_SPENT


def test_a_budget_is_kept_in_seconds():
    problem, _ = random_problem(5)

    def waits(progress):
        time.sleep(60)

    began_s = time.perf_counter()
    result = Exact(gap=0.0, budget_s=0.2).search(problem, on_progress=waits)
    assert result.ended == BUDGET_SPENT and time.perf_counter() - began_s < 30


@pytest.mark.usefixtures("calls")
def test_a_budget_that_is_too_small_for_any_answer_is_named(toy):
    refused(run("aceso", "search", *options(toy, **{"--budget-s": 0.5})), "within 0.5 s")
