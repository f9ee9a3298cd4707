"""A pipeline's tasks as data: the list of tasks that each submesh runs, in order. No arrays, no
devices, no costs.

`cost` prices these lists, and the runtime walks them in one global order, so that every process
issues the same transfers in the same order.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from ..core import InputError


class TaskKind(enum.StrEnum):
    """The part of a stage's work on a micro-batch that a task computes.

    `BACKWARD` is the whole backward pass. It can be split into two halves: `BACKWARD_INPUT` makes
    the gradient that the stage before waits for, `BACKWARD_WEIGHT` those of the stage's own
    parameters, for which only the update waits. The first stage has a `BACKWARD_INPUT`, too, so
    that all stages are alike; it may be empty.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward-input"
    BACKWARD_WEIGHT = "backward-weight"


@dataclass(frozen=True, slots=True)
class Task:
    """One box of a schedule: what a stage computes at once for one micro-batch. Both numbers count
    from 0.
    """

    stage: int
    micro_batch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in stage {self.stage}"


Lists = tuple[tuple[Task, ...], ...]

_TRAINING = {TaskKind.FORWARD, TaskKind.BACKWARD}
_SPLIT = {TaskKind.FORWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT}
_INFERENCE = {TaskKind.FORWARD}
_ROWS = {
    TaskKind.FORWARD: 0,
    TaskKind.BACKWARD: 1,
    TaskKind.BACKWARD_INPUT: 1,
    TaskKind.BACKWARD_WEIGHT: 2,
}


def round_robin(num_stages: int, num_submeshes: int) -> tuple[int, ...]:
    """The submesh of each stage where stages take turns: 0, 1, 2, 0, 1, 2."""
    return tuple(stage % num_submeshes for stage in range(num_stages))


def dependencies(task: Task, num_stages: int) -> tuple[Task, ...]:
    """The tasks whose results a task reads. A schedule has whole backward tasks or split ones,
    never both.

    Forward reads the forward task of the stage before. Backward (or `BACKWARD_INPUT`) reads the
    forward task of its own stage and, except in the last stage, the same backward task of the stage
    after. `BACKWARD_WEIGHT` reads `BACKWARD_INPUT` of its own stage.

    >>> [str(read) for read in dependencies(Task(1, 0, TaskKind.BACKWARD), num_stages=3)]
    ['forward of micro-batch 0 in stage 1', 'backward of micro-batch 0 in stage 2']
    """
    stage, micro_batch, kind = task.stage, task.micro_batch, task.kind
    if kind is TaskKind.FORWARD:
        return (Task(stage - 1, micro_batch, kind),) if stage else ()
    if kind is TaskKind.BACKWARD_WEIGHT:
        return (Task(stage, micro_batch, TaskKind.BACKWARD_INPUT),)
    forward = Task(stage, micro_batch, TaskKind.FORWARD)
    return (forward,) if stage == num_stages - 1 else (forward, Task(stage + 1, micro_batch, kind))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order in which every submesh runs its tasks, one at a time.

    Attributes:
        name: its key in `SCHEDULES`, or any name for lists made by hand.
        num_stages, num_micro_batches, num_submeshes: how many there are.
        lists: the tasks of each submesh, in order.
        placement: for each stage its submesh; by default stage k runs on submesh `k %
            num_submeshes`.
        early_updates: stages that are updated right after their own last task. All others are
            updated after the last task of their submesh.

    Raises:
        InputError: A task is missing, twice, or on another submesh than its stage.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_submeshes: int
    lists: Lists
    placement: tuple[int, ...] = ()
    early_updates: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", round_robin(self.num_stages, self.num_submeshes))
        faults = list(self._faults())
        if faults:
            raise InputError(f"schedule {self.name!r} cannot be run: {'; '.join(faults)}")

    def _faults(self) -> Iterator[str]:
        if len(self.placement) != self.num_stages or set(self.placement) != set(
            range(self.num_submeshes)
        ):
            yield (
                f"{self.num_stages} stages are placed on submeshes {self.placement}, and there are"
                f" {self.num_submeshes}"
            )
            return
        if self.early_updates - set(range(self.num_stages)):
            yield f"stages {sorted(self.early_updates)} are updated early, of {self.num_stages}"
        if len(self.lists) != self.num_submeshes:
            yield f"it has {len(self.lists)} lists for {self.num_submeshes} submeshes"
        kinds = {task.kind for tasks in self.lists for task in tasks}
        if kinds not in (_TRAINING, _SPLIT, _INFERENCE):
            yield (
                f"its tasks are {', '.join(sorted(kinds)) or 'none'}: neither forward alone nor"
                " forward and backward"
            )
            return
        first_at: dict[int, Task] = {}
        for submesh, tasks in enumerate(self.lists):
            for task in tasks:
                if not (
                    0 <= task.stage < self.num_stages
                    and 0 <= task.micro_batch < self.num_micro_batches
                ):
                    yield f"there can be no {task}"
                    continue
                if first_at.setdefault(self.number(task), task) is not task:
                    yield f"it has the {task} twice"
                if self.submesh_of(task.stage) != submesh:
                    yield f"the {task} is on submesh {submesh}"
        wanted = self.num_stages * self.num_micro_batches * len(kinds)
        if len(first_at) < wanted:
            yield f"it lacks {wanted - len(first_at)} of {wanted} tasks"

    def early_after(self) -> dict[Task, int]:
        """The stages of `early_updates`, each by its last task."""
        last = {}
        for tasks in self.lists:
            for task in tasks:
                last[task.stage] = task
        return {last[stage]: stage for stage in sorted(self.early_updates)}

    def number(self, task: Task) -> int:
        """A unique number for each task: by row (0 for forward, 1 for backward or its half for
        inputs, 2 for its half for weights), then by stage, then by micro-batch.
        """
        return (_ROWS[task.kind] * self.num_stages + task.stage) * self.num_micro_batches + (
            task.micro_batch
        )

    @functools.cached_property
    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the tasks of each submesh, in order."""
        return tuple(tuple(map(self.number, tasks)) for tasks in self.lists)

    def submesh_of(self, stage: int) -> int:
        """The submesh that a stage runs on."""
        return self.placement[stage]

    def stages_of(self, submesh: int) -> tuple[int, ...]:
        """The stages that a submesh runs, in order."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == submesh)

    def in_flight(self, stage: int, until: TaskKind = TaskKind.BACKWARD_WEIGHT) -> int:
        """The most micro-batches whose residuals a stage holds at once, that of the running task
        included.

        Residuals are held from `FORWARD` to `BACKWARD`, or to `until` where backward is split:
        `BACKWARD_WEIGHT`, or `BACKWARD_INPUT` for residuals that only that half reads. Without
        backward tasks, only the running task holds any.
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
        """All tasks in one order that respects every dependency and every submesh's own list. The
        order is always the same.

        Tasks are sorted by earliest start, where a forward task and each half of a backward task
        take one unit of time and transfers none, then by submesh. Raises `InputError` if the tasks
        deadlock.
        """
        starts, places = self._earliest_starts()
        stuck = []
        for submesh, tasks in enumerate(self.lists):
            if tasks[places[submesh] :]:
                stuck.append((submesh, tasks[places[submesh]]))
        if stuck:
            heads = "; ".join(f"submesh {submesh} at the {task}" for submesh, task in stuck)
            raise InputError(f"tasks of schedule {self.name!r} wait for one another: {heads}")
        timed = []
        for submesh, tasks in enumerate(self.lists):
            for t in tasks:
                timed.append((starts[self.number(t)], submesh, t))
        return tuple(task for _, _, task in sorted(timed, key=itemgetter(0, 1)))

    def _earliest_starts(self) -> tuple[list[int], list[int]]:
        """Earliest start of each task in units of time, by its number, and how many tasks each
        submesh can run before it is stuck.

        Hashing tasks would take most of the time. What a number reads is the same as in
        `dependencies`.
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
                number = self.number(task)
                reads = [number - row] if number >= row else [number - stride] if task.stage else []
                # Backward of all stages but the last reads that of the stage after.
                if row <= number < 2 * row - stride:
                    reads.append(number + stride)
                # Every task takes time, so an end of 0 means that it has not run.
                missing = next((read for read in reads if not ends[read]), None)
                if missing is not None:
                    # The submesh sleeps until that task has run, so it is not checked in vain.
                    waiting.setdefault(missing, []).append(submesh)
                    break
                starts[number] = max([free[submesh], *[ends[read] for read in reads]])
                ends[number] = free[submesh] = starts[number] + (
                    2 if task.kind is TaskKind.BACKWARD else 1
                )
                places[submesh] += 1
                awake += waiting.pop(number, ())
        return starts, places
