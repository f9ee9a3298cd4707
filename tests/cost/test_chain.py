"""Tables of a chain against sums written out, transfers and closed forms against figures worked out
by hand.
"""

from dataclasses import replace

import numpy as np
import pytest
from planners.inter.chains import even_chain, random_chain

from aliquot.cluster import Link
from aliquot.core import InputError
from aliquot.cost import (
    PrefixSums,
    StageChoice,
    chain_in_flight,
    find_stage_faults,
    judge_stages,
    simulate_stages,
)
from aliquot.plans import make_schedule

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved-1f1b")


@pytest.mark.parametrize("seed", range(6))
def test_any_run_of_units_is_a_lookup(seed):
    chain = random_chain(np.random.default_rng(seed), num_units=9, geometry=(2, 2))
    tables = PrefixSums.of(chain)
    for o in range(len(chain.options)):
        runs = np.isfinite(chain.forward_s[:, o])
        for i in range(9):
            ends = [j for j in range(i, 10) if runs[i:j].all()]
            assert tables.last_end[o, i] == ends[-1]
            for j in ends[1:]:
                kept = chain.state_bytes[i:j, o].sum() + 3 * chain.in_flight_bytes[i:j, o].sum()
                working = chain.working_bytes[i:j, o].max() + chain.recomputed_bytes[i:j, o].sum()
                assert tables.stage_bytes(o, i, j, 3) == pytest.approx(kept + working)
                assert tables.stage_bytes(o, i, j, 3, chunks=2) == pytest.approx(
                    2 * (kept + working)
                )
                assert tables.backward_s[o, j] - tables.backward_s[o, i] == pytest.approx(
                    chain.backward_s[i:j, o].sum()
                )


@pytest.mark.parametrize(
    ("forward", "inputs", "weights", "exposed"),
    [(1, 1, 1, 1), (2, 3, 1, 4), (1, 2, 5, 2), (4, 1, 3, 4), (1, 1, 0, 2)],
)
def test_time_that_zero_bubble_schedules_cannot_fill(forward, inputs, weights, exposed):
    chain = even_chain(1, devices=1)
    ones = np.ones((1, 1))
    chain = replace(
        chain,
        forward_s=forward * ones,
        backward_s=(inputs + weights) * ones,
        weight_gradient_s=weights * ones,
    )
    assert PrefixSums.of(chain).exposed_s[0, 1] == exposed


@pytest.mark.parametrize(
    ("sender", "receiver", "crosses", "seconds"),
    [
        (1, 1, False, 80 / 10 + 0.5),
        (4, 2, False, 80 / 20 + 0.5),
        (1, 4, True, 80 / 10 + 2),  # One device does not fill its host's network.
        (4, 4, True, 80 / 20 + 2),  # Four share it.
        (8, 8, True, 80 / 40 + 2),
        (8, 4, True, 80 / 20 + 2),
    ],
)
def test_transfers(sender, receiver, crosses, seconds):
    chain = replace(
        even_chain(2, devices=4),
        num_hosts=2,
        intra=Link(latency_s=0.5, bandwidth_bytes_per_s=10),
        inter=Link(latency_s=2, bandwidth_bytes_per_s=20),
    )
    assert chain.transfer_s(80, sender, receiver, crosses) == pytest.approx(seconds)
    assert chain.transfer_s(0, sender, receiver, crosses) == 0


def _even_stages(num_units, count, submeshes):
    size = num_units // count
    return [
        StageChoice(
            first_unit=k * size, last_unit=(k + 1) * size, option=0, first_device=k % submeshes
        )
        for k in range(count)
    ]


@pytest.mark.parametrize(
    ("schedule", "count", "seconds"),
    # Four devices, 8 micro-batches, 3 s for each of 8 units, of which 1 s forward and 1 s for
    # gradients of weights.
    [
        ("gpipe", 4, (8 + 3) * 6),
        ("1f1b", 4, (8 + 3) * 6),
        ("zero-bubble", 4, 8 * 6 + 3 * 2),
        ("interleaved-1f1b", 8, 8 * 6 + 3 * 6 / 2),
    ],
)
def test_closed_forms_of_equal_stages(schedule, count, seconds):
    """Without transfers these are what the schedules' tasks take."""
    chain = even_chain(8, devices=4, micro_batches=8)
    chain = replace(chain, boundary_bytes=np.zeros(8), once_s=0 * chain.once_s)
    plan = judge_stages(chain, _even_stages(8, count, 4), schedule, num_submeshes=4)
    assert plan.closed_form_s == pytest.approx(seconds)
    simulated, peak_bytes = simulate_stages(chain, plan)
    assert simulated.step_time_s == pytest.approx(seconds)
    assert peak_bytes <= plan.peak_bytes + 1e-9


@pytest.mark.parametrize("overlaps", [False, True])
def test_closed_form_of_unequal_stages(overlaps):
    """1f1b, stages of 1 and 3 units, an edge of 2 s: it belongs to the second stage's pace unless
    it overlaps.
    """
    chain = replace(
        even_chain(4, devices=2, micro_batches=5),
        boundary_bytes=np.full(4, 2.0),
        overlaps_transfers=overlaps,
    )
    stages = [
        StageChoice(first_unit=0, last_unit=1, option=0, first_device=0),
        StageChoice(first_unit=1, last_unit=4, option=0, first_device=1),
    ]
    pace = 9 if overlaps else 9 + 4
    assert judge_stages(chain, stages, "1f1b").closed_form_s == pytest.approx(
        3 + 9 + 4 + 4 * pace + 0.3
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 9])
def test_in_flight_covers_the_tasks(schedule, micro_batches):
    for submeshes in (1, 2, 3, 5):
        count = submeshes * (2 if schedule == "interleaved-1f1b" else 1)
        lists = make_schedule(schedule, count, micro_batches, submeshes)
        kept = chain_in_flight(schedule, micro_batches, count, submeshes)
        assert all(lists.in_flight(k) <= kept[k] <= micro_batches for k in range(count))
        if schedule != "zero-bubble":
            assert [lists.in_flight(k) for k in range(count)] == kept.tolist()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_that_fit_by_closed_form_fit_when_simulated(schedule, seed):
    chain = random_chain(np.random.default_rng(seed), num_units=12, geometry=(1, 2), most_options=1)
    chain = replace(chain, options=(replace(chain.options[0], submesh=(1, 1)),))
    if np.isinf(chain.forward_s).any():
        chain = replace(chain, forward_s=np.ones_like(chain.forward_s))
    count = 4 if schedule == "interleaved-1f1b" else 2
    edges = [
        0,
        *sorted(np.random.default_rng(seed).permutation(np.arange(1, 12))[: count - 1].tolist()),
        12,
    ]
    stages = [
        StageChoice(first_unit=i, last_unit=j, option=0, first_device=k % 2)
        for k, (i, j) in enumerate(zip(edges, edges[1:]))
    ]
    assert find_stage_faults(chain, stages, schedule, num_submeshes=2) == ()
    plan = judge_stages(chain, stages, schedule, num_submeshes=2)
    assert simulate_stages(chain, plan)[1] <= plan.peak_bytes * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_whole_of_a_backward_pass_may_be_for_weights(seed):
    """Sums of stretches are differences of prefix sums, which round; a part never exceeds the
    whole.
    """
    rng = np.random.default_rng(seed)
    chain = random_chain(rng, num_units=12, geometry=(1, 2), most_options=1)
    passes = rng.random((12, 1))
    chain = replace(
        chain, forward_s=passes, backward_s=passes, weight_gradient_s=passes * (1 + 5e-10)
    )
    for first in range(12):
        for last in range(first + 1, 13):
            stage = StageChoice(first_unit=first, last_unit=last, option=0, first_device=0)
            (figures,) = chain.quote([stage], [1.0])
            assert figures.weight_gradient_s <= figures.backward_s


def test_wrong_chains_say_everything():
    chain = even_chain(3, devices=2)
    with pytest.raises(InputError) as caught:
        replace(
            chain,
            forward_s=chain.forward_s[:2],
            backward_s=-chain.backward_s,
            num_micro_batches=0,
            options=(chain.options[0], replace(chain.options[1], submesh=(2, 1))),
        )
    for said in (
        "`forward_s` has shape (2, 2), expected (3, 2)",
        "`backward_s` has entries",
        "is 0",
        "2x1 of 1x2",
    ):
        assert said in str(caught.value)
    with pytest.raises(InputError, match="exceeds it"):
        replace(chain, weight_gradient_s=chain.backward_s * 2)
    with pytest.raises(InputError, match="infinite entries"):
        replace(chain, boundary_bytes=np.full(3, np.inf))


def test_unknown_schedule():
    with pytest.raises(InputError, match="did you mean 'gpipe'"):
        judge_stages(even_chain(1, devices=1), _even_stages(1, 1, 1), "gpip")


def test_schedules_that_defer_weight_gradients_count_the_arrays_kept_for_them():
    ones = np.ones((1, 2))
    in_flight, deferred = np.array([[4.0], [1.0]]), np.array([[2.0], [3.0]])
    chain = replace(
        even_chain(2, devices=2), in_flight_bytes=in_flight * ones, deferred_bytes=deferred * ones
    )
    assert chain.under("1f1b") is chain and chain.under("zero-bubble") is chain.under("zero-bubble")
    assert chain.under("zero-bubble").in_flight_bytes[:, 0].tolist() == [4.0, 3.0]
    stages = [
        StageChoice(first_unit=k, last_unit=k + 1, option=0, first_device=k) for k in range(2)
    ]
    held = [f.held_bytes for f in judge_stages(chain, stages, "zero-bubble").figures]
    assert held == [2 * 4.0, 2 * 3.0]
    assert [f.held_bytes for f in judge_stages(chain, stages, "1f1b").figures] == [2 * 4.0, 1.0]
