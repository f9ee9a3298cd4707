"""The simulation of a schedule, against one that goes through time tick by tick, and against the
textbook.
"""

import re
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.core import InputError
from aliquot.cost import StageCosts, simulate
from aliquot.plans import (
    SCHEDULES,
    Schedule,
    Task,
    TaskKind,
    dependencies,
    make_schedule,
    schedule_kind,
)

FORWARD, BACKWARD = TaskKind.FORWARD, TaskKind.BACKWARD
FIRST_HALF, SECOND_HALF = TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
WHOLE_STEP = st.sampled_from([(FORWARD, BACKWARD), (FORWARD, FIRST_HALF, SECOND_HALF), (FORWARD,)])


def stage_costs(forward_s, backward_s=None, **others) -> StageCosts:
    """Costs with zeros for all that is not given; a whole backward task counts as work on
    weights.
    """
    zeros = np.zeros(len(forward_s))
    given_s = {
        "forward_s": forward_s,
        "backward_weight_s": zeros if backward_s is None else backward_s,
    }
    names = ("backward_input_s", "update_s", "state_bytes", "in_flight_bytes", "working_bytes")
    return StageCosts(
        **{**dict.fromkeys(names, zeros), "transfer_s": zeros[1:], **given_s, **others}
    )


@st.composite
def schedules(draw):
    """Any order of any tasks that can be run, on lists of any number of submeshes."""
    stages = draw(st.integers(1, 4))
    micro_batches, submeshes = draw(st.integers(1, 4)), draw(st.integers(1, stages))
    kinds = draw(WHOLE_STEP)
    left = [Task(s, m, kind) for s in range(stages) for m in range(micro_batches) for kind in kinds]
    random, done = draw(st.randoms(use_true_random=False)), []
    while left:
        task = random.choice(
            [t for t in left if all(read in done for read in dependencies(t, stages))]
        )
        left.remove(task)
        done.append(task)
    lists = tuple(
        tuple(t for t in done if t.stage % submeshes == submesh) for submesh in range(submeshes)
    )
    return Schedule(
        name="any",
        num_stages=stages,
        num_micro_batches=micro_batches,
        num_submeshes=submeshes,
        lists=lists,
        early_updates=draw(st.frozensets(st.integers(0, stages - 1))),
    )


@st.composite
def pipelines(draw, shortest=0):
    """A schedule with costs in whole numbers, so that sums are exact."""
    schedule = draw(schedules())

    def numbers(count, least=shortest):
        return draw(st.lists(st.integers(least, 5), min_size=count, max_size=count))

    stages = schedule.num_stages
    costs = StageCosts(
        forward_s=numbers(stages),
        backward_input_s=numbers(stages),
        backward_weight_s=numbers(stages),
        update_s=numbers(stages, 0),
        transfer_s=numbers(stages - 1, 0),
        transfer_back_s=numbers(stages - 1, 0),
        state_bytes=numbers(stages, 0),
        in_flight_bytes=numbers(stages, 0),
        deferred_bytes=numbers(stages, 0),
        handed_bytes=numbers(stages, 0),
        working_bytes=numbers(stages, 0),
        overlaps_transfers=draw(st.booleans()),
    )
    return schedule, costs


def duration(costs, task) -> int:
    halves = costs.backward_input_s[task.stage], costs.backward_weight_s[task.stage]
    return int(
        {FORWARD: costs.forward_s[task.stage], FIRST_HALF: halves[0], SECOND_HALF: halves[1]}.get(
            task.kind, sum(halves)
        )
    )


def tick_by_tick(schedule, costs):
    """`{task: (start, end)}` with early updates by their stages, and for each submesh how many
    ticks it is busy and the end of the last of them.

    Looks at everything again in every tick.
    """
    submeshes = range(schedule.num_submeshes)
    todo = [list(tasks) for tasks in schedule.lists]
    running = {}  # submesh -> [task, stage to update or "transfer", ticks left]
    by_stage = [[t for t in sum(todo, []) if t.stage == k] for k in range(schedule.num_stages)]
    updates = {by_stage[k][-1]: k for k in schedule.early_updates}  # by the task before
    queues = {
        (a, b): [] for a in submeshes for b in submeshes
    }  # link -> waiting [ticks left, what arrives]
    moving = []  # without overlap: [ticks left, what arrives, its two ends]
    asked = []  # without overlap: (ticks, what arrives, its two ends)
    present, start, end = set(), {}, {}
    busy, last = [0] * len(submeshes), [0] * len(submeshes)
    back_s = costs.transfer_back_s
    now = 0
    while any(todo) or running:
        changed = True
        while changed:
            changed = False
            for entry in [entry for entry in moving if entry[0] == 0]:
                moving.remove(entry)
                present.add(entry[1])
                for submesh in entry[2]:
                    del running[submesh]
                changed = True
            for queue in queues.values():
                while queue and queue[0][0] == 0:
                    present.add(queue.pop(0)[1])
                    changed = True
            for submesh in submeshes:
                task, left = running.get(submesh, (None, None))
                if not isinstance(task, Task | int) or left:
                    continue
                del running[submesh]
                end[task] = now
                changed = True
                if isinstance(task, int):
                    continue
                if task in updates:
                    todo[submesh].insert(0, updates[task])
                target = task.stage + 1 if task.kind is FORWARD else task.stage - 1
                if task.kind is SECOND_HALF or not 0 <= target < schedule.num_stages:
                    continue
                ticks = int(
                    costs.transfer_s[task.stage] if task.kind is FORWARD else back_s[target]
                )
                ends = submesh, target % schedule.num_submeshes
                if ticks == 0 or ends[0] == ends[1]:
                    present.add((target, task.micro_batch, task.kind))
                elif costs.overlaps_transfers:
                    queues[ends].append([ticks, (target, task.micro_batch, task.kind)])
                else:
                    asked.append((ticks, (target, task.micro_batch, task.kind), ends))
            for request in list(asked):
                ticks, what, ends = request
                if not set(ends) & set(running):
                    asked.remove(request)
                    moving.append([ticks, what, ends])
                    running.update(dict.fromkeys(ends, ("transfer", None)))
                    changed = True
            for submesh in submeshes:
                if (
                    submesh in running
                    or not todo[submesh]
                    or any(ends[0] == submesh for _, _, ends in asked)
                ):
                    continue
                task = todo[submesh][0]
                is_update = isinstance(task, int)
                reads = () if is_update else dependencies(task, schedule.num_stages)
                here = all(
                    (
                        read in end
                        if read.stage == task.stage
                        else (task.stage, task.micro_batch, task.kind) in present
                    )
                    for read in reads
                )
                if here:
                    start[task] = now
                    ticks = int(costs.update_s[task]) if is_update else duration(costs, task)
                    running[submesh] = [todo[submesh].pop(0), ticks]
                    changed = True
        for submesh, entry in running.items():
            busy[submesh] += 1
            last[submesh] = now + 1
            if isinstance(entry[0], Task | int):
                entry[1] -= 1
        for entry in moving:
            entry[0] -= 1
        for queue in queues.values():
            if queue:
                queue[0][0] -= 1
        now += 1
        assert now < 10_000
    return {task: (start[task], end[task]) for task in end}, busy, last


@given(pipelines())
@settings(deadline=None, max_examples=300)
def test_same_as_tick_by_tick(pipeline):
    schedule, costs = pipeline
    times = simulate(schedule, costs)
    wanted, busy, last = tick_by_tick(schedule, costs)
    finished = []
    for submesh, tasks in enumerate(schedule.lists):
        found = list(zip(times.start_s[submesh].tolist(), times.end_s[submesh].tolist()))
        assert found == [wanted[task] for task in tasks]
        mine = schedule.stages_of(submesh)
        update = sum(costs.update_s[k] for k in mine if k not in schedule.early_updates)
        assert times.busy_s[submesh] == busy[submesh] + update
        now = max(last[submesh], found[-1][1])
        for k in mine:
            starts = wanted[k][0] if k in schedule.early_updates else now
            assert times.update_start_s[k] == starts
            now += 0 if k in schedule.early_updates else costs.update_s[k]
        finished.append(now)
    assert times.step_time_s == max(finished)
    if times.step_time_s:
        assert times.bubble_share.tolist() == [
            1 - seconds / times.step_time_s for seconds in times.busy_s
        ]


@given(pipelines(shortest=1))
@settings(deadline=None, max_examples=150)
def test_memory_at_every_moment(pipeline):
    """Between any two ticks, what has been begun and not yet ended, by the times of the
    simulation.
    """
    schedule, costs = pipeline
    times = simulate(schedule, costs)
    span = {}
    for submesh, tasks in enumerate(schedule.lists):
        span |= dict(zip(tasks, zip(times.start_s[submesh], times.end_s[submesh])))
    for submesh, tasks in enumerate(schedule.lists):
        most = 0.0
        for moment in np.arange(0.5, times.step_time_s + 1):
            now = sum(
                costs.state_bytes[stage]
                for stage in range(schedule.num_stages)
                if stage % len(times.busy_s) == submesh
            )
            for task in tasks:
                stage, micro_batch, (begin, end) = task.stage, task.micro_batch, span[task]
                now += costs.working_bytes[stage] * (begin < moment < end)
                if task.kind is FORWARD:
                    first = next(
                        k
                        for k in (BACKWARD, FIRST_HALF, FORWARD)
                        if Task(stage, micro_batch, k) in span
                    )
                    released = span[Task(stage, micro_batch, first)][1]
                    now += costs.in_flight_bytes[stage] * (begin < moment < released)
                if task.kind is FIRST_HALF:
                    now += costs.handed_bytes[stage] * (begin < moment < end)
                if task.kind is SECOND_HALF:
                    now += costs.deferred_bytes[stage] * (
                        span[Task(stage, micro_batch, FIRST_HALF)][1] < moment < end
                    )
            most = max(most, now)
        assert times.peak_bytes[submesh] == most


def closed_form_s(name, forward, backward, micro_batches):
    """Step time of stages along the last axis, without transfers and updates."""
    zeros = np.zeros_like(forward)
    times = types.SimpleNamespace(
        forward_s=forward,
        backward_s=backward,
        weight_gradient_s=zeros,
        exposed_s=zeros,
        once_s=zeros,
    )
    return SCHEDULES[name].closed_form(times, micro_batches).total_s(zeros, overlaps=True)


stage_seconds = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7)


@given(stage_seconds, st.integers(1, 12))
@settings(deadline=None, max_examples=150)
def test_formulas(stages, micro_batches):
    forward, backward = np.array(stages, float).T
    costs = stage_costs(forward, backward)
    found = {
        name: simulate(make_schedule(name, len(stages), micro_batches), costs).step_time_s
        for name in ("gpipe", "1f1b", "inference")
    }
    for name in ("gpipe", "inference"):
        assert found[name] == closed_form_s(name, forward, backward, micro_batches)
    assert found["1f1b"] <= found["gpipe"]
    backward = 2 * forward
    costs = stage_costs(forward, backward)
    found_proportional = simulate(
        make_schedule("1f1b", len(stages), micro_batches), costs
    ).step_time_s
    assert found_proportional <= closed_form_s("1f1b", forward, backward, micro_batches)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_1f1b_of_equal_stages_is_the_formula(forward, backward, stages, micro_batches):
    forward_s, backward_s = np.full(stages, forward), np.full(stages, backward)
    found = simulate(
        make_schedule("1f1b", stages, micro_batches), stage_costs(forward_s, backward_s)
    ).step_time_s
    assert found == closed_form_s("1f1b", forward_s, backward_s, micro_batches)


def test_1f1b_may_take_longer_than_its_formula():
    """The second stage must run another forward task, which the first makes late, before its first
    backward task.
    """
    forward, backward = np.array([10.0, 0.0, 0.0]), np.array([0.0, 10.0, 0.0])
    assert simulate(make_schedule("1f1b", 3, 3), stage_costs(forward, backward)).step_time_s == 50
    assert closed_form_s("1f1b", forward, backward, 3) == 40


def test_formulas_of_many_candidates():
    forward, backward = np.arange(24.0).reshape(2, 3, 4), np.arange(24.0)[::-1].reshape(2, 3, 4)
    together = closed_form_s("1f1b", forward, backward, np.array([1, 2, 5]))
    assert together.shape == (2, 3)
    assert together[1, 2] == closed_form_s("1f1b", forward[1, 2], backward[1, 2], 5) == 92 + 4 * 23


def test_no_formula():
    with pytest.raises(InputError, match="Unknown schedule '1f1': did you mean '1f1b'"):
        schedule_kind("1f1")


def test_transfers_of_one_link_queue():
    """Two micro-batches, forward 1 s, the link 5 s: the second arrives at 11 s, not at 7 s."""
    schedule = make_schedule("inference", 2, 2)
    times = simulate(schedule, stage_costs(np.ones(2), transfer_s=[5.0]))
    assert times.start_s[1].tolist() == [6.0, 11.0] and times.start_s[0].tolist() == [0.0, 1.0]
    blocking = simulate(
        schedule, stage_costs(np.ones(2), transfer_s=[5.0], overlaps_transfers=False)
    )
    assert blocking.start_s[0].tolist() == [0.0, 6.0] and blocking.busy_s.tolist() == [12.0, 12.0]


def test_1f1b_waits_for_transfers_that_overlap():
    """Four stages, a second each way: three round trips' worth for every four micro-batches. GPipe
    waits once.
    """
    costs = stage_costs(np.full(4, 10.0), np.full(4, 20.0), transfer_s=np.ones(3))

    def later(name, micro_batches):
        found = simulate(make_schedule(name, 4, micro_batches), costs).step_time_s
        return found - closed_form_s(name, costs.forward_s, costs.backward_weight_s, micro_batches)

    assert later("1f1b", 44) - later("1f1b", 4) == 40 * 2 * 3 / 4
    assert later("gpipe", 44) == later("gpipe", 4) == 6


def test_chunks_of_a_submesh_share_its_memory():
    schedule = make_schedule("interleaved-1f1b", 4, 4, 2)
    sizes = np.array([1.0, 10.0, 100.0, 1000.0])
    times = simulate(
        schedule, stage_costs(np.ones(4), np.ones(4), state_bytes=sizes, in_flight_bytes=sizes)
    )
    # At the peak stage 0 has 3 in flight and stage 2 has 2; stage 1 has 2 and stage 3 has 1.
    assert times.peak_bytes.tolist() == [101 + 3 + 200, 1010 + 20 + 1000]
    assert times.in_flight.tolist() == [4, 3, 2, 1]


def test_bubble_of_equal_stages():
    times = simulate(make_schedule("1f1b", 4, 8), stage_costs(np.ones(4), np.full(4, 2.0)))
    assert times.bubble_share.tolist() == pytest.approx([3 / 11] * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer_s": np.zeros(2)}, "transfer_s has shape (2,) where forward_s calls for (1,)"),
        ({"state_bytes": np.zeros(3)}, "state_bytes has shape (3,) where forward_s calls for (2,)"),
        ({"update_s": np.array([0, -1])}, "update_s has entries below zero or not finite"),
        (
            {"working_bytes": np.array([0, np.nan])},
            "working_bytes has entries below zero or not finite",
        ),
    ],
)
def test_impossible_costs(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        stage_costs(np.ones(2), **changes)


def test_costs_of_other_stages():
    with pytest.raises(InputError, match="costs of 2 stages for a schedule of 3"):
        simulate(make_schedule("gpipe", 3, 1), stage_costs(np.ones(2)))


def test_lists_that_wait_for_one_another():
    lists = (
        (Task(0, 0, FORWARD), Task(0, 0, BACKWARD)),
        (Task(1, 0, BACKWARD), Task(1, 0, FORWARD)),
    )
    schedule = Schedule(name="own", num_stages=2, num_micro_batches=1, num_submeshes=2, lists=lists)
    with pytest.raises(InputError, match="wait for one another"):
        simulate(schedule, stage_costs(np.ones(2)))
