"""Recomputation of single stages, also of stages that share devices."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planners.inter.chains import even_chain

from aliquot.cost import UNIT_FIGURES, find_stage_faults, judge_stages, simulate_stages
from aliquot.planners.inter import EqualStages, StageDP
from aliquot.planners.inter._less_recomputed import recomputing_less

NAME = "interleaved-1f1b"


def chain_that_recomputes(num_units, *, limit_bytes, micro_batches=8):
    """An even chain on two devices, each of whose options may recompute: a unit then repeats 1 s of
    work for each micro-batch, of which it keeps 0.1 bytes instead of 1, and 1 byte once.
    """
    chain = even_chain(num_units, devices=2, micro_batches=micro_batches)
    added = {name: getattr(chain, name).copy() for name in UNIT_FIGURES}
    added["backward_s"] += chain.forward_s
    added["state_bytes"] += 1
    added["in_flight_bytes"] = 0.1 * chain.in_flight_bytes
    added["weight_gradient_s"] = 0 * chain.weight_gradient_s
    added["deferred_bytes"] = 0 * chain.deferred_bytes
    return replace(
        chain,
        options=(
            *chain.options,
            *(replace(o, name=f"{o.name}, recompute", recompute="stage") for o in chain.options),
        ),
        memory_limit_bytes=limit_bytes,
        **{
            name: np.concatenate([getattr(chain, name), column], axis=1)
            for name, column in added.items()
        },
    )


def recomputed(chain, plan):
    return [chain.options[stage.option].recompute == "stage" for stage in plan.stages]


@pytest.mark.parametrize(
    ("limit_bytes", "wanted"),
    [
        (29.0, [0, 0, 0, 0, 0, 0, 0, 0]),
        # The first chunks of each submesh have the most micro-batches in flight.
        (27.0, [1, 0, 0, 0, 0, 0, 0, 0]),
        (26.5, [1, 1, 0, 0, 0, 0, 0, 0]),
        (24.5, [1, 1, 1, 0, 0, 0, 0, 0]),
        (23.5, [1, 1, 1, 1, 1, 0, 0, 0]),
        # The first submesh needs all of it, and the second only two of four.
        (22.9, [1, 1, 1, 1, 1, 0, 1, 0]),
    ],
)
def test_only_as_many_chunks_recompute_as_have_to(limit_bytes, wanted):
    chain = chain_that_recomputes(8, limit_bytes=limit_bytes)
    plan = EqualStages(data=1, tensor=1, num_submeshes=2, chunks=4).solve([chain])
    assert recomputed(chain, plan) == wanted
    # No other choice of chunks that fits takes less time.
    for options in itertools.product([0, 2], repeat=8):
        stages = [replace(s, option=o) for s, o in zip(plan.stages, options, strict=True)]
        if not find_stage_faults(chain, stages, NAME, num_submeshes=2):
            other = judge_stages(chain, stages, NAME, num_submeshes=2)
            assert plan.step_time_s <= simulate_stages(chain, other)[0].step_time_s * (1 + 1e-9)


def test_the_search_chooses_for_each_chunk():
    """With an equal part of the memory for each chunk, the first two on each submesh would have to
    recompute; together, only one has to.
    """
    chain = chain_that_recomputes(8, limit_bytes=28.0)
    plan = StageDP(schedules=(NAME,), num_stages=8).solve([chain])
    assert recomputed(chain, plan) == [1, 0, 0, 0, 0, 0, 0, 0]
    alone = [figures.peak_bytes > chain.memory_limit_bytes for figures in plan.figures]
    assert alone == [False, True, True, True, False, False, False, False]
    assert plan.peak_bytes <= chain.memory_limit_bytes
    assert plan.gap is not None and plan.gap >= 0


def test_nothing_is_found_where_nothing_fits():
    chain = chain_that_recomputes(8, limit_bytes=100.0)
    stages = EqualStages(data=1, tensor=1, num_submeshes=2, chunks=4).solve([chain]).stages
    all_of_them = [replace(stage, option=2) for stage in stages]
    for limit_bytes, count in ((22.1, 0), (22.3, 1)):
        tight = replace(chain, memory_limit_bytes=limit_bytes)
        plan = judge_stages(tight, all_of_them, NAME, num_submeshes=2)
        assert len(list(recomputing_less(tight, plan))) == count


def test_chunks_on_the_same_devices_recompute_in_turn():
    chain = chain_that_recomputes(8, limit_bytes=100.0)
    again = np.array([[option.recompute == "stage" for option in chain.options]] * 8)
    with_arrays = replace(chain, recomputed_bytes=5.0 * again)
    stages = EqualStages(data=1, tensor=1, num_submeshes=2, chunks=4).solve([chain]).stages
    all_of_them = [replace(stage, option=2) for stage in stages]
    peaks = []
    for each in (chain, with_arrays):
        plan = judge_stages(each, all_of_them, NAME, num_submeshes=2)
        peaks.append((*plan.submesh_bytes, simulate_stages(each, plan)[1]))
    # A stage has one unit, and four stages share a submesh.
    assert np.subtract(*reversed(peaks)) == pytest.approx([5.0, 5.0, 5.0])
