"""Simulation of a schedule: step time, idle time and memory of a pipeline, event by event.

It is exact for given times of tasks and transfers, but slower than a formula: planners search with
a schedule's closed form, and only their few best answers are simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from ..core import InputError
from ..plans import Schedule, Task, TaskKind

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
        transfers: those that take time, in the order in which they start.
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
    transfers: tuple[TransferTime, ...]
    busy_s: Floats
    peak_bytes: Floats
    held_bytes: Floats
    in_flight: NDArray[np.int64]

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
    return PipelineTimes(
        step_time_s=max(run.idle_since),
        start_s=tuple(np.array(starts) for starts in run.starts),
        end_s=tuple(np.array(ends) for ends in run.ends),
        update_start_s=np.array(run.update_starts),
        transfers=tuple(sorted(run.sent, key=lambda sent: (sent.start_s, sent.sender))),
        busy_s=np.array(run.busy),
        peak_bytes=np.array(
            [_peak_bytes(schedule, costs, submesh) for submesh in range(schedule.num_submeshes)]
        ),
        held_bytes=np.array(
            [max(_held_bytes(schedule, costs, stage)) for stage in range(schedule.num_stages)]
        ),
        in_flight=np.array([schedule.in_flight(stage) for stage in range(schedule.num_stages)]),
    )


@dataclass(frozen=True, slots=True)
class _Transfer:
    sender: int
    receiver: int
    seconds: float
    stage: int
    micro_batch: int
    kind: TaskKind


@dataclass(frozen=True, slots=True)
class _Update:
    submesh: int


# (time, 0 for a transfer or 1 for a task or update, submesh, running number, what ends). Events of
# one time are handled in this order; the running number breaks ties.
_Event = tuple[float, int, int, int, "_Transfer | Task | _Update"]


class _Run:
    """A simulated step in progress. All events of one time are handled before any task or transfer
    starts at that time.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.overlaps = schedule, costs.overlaps_transfers
        stages, submeshes = schedule.num_stages, schedule.num_submeshes
        self.ahead_s, self.back_s = (
            [*costs.transfer_s.tolist(), 0.0],
            [0.0, *costs.transfer_back_s.tolist()],
        )
        self.seconds = {kind: costs.seconds(kind).tolist() for kind in TaskKind}
        # By stage: the micro-batches whose forward and backward tasks have ended, and those whose
        # activations and gradients have arrived from the neighbouring stages.
        self.through_forward: list[set[int]] = [set() for _ in range(stages)]
        self.through_backward: list[set[int]] = [set() for _ in range(stages)]
        self.activations = [
            set(range(schedule.num_micro_batches)),
            *(set[int]() for _ in range(stages - 1)),
        ]
        self.cotangents = [
            *(set[int]() for _ in range(stages - 1)),
            set(range(schedule.num_micro_batches)),
        ]
        self.early_after = schedule.early_after()
        self.update_s = costs.update_s.tolist()
        self.update_starts = [0.0] * stages
        # By submesh: the stage to update before the next task.
        self.to_update: dict[int, int] = {}
        self.idle = [True] * submeshes
        self.idle_since = [0.0] * submeshes
        self.busy = [0.0] * submeshes
        self.starts: list[list[float]] = [[] for _ in range(submeshes)]
        self.ends: list[list[float]] = [[] for _ in range(submeshes)]
        self.link_free: dict[tuple[int, int], float] = {}
        self.unsent: list[_Transfer] = []
        self.sent: list[TransferTime] = []
        self.events: list[_Event] = []
        self.num_events = 0

    def to_the_end(self) -> None:
        """Start whatever can start, go to the next event, and repeat until there is none."""
        touched = set(range(self.schedule.num_submeshes))
        now = 0.0
        while True:
            self._start_transfers(now)
            self._start_tasks(now, sorted(touched))
            if not self.events:
                break
            now = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == now:
                ended = heapq.heappop(self.events)[-1]
                if isinstance(ended, _Update):
                    self.idle[ended.submesh] = True
                    touched.add(ended.submesh)
                elif isinstance(ended, _Transfer):
                    touched.update(self._arrive(ended))
                else:
                    touched.update(self._finish(ended, now))
        if any(len(ends) < len(tasks) for ends, tasks in zip(self.ends, self.schedule.lists)):
            self.schedule.order()  # Says which tasks wait for one another.
            raise AssertionError("a schedule that can be run got stuck in simulation")

    def update(self, stage: int, now: float) -> None:
        """Start the update of a stage."""
        submesh = self.schedule.submesh_of(stage)
        self.update_starts[stage] = now
        self._occupy(submesh, now, self.update_s[stage])

    def _push(
        self, time: float, kind: int, submesh: int, ending: _Transfer | Task | _Update
    ) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, kind, submesh, self.num_events, ending))

    def _ready(self, task: Task) -> bool:
        stage, micro_batch = task.stage, task.micro_batch
        if task.kind is TaskKind.FORWARD:
            return micro_batch in self.activations[stage]
        if task.kind is TaskKind.BACKWARD_WEIGHT:
            return micro_batch in self.through_backward[stage]
        return micro_batch in self.through_forward[stage] and micro_batch in self.cotangents[stage]

    def _start_tasks(self, now: float, submeshes: list[int]) -> None:
        """Start the next update or task of each idle submesh, if the task's inputs have arrived and
        no result of the submesh waits to be sent.
        """
        senders = {transfer.sender for transfer in self.unsent}
        for submesh in submeshes:
            if not self.idle[submesh] or submesh in senders:
                continue
            tasks, place = self.schedule.lists[submesh], len(self.starts[submesh])
            if submesh in self.to_update:
                self.update(self.to_update.pop(submesh), now)
                self._push(self.idle_since[submesh], 1, submesh, _Update(submesh))
            elif place < len(tasks) and self._ready(tasks[place]):
                task = tasks[place]
                seconds = self.seconds[task.kind][task.stage]
                self.starts[submesh].append(now)
                self._occupy(submesh, now, seconds)
                self._push(now + seconds, 1, submesh, task)

    def _occupy(self, submesh: int, now: float, seconds: float) -> None:
        self.idle[submesh] = False
        self.idle_since[submesh] = now + seconds
        self.busy[submesh] += seconds

    def _finish(self, task: Task, now: float) -> Iterator[int]:
        """Record a task's end and send its result; yields the submeshes that may now be able to
        start a task.
        """
        submesh = self.schedule.submesh_of(task.stage)
        self.idle[submesh] = True
        self.ends[submesh].append(now)
        if task in self.early_after:
            self.to_update[submesh] = task.stage
        yield submesh
        if task.kind is TaskKind.FORWARD:
            self.through_forward[task.stage].add(task.micro_batch)
            target, seconds = task.stage + 1, self.ahead_s[task.stage]
        elif task.kind is TaskKind.BACKWARD_WEIGHT:
            return
        else:
            self.through_backward[task.stage].add(task.micro_batch)
            target, seconds = task.stage - 1, self.back_s[task.stage]
        if not 0 <= target < self.schedule.num_stages:
            return
        receiver = self.schedule.submesh_of(target)
        transfer = _Transfer(submesh, receiver, seconds, target, task.micro_batch, task.kind)
        if not seconds or receiver == submesh:
            self._deliver(transfer)
            yield receiver
        elif self.overlaps:
            end = max(now, self.link_free.get((submesh, receiver), 0.0)) + seconds
            self.link_free[submesh, receiver] = end
            self._send(transfer, end)
        else:
            self.unsent.append(transfer)

    def _start_transfers(self, now: float) -> None:
        """Without overlap: start transfers whose sender and receiver are idle, the oldest first."""
        still = []
        for transfer in self.unsent:
            if self.idle[transfer.sender] and self.idle[transfer.receiver]:
                for submesh in (transfer.sender, transfer.receiver):
                    self._occupy(submesh, now, transfer.seconds)
                self._send(transfer, now + transfer.seconds)
            else:
                still.append(transfer)
        self.unsent = still

    def _send(self, transfer: _Transfer, end: float) -> None:
        self._push(end, 0, transfer.sender, transfer)
        self.sent.append(
            TransferTime(
                sender=transfer.sender,
                receiver=transfer.receiver,
                stage=transfer.stage,
                micro_batch=transfer.micro_batch,
                kind=transfer.kind,
                start_s=end - transfer.seconds,
                end_s=end,
            )
        )

    def _arrive(self, transfer: _Transfer) -> Iterator[int]:
        """Deliver an arrived result; yields the submeshes that may now be able to start a task."""
        self._deliver(transfer)
        yield transfer.receiver
        if not self.overlaps:
            self.idle[transfer.sender] = self.idle[transfer.receiver] = True
            yield transfer.sender

    def _deliver(self, transfer: _Transfer) -> None:
        arrived = self.activations if transfer.kind is TaskKind.FORWARD else self.cotangents
        arrived[transfer.stage].add(transfer.micro_batch)


def _peak_bytes(schedule: Schedule, costs: StageCosts, submesh: int) -> float:
    """Peak memory of a device of a submesh. It depends only on the order of the submesh's tasks,
    not on their times: memory does not grow between tasks.
    """
    stages = schedule.stages_of(submesh)
    held = {stage: _held_bytes(schedule, costs, stage) for stage in stages}
    working = costs.working_bytes.tolist()
    most = 0.0
    for k, task in enumerate(schedule.lists[submesh]):
        most = max(most, sum(held[stage][k] for stage in stages) + working[task.stage])
    return float(costs.state_bytes[list(stages)].sum()) + most


def _held_bytes(schedule: Schedule, costs: StageCosts, stage: int) -> list[float]:
    """Bytes that micro-batches in flight keep of a stage during each task of its submesh."""
    tasks = schedule.lists[schedule.submesh_of(stage)]
    keeps = any(task.kind is not TaskKind.FORWARD for task in tasks)
    forward, deferred, handed = (
        float(figures[stage])
        for figures in (costs.in_flight_bytes, costs.deferred_bytes, costs.handed_bytes)
    )
    # Numbers of micro-batches between their forward task and their (input half of the) backward
    # task, and between the two halves of the backward task.
    in_flight = waiting = 0
    during = []
    for task in tasks:
        mine = task.stage == stage
        in_flight += mine and task.kind is TaskKind.FORWARD
        # Computed from counts each time: a running sum would accumulate rounding errors.
        makes = handed if mine and task.kind is TaskKind.BACKWARD_INPUT else 0.0
        during.append(in_flight * forward + waiting * deferred + makes)
        if not mine:
            continue
        match task.kind:
            case TaskKind.FORWARD:
                in_flight -= not keeps
            case TaskKind.BACKWARD_INPUT:
                in_flight, waiting = in_flight - 1, waiting + 1
            case TaskKind.BACKWARD_WEIGHT:
                waiting -= 1
            case _:
                in_flight -= 1
    return during
