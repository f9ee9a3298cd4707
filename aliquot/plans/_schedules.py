"""Schedules of a pipeline as data: which submesh runs which task after which. No arrays, no devices, no costs.

A schedule is one list of tasks for each submesh. `cost` prices such lists, planners choose among them by name, and the
runtime walks them in one global order, so that every process issues the same transfers in the same order. Adding one
is one function that returns the lists, and one row in `SCHEDULES`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from ..core import InputError, nearest


class TaskKind(enum.StrEnum):
    """What a task computes for its stage and micro-batch.

    A whole `BACKWARD` is two halves in one: `BACKWARD_INPUT` makes the gradient that the stage before waits for,
    `BACKWARD_WEIGHT` those of the stage's own parameters, for which nothing waits before the update. The first stage
    has none before it: its `BACKWARD_INPUT` is there all the same, so that stages are alike, and may be empty.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward-input"
    BACKWARD_WEIGHT = "backward-weight"


@dataclass(frozen=True, slots=True)
class Task:
    """One box of a schedule: a stage computes something for one micro-batch. Both count from 0."""

    stage: int
    micro_batch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in stage {self.stage}"


Lists = tuple[tuple[Task, ...], ...]

_TRAINING = {TaskKind.FORWARD, TaskKind.BACKWARD}
_SPLIT = {TaskKind.FORWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT}
_INFERENCE = {TaskKind.FORWARD}


def dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks whose results a task reads. A schedule has whole backward tasks or split ones, never both.

    Forward reads the stage before. Backward (or its half for the inputs) reads its own forward and, save in the last
    stage, the same of the stage after. The half for the weights reads the half for the inputs.

    >>> [str(read) for read in dependencies(Task(1, 0, TaskKind.BACKWARD), num_stages=3)]
    ['forward of micro-batch 0 in stage 1', 'backward of micro-batch 0 in stage 2']
    """
    stage, micro_batch, kind = task.stage, task.micro_batch, task.kind
    if kind is TaskKind.FORWARD:
        return (Task(stage - 1, micro_batch, kind),) if stage else ()
    if kind is TaskKind.BACKWARD_WEIGHT:
        return (Task(stage, micro_batch, TaskKind.BACKWARD_INPUT),)
    own = Task(stage, micro_batch, TaskKind.FORWARD)
    return (own,) if stage == num_stages - 1 else (own, Task(stage + 1, micro_batch, kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order in which every submesh runs its tasks, one at a time.

    Attributes:
        name: its key in `SCHEDULES`, or any name for lists made by hand.
        num_stages, num_micro_batches, num_submeshes: stage k runs on submesh `k % num_submeshes`.
        lists: the tasks of each submesh, in order.

    Raises:
        InputError: A task is missing, twice, or on another submesh than its stage.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_submeshes: int
    lists: Lists

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise InputError(f"schedule {self.name!r} cannot be run: {'; '.join(faults)}")

    def _faults(self) -> Iterator[str]:
        if len(self.lists) != self.num_submeshes:
            yield f"it has {len(self.lists)} lists for {self.num_submeshes} submeshes"
        kinds = {task.kind for tasks in self.lists for task in tasks}
        if kinds not in (_TRAINING, _SPLIT, _INFERENCE):
            yield f"its tasks are {', '.join(sorted(kinds)) or 'none'}: neither forward alone nor forward and backward"
            return
        found: dict[int, Task] = {}
        for submesh, tasks in enumerate(self.lists):
            for task in tasks:
                if not (0 <= task.stage < self.num_stages and 0 <= task.micro_batch < self.num_micro_batches):
                    yield f"there can be no {task}"
                elif found.setdefault(self._slot(task), task) is not task:
                    yield f"it has the {task} twice"
                if self.submesh_of(task.stage) != submesh:
                    yield f"the {task} is on submesh {submesh}"
        wanted = self.num_stages * self.num_micro_batches * len(kinds)
        if len(found) < wanted:
            yield f"it lacks {wanted - len(found)} of {wanted} tasks"

    def _slot(self, task: Task) -> int:
        """A number of its own for each task: a row for forward, one for backward or its first half, one for weights."""
        row = 0 if task.kind is TaskKind.FORWARD else 2 if task.kind is TaskKind.BACKWARD_WEIGHT else 1
        return (row * self.num_stages + task.stage) * self.num_micro_batches + task.micro_batch

    def submesh_of(self, stage: int) -> int:
        """The submesh that a stage runs on."""
        return stage % self.num_submeshes

    def in_flight(self, stage: int, until: TaskKind = TaskKind.BACKWARD_WEIGHT) -> int:
        """The most micro-batches at once whose residuals a stage holds, that of the running task included.

        They are held from `FORWARD` to `BACKWARD`, or to `until` where backward is split: `BACKWARD_WEIGHT`, or
        `BACKWARD_INPUT` for what only that half reads. Without backward nothing is held but by the running task.
        """
        held = most = 0
        endings = (TaskKind.BACKWARD, until)
        tasks = [task for task in self.lists[self.submesh_of(stage)] if task.stage == stage]
        if all(task.kind is TaskKind.FORWARD for task in tasks):
            return 1
        for task in tasks:
            held += (task.kind is TaskKind.FORWARD) - (task.kind in endings)
            most = max(most, held)
        return most

    def order(self) -> tuple[Task, ...]:
        """All tasks in one order that meets every dependency and every submesh's own list; always the same one.

        By earliest start, where a forward task and each half of a backward one take one unit of time and transfers
        none; tasks that start together go by submesh. Raises `InputError` if tasks wait for one another in a circle.
        """
        starts, places = self._earliest_starts()
        stuck = [
            (submesh, tasks[places[submesh]]) for submesh, tasks in enumerate(self.lists) if tasks[places[submesh] :]
        ]
        if stuck:
            heads = "; ".join(f"submesh {submesh} at the {task}" for submesh, task in stuck)
            raise InputError(f"tasks of schedule {self.name!r} wait for one another: {heads}")
        timed = [(starts[self._slot(t)], submesh, t) for submesh, tasks in enumerate(self.lists) for t in tasks]
        return tuple(task for _, _, task in sorted(timed, key=itemgetter(0, 1)))

    def _earliest_starts(self) -> tuple[list[int], list[int]]:
        """Unit time at which each task starts, by its slot, and how many tasks each submesh can run.

        Goes by slots: hashing as many tasks would take most of the time. What a slot reads is what `dependencies` says.
        """
        row, stride = self.num_stages * self.num_micro_batches, self.num_micro_batches
        starts, ends = [0] * (3 * row), [0] * (3 * row)
        waiting: dict[int, list[int]] = {}
        free, places = [0] * self.num_submeshes, [0] * self.num_submeshes
        awake = list(range(self.num_submeshes))
        while awake:
            submesh = awake.pop()
            tasks = self.lists[submesh]
            while places[submesh] < len(tasks):
                task = tasks[places[submesh]]
                slot = self._slot(task)
                reads = [slot - row] if slot >= row else [slot - stride] if task.stage else []
                if row <= slot < 2 * row - stride:
                    reads.append(slot + stride)
                missing = next((read for read in reads if not ends[read]), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(submesh)
                    break
                starts[slot] = max([free[submesh], *[ends[read] for read in reads]])
                ends[slot] = free[submesh] = starts[slot] + (2 if task.kind is TaskKind.BACKWARD else 1)
                places[submesh] += 1
                awake += waiting.pop(slot, ())
        return starts, places


def _shared(name: str, stage_lists: Iterable[Iterable[Task]], num_micro_batches: int, num_submeshes: int) -> Lists:
    """The lists of stages that take turns on fewer submeshes, in the order of stages that have one each.

    Leaving out where a task runs takes no dependency away and adds none, so what could be run can still be run.
    """
    lists = tuple(tuple(tasks) for tasks in stage_lists)
    if num_submeshes == len(lists):
        return lists
    apart = Schedule(
        name=name,
        num_stages=len(lists),
        num_micro_batches=num_micro_batches,
        num_submeshes=len(lists),
        lists=lists,
    )
    order = apart.order()
    return tuple(tuple(t for t in order if t.stage % num_submeshes == submesh) for submesh in range(num_submeshes))


def _interleave(first: list[Task], second: list[Task], ahead: int) -> list[Task]:
    """`ahead` tasks of the first list, then by turns one of each, then what is left of the second."""
    ahead = min(ahead, len(first))
    turns = [task for pair in zip(first[ahead:], second) for task in pair]
    return [*first[:ahead], *turns, *second[len(first) - ahead :]]


def _row(stage: int, kind: TaskKind, micro_batches: Iterable[int]) -> list[Task]:
    return [Task(stage, micro_batch, kind) for micro_batch in micro_batches]


def gpipe(num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
    """All forward tasks, then all backward ones. Every stage holds all micro-batches.

    Micro-batches go through backward in the order of forward, so that gradients add up in the same order as in every
    other schedule.

    Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
    section 2.3.
    """
    all_of_them = range(num_micro_batches)
    stages = (
        _row(stage, TaskKind.FORWARD, all_of_them) + _row(stage, TaskKind.BACKWARD, all_of_them)
        for stage in range(num_stages)
    )
    return _shared("gpipe", stages, num_micro_batches, num_submeshes)


def one_forward_one_backward(num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
    """Backward as soon as it can be: stage s of S holds at most S - s micro-batches, in the time of GPipe.

    Those are just enough for a round trip to the last stage. If an activation or a gradient travels for d seconds, a
    round trip takes 2 d (S - s - 1) longer, so each micro-batch takes 2 d (S - 1) / S longer, even where transfers run
    beside tasks; GPipe and interleaved stages hide them.

    Reference: D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.2
    (PipeDream-Flush).
    """
    stages = (_one_forward_one_backward(s, num_stages, num_micro_batches, TaskKind.BACKWARD) for s in range(num_stages))
    return _shared("1f1b", stages, num_micro_batches, num_submeshes)


def _one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int, backward: TaskKind) -> list[Task]:
    forwards = _row(stage, TaskKind.FORWARD, range(num_micro_batches))
    return _interleave(forwards, _row(stage, backward, range(num_micro_batches)), num_stages - stage - 1)


def zero_bubble(num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
    """ZB-H1: 1F1B whose gradients of weights wait and fill what would be idle time.

    Stage s keeps the half for the weights s micro-batches behind. All stages then end together, and none of S holds
    more than S micro-batches, the bound of 1F1B's first stage; up to the half for the inputs it is S - s, as in 1F1B.

    Reference: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2023, section 2.2.
    """
    stages = []
    for stage in range(num_stages):
        tasks: list[Task] = []
        for task in _one_forward_one_backward(stage, num_stages, num_micro_batches, TaskKind.BACKWARD_INPUT):
            tasks.append(task)
            if task.kind is TaskKind.BACKWARD_INPUT and task.micro_batch >= stage:
                tasks.append(Task(stage, task.micro_batch - stage, TaskKind.BACKWARD_WEIGHT))
        left = range(max(0, num_micro_batches - stage), num_micro_batches)
        stages.append(tasks + _row(stage, TaskKind.BACKWARD_WEIGHT, left))
    return _shared("zero-bubble", stages, num_micro_batches, num_submeshes)


def interleaved(num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
    """1F1B for submeshes that run v stages (chunks) each: a v-th of the bubble, at the price of more transfers.

    Micro-batches go round in groups of at least P, the number of submeshes: a group passes a submesh's first chunk,
    then its second, and so on. The original wants groups of exactly P; here their sizes are as even as can be, so any
    number of micro-batches will do. If G is the size of the largest, submesh p runs 2 (P - p - 1) + (v - 1) G forward
    tasks ahead, and holds at most one micro-batch more, counted over its chunks.

    It never gets stuck. Let submesh p run its k-th forward task at time k + p and its k-th backward task, half a unit
    later, at time k + (v - 1) G + 2 P - p - 2: this is the order of its list, and every task then comes after all that
    it reads. Where stages or micro-batches are too few to fill a round, the missing ones are taken out of the lists.
    With one stage for each submesh it is 1F1B.

    Reference: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    2021, section 2.2.2.
    """
    if num_submeshes == num_stages:
        return one_forward_one_backward(num_stages, num_micro_batches, num_submeshes)
    chunks = -(-num_stages // num_submeshes)
    groups = _groups(max(num_micro_batches, num_submeshes), num_submeshes)
    lists = []
    for submesh in range(num_submeshes):
        stages = range(submesh, chunks * num_submeshes, num_submeshes)
        forwards = [task for group in groups for stage in stages for task in _row(stage, TaskKind.FORWARD, group)]
        backwards = [
            task for group in groups for stage in reversed(stages) for task in _row(stage, TaskKind.BACKWARD, group)
        ]
        ahead = 2 * (num_submeshes - submesh - 1) + (chunks - 1) * max(map(len, groups))
        tasks = _interleave(forwards, backwards, ahead)
        lists.append(tuple(t for t in tasks if t.stage < num_stages and t.micro_batch < num_micro_batches))
    return tuple(lists)


def interleaved_in_flight(num_stages: int, num_micro_batches: int, num_submeshes: int) -> list[int]:
    """`Schedule.in_flight` of every stage of an interleaved schedule, without its lists: a search asks for many of them."""
    if num_submeshes == num_stages:
        return [min(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    chunks = -(-num_stages // num_submeshes)
    groups = _groups(max(num_micro_batches, num_submeshes), num_submeshes)
    # Where the forward tasks of each chunk stand among a submesh's, and its backward tasks; some there are too many.
    forwards: list[list[int]] = [[] for _ in range(chunks)]
    backwards: list[list[int]] = [[] for _ in range(chunks)]
    for group in groups:
        count = sum(1 for k in group if k < num_micro_batches)
        for turn in range(chunks):
            start = group.start * chunks + turn * len(group)
            forwards[turn] += range(start, start + count)
            backwards[chunks - 1 - turn] += range(start, start + count)
    total = groups[-1].stop * chunks
    found = []
    for stage in range(num_stages):
        chunk, submesh = divmod(stage, num_submeshes)
        ahead = min(2 * (num_submeshes - submesh - 1) + (chunks - 1) * max(map(len, groups)), total)
        ended, most = 0, 0
        for begun, place in enumerate(forwards[chunk], 1):
            while ended < num_micro_batches and backwards[chunk][ended] < place - ahead:
                ended += 1
            most = max(most, begun - ended)
        found.append(most)
    return found


def _groups(count: int, at_least: int) -> list[range]:
    """The numbers below `count` in stretches of even lengths, none below `at_least` and as many as that allows."""
    number = count // at_least
    cuts = [count * index // number for index in range(number + 1)]
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:])]


def inference(num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
    """Forward alone: micro-batches stream through the stages."""
    stages = (_row(stage, TaskKind.FORWARD, range(num_micro_batches)) for stage in range(num_stages))
    return _shared("inference", stages, num_micro_batches, num_submeshes)


# From (num_stages, num_micro_batches, num_submeshes), all at least 1 and no more submeshes than stages, to the lists.
SCHEDULES: dict[str, Callable[[int, int, int], Lists]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved-1f1b": interleaved,
    "zero-bubble": zero_bubble,
    "inference": inference,
}


def make_schedule(name: str, num_stages: int, num_micro_batches: int, num_submeshes: int | None = None) -> Schedule:
    """The schedule of a name for so many stages and micro-batches.

    Args:
        name: A key of `SCHEDULES`.
        num_stages: At least 1.
        num_micro_batches: At least 1.
        num_submeshes: At least 1, at most one for each stage, which is the default. Stage k runs on submesh
            `k % num_submeshes`.

    Raises:
        InputError: The name is unknown, or a count is impossible; says all that is wrong.

    >>> schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=3)
    >>> " ".join(f"{task.kind[0]}{task.micro_batch}" for task in schedule.lists[0])
    'f0 f1 b0 f2 b1 b2'
    >>> [schedule.in_flight(stage) for stage in range(2)]
    [2, 1]
    """
    submeshes = num_stages if num_submeshes is None else num_submeshes
    faults = [] if name in SCHEDULES else [f"there is no schedule {name!r}: {nearest(name, SCHEDULES)}"]
    counts = {"stages": num_stages, "micro-batches": num_micro_batches, "submeshes": submeshes}
    given = [what for what in counts if what != "submeshes" or num_submeshes is not None]
    faults += [f"it has {counts[what]} {what}, and needs at least 1" for what in given if counts[what] < 1]
    if submeshes > num_stages >= 1:
        faults.append(f"{submeshes} submeshes are more than the {num_stages} stages to run on them, so some would idle")
    if faults:
        raise InputError(f"this pipeline cannot be scheduled: {'; '.join(faults)}")
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_submeshes=submeshes,
        lists=SCHEDULES[name](num_stages, num_micro_batches, submeshes),
    )
