"""StageDP against all ways to cut small chains, and what it says when nothing fits."""

from dataclasses import replace

import numpy as np
import pytest
from planners.inter.chains import GEOMETRIES, compare, even_chain, random_chain

from aliquot.cluster import Link
from aliquot.core import InfeasibleError, InputError
from aliquot.cost import Chain, StageOption, find_stage_faults, judge_stages
from aliquot.planners.inter import Grid, StageDP
from aliquot.planners.inter.stages._devices import DeviceProgram
from aliquot.planners.inter.stages._limits import RunMinima

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved-1f1b", "1f1b-overlap-friendly")


_NUM_CHAINS = 250
REPORT = {
    "name": "inter_brute_force",
    "question": "Are StageDP's stages the best of all ways to cut a chain?",
    "bar": (
        "relative difference of step times (closed form) at most 1e-9 everywhere, no bound above"
        " the best"
    ),
    "method": (
        f"{_NUM_CHAINS} random chains for each schedule (1 to 4 devices in 1 to 3 hosts, up to 7"
        " units and 4 options, some of which cannot run some units; 1 to 16 micro-batches;"
        " transfers that overlap or not), without a memory limit, with two that exclude some cuts"
        " and with one that excludes all; every cut priced by itself from the definitions."
    ),
    "largest": ["difference", "most_cuts"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("part", [0, 1])
def test_the_stages_are_those_of_brute_force(schedule, part):
    """Without a memory limit, at limits that bind, and below the smallest peak."""
    first = 1000 * SCHEDULES.index(schedule) + part
    found = [c for seed in range(first, first + 56, 4) for c in compare(seed, schedule)]
    assert len({c.seed for c in found}) == 14
    assert [c for c in found if c.difference > 1e-9 or c.bound_exceeds] == []
    assert sum(c.best_s is None for c in found) >= 5
    assert sum(c.binds for c in found) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stages_of_many_chains_are_those_of_brute_force(schedule, row):
    first = 10_000 * SCHEDULES.index(schedule)
    seeds = range(first, first + _NUM_CHAINS)
    found = [c for seed in seeds for c in compare(seed, schedule)]
    wrong = [c for c in found if c.difference > 1e-9 or c.bound_exceeds]
    row(
        "Schedules",
        schedule=schedule,
        comparisons=len(found),
        limits_that_exclude_the_best_cut=sum(c.binds for c in found),
        limits_that_exclude_all=sum(c.best_s is None for c in found),
        most_cuts=max(c.num_tried for c in found),
        difference=max(c.difference for c in found),
        wrong=len(wrong),
    )
    assert wrong == []


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_without_an_option_are_those_of_brute_force(schedule, without):
    found = [c for seed in range(12) for c in compare(seed, schedule, without=without)]
    assert [c for c in found if c.difference > 1e-9 or c.bound_exceeds] == []
    assert any(c.best_s is not None for c in found) and any(c.best_s is None for c in found)


@pytest.mark.parametrize("imbalance", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_balanced_stages_are_balanced_and_bounds_are_never_above_brute_force(schedule, imbalance):
    """Stages that are as balanced as is asked for are not searched to a proof."""
    found = [c for seed in range(18) for c in compare(seed, schedule, imbalance=imbalance)]
    assert [c for c in found if c.bound_exceeds or c.breaks_limits] == []
    answered = [c for c in found if c.best_s is not None]
    assert len(answered) >= 3
    assert sum(c.difference <= 1e-9 for c in answered) >= 0.9 * len(answered)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_number_of_stages_is_honoured(schedule, num_stages):
    found = [c for seed in range(6) for c in compare(seed, schedule, num_stages=num_stages)]
    assert found and [c for c in found if c.difference > 1e-9] == []


def test_more_stages_than_units():
    chain = even_chain(4, devices=8)
    with pytest.raises(InputError, match="5 stages were asked for, but the step has 4 layers"):
        StageDP(num_stages=5).solve([chain])
    with pytest.raises(InfeasibleError, match="no 4 stages use all of 1x2 devices"):
        StageDP(num_stages=4, schedules=("1f1b",)).solve([even_chain(4, devices=2)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedules": ()}, "No schedule"),
        ({"schedules": ("1b1f",)}, "did you mean '1f1b'"),
        ({"num_stages": 0}, "at least 1"),
        ({"simulated": 0}, "at least 1"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(InputError, match=message):
        StageDP(**wrong)


def test_chains_must_belong_together():
    chain = even_chain(4, devices=2)
    for chains, message in (
        ([], "No chain"),
        ([chain, chain], "same number"),
        ([chain, replace(even_chain(5, devices=2), num_micro_batches=9)], "different steps"),
    ):
        with pytest.raises(InputError, match=message):
            StageDP().solve(chains)


def test_the_best_number_of_micro_batches_is_chosen():
    """Twice the micro-batches of half the time each: less bubble, until each costs something by
    itself.
    """
    chains = []
    for count in (2, 4, 8, 16, 32):
        chain = even_chain(8, devices=4, micro_batches=count)
        chains.append(
            replace(chain, forward_s=chain.forward_s * 32 / count + 0.4, memory_limit_bytes=20.0)
        )
    alone = [StageDP(schedules=("1f1b",), simulated=1).solve([c]) for c in chains]
    plan = StageDP(schedules=("1f1b",), simulated=1).solve(chains)
    assert plan.closed_form_s == pytest.approx(min(p.closed_form_s for p in alone), rel=1e-3)
    assert plan.num_micro_batches not in (2, 32)
    assert plan.lower_bound_s <= min(p.closed_form_s for p in alone)


@pytest.mark.parametrize("seed", range(12))
def test_no_grid_is_better(seed):
    rng = np.random.default_rng(seed)
    chain = random_chain(
        rng, num_units=int(rng.integers(4, 12)), geometry=GEOMETRIES[seed % len(GEOMETRIES)]
    )
    options = tuple(replace(o, dp=o.num_devices, tp=1) for o in chain.options)
    chain = replace(chain, options=options)
    try:
        grid = Grid().solve([chain])
    except InputError:
        return
    best = StageDP(schedules=("1f1b",), simulated=1, relative_gap=0.0).solve([chain])
    assert best.closed_form_s <= grid.closed_form_s * (1 + 1e-9)
    assert best.lower_bound_s <= grid.closed_form_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_answers_pass_the_judge(schedule):
    """A middle-sized chain with a limit that binds: usable, priced as the judge does, simulated."""
    chain = random_chain(np.random.default_rng(3), num_units=24, geometry=(2, 4), most_options=8)
    free = StageDP(schedules=(schedule,)).solve([chain])
    chain = replace(chain, memory_limit_bytes=free.peak_bytes * 0.9)
    plan = StageDP(schedules=(schedule,)).solve([chain])
    submeshes = plan.num_submeshes
    assert find_stage_faults(chain, plan.stages, schedule, num_submeshes=submeshes) == ()
    judged = judge_stages(chain, plan.stages, schedule, num_submeshes=submeshes)
    assert judged.closed_form_s == plan.closed_form_s >= free.lower_bound_s
    assert plan.lower_bound_s <= plan.closed_form_s
    assert (
        plan.status in ("optimal", "optimal within the gap")
        and "consecutive" in plan.bound_holds_for
    )
    assert plan.step_time_s == pytest.approx(plan.closed_form_s, rel=0.5)


@pytest.mark.parametrize("num_units", [40, 96])
def test_long_chains_are_cut_exactly(num_units):
    """Equal units: what the dynamic program finds is what all cuts into 1, 2, 4 and 8 stages of
    equal options give.
    """
    chain = even_chain(num_units, devices=4, micro_batches=8)
    plan = StageDP(schedules=("1f1b",), simulated=1, relative_gap=1e-9, num_stages=4).solve([chain])
    assert [s.last_unit - s.first_unit for s in plan.stages] == [num_units // 4] * 4
    uneven = replace(chain, memory_limit_bytes=float(num_units // 4 * 4 + num_units // 4 * 3 + 2))
    plan = StageDP(schedules=("1f1b",), simulated=1, relative_gap=1e-9, num_stages=4).solve(
        [uneven]
    )
    sizes = [s.last_unit - s.first_unit for s in plan.stages]
    assert sizes[0] < num_units // 4 < max(sizes) and plan.peak_bytes <= uneven.memory_limit_bytes


@pytest.mark.parametrize("limits", [{"solve_limit": 1}, {"work_limit": 1}], ids=str)
def test_the_bound_is_valid_when_the_solve_limit_ends_the_search(limits):
    chain = random_chain(np.random.default_rng(5), num_units=12, geometry=(2, 2))
    exact = StageDP(schedules=("1f1b",), simulated=1, relative_gap=1e-9).solve([chain])
    hasty = StageDP(schedules=("1f1b",), simulated=1, relative_gap=1e-9, **limits).solve([chain])
    assert hasty.lower_bound_s <= exact.closed_form_s <= hasty.closed_form_s * (1 + 1e-9)
    assert hasty.status == "solve limit" or hasty.gap < 1e-6


def test_a_search_that_ends_at_its_limit_says_so_and_not_that_nothing_fits():
    chain = random_chain(np.random.default_rng(5), num_units=12, geometry=(2, 2))
    with pytest.raises(InfeasibleError, match="within the limits of the search") as caught:
        StageDP(work_limit=0).solve([chain])
    assert caught.value.required_bytes is None


def test_solves_of_one_search_share_the_limit_on_work():
    chain = random_chain(np.random.default_rng(5), num_units=12, geometry=(2, 2))
    alone = StageDP().solve([chain])
    planner = StageDP(work_limit=1e6).for_one_search()
    assert planner.solve([chain]) == alone
    spent = 1e6 - planner.work.left
    assert 0 < spent < 1e6
    planner.solve([chain])
    assert planner.work.left == pytest.approx(1e6 - 2 * spent)


def chain_on_many_devices(hosts: int, num_units: int, micro_batches: int) -> Chain:
    """Options of one device, half a host, and 1, 2, 4, ... hosts of eight devices."""
    submeshes = [(1, 1), (1, 4), *((2**k, 8) for k in range(hosts.bit_length()))]
    options = tuple(
        StageOption(name=f"{h}x{n}", submesh=(h, n), mesh_shape=(h * n,)) for h, n in submeshes
    )
    devices = np.array([option.num_devices for option in options], np.float64)
    each = np.random.default_rng(0).uniform(0.9, 1.1, (num_units, 1)) / devices**0.95
    return Chain(
        unit_names=tuple(f"unit {k}" for k in range(num_units)),
        options=options,
        num_micro_batches=micro_batches,
        forward_s=each,
        backward_s=2 * each,
        weight_gradient_s=each,
        once_s=0.1 * each,
        state_bytes=4 * each,
        in_flight_bytes=each,
        working_bytes=each,
        boundary_bytes=np.full(num_units, 1e-3),
        memory_limit_bytes=1e9,
        num_hosts=hosts,
        devices_per_host=8,
        intra=Link(latency_s=0.0, bandwidth_bytes_per_s=10.0),
        inter=Link(latency_s=0.0, bandwidth_bytes_per_s=1.0),
    )


def test_stages_on_very_many_devices_are_found_within_the_limit():
    """Stages on few devices are too slow for any good plan, so that few places are left."""
    chains = [chain_on_many_devices(512, 32, count) for count in (8, 32, 128)]
    planner = StageDP().for_one_search()
    plan = planner.solve(chains)
    assert plan.status in ("optimal", "optimal within the gap") and plan.gap < 1e-3
    assert planner.work_limit - planner.work.left < 3e7


@pytest.mark.parametrize("limit", [9.0, 13.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_infeasible_errors_name_the_smallest_need(schedule, limit):
    chain = replace(even_chain(8, devices=4, micro_batches=8), memory_limit_bytes=limit)
    with pytest.raises(InfeasibleError) as caught:
        StageDP(schedules=(schedule,)).solve([chain])
    error = caught.value
    assert error.required_bytes > error.available_bytes == int(limit)
    assert sum(error.parts.values()) == pytest.approx(error.required_bytes, abs=1)
    assert set(error.parts) == {"state", "activations in flight", "working memory"}
    for said in ("The smallest found", "on stage", "It could fit with", "such devices (now 4)"):
        assert said in str(error)
    assert ("options that recompute" in str(error)) == (limit > error.parts["state"])


def test_submeshes_that_cannot_fill_the_cluster():
    chain = even_chain(4, devices=4)
    three = tuple(replace(option, submesh=(1, 3), mesh_shape=(3,)) for option in chain.options)
    with pytest.raises(
        InfeasibleError, match=r"submeshes offered \(1x3\), no stages use all of 1x4"
    ):
        StageDP().solve([replace(chain, options=three)])


def test_numbers_of_stages_that_are_too_few_are_not_searched(monkeypatch):
    """Where stages keep as many micro-batches as there are stages, each number of them is a program
    of its own.
    """
    counts = []
    plainly = DeviceProgram._run

    def run(self, reach, kept, num_stages):
        counts.append(num_stages)
        return plainly(self, reach, kept, num_stages)

    monkeypatch.setattr(DeviceProgram, "_run", run)
    chain = replace(even_chain(32, devices=8, micro_batches=16), memory_limit_bytes=49.5)
    plan = StageDP(schedules=("zero-bubble",)).solve([chain])
    assert len(plan.stages) >= 5 and plan.peak_bytes <= 49.5
    assert all(count is None or count >= 4 for count in counts)


def test_minima_of_runs():
    rng = np.random.default_rng(0)
    first, last = rng.integers(0, 9, (2, 5, 3, 7))
    asked = RunMinima((3, 9), first, last)
    for _ in range(2):
        values = rng.random((3, 9))
        found = asked.of(values)
        for place in np.ndindex(5, 3, 7):
            run = values[place[1], first[place] : last[place] + 1]
            assert found[place] == run.min(initial=np.inf)
