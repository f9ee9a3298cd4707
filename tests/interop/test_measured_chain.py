"""Inter planners over a measured database: what they plan is what the database's judge says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from interop.test_aceso_search import random_problem

import aliquot as aq
from aliquot.core import InfeasibleError
from aliquot.cost import StageMemory, judge_stages
from aliquot.interop.aceso.search import MeasuredChain

INTERS = {
    "bottleneck": aq.Bottleneck(schedules=("1f1b",)),
    "stages": aq.StageDP(schedules=("1f1b",)),
    "grid": aq.Grid(),
}


@pytest.mark.parametrize("name", INTERS)
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_a_database_take_what_its_judge_says(name, seed):
    problem, rng = random_problem(seed, judge="aliquot")
    needed_mb = 1e9
    for limit_mb in (1e9, None):
        limited = replace(problem, memory_limit_mb=limit_mb or 0.8 * needed_mb)
        chain = MeasuredChain.make(limited, int(rng.choice([1, 2])))
        try:
            plan = aq.plan_chain(chain, INTERS[name])
        except InfeasibleError:
            assert limit_mb is None
            continue
        stages = tuple([chain.configured(stage) for stage in plan.stages])
        judged = limited.evaluate(limited.configuration(chain.micro_batch, stages))
        assert judged.iteration_time_ms == pytest.approx(1000 * plan.closed_form_s)
        for figures, stage in zip(plan.figures, judged.stages, strict=True):
            assert figures.peak_bytes / 2**20 == pytest.approx(stage.memory_mb)
            assert figures.state_bytes / 2**20 == pytest.approx(stage.state_mb)
        needed_mb = max(stage.memory_mb for stage in judged.stages)


def test_planners_agree_where_all_stages_are_within_reach():
    problem, _ = random_problem(1, judge="aliquot")
    chain = MeasuredChain.make(problem, 1)
    exact, found = (aq.plan_chain(chain, INTERS[name]) for name in ("stages", "bottleneck"))
    assert found.step_time_s <= 1.01 * exact.step_time_s


@pytest.mark.parametrize("seed", range(4))
def test_many_pipelines_have_the_figures_of_each(seed):
    problem, _ = random_problem(seed, judge="aliquot")
    chain = MeasuredChain.make(problem, 1)
    one = next(k for k, option in enumerate(chain.options) if option.num_devices == 1)
    for cut in range(1, chain.num_units):
        first, last = np.array([[0, cut]]), np.array([[cut, chain.num_units]])
        options, devices = np.array([[one, one]]), np.array([[0, 1]])
        many = chain.quote_many(options, first, last, first_device=devices, in_flight=[2.0, 1.0])
        stages = [
            chain.propose(
                one,
                i,
                j,
                first_device=d,
                memory=StageMemory(in_flight=kept, limit_bytes=chain.memory_limit_bytes),
            )
            for i, j, d, kept in ((0, cut, 0, 2.0), (cut, chain.num_units, 1, 1.0))
        ]
        figures = judge_stages(chain, stages, "1f1b").figures
        for k, each in enumerate(figures):
            assert many.forward_s[0, k] == pytest.approx(each.forward_s + each.backward_s)
            assert many.peak_bytes[0, k] == pytest.approx(each.peak_bytes)
            assert each.forward_s + each.backward_s >= chain.least_s(one, first[0, k], last[0, k])
