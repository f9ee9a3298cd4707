"""Schedules to choose from: one object each, and one row in `SCHEDULES`.

Each object defines the tasks of every submesh in order, the submesh of each stage, the number of
micro-batches that each stage keeps, and the step time in closed form. Planners, the simulation, the
runtime and plan files use nothing else of a schedule.

In formulas S is the number of stages and M that of micro-batches; stage s takes t seconds for
forward and backward of a micro-batch; sums and maxima run over the stages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core import InputError, nearest
from ._schedule import Lists, Schedule, Task, TaskKind
from ._schedule_kind import AbstractScheduleKind, ClosedForm, Keeps, Maximum, StageTimes


def share_submeshes(
    name: str,
    stage_lists: Iterable[Iterable[Task]],
    num_micro_batches: int,
    placement: Sequence[int],
) -> Lists:
    """The task list of each submesh, where several stages may share one.

    Tasks on one submesh run in the order in which they could start if each stage had a submesh of
    its own. Every task then still comes after all that it reads, so the lists cannot deadlock.

    Args:
        stage_lists: the task list of each stage.
        placement: the submesh of each stage.
    """
    lists = tuple(map(tuple, stage_lists))
    num_submeshes = max(placement) + 1
    # If each stage has its own submesh, nothing is shared.
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
    found = []
    for submesh in range(num_submeshes):
        found.append(tuple(t for t in order if placement[t.stage] == submesh))
    return tuple(found)


def _alternate(first: list[Task], second: list[Task], ahead: int) -> list[Task]:
    """`ahead` tasks of the first list, then one of each list in turn, then the rest of the second.
    Both lists have the same length.
    """
    ahead = min(ahead, len(first))
    turns: list[Task] = []
    for pair in zip(first[ahead:], second):
        turns.extend(pair)
    return [*first[:ahead], *turns, *second[len(first) - ahead :]]


def _tasks_of_kind(stage: int, kind: TaskKind, micro_batches: Iterable[int]) -> list[Task]:
    """One task of a kind for each micro-batch of a stage."""
    return [Task(stage, micro_batch, kind) for micro_batch in micro_batches]


def _one_forward_one_backward(
    stage: int, num_stages: int, num_micro_batches: int, backward: TaskKind
) -> list[Task]:
    """The task list of a stage in 1F1B: forward runs ahead by one micro-batch for each later
    stage.
    """
    forwards = _tasks_of_kind(stage, TaskKind.FORWARD, range(num_micro_batches))
    return _alternate(
        forwards, _tasks_of_kind(stage, backward, range(num_micro_batches)), num_stages - stage - 1
    )


def _largest_once(times: StageTimes, chunks: int = 1) -> Maximum:
    """The term for time spent once in a step: that of the stage that spends the most, times the
    chunks of a submesh, which spends it for each.
    """
    return Maximum(sums=times.once_s, weight=float(chunks))


@dataclass(frozen=True, slots=True)
class GPipe(AbstractScheduleKind):
    """All forward tasks, then all backward ones. Every stage holds all micro-batches.

    Micro-batches go through backward in the order of forward, so that gradients add up in the same
    order as in every other schedule. Step time: sum t + (M - 1) (max forward + max backward).

    Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019, section 2.3.
    """

    name: ClassVar[str] = "gpipe"
    keeps: ClassVar[Keeps] = Keeps.ALL

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        all_of_them = range(num_micro_batches)
        stages = (
            _tasks_of_kind(stage, TaskKind.FORWARD, all_of_them)
            + _tasks_of_kind(stage, TaskKind.BACKWARD, all_of_them)
            for stage in range(num_stages)
        )
        return share_submeshes(
            self.name, stages, num_micro_batches, self.placement(num_stages, num_submeshes)
        )

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        """All forward passes stream through, then all
        backward ones.
        """
        passes = []
        for sums in (times.forward_s, times.backward_s):
            passes.append(Maximum(sums=sums, weight=num_micro_batches - 1.0, transfers=1, link=1))
        return ClosedForm(
            sums=times.forward_s + times.backward_s,
            transfers=2,
            maxima=(*passes, _largest_once(times, chunks)),
        )

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """All micro-batches."""
        return (num_micro_batches,) * num_stages


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward(AbstractScheduleKind):
    """Backward as early as possible: stage s of S holds at most S - s micro-batches, and the step
    takes as long as with GPipe.

    That is just enough to keep a stage busy until its first gradient comes back from the last
    stage. If a transfer takes d seconds, the gradient comes 2 d (S - s - 1) later and the stage
    idles, even if transfers overlap with tasks: each micro-batch takes 2 d (S - 1) / S longer.
    GPipe, `OverlapFriendly` and interleaved stages keep more micro-batches and hide transfers.

    Step time: sum t + (M - 1) max t. That is exact for equal stages; a simulation may exceed it
    where backward does not take the same multiple of forward in all stages.

    Reference: D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section
    3.2 (PipeDream-Flush); L. Zheng et al., "Alpa", 2022, section 5.1, equation 2 (step time).
    """

    name: ClassVar[str] = "1f1b"
    keeps: ClassVar[Keeps] = Keeps.BEHIND

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        stages = (
            _one_forward_one_backward(s, num_stages, num_micro_batches, TaskKind.BACKWARD)
            for s in range(num_stages)
        )
        return share_submeshes(
            self.name, stages, num_micro_batches, self.placement(num_stages, num_submeshes)
        )

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        """After the first micro-batch, the slowest stage
        sets the pace.
        """
        both = times.forward_s + times.backward_s
        slowest = Maximum(sums=both, weight=num_micro_batches - 1.0, transfers=2, link=1)
        return ClosedForm(sums=both, transfers=2, maxima=(slowest, _largest_once(times, chunks)))

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """One for itself and one for each later stage."""
        return tuple(min(num_stages - stage, num_micro_batches) for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class OverlapFriendly(AbstractScheduleKind):
    """1F1B that runs twice as far ahead, so that transfers that overlap with tasks are hidden:
    stage s of S holds at most 2 (S - s) - 1 micro-batches.

    Between two stages a forward and a backward task then lie behind each other where 1F1B has a
    round trip of two transfers: a stage idles only if a transfer takes longer than a task. Where
    transfers do not overlap it takes as long as 1F1B or longer.

    Step time: sum t + (M - 1) max t.

    Reference: Y. Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023 (eager
    1F1B).
    """

    name: ClassVar[str] = "1f1b-overlap-friendly"
    keeps: ClassVar[Keeps] = Keeps.BEHIND

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        all_of_them = range(num_micro_batches)
        stages = (
            _alternate(
                _tasks_of_kind(stage, TaskKind.FORWARD, all_of_them),
                _tasks_of_kind(stage, TaskKind.BACKWARD, all_of_them),
                2 * (num_stages - stage - 1),
            )
            for stage in range(num_stages)
        )
        return share_submeshes(
            self.name, stages, num_micro_batches, self.placement(num_stages, num_submeshes)
        )

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        """The step time in closed form: that of 1F1B, which its simulation exceeds less
        often.
        """
        return OneForwardOneBackward().closed_form(times, num_micro_batches, chunks)

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """Micro-batches in flight: one for itself and two for each later stage."""
        return tuple(
            min(2 * (num_stages - stage) - 1, num_micro_batches) for stage in range(num_stages)
        )


@dataclass(frozen=True, slots=True)
class ZeroBubble(AbstractScheduleKind):
    """ZB-H1: 1F1B that defers weight gradients into time that would be idle.

    Backward is two tasks: gradients of inputs, for which the stage before waits, and gradients of
    weights, for which only the update waits. Stage s computes the latter s micro-batches after the
    former, so that all stages end together. It keeps at most S micro-batches, as the first stage of
    1F1B does; of these, S - s have no gradients of inputs yet, as in 1F1B.

    Step time: sum e + max (M t - e), where e (`exposed_s`) is the idle time that a stage adds while
    the pipeline fills and drains: forward + input gradient - min(weight gradient, forward, input
    gradient). With equal stages whose weight gradient takes the least of the three:
    M t + (S - 1) (forward + input gradient - weight gradient).

    Reference: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2023, section
    2.2 and table 2.
    """

    name: ClassVar[str] = "zero-bubble"
    splits_backward: ClassVar[bool] = True
    keeps: ClassVar[Keeps] = Keeps.STAGES

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        stages = []
        for stage in range(num_stages):
            tasks: list[Task] = []
            for task in _one_forward_one_backward(
                stage, num_stages, num_micro_batches, TaskKind.BACKWARD_INPUT
            ):
                tasks.append(task)
                if task.kind is TaskKind.BACKWARD_INPUT and task.micro_batch >= stage:
                    tasks.append(Task(stage, task.micro_batch - stage, TaskKind.BACKWARD_WEIGHT))
            left = range(max(0, num_micro_batches - stage), num_micro_batches)
            stages.append(tasks + _tasks_of_kind(stage, TaskKind.BACKWARD_WEIGHT, left))
        return share_submeshes(
            self.name, stages, num_micro_batches, self.placement(num_stages, num_submeshes)
        )

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        later = num_micro_batches - 1.0
        slowest = Maximum(
            sums=num_micro_batches * (times.forward_s + times.backward_s) - times.exposed_s,
            weight=1,
            transfers=2 * later,
            link=later,
        )
        return ClosedForm(
            sums=times.exposed_s, transfers=2, maxima=(slowest, _largest_once(times, chunks))
        )

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """As many as the first stage of 1F1B, since weight
        gradients are computed later.
        """
        return (min(num_stages, num_micro_batches),) * num_stages


@dataclass(frozen=True, slots=True)
class Interleaved(AbstractScheduleKind):
    """1F1B for submeshes that run v stages (chunks) each: a v-th of the bubble, at the price of
    more transfers.

    Micro-batches are run in groups of at least P, the number of submeshes: a submesh runs its first
    chunk on a whole group, then its second, and so on. The original needs groups of exactly P; here
    their sizes are as even as possible, so that any number of micro-batches works. If G is the size
    of the largest group, submesh p runs 2 (P - p - 1) + (v - 1) G forward tasks ahead, and holds at
    most one micro-batch more, counted over its chunks.

    It cannot deadlock. Let submesh p run its k-th forward task at time k + p and its k-th backward
    task, half a unit later, at time k + (v - 1) G + 2 P - p - 2: this is the order of its list, and
    every task then comes after all that it reads. Where stages are too few for v on every submesh,
    or micro-batches for one group, the missing ones are taken out of the lists. With one stage for
    each submesh it is 1F1B.

    Step time: sum t / v + (M v - 1) max t over chunks. Chunks that differ are taken to be as slow
    as the slowest, which is pessimistic.

    Reference: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2.2.
    """

    name: ClassVar[str] = "interleaved-1f1b"
    interleaves: ClassVar[bool] = True

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        if num_submeshes == num_stages:
            return OneForwardOneBackward().tasks(num_stages, num_micro_batches, num_submeshes)
        chunks = -(-num_stages // num_submeshes)
        groups = _groups(max(num_micro_batches, num_submeshes), num_submeshes)
        lists = []
        for submesh in range(num_submeshes):
            stages = range(submesh, chunks * num_submeshes, num_submeshes)
            forwards = []
            for group in groups:
                for stage in stages:
                    forwards.extend(_tasks_of_kind(stage, TaskKind.FORWARD, group))
            backwards = []
            for group in groups:
                for stage in reversed(stages):
                    backwards += _tasks_of_kind(stage, TaskKind.BACKWARD, group)
            ahead = 2 * (num_submeshes - submesh - 1) + (chunks - 1) * max(map(len, groups))
            tasks = _alternate(forwards, backwards, ahead)
            lists.append(
                tuple(
                    t for t in tasks if t.stage < num_stages and t.micro_batch < num_micro_batches
                )
            )
        return tuple(lists)

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        both = times.forward_s + times.backward_s
        slowest = Maximum(sums=both, weight=num_micro_batches * chunks - 1.0, transfers=2, link=1)
        return ClosedForm(
            sums=both / chunks, transfers=2 / chunks, maxima=(slowest, _largest_once(times, chunks))
        )

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """Counted without building the task lists, because
        searches call this often.
        """
        return _interleaved_in_flight(num_stages, num_micro_batches, num_submeshes)


@functools.lru_cache(maxsize=1024)
def _interleaved_in_flight(
    num_stages: int, num_micro_batches: int, num_submeshes: int
) -> tuple[int, ...]:
    """The most micro-batches that each stage keeps, counted from positions of its tasks."""
    if num_submeshes == num_stages:
        return tuple(min(num_stages - stage, num_micro_batches) for stage in range(num_stages))
    chunks = -(-num_stages // num_submeshes)
    groups = _groups(max(num_micro_batches, num_submeshes), num_submeshes)
    # Positions of each chunk's forward tasks among all forward tasks of a submesh, and of its
    # backward tasks among the backward ones. Positions of micro-batches that only fill up a group
    # stay empty.
    forwards: list[list[int]] = [[] for _ in range(chunks)]
    backwards: list[list[int]] = [[] for _ in range(chunks)]
    for group in groups:
        count = sum(1 for k in group if k < num_micro_batches)
        for turn in range(chunks):
            start = group.start * chunks + turn * len(group)
            forwards[turn] += range(start, start + count)
            backwards[chunks - 1 - turn] += range(start, start + count)
    total = groups[-1].stop * chunks
    kept = []
    for stage in range(num_stages):
        chunk, submesh = divmod(stage, num_submeshes)
        ahead = min(2 * (num_submeshes - submesh - 1) + (chunks - 1) * max(map(len, groups)), total)
        # Before the forward task at a position, the backward tasks below that position less `ahead`
        # have run: see `_alternate`.
        ended, most = 0, 0
        for begun, place in enumerate(forwards[chunk], 1):
            while ended < num_micro_batches and backwards[chunk][ended] < place - ahead:
                ended += 1
            most = max(most, begun - ended)
        kept.append(most)
    return tuple(kept)


def _groups(count: int, at_least: int) -> list[range]:
    """`range(count)` cut into as many ranges of nearly equal length as have at least `at_least`."""
    number = count // at_least
    cuts = [count * index // number for index in range(number + 1)]
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:])]


@dataclass(frozen=True, slots=True)
class Inference(AbstractScheduleKind):
    """Forward alone: micro-batches stream through the stages. Step time: sum forward + (M - 1) max
    forward.
    """

    name: ClassVar[str] = "inference"
    trains: ClassVar[bool] = False
    # One micro-batch in each stage, whatever the number of stages: any value of `Keeps` describes a
    # constant.
    keeps: ClassVar[Keeps] = Keeps.BEHIND

    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        stages = (
            _tasks_of_kind(stage, TaskKind.FORWARD, range(num_micro_batches))
            for stage in range(num_stages)
        )
        return share_submeshes(
            self.name, stages, num_micro_batches, self.placement(num_stages, num_submeshes)
        )

    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        slowest = Maximum(sums=times.forward_s, weight=num_micro_batches - 1.0, transfers=1, link=1)
        return ClosedForm(
            sums=times.forward_s, transfers=1, maxima=(slowest, _largest_once(times, chunks))
        )

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """Only the one that is running."""
        return (1,) * num_stages


SCHEDULES: dict[str, AbstractScheduleKind] = {
    kind.name: kind
    for kind in (
        GPipe(),
        OneForwardOneBackward(),
        OverlapFriendly(),
        Interleaved(),
        ZeroBubble(),
        Inference(),
    )
}


def training_schedules() -> tuple[str, ...]:
    """Names of the schedules that planners may choose."""
    return tuple(name for name, kind in SCHEDULES.items() if kind.trains)


def schedule_kind(name: str) -> AbstractScheduleKind:
    """The schedule with a name, if planners may choose it. Raises `InputError` for other names."""
    known = training_schedules()
    if name not in known:
        raise InputError(f"Unknown schedule {name!r}: {nearest(name, known)}")
    return SCHEDULES[name]


# Searches simulate one schedule with the costs of many pipelines.
@functools.lru_cache(maxsize=16)
def make_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    num_submeshes: int | None = None,
    early_updates: frozenset[int] = frozenset(),
) -> Schedule:
    """The schedule with a name, for given numbers of stages and micro-batches.

    Args:
        name: a key of `SCHEDULES`.
        num_stages: at least 1.
        num_micro_batches: at least 1.
        num_submeshes: at least 1, at most one for each stage, which is the default. Stage k runs on
            submesh `k % num_submeshes`, unless the schedule places them otherwise.
        early_updates: see `Schedule`.

    Raises:
        InputError: the name is unknown, or a count is impossible; the message lists every fault.

    >>> schedule = make_schedule("1f1b", num_stages=2, num_micro_batches=3)
    >>> " ".join(f"{task.kind[0]}{task.micro_batch}" for task in schedule.lists[0])
    'f0 f1 b0 f2 b1 b2'
    >>> [schedule.in_flight(stage) for stage in range(2)]
    [2, 1]
    """
    submeshes = num_stages if num_submeshes is None else num_submeshes
    faults = (
        [] if name in SCHEDULES else [f"there is no schedule {name!r}: {nearest(name, SCHEDULES)}"]
    )
    counts = {"stages": num_stages, "micro-batches": num_micro_batches, "submeshes": submeshes}
    given = [part for part in counts if part != "submeshes" or num_submeshes is not None]
    faults += [
        f"it has {counts[part]} {part}, and needs at least 1" for part in given if counts[part] < 1
    ]
    if submeshes > num_stages >= 1:
        faults.append(
            f"{submeshes} submeshes are more than the {num_stages} stages to run on them, so some"
            " would idle"
        )
    if faults:
        raise InputError(f"this pipeline cannot be scheduled: {'; '.join(faults)}")
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_submeshes=submeshes,
        lists=SCHEDULES[name].tasks(num_stages, num_micro_batches, submeshes),
        placement=SCHEDULES[name].placement(num_stages, submeshes),
        early_updates=early_updates,
    )
