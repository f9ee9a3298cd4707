"""What every schedule owes to planners, the simulation, the runtime and plan files."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from planners.inter.chains import even_chain, random_chain
from planners.plugins import INTERS, KINDS, TRAINING, all_schedules  # noqa: F401
from planners.test_pipeshard import BATCH, STATE, init, plan_of, state_of, train_step

import aliquot as aq
from aliquot.cost import (
    PrefixSums,
    StageCosts,
    find_stage_faults,
    judge_stages,
    simulate,
    simulate_stages,
)
from aliquot.planners import ManualStages, StageDP, StageLimits, plan_chain
from aliquot.plans import SCHEDULES, Keeps, Plan, make_schedule, violations
from aliquot.report import planned_trace


def sizes(kind):
    """Numbers of stages, micro-batches and submeshes that a schedule must make lists for."""
    for submeshes in (1, 2, 3, 4):
        for chunks in (1, 2, 3) if kind.interleaves else (1,):
            yield from ((submeshes * chunks, count, submeshes) for count in (1, 2, 5, 8))


@pytest.mark.parametrize("name", KINDS)
class TestEverySchedule:
    def test_task_lists_can_be_run(self, name):
        for counts in sizes(KINDS[name]):
            schedule = make_schedule(name, *counts)
            tasks = schedule.order()
            assert len(tasks) == len(set(tasks)) == sum(map(len, schedule.lists))
            assert schedule.placement[: schedule.num_submeshes] == tuple(
                range(schedule.num_submeshes)
            )
            assert sorted(
                k for s in range(schedule.num_submeshes) for k in schedule.stages_of(s)
            ) == [*range(schedule.num_stages)]

    def test_micro_batches_in_flight_cover_the_task_lists(self, name):
        for stages, count, submeshes in sizes(KINDS[name]):
            schedule = make_schedule(name, stages, count, submeshes)
            kept = KINDS[name].in_flight(stages, count, submeshes)
            assert len(kept) == stages
            assert all(schedule.in_flight(k) <= kept[k] <= count for k in range(stages))

    def test_micro_batches_in_flight_depend_on_what_the_schedule_declares(self, name):
        kind, count = KINDS[name], 5
        kept = {stages: list(kind.in_flight(stages, count, stages)) for stages in range(1, 9)}
        match kind.keeps:
            case Keeps.ALL:
                assert all(k == count for row in kept.values() for k in row)
            case Keeps.BEHIND:
                assert all(row == kept[8][8 - stages :] for stages, row in kept.items())
            case Keeps.STAGES:
                assert all(len(set(row)) == 1 for row in kept.values())
                assert sorted(kept.values(), key=lambda row: row[0]) == list(kept.values())

    def test_the_closed_form_is_linear_in_times(self, name):
        random = np.random.default_rng(0)
        names = ("forward_s", "backward_s", "weight_gradient_s", "exposed_s", "once_s")
        first, second = ({n: random.uniform(1, 2, 6) for n in names} for _ in range(2))

        def form(times):
            return KINDS[name].closed_form(types.SimpleNamespace(**times), 8, 2)

        both = form({n: first[n] + 3 * second[n] for n in names})
        parts = form(first), form(second)
        np.testing.assert_allclose(both.sums, parts[0].sums + 3 * parts[1].sums)
        for term, a, b in zip(both.maxima, parts[0].maxima, parts[1].maxima, strict=True):
            np.testing.assert_allclose(term.sums, a.sums + 3 * b.sums)
            assert (term.weight, term.transfers, term.link) == (a.weight, a.transfers, a.link)

    def test_the_closed_form_is_near_the_simulation_of_equal_stages(self, name):
        for stages, count, submeshes in sizes(KINDS[name]):
            ones, zeros = np.ones(stages), np.zeros(stages)
            trains = KINDS[name].trains
            times = types.SimpleNamespace(
                forward_s=ones,
                backward_s=2 * ones,
                weight_gradient_s=ones,
                exposed_s=ones,
                once_s=zeros,
            )
            form = KINDS[name].closed_form(times, count, stages // submeshes)
            costs = StageCosts(
                forward_s=ones,
                backward_input_s=ones if trains else zeros,
                backward_weight_s=ones if trains else zeros,
                update_s=zeros,
                transfer_s=zeros[1:],
                state_bytes=zeros,
                in_flight_bytes=zeros,
                working_bytes=zeros,
            )
            step_s = simulate(make_schedule(name, stages, count, submeshes), costs).step_time_s
            assert 0.5 * step_s <= form.total_s(zeros, overlaps=True) <= 2 * step_s

    def test_a_predicted_trace_shows_all_tasks(self, name):
        if not KINDS[name].trains:
            return
        plan = plan_of(num_stages=4, num_micro_batches=8, schedule=name)
        events = [
            e for e in planned_trace(plan).events if e.lane == "compute" and e.kind != "update"
        ]
        lists = make_schedule(name, 4, 8, plan.num_submeshes).lists
        tasks = {
            (s, t.stage, t.micro_batch, t.kind.value) for s, row in enumerate(lists) for t in row
        }
        assert {(e.submesh, e.stage, e.micro_batch, str(e.kind)) for e in events} == tasks


@pytest.mark.parametrize("name", TRAINING)
class TestEveryTrainingSchedule:
    @pytest.mark.parametrize("inter", INTERS.values(), ids=INTERS)
    def test_planners_can_choose_the_schedule(self, name, inter):
        chain = even_chain(8, devices=4, micro_batches=8)
        try:
            inter.check_limits(limits := StageLimits(schedule=name))
        except aq.InputError:
            return
        plan = plan_chain(chain, inter, limits=limits)
        assert plan.schedule == name

    @pytest.mark.parametrize("seed", range(4))
    def test_stages_that_fit_by_closed_form_fit_when_simulated(self, name, seed):
        chain = random_chain(np.random.default_rng(seed), num_units=8, geometry=(1, 4))
        try:
            plan = plan_chain(chain, StageDP(schedules=(name,), simulated=1))
        except aq.InfeasibleError:
            return
        assert simulate_stages(chain, plan)[1] <= plan.peak_bytes * (1 + 1e-9)

    def test_prefix_sums_and_stages_give_the_same_closed_form(self, name):
        chain = even_chain(8, devices=4, micro_batches=8)
        plan = plan_chain(chain, StageDP(schedules=(name,)))
        chunks = len(plan.stages) // plan.num_submeshes
        form = KINDS[name].closed_form(PrefixSums.of(chain), chain.num_micro_batches, chunks)
        rows = [(s.option, s.first_unit, s.last_unit) for s in plan.stages]
        sums = np.array([form.sums[o, j] - form.sums[o, i] for o, i, j in rows])
        edges = form.transfers * np.array([f.transfer_s for f in plan.figures])
        total = float((sums + edges).sum())
        for term in form.maxima:
            values = [term.sums[o, j] - term.sums[o, i] for o, i, j in rows]
            total += term.weight * max(
                v + term.transfers * f.transfer_s for v, f in zip(values, plan.figures, strict=True)
            )
        assert plan.closed_form_s == pytest.approx(total)

    def test_stages_that_share_submeshes_follow_the_placement(self, name):
        if not KINDS[name].interleaves:
            return
        chain = even_chain(8, devices=4, micro_batches=8)
        half = next(o.name for o in chain.options if o.num_devices == 2)
        cuts = tuple((2 * k, 2 * k + 2) for k in range(4))
        manual = ManualStages(boundaries=cuts, options=(half,) * 4, schedule=name, num_submeshes=2)
        plan = plan_chain(chain, manual)
        places = KINDS[name].placement(4, 2)
        assert [s.first_device for s in plan.stages] == [2 * place for place in places]
        # What stays on its devices does not travel.
        assert [f.transfer_s > 0 for f in plan.figures[1:]] == [
            a != b for a, b in zip(places, places[1:])
        ]
        swapped = judge_stages(chain, plan.stages[::-1], name, num_submeshes=2).stages
        assert find_stage_faults(chain, swapped, name, num_submeshes=2)


# Those that Aliquot has run in tests of pipelines, too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SCHEDULES and name != "1f1b" else ())
        for name in TRAINING
    ],
)
def test_a_saved_plan_with_the_schedule_runs(name):
    stages = 4 if KINDS[name].interleaves else 2
    method = aq.PipeshardParallel(num_stages=stages, num_micro_batches=4, schedule=name)
    plan = aq.plan(train_step, STATE, BATCH, cluster=aq.Cluster.preset("4xcpu"), method=method)
    assert (
        violations(plan) == []
        and plan.schedule == name
        and (plan.num_submeshes < stages) == KINDS[name].interleaves
    )
    assert Plan.from_json(plan.to_json()) == plan
    step = aq.parallelize(train_step, plan, devices=jax.devices()[:4])
    state = state_of(init(jax.random.key(0)))
    tokens = jax.random.randint(jax.random.key(1), (64,), 0, 256)
    batch = {"tokens": tokens, "targets": (tokens * 7) % 256}
    want, metrics = jax.jit(train_step)(state, batch)
    new, found = step(step.init(lambda k: state_of(init(k)), jax.random.key(0)), batch)
    assert float(found["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=1e-4, atol=1e-6)
