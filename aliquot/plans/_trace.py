"""Timelines of a pipeline's step, planned or measured, as files for trace viewers.

The file is Chrome's JSON object format, which Perfetto reads: a process for each submesh, a thread
for what it computes and one for each direction in which it sends.

Reference: "Trace Event Format", Chromium project, sections "JSON Object Format" and "Complete
Events".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core import write_atomic
from ._schedule import TaskKind

COMPUTE, SEND, SEND_BACK = "compute", "transfers", "transfers back"
_LANES = (COMPUTE, SEND, SEND_BACK)
_LETTERS = {
    TaskKind.FORWARD: "F",
    TaskKind.BACKWARD: "B",
    TaskKind.BACKWARD_INPUT: "I",
    TaskKind.BACKWARD_WEIGHT: "W",
}
_ENDS = (TaskKind.BACKWARD, TaskKind.BACKWARD_WEIGHT)
_US = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """A task, transfer or update of a submesh, planned or measured.

    Attributes:
        kind: a `TaskKind`, or what happens once in a step, such as `update`; of a transfer the kind
            of the task whose result is sent.
        lane: `"compute"`, or for transfers `"transfers"` (to later stages) and `"transfers back"`.
        submesh: the submesh that runs it; of a transfer the sender.
        stage: the stage of the task; of a transfer the stage that receives.
        micro_batch: its number; -1 for what happens once in a step.
        start_s, end_s: seconds since the step began.
    """

    kind: str
    lane: str
    submesh: int
    stage: int
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """Short name, such as `F 3`, `send F 3`, `B 3`, `I 3` and `W 3` (halves of a backward
        task), `update`.
        """
        letter = next((short for kind, short in _LETTERS.items() if kind == self.kind), self.kind)
        number = f" {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"{'' if self.lane == COMPUTE else 'send '}{letter}{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The timeline of one step.

    Attributes:
        title: what ran.
        source: `"predicted"` or `"measured"`.
        submeshes: name of each submesh.
        events: in any order.
    """

    title: str
    source: str
    submeshes: tuple[str, ...]
    events: tuple[TraceEvent, ...]

    @property
    def step_time_s(self) -> float:
        """Time at which the last event ends."""
        return max((event.end_s for event in self.events), default=0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that https://ui.perfetto.dev and chrome://tracing open; see
        `save_trace`.
        """
        save_trace(self, path)


def in_flight_events(events: Iterable[TraceEvent]) -> Iterator[tuple[float, int, int, int]]:
    """Micro-batches in flight on each stage: `(second, submesh, stage, count from then on)`, by
    time.

    Yields nothing if there is no backward pass for which to keep them.
    """
    moves = [
        (event.start_s, 1, event) if event.kind == TaskKind.FORWARD else (event.end_s, -1, event)
        for event in events
        if event.lane == COMPUTE and (event.kind == TaskKind.FORWARD or event.kind in _ENDS)
    ]
    if all(change > 0 for _, change, _ in moves):
        return
    held: dict[int, int] = {}
    for second, change, event in sorted(moves, key=lambda move: (move[0], move[1])):
        held[event.stage] = held.get(event.stage, 0) + change
        yield second, event.submesh, event.stage, held[event.stage]


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace as the object that trace viewers read; times in microseconds."""
    records: list[dict[str, Any]] = []
    for submesh, name in enumerate(trace.submeshes):
        records.append(_named("process_name", submesh, 0, name))
        records.append(
            {
                "name": "process_sort_index",
                "ph": "M",
                "pid": submesh,
                "tid": 0,
                "args": {"sort_index": submesh},
            }
        )
        used = {event.lane for event in trace.events if event.submesh == submesh}
        for tid, lane in enumerate(_LANES):
            if lane in used:
                records.append(_named("thread_name", submesh, tid, lane))
    for event in sorted(
        trace.events, key=lambda event: (event.start_s, event.submesh, event.end_s)
    ):
        start, end = _us(event.start_s), _us(event.end_s)
        args: dict[str, Any] = {"stage": event.stage}
        if event.micro_batch >= 0:
            args["micro-batch"] = event.micro_batch
        records.append(
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                "ts": start,
                # The difference of rounded times, so that consecutive events do not overlap.
                "dur": round(end - start, 3),
                "pid": event.submesh,
                "tid": _LANES.index(event.lane),
                "args": args,
            }
        )
    held: dict[int, dict[str, int]] = {submesh: {} for submesh in range(len(trace.submeshes))}
    for second, submesh, stage, count in in_flight_events(trace.events):
        held[submesh][f"stage {stage}"] = count
        records.append(
            {
                "name": "micro-batches in flight",
                "ph": "C",
                "ts": _us(second),
                "pid": submesh,
                "args": dict(held[submesh]),
            }
        )
    return {
        "traceEvents": records,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": trace.title,
            "source": trace.source,
            "step_time_s": trace.step_time_s,
        },
    }


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace file, whole or not at all.

    Raises:
        InputError: The place cannot be written to.
    """
    write_atomic(path, json.dumps(chrome_trace(trace)) + "\n")


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * _US, 3)
