"""Simulation of a schedule: step time, idle time and memory of a pipeline, event by event.

It is exact for given times of tasks and transfers, but slower than a formula: planners search with
a schedule's closed form, and only their few best answers are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core import InputError
from ..plans import Schedule, TaskKind

Floats = NDArray[np.float64]
_NOT_GIVEN: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Costs of each stage of a pipeline: arrays, or sequences, with one entry for each stage.

    Attributes:
        forward_s: seconds of a forward task, for one micro-batch.
        backward_input_s, backward_weight_s: seconds of the two halves of a backward task (gradients
            of inputs, gradients of weights); a whole backward task takes their sum.
        update_s: seconds once a step: gradient synchronisation and the update; see
            `Schedule.early_updates`.
        transfer_s: shape `[num_stages - 1]`, seconds to send activations from stage s to stage s
            + 1. A transfer that takes no time, or stays on one submesh, arrives at once.
        transfer_back_s: the same for their gradients from stage s + 1 to stage s; by default they
            take as long.
        overlaps_transfers: whether transfers overlap with tasks. If so, a transfer delays only the
            task that reads it, and transfers from one submesh to another queue in the order of
            their tasks, each direction by itself. If not, a submesh sends a result before its next
            task, as soon as the receiver is between two tasks, and both are busy meanwhile.
        state_bytes: held all the time, per device: parameters, gradients, optimizer state.
        in_flight_bytes: residuals of one micro-batch, held from its forward task to the end of its
            backward task, or of `BACKWARD_INPUT` where backward is split.
        deferred_bytes: arrays that `BACKWARD_WEIGHT` reads, held from the end of `BACKWARD_INPUT`
            to its own end; by default `in_flight_bytes`.
        handed_bytes: the part of `deferred_bytes` that `BACKWARD_INPUT` makes.
        working_bytes: held while a task of the stage runs: also what it recomputes.

    Raises:
        InputError: Arrays of lengths that do not fit, or an entry below zero or not finite; the
            message lists every fault.
    """

    forward_s: Floats
    backward_input_s: Floats
    backward_weight_s: Floats
    update_s: Floats
    transfer_s: Floats
    state_bytes: Floats
    in_flight_bytes: Floats
    working_bytes: Floats
    overlaps_transfers: bool = True
    deferred_bytes: Floats = field(default_factory=lambda: _NOT_GIVEN)
    handed_bytes: Floats = field(default_factory=lambda: _NOT_GIVEN)
    transfer_back_s: Floats = field(default_factory=lambda: _NOT_GIVEN)

    def __post_init__(self) -> None:
        if self.deferred_bytes is _NOT_GIVEN:
            object.__setattr__(self, "deferred_bytes", self.in_flight_bytes)
        if self.handed_bytes is _NOT_GIVEN:
            object.__setattr__(self, "handed_bytes", np.zeros(np.shape(self.deferred_bytes)))
        if self.transfer_back_s is _NOT_GIVEN:
            object.__setattr__(self, "transfer_back_s", self.transfer_s)
        names = [f.name for f in fields(self) if f.name != "overlaps_transfers"]
        for name in names:
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        faults = []
        for name in names:
            array = getattr(self, name)
            wanted = (self.forward_s.size - name.startswith("transfer"),)
            if array.shape != wanted:
                faults.append(f"{name} has shape {array.shape} where forward_s calls for {wanted}")
            if not (np.isfinite(array).all() and (array >= 0).all()):
                faults.append(f"{name} has entries below zero or not finite")
        if faults:
            raise InputError(f"these costs of stages cannot be used: {'; '.join(faults)}")

    def seconds(self, kind: TaskKind) -> Floats:
        """Seconds of a task of this kind in each stage."""
        match kind:
            case TaskKind.FORWARD:
                return self.forward_s
            case TaskKind.BACKWARD_INPUT:
                return self.backward_input_s
            case TaskKind.BACKWARD_WEIGHT:
                return self.backward_weight_s
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """Transfer of a task's result for one micro-batch to `stage`, from one submesh to another."""

    sender: int
    receiver: int
    stage: int
    micro_batch: int
    kind: TaskKind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """One training step of a pipeline.

    Attributes:
        step_time_s: time at which the last submesh has finished its update.
        start_s, end_s: for each submesh, the times of its tasks in the order of its list.
        update_start_s: shape `[num_stages]`, the time at which each stage's update begins.
        busy_s: shape `[num_submeshes]`, tasks, updates, and transfers where they do not overlap.
        peak_bytes: shape `[num_submeshes]`, peak memory of a device of the submesh, all its stages
            together.
        held_bytes: shape `[num_stages]`, the most that micro-batches in flight keep of a stage.
        in_flight: shape `[num_stages]`, the most micro-batches whose residuals are held at once
            (`Schedule.in_flight`).
    """

    step_time_s: float
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    update_start_s: Floats
    busy_s: Floats
    peak_bytes: Floats
    held_bytes: Floats
    in_flight: NDArray[np.int64]
    sent: Callable[[], Iterator[TransferTime]] = field(repr=False)

    @property
    def transfers(self) -> tuple[TransferTime, ...]:
        """The transfers that take time, in the order in which they start."""
        return tuple(sorted(self.sent(), key=lambda sent: (sent.start_s, sent.sender)))

    @property
    def bubble_share(self) -> Floats:
        """Share of the step in which each submesh is idle."""
        return (
            1.0 - self.busy_s / self.step_time_s if self.step_time_s else np.zeros_like(self.busy_s)
        )


def simulate(schedule: Schedule, costs: StageCosts) -> PipelineTimes:
    """Simulate a schedule event by event. A submesh starts a task when it is idle and everything
    that the task reads has arrived.

    Raises:
        InputError: Costs of another number of stages, or task lists that deadlock.
    """
    if costs.forward_s.size != schedule.num_stages:
        raise InputError(
            f"costs of {costs.forward_s.size} stages for a schedule of {schedule.num_stages}"
        )
    run = _Run(schedule, costs)
    run.to_the_end()
    for stage in range(schedule.num_stages):
        if stage not in schedule.early_updates:
            submesh = schedule.submesh_of(stage)
            run.update(stage, run.idle_since[submesh])
    kept = _kept(schedule, run)
    held = [each.bytes_of(costs, stage) for stage, each in enumerate(kept)]
    return PipelineTimes(
        step_time_s=max(run.idle_since),
        start_s=tuple(np.array(starts) for starts in run.starts),
        end_s=tuple(np.array(ends) for ends in run.ends),
        update_start_s=np.array(run.update_starts),
        sent=run.transfers,
        busy_s=np.array(run.busy),
        peak_bytes=np.array(list(_peak_bytes(schedule, run, held, costs))),
        held_bytes=np.array([during.max() for during in held]),
        in_flight=np.array([(each.in_flight + each.waiting).max() for each in kept]),
    )


# (time, 0 for a transfer or 1 for a task or update, submesh, running number, what ends). Events of
# one time are handled in this order; the running number breaks ties. What ends is the number of a
# task, `_UPDATE`, or a transfer's place in `_Run.sent`.
_Event = tuple[float, int, int, int, int]
_UPDATE = -1


class _Transfer(NamedTuple):
    """A transfer that waits or runs; `task` is the number of the task that made what is sent."""

    sender: int
    receiver: int
    seconds: float
    task: int


class _Run:
    """A simulated step in progress. Tasks are numbers here (`Schedule.number`), because searches
    simulate pipelines of ten thousand tasks many times.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.overlaps = schedule, costs.overlaps_transfers
        stages, submeshes = schedule.num_stages, schedule.num_submeshes
        self.lists = schedule.numbers
        self.splits = any(
            task.kind is TaskKind.BACKWARD_INPUT for tasks in schedule.lists for task in tasks
        )
        backward = TaskKind.BACKWARD_INPUT if self.splits else TaskKind.BACKWARD
        # By row of tasks and stage: seconds of a task, and of the transfer of its result.
        kinds = (TaskKind.FORWARD, backward, TaskKind.BACKWARD_WEIGHT)
        self.task_s = [s for kind in kinds for s in costs.seconds(kind).tolist()]
        self.sent_s = [*costs.transfer_s.tolist(), 0.0, 0.0, *costs.transfer_back_s.tolist()]
        self.update_s = costs.update_s.tolist()
        self.update_starts = [0.0] * stages
        self.idle = [True] * submeshes
        self.idle_since = [0.0] * submeshes
        self.busy = [0.0] * submeshes
        self.starts: list[list[float]] = [[] for _ in range(submeshes)]
        self.ends: list[list[float]] = [[] for _ in range(submeshes)]
        self.sent: list[tuple[_Transfer, float]] = []
        self.events: list[_Event] = []
        self.num_events = 0

    def to_the_end(self) -> None:
        """Start whatever can start, go to the next event, and repeat until there is none. All
        events of one time are handled before any task or transfer starts at that time.
        """
        schedule, lists = self.schedule, self.lists
        stages, count = schedule.num_stages, schedule.num_micro_batches
        place, idle, starts = schedule.placement, self.idle, self.starts
        events, link_free = self.events, dict[tuple[int, int], float]()
        # What each task still waits for: a forward task for activations; a backward task for its
        # own forward task and for cotangents; the half for weights for the other half.
        missing = [0] * count + [1] * (stages - 1) * count
        missing += [2] * (stages - 1) * count + [1] * count + [1] * stages * count
        early_after = {schedule.number(t): s for t, s in schedule.early_after().items()}
        # By submesh: the stage to update before the next task.
        to_update: dict[int, int] = {}
        unsent: list[_Transfer] = []
        touched = set(range(schedule.num_submeshes))
        now = 0.0
        while True:
            if unsent:
                unsent = [
                    transfer
                    for transfer in unsent
                    if not (
                        idle[transfer[0]] and idle[transfer[1]] and self._send_now(transfer, now)
                    )
                ]
            senders = {transfer[0] for transfer in unsent} if unsent else ()
            # The next update or task of each idle submesh starts, if the task's inputs have arrived
            # and no result of the submesh waits to be sent.
            for submesh in sorted(touched):
                if not idle[submesh] or submesh in senders:
                    continue
                tasks, following = lists[submesh], len(starts[submesh])
                if submesh in to_update:
                    self.update(to_update.pop(submesh), now)
                    self._push(self.idle_since[submesh], 1, submesh, _UPDATE)
                elif following < len(tasks) and not missing[tasks[following]]:
                    task = tasks[following]
                    seconds = self.task_s[task // count]
                    starts[submesh].append(now)
                    self._occupy(submesh, now, seconds)
                    self._push(now + seconds, 1, submesh, task)
            if not events:
                break
            now = events[0][0]
            touched = set()
            while events and events[0][0] == now:
                _, is_task, submesh, _, ended = heapq.heappop(events)
                if not is_task:
                    transfer = self.sent[ended][0]
                    missing[self._reader(transfer.task)] -= 1
                    touched.add(transfer.receiver)
                    if not self.overlaps:
                        idle[submesh] = idle[transfer.receiver] = True
                        touched.add(submesh)
                    continue
                idle[submesh] = True
                touched.add(submesh)
                if ended == _UPDATE:
                    continue
                self.ends[submesh].append(now)
                if ended in early_after:
                    to_update[submesh] = early_after[ended]
                row, stage = divmod(ended // count, stages)
                if row == 2:
                    continue
                missing[ended + stages * count] -= 1
                target = stage - 1 if row else stage + 1
                if not 0 <= target < stages:
                    continue
                receiver, seconds = place[target], self.sent_s[ended // count]
                if not seconds or receiver == submesh:
                    missing[self._reader(ended)] -= 1
                    touched.add(receiver)
                elif self.overlaps:
                    end = max(now, link_free.get((submesh, receiver), 0.0)) + seconds
                    link_free[submesh, receiver] = end
                    self._send(_Transfer(submesh, receiver, seconds, ended), end)
                else:
                    unsent.append(_Transfer(submesh, receiver, seconds, ended))
        if any(len(ends) < len(tasks) for ends, tasks in zip(self.ends, lists)):
            schedule.order()  # Says which tasks wait for one another.
            raise AssertionError("a schedule that can be run got stuck in simulation")

    def update(self, stage: int, now: float) -> None:
        """Start the update of a stage."""
        self.update_starts[stage] = now
        self._occupy(self.schedule.submesh_of(stage), now, self.update_s[stage])

    def transfers(self) -> Iterator[TransferTime]:
        """The transfers that took time, in the order in which they were started."""
        stages, count = self.schedule.num_stages, self.schedule.num_micro_batches
        backward = TaskKind.BACKWARD_INPUT if self.splits else TaskKind.BACKWARD
        for transfer, end in self.sent:
            row, stage = divmod(transfer.task // count, stages)
            yield TransferTime(
                sender=transfer.sender,
                receiver=transfer.receiver,
                stage=stage - 1 if row else stage + 1,
                micro_batch=transfer.task % count,
                kind=backward if row else TaskKind.FORWARD,
                start_s=end - transfer.seconds,
                end_s=end,
            )

    def _reader(self, task: int) -> int:
        """The task of the neighbouring stage that reads a result."""
        stages, count = self.schedule.num_stages, self.schedule.num_micro_batches
        return task + count if task < stages * count else task - count

    def _push(self, time: float, is_task: int, submesh: int, ending: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, is_task, submesh, self.num_events, ending))

    def _occupy(self, submesh: int, now: float, seconds: float) -> None:
        self.idle[submesh] = False
        self.idle_since[submesh] = now + seconds
        self.busy[submesh] += seconds

    def _send(self, transfer: _Transfer, end: float) -> None:
        self._push(end, 0, transfer.sender, len(self.sent))
        self.sent.append((transfer, end))

    def _send_now(self, transfer: _Transfer, now: float) -> bool:
        """Start a transfer that does not overlap with tasks, between two tasks of both ends."""
        self._occupy(transfer.sender, now, transfer.seconds)
        self._occupy(transfer.receiver, now, transfer.seconds)
        self._send(transfer, now + transfer.seconds)
        return True


class _Kept(NamedTuple):
    """What a stage keeps during each task of its submesh: shape `[tasks of the submesh]`.

    Attributes:
        in_flight: micro-batches between their forward task and their (input half of the) backward
            task. Without backward tasks, a forward task keeps nothing.
        waiting: micro-batches between the two halves of their backward task.
        is_first_half: whether the task is an input half of this stage.
    """

    in_flight: NDArray[np.int64]
    waiting: NDArray[np.int64]
    is_first_half: NDArray[np.bool_]

    def bytes_of(self, costs: StageCosts, stage: int) -> Floats:
        """Bytes of what this stage keeps."""
        # Computed from counts: a running sum would accumulate rounding errors.
        return np.asarray(
            self.in_flight * costs.in_flight_bytes[stage]
            + self.waiting * costs.deferred_bytes[stage]
            + np.where(self.is_first_half, costs.handed_bytes[stage], 0.0)
        )


def _kept(schedule: Schedule, run: _Run) -> list[_Kept]:
    """What each stage keeps."""
    stages, count = schedule.num_stages, schedule.num_micro_batches
    numbers = [np.array(tasks, np.int64) for tasks in run.lists]
    kept = []
    for stage, submesh in enumerate(schedule.placement):
        row = numbers[submesh] // (stages * count)
        mine = numbers[submesh] // count % stages == stage
        forward, backward, second_half = (mine & (row == k) for k in range(3))
        first_half = backward & run.splits
        ended = backward if row.any() else forward
        kept.append(
            _Kept(
                in_flight=np.cumsum(forward) - np.cumsum(ended) + ended,
                waiting=np.cumsum(first_half) - first_half - np.cumsum(second_half) + second_half,
                is_first_half=first_half,
            )
        )
    return kept


def _peak_bytes(
    schedule: Schedule, run: _Run, held: Sequence[Floats], costs: StageCosts
) -> Iterator[float]:
    """By submesh, the peak memory of a device. It depends only on the order of the submesh's tasks,
    not on their times: memory does not grow between tasks.
    """
    stages, count = schedule.num_stages, schedule.num_micro_batches
    for submesh, tasks in enumerate(run.lists):
        mine = schedule.stages_of(submesh)
        working = costs.working_bytes[np.array(tasks, np.int64) // count % stages]
        during = sum([held[stage] for stage in mine], start=np.zeros(len(tasks))) + working
        state = float(costs.state_bytes[list(mine)].sum())
        yield state + float(during.max(initial=0.0))
