"""Traces of a pipeline's step, timed program by program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...plans import Trace, TraceEvent, submesh_name
from ._instructions import PART_OF, Run

if TYPE_CHECKING:
    from ._pipeline import Pipeline

_KINDS = {part: kind.value for kind, part in PART_OF.items()}

Span = tuple[int, float, float]


def measured_trace(pipeline: Pipeline, spans: Sequence[Span], title: str) -> Trace:
    """The measured timeline of this process in a step.

    Args:
        spans: for each instruction that it took part in the number, and when it began and ended, in
            seconds on any clock.
        title: what ran.
    """
    begin = min((start for _, start, _ in spans), default=0.0)
    steps, schedule = pipeline.instructions.steps, pipeline.schedule
    # A stage sends results of the program that it ran last.
    last = [""] * schedule.num_stages
    events = []
    timed = {number: (start - begin, end - begin) for number, start, end in spans}
    for number, step in enumerate(steps):
        if isinstance(step, Run):
            kind = _KINDS.get(part := pipeline.functions[step.function].program.part, part.value)
            lane, at, stage = "compute", step.stage, step.stage
            last[step.stage] = kind
        else:
            kind = last[step.source] or "inputs"
            lane = "transfers" if step.target > step.source else "transfers back"
            at, stage = step.source, step.target
        if number in timed:
            events.append(
                TraceEvent(
                    kind=kind,
                    lane=lane,
                    submesh=schedule.submesh_of(at),
                    stage=stage,
                    micro_batch=step.micro_batch,
                    start_s=timed[number][0],
                    end_s=timed[number][1],
                )
            )
    names = []
    for submesh in range(schedule.num_submeshes):
        devices = [device.id for device in pipeline.contexts[submesh].mesh.devices.flat]
        stages = schedule.stages_of(submesh)
        names.append(submesh_name(submesh, stages, min(devices), max(devices)))
    return Trace(title=title, source="measured", submeshes=tuple(names), events=tuple(events))
