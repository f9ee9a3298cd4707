"""Relief of the bottleneck: figures of many pipelines at once, and answers near the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planners.inter.chains import even_chain, random_chain
from planners.inter.operators import disguised, operators
from planners.test_pipeshard import plan_of

import aliquot as aq
from aliquot.core import InfeasibleError, InputError
from aliquot.cost import StageChoice, StageColumns, judge_stages
from aliquot.planners import Interrupted, StageLimits, method_by_name
from aliquot.planners.inter.bottleneck import Relief
from aliquot.plans import violations

NAMES = StageColumns.__slots__


def pipelines(chain, rng, *, stages, chunks=1):
    """Random cuts and options of equal submeshes: options, first and last units, devices."""
    size = chain.num_devices // (stages // chunks)
    alike = [k for k, o in enumerate(chain.options) if o.num_devices == size]
    options = rng.choice(alike, (5, stages))
    cuts = np.sort([rng.permutation(chain.num_units - 1)[: stages - 1] + 1 for _ in range(5)])
    first = np.concatenate((np.zeros((5, 1), int), cuts), axis=1)
    last = np.concatenate((cuts, np.full((5, 1), chain.num_units)), axis=1)
    devices = np.tile(np.arange(stages) % (stages // chunks) * size, (5, 1))
    return options, first, last, devices


@pytest.mark.parametrize("stages,chunks", [(1, 1), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("geometry", [(1, 4), (2, 2)])
def test_many_pipelines_have_the_figures_of_each(geometry, stages, chunks):
    rng = np.random.default_rng(stages + chunks)
    chain = random_chain(rng, num_units=9, geometry=geometry, most_options=30)
    rows = pipelines(chain, rng, stages=stages, chunks=chunks)
    in_flight = rng.uniform(1, 4, stages).tolist()
    where = {"in_flight": in_flight, "chunks": chunks}
    many = chain.quote_many(*rows[:3], first_device=rows[3], **where)
    for n, row in enumerate(zip(*(each.tolist() for each in rows), strict=True)):
        choices = [
            StageChoice(option=o, first_unit=i, last_unit=j, first_device=d)
            for o, i, j, d in zip(*row, strict=True)
        ]
        if any(chain.find_fault(choice) for choice in choices):
            assert np.isinf(many.peak_bytes[n]).any()
            continue
        for k, figures in enumerate(chain.quote(choices, in_flight, chunks)):
            assert all(getattr(many, name)[n, k] == getattr(figures, name) for name in NAMES)


def test_chains_without_figures_of_many_are_asked_one_stage_at_a_time():
    chain = disguised(even_chain(9, devices=4, micro_batches=8))
    rows = pipelines(chain, np.random.default_rng(0), stages=4)
    where = {"first_device": rows[3], "in_flight": [4.0, 3.0, 2.0, 1.0]}
    found, wanted = (c.quote_many(*rows[:3], **where) for c in (chain, chain.inner))
    for name in NAMES:
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name))
    # Stages within a limit where there are some, else the fastest without a limit.
    for limit_bytes in (300.0, 1.0):
        chain = operators(limit_bytes=limit_bytes)
        columns = [np.array([[each]]) for each in (2, 0, chain.num_units)]
        columns = chain.quote_many(*columns, first_device=np.array([[0]]), in_flight=[2.0])
        (peak_bytes,) = columns.peak_bytes.ravel()
        assert np.isfinite(peak_bytes) and (peak_bytes <= limit_bytes) == (limit_bytes == 300)


@pytest.mark.parametrize("seed", range(8))
def test_stages_are_nearly_as_fast_as_the_best(seed):
    chain = random_chain(
        np.random.default_rng(seed),
        num_units=12,
        geometry=((1, 4), (2, 2))[seed % 2],
        most_options=12,
    )
    best = aq.plan_chain(chain, aq.StageDP())
    for limit_bytes in (1e9, best.peak_bytes):
        limited = replace(chain, memory_limit_bytes=limit_bytes)
        exact, found = (aq.plan_chain(limited, inter) for inter in (aq.StageDP(), aq.Bottleneck()))
        assert found.closed_form_s >= exact.lower_bound_s * (1 - 1e-9)
        assert found.step_time_s <= 1.03 * exact.step_time_s
        assert found.lower_bound_s is None and found.status == "local search"


def test_units_move_away_from_the_slowest_stage():
    chain = even_chain(12, devices=4, micro_batches=8)
    slow = np.where(np.arange(12) == 2, 4.0, 1.0)[:, None]
    chain = replace(chain, forward_s=chain.forward_s * slow, backward_s=chain.backward_s * slow)
    limits = StageLimits(num_stages=4, schedule="1f1b")
    plan = aq.plan_chain(chain, aq.Bottleneck(), limits=limits)
    exact = aq.plan_chain(chain, aq.StageDP(), limits=limits)
    assert plan.step_time_s == pytest.approx(exact.step_time_s)
    counts = [stage.last_unit - stage.first_unit for stage in plan.stages]
    assert max(counts) - min(counts) >= 2


@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_stages_can_be_asked_for(count):
    chain = random_chain(np.random.default_rng(1), num_units=9, geometry=(4, 2), most_options=40)
    assert len(aq.plan_chain(chain, aq.Bottleneck(num_stages=count)).stages) == count


def test_too_many_stages_are_refused_and_bad_settings_listed():
    with pytest.raises(InputError, match="10 stages were asked for, but the step has 9 layers"):
        aq.plan_chain(even_chain(9, devices=4), aq.Bottleneck(num_stages=10))
    with pytest.raises(InputError) as refused:
        aq.Bottleneck(max_steps=0, starts=-1, schedules=("1f1", "gpipe"))
    for part in ("max_steps must be at least 1, got 0", "starts", "'1f1': "):
        assert part in str(refused.value)
    with pytest.raises(InfeasibleError, match="With the submeshes offered"):
        chain = even_chain(9, devices=4)
        aq.plan_chain(
            replace(chain, num_hosts=3, options=chain.options), aq.Bottleneck(num_stages=1)
        )


@pytest.mark.parametrize("intra", [aq.ILP(), aq.Blocks()], ids=["ilp", "blocks"])
def test_it_plans_captured_steps(intra):
    asked = {"cluster": "4xV100-16GB", "intra": intra, "num_micro_batches": 4, "num_stages": 2}
    plan, best = (plan_of(inter=inter, **asked) for inter in (aq.Bottleneck(), aq.StageDP()))
    assert plan.method == "bottleneck" and len(plan.stages) == 2
    assert plan.prediction.step_time_s <= 1.03 * best.prediction.step_time_s


def test_ctrl_c_keeps_the_best_pipeline_so_far(monkeypatch):
    relieve, calls, stops_at = Relief.run, [], 0

    def run(self, **options):
        calls.append(self)
        if len(calls) == stops_at:
            raise KeyboardInterrupt
        return relieve(self, **options)

    monkeypatch.setattr(Relief, "run", run)
    asked = {"cluster": "4xV100-16GB", "inter": aq.Bottleneck(), "num_stages": 2}
    whole = plan_of(**asked)
    # The last call belongs to a number of micro-batches after the first that was solved.
    stops_at, calls[:] = len(calls), []
    with pytest.raises(Interrupted) as stopped:
        plan_of(**asked)
    assert len(stopped.value.plan.stages) == 2 and violations(stopped.value.plan) == []
    assert stopped.value.plan.prediction.step_time_s >= whole.prediction.step_time_s


def test_the_command_line_knows_it():
    assert method_by_name("bottleneck").inter == aq.Bottleneck()


def test_relief_goes_on_from_given_stages():
    """A pipeline one unit away from the best: a single step leads there."""
    chain = random_chain(np.random.default_rng(1), num_units=30, geometry=(1, 4), most_options=12)
    best = aq.plan_chain(chain, aq.StageDP(schedules=("1f1b",)))
    first, second, *others = best.stages
    moved = (
        replace(first, last_unit=first.last_unit - 1),
        replace(second, first_unit=second.first_unit - 1),
        *others,
    )
    start = judge_stages(chain, moved, best.schedule)
    inter = aq.Bottleneck(schedules=("1f1b",), max_steps=1, starts=1)
    alone = aq.plan_chain(chain, inter)
    found = aq.plan_chain(chain, inter, start=start)
    assert found.step_time_s < min(start.step_time_s, alone.step_time_s)
