"""Schedules: complete, free of circles, within their bounds of memory, and with the bubbles of the
textbook.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.core import InputError
from aliquot.plans import SCHEDULES, Schedule, Task, TaskKind, dependencies, make_schedule

UNITS = {
    TaskKind.FORWARD: 1,
    TaskKind.BACKWARD: 2,
    TaskKind.BACKWARD_INPUT: 1,
    TaskKind.BACKWARD_WEIGHT: 1,
}
KINDS = {
    "inference": {TaskKind.FORWARD},
    "zero-bubble": {TaskKind.FORWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT},
}
WHOLE = {TaskKind.FORWARD, TaskKind.BACKWARD}


@st.composite
def counts(draw):
    """Stages, micro-batches, submeshes."""
    stages = draw(st.integers(1, 9))
    return stages, draw(st.integers(1, 17)), draw(st.integers(1, stages))


def unit_time(schedule) -> int:
    """Until when the tasks run, if forward takes 1 and each half of backward 1. Fails if the order
    is wrong.
    """
    ends: dict[Task, int] = {}
    free = [0] * schedule.num_submeshes
    for task in schedule.order():
        submesh = schedule.submesh_of(task.stage)
        start = max(
            [free[submesh], *(ends[read] for read in dependencies(task, schedule.num_stages))]
        )
        ends[task] = free[submesh] = start + UNITS[task.kind]
    return max(free)


def text(tasks) -> str:
    """Short names, such as `f0 b0`; in lists with chunks `f2.0`, the stage before the
    micro-batch.
    """
    letters = {"forward": "f", "backward": "b", "backward-input": "i", "backward-weight": "w"}
    chunks = len({task.stage for task in tasks}) > 1
    return " ".join(
        f"{letters[t.kind]}{f'{t.stage}.' if chunks else ''}{t.micro_batch}" for t in tasks
    )


@pytest.mark.parametrize("name", SCHEDULES)
@given(counts())
@settings(deadline=None, max_examples=60)
def test_every_task_once_in_an_order_that_can_be_run(name, sizes):
    stages, micro_batches, submeshes = sizes
    schedule = make_schedule(name, stages, micro_batches, submeshes)
    kinds = KINDS.get(name, WHOLE)
    wanted = {
        Task(s, m, kind) for s in range(stages) for m in range(micro_batches) for kind in kinds
    }
    order = schedule.order()
    assert len(order) == len(wanted) and set(order) == wanted
    for submesh, tasks in enumerate(schedule.lists):
        assert [task for task in order if task.stage % submeshes == submesh] == list(tasks)
    unit_time(schedule)
    assert order == make_schedule(name, stages, micro_batches, submeshes).order()


@given(counts())
@settings(deadline=None, max_examples=60)
def test_the_order_is_by_earliest_start(sizes):
    schedule = make_schedule("1f1b", *sizes)
    ends, free, keys = {}, [0] * schedule.num_submeshes, []
    for task in schedule.order():
        submesh = schedule.submesh_of(task.stage)
        start = max(
            [free[submesh], *(ends[read] for read in dependencies(task, schedule.num_stages))]
        )
        ends[task] = free[submesh] = start + UNITS[task.kind]
        keys.append((start, submesh))
    assert keys == sorted(keys)


@given(counts())
@settings(deadline=None, max_examples=100)
def test_in_flight(sizes):
    stages, micro_batches, submeshes = sizes
    made = {name: make_schedule(name, *sizes) for name in SCHEDULES}
    for stage in range(stages):
        assert made["gpipe"].in_flight(stage) == micro_batches
        assert made["1f1b"].in_flight(stage) == min(micro_batches, stages - stage)
        assert made["zero-bubble"].in_flight(stage) == min(micro_batches, stages)
        until_input = made["zero-bubble"].in_flight(stage, TaskKind.BACKWARD_INPUT)
        assert until_input == min(micro_batches, stages - stage)
        assert made["inference"].in_flight(stage) == 1


@given(counts())
@settings(deadline=None, max_examples=200)
def test_in_flight_of_interleaved_without_its_lists(sizes):
    schedule = make_schedule("interleaved-1f1b", *sizes)
    assert list(SCHEDULES["interleaved-1f1b"].in_flight(*sizes)) == [
        schedule.in_flight(stage) for stage in range(sizes[0])
    ]


@given(counts())
@settings(deadline=None, max_examples=100)
def test_in_flight_of_interleaved(sizes):
    stages, micro_batches, submeshes = sizes
    schedule = make_schedule("interleaved-1f1b", *sizes)
    chunks, rounds = -(-stages // submeshes), max(1, micro_batches // submeshes)
    group = max(submeshes, -(-micro_batches // rounds))
    for submesh, tasks in enumerate(schedule.lists):
        held = most = 0
        for task in tasks:
            held += 1 if task.kind is TaskKind.FORWARD else -1
            most = max(most, held)
        bound = 2 * (submeshes - submesh - 1) + (chunks - 1) * group + 1
        assert most <= (bound if chunks > 1 else stages - submesh)


@pytest.mark.parametrize(
    ("name", "sizes", "lists"),
    [
        ("gpipe", (2, 2, 2), ("f0 f1 b0 b1", "f0 f1 b0 b1")),
        (
            "1f1b",
            (3, 4, 3),
            ("f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"),
        ),
        ("zero-bubble", (2, 3, 2), ("f0 f1 i0 w0 f2 i1 w1 i2 w2", "f0 i0 f1 i1 w0 f2 i2 w1 w2")),
        (
            "interleaved-1f1b",
            (4, 4, 2),
            (
                "f0.0 f0.1 f2.0 f2.1 f0.2 b2.0 f0.3 b2.1 f2.2 b0.0 f2.3 b0.1 b2.2 b2.3 b0.2 b0.3",
                "f1.0 f1.1 f3.0 b3.0 f3.1 b3.1 f1.2 b1.0 f1.3 b1.1 f3.2 b3.2 f3.3 b3.3 b1.2 b1.3",
            ),
        ),
        ("inference", (3, 2, 3), ("f0 f1", "f0 f1", "f0 f1")),
    ],
)
def test_lists_of_the_papers(name, sizes, lists):
    assert tuple(text(tasks) for tasks in make_schedule(name, *sizes).lists) == lists


@given(st.integers(1, 9), st.integers(1, 17))
@settings(deadline=None, max_examples=60)
def test_bubbles_of_own_submeshes(stages, micro_batches):
    """Idle share (S - 1) / (M + S - 1), a third of that idle time for the zero-bubble schedule if M
    >= S.
    """
    times = {name: unit_time(make_schedule(name, stages, micro_batches)) for name in SCHEDULES}
    assert (
        times["1f1b"]
        == times["gpipe"]
        == times["interleaved-1f1b"]
        == 3 * (micro_batches + stages - 1)
    )
    assert times["inference"] == micro_batches + stages - 1
    if stages > 1:
        assert times["zero-bubble"] < times["1f1b"]
    if micro_batches >= stages:
        assert times["zero-bubble"] == 3 * micro_batches + stages - 1


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 17))
@settings(deadline=None, max_examples=100)
def test_bubble_of_interleaved(submeshes, chunks, micro_batches):
    """With v chunks the time of a submesh's work and a v-th of the bubble; also where micro-batches
    fill no group.
    """
    time = unit_time(
        make_schedule("interleaved-1f1b", submeshes * chunks, micro_batches, submeshes)
    )
    if micro_batches >= submeshes:
        assert time == 3 * (chunks * micro_batches + submeshes - 1)
    # The same work as one stage for each submesh; a single micro-batch finds no work to overlap
    # with either way.
    whole = chunks * unit_time(make_schedule("1f1b", submeshes, micro_batches))
    assert time < whole if micro_batches > 1 else time == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f1", 2, 2),
            "there is no schedule '1f1': did you mean '1f1b' or",
        ),
        (("gpipe", 0, 4), "it has 0 stages, and needs at least 1"),
        (("gpipe", 2, 0), "it has 0 micro-batches, and needs at least 1"),
        (("gpipe", 2, 2, 0), "it has 0 submeshes, and needs at least 1"),
        (("1f1b", 2, 2, 3), "3 submeshes are more than the 2 stages"),
    ],
)
def test_impossible(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make_schedule(*arguments)


def test_all_that_is_wrong_at_once():
    with pytest.raises(InputError) as caught:
        make_schedule("gpip", 2, -1, 4)
    assert [
        part in str(caught.value) for part in ("'gpipe'?", "-1 micro-batches", "4 submeshes")
    ] == [True] * 3


def f(stage, micro_batch=0):
    return Task(stage, micro_batch, TaskKind.FORWARD)


def b(stage, micro_batch=0):
    return Task(stage, micro_batch, TaskKind.BACKWARD)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (((f(0), b(0), f(1), b(1)),), "1 lists for 2 submeshes"),
        (((f(0), b(0)), (f(1),)), "lacks 1 of 4 tasks"),
        (((f(0), b(0), b(0)), (f(1), b(1))), "has the backward of micro-batch 0 in stage 0 twice"),
        (((f(0), b(1)), (f(1), b(0))), "the backward of micro-batch 0 in stage 0 is on submesh 1"),
        (((f(0), b(0), f(2)), (f(1), b(1))), "there can be no forward of micro-batch 0 in stage 2"),
        (((b(0),), (b(1),)), "neither forward alone nor forward and backward"),
    ],
)
def test_lists_that_are_no_schedule(lists, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Schedule(name="own", num_stages=2, num_micro_batches=1, num_submeshes=2, lists=lists)


def test_tasks_that_wait_for_one_another():
    lists = ((f(0), b(0)), (b(1), f(1)))
    schedule = Schedule(name="own", num_stages=2, num_micro_batches=1, num_submeshes=2, lists=lists)
    with pytest.raises(
        InputError, match="submesh 0 at the backward of micro-batch 0 in stage 0; submesh 1 at"
    ):
        schedule.order()
