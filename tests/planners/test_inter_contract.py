"""What every inter planner owes to chains, schedules and steps that it is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planners.inter.chains import even_chain, random_chain
from planners.inter.operators import disguised, operators
from planners.plugins import INTERS, INTRAS, TRAINING, all_schedules  # noqa: F401
from planners.test_pipeshard import plan_of

import aliquot as aq
from aliquot.core import InfeasibleError, InputError, PlanMismatchError
from aliquot.cost import ChainPlan, StageMemory, find_stage_faults, judge_stages, simulate_stages
from aliquot.planners import (
    AbstractInter,
    ManualStages,
    NoFasterStages,
    StageDP,
    StageLimits,
    plan_chain,
)
from aliquot.plans import violations

CHAINS = {
    "even": even_chain(8, devices=4, micro_batches=8),
    "random": random_chain(np.random.default_rng(3), num_units=7, geometry=(1, 4)),
    "hosts": random_chain(np.random.default_rng(5), num_units=7, geometry=(2, 2)),
    "disguised": disguised(random_chain(np.random.default_rng(3), num_units=7, geometry=(1, 4))),
    "operators": operators(),
    "operators with little memory": operators(limit_bytes=300),
}


def judged(chain, plan: ChainPlan) -> None:
    """A plan is what the judges say of its stages."""
    where = {"num_submeshes": plan.num_submeshes}
    assert find_stage_faults(chain, plan.stages, plan.schedule, **where) == ()
    again = judge_stages(chain, plan.stages, plan.schedule, **where)
    assert plan.figures == again.figures and plan.closed_form_s == pytest.approx(
        again.closed_form_s
    )
    simulated, peak_bytes = simulate_stages(chain, again)
    assert plan.step_time_s == pytest.approx(simulated.step_time_s)
    assert peak_bytes <= chain.memory_limit_bytes * (1 + 1e-9)
    assert plan.lower_bound_s is None or plan.lower_bound_s <= again.closed_form_s * (1 + 1e-9)


@pytest.mark.parametrize("inter", INTERS.values(), ids=INTERS)
class TestEveryInterPlanner:
    @pytest.mark.parametrize("name", CHAINS)
    def test_figures_of_stages_are_those_of_the_judges(self, inter, name):
        try:
            plan = plan_chain(CHAINS[name], inter)
        except (InfeasibleError, InputError) as error:
            assert name in ("random", "hosts", "disguised") and str(error)
            return
        judged(CHAINS[name], plan)
        assert plan_chain(CHAINS[name], inter) == plan

    def test_the_planner_chooses_among_numbers_of_micro_batches(self, inter):
        chains = [even_chain(8, devices=4, micro_batches=n) for n in (4, 8)]
        plan = plan_chain(chains, inter)
        (own,) = (c for c in chains if c.num_micro_batches == plan.num_micro_batches)
        judged(own, plan)

    @pytest.mark.parametrize("schedule", TRAINING)
    def test_limits_are_respected_or_refused(self, inter, schedule):
        limits = StageLimits(num_stages=4, schedule=schedule)
        chain = even_chain(8, devices=4, micro_batches=8)
        try:
            inter.check_limits(limits)
        except InputError as error:
            assert "has its own" in str(error)
            return
        plan = plan_chain(chain, inter, limits=limits)
        assert (len(plan.stages), plan.schedule) == (4, schedule)
        judged(chain, plan)

    def test_too_little_memory_raises(self, inter):
        for chain in (
            replace(even_chain(8, devices=4), memory_limit_bytes=1e-3),
            operators(limit_bytes=1.0),
        ):
            with pytest.raises(InfeasibleError, match="could fit"):
                plan_chain(chain, inter)

    def test_the_result_is_no_slower_than_the_start(self, inter):
        chain = even_chain(8, devices=4, micro_batches=8)
        best = plan_chain(chain, StageDP())
        plan = plan_chain(chain, inter, start=best)
        assert plan.step_time_s <= best.step_time_s * (1 + 1e-9) or not inter.searches

    @pytest.mark.parametrize("name", ["even", "hosts", "operators"])
    def test_asking_for_faster_stages_changes_no_answer(self, inter, name):
        try:
            plan = plan_chain(CHAINS[name], inter)
        except (InfeasibleError, InputError):
            return
        above = StageLimits(faster_than_s=plan.step_time_s * 1.01)
        assert plan_chain(CHAINS[name], inter, limits=above).step_time_s == plan.step_time_s
        # None take less than half of the bound: it says so, or answers all the same.
        half = StageLimits(faster_than_s=plan.closed_form_s / 2)
        try:
            same = plan_chain(CHAINS[name], inter, limits=half)
        except NoFasterStages as error:
            assert inter.searches and "take less than" in str(error)
        else:
            assert same.step_time_s == plan.step_time_s

    @pytest.mark.parametrize(
        "intra",
        [
            pytest.param(
                intra, id=name, marks=pytest.mark.slow if name in ("zero2", "blocks, cfp") else ()
            )
            for name, intra in INTRAS.items()
        ],
    )
    def test_the_planner_works_with_every_intra_planner(self, inter, intra):
        plan = plan_of(cluster="4xV100-16GB", inter=inter, intra=intra, num_micro_batches=4)
        assert violations(plan) == []
        if len(plan.stages) > 1:
            assert plan.provenance.planner == f"{type(inter).__name__}, each stage by {intra.name}"

    def test_no_profiles_are_required_beyond_the_chains(self, inter):
        assert inter.required_profiles([even_chain(4, devices=2)]) == ()


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("name", ["even", "operators", "operators with little memory"])
def test_stages_by_hand_on_every_chain(name, schedule):
    chain = CHAINS[name]
    cuts = [k * chain.num_units // 2 for k in range(3)]
    half = next(o.name for o in chain.options if o.num_devices == 2)
    manual = ManualStages(
        boundaries=tuple(zip(cuts, cuts[1:])), options=(half,) * 2, schedule=schedule
    )
    try:
        plan = plan_chain(chain, manual)
    except InfeasibleError as error:
        assert "with little memory" in name and "do not fit" in str(error)
        return
    judged(chain, plan)


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("seed", range(4))
def test_tables_of_quotes_find_what_prefix_sums_find(schedule, seed):
    chain = disguised(random_chain(np.random.default_rng(seed), num_units=6, geometry=(1, 4)))
    planner = StageDP(schedules=(schedule,), simulated=1, relative_gap=1e-9)
    try:
        exact = plan_chain(chain.inner, planner)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            plan_chain(chain, planner)
        return
    plan = plan_chain(chain, planner)
    assert plan.closed_form_s == pytest.approx(exact.closed_form_s, rel=1e-6)
    assert plan.lower_bound_s is None and plan.gap is None


@pytest.mark.parametrize("option", range(3))
def test_operators_never_cost_less_than_their_bound(option):
    chain = operators()
    for first in range(6):
        for last in range(first + 1, 7):
            for limit in (np.inf, 300.0):
                memory = StageMemory(in_flight=2.0, limit_bytes=limit)
                stage = chain.propose(option, first, last, first_device=0, memory=memory)
                if stage is not None:
                    (figures,) = chain.quote([stage], [2.0])
                    assert figures.peak_bytes <= limit and len(stage.unit_options) == last - first
                    assert figures.forward_s + figures.backward_s >= chain.least_s(
                        option, first, last
                    ) * (1 - 1e-9)


def test_little_memory_is_met_by_recomputing_single_operators():
    free, tight = (
        plan_chain(CHAINS[name]) for name in ("operators", "operators with little memory")
    )
    assert tight.step_time_s > free.step_time_s
    chain = CHAINS["operators with little memory"]
    again = [chain.ways(s.option)[k][1] for s in tight.stages for k in s.unit_options]
    assert any(again) and not all(again)


class Overlapping(AbstractInter):
    """Gives all units to the first device, and leaves the others out."""

    def solve(self, chains, **options):
        memory = StageMemory(in_flight=1.0, limit_bytes=np.inf)
        stage = chains[0].propose(0, 0, chains[0].num_units, first_device=0, memory=memory)
        return judge_stages(chains[0], [stage], "1f1b")


def test_stages_that_cannot_be_run_are_a_fault_of_the_planner():
    with pytest.raises(PlanMismatchError, match="devices are in no stage") as caught:
        plan_chain(even_chain(8, devices=4), Overlapping())
    assert "Overlapping" in str(caught.value)


def test_plan_chain_is_public():
    assert aq.plan_chain is plan_chain
