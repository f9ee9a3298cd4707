"""Data for the pictures of a plan's page: memory over the course of a step, and the tasks of a
pipeline's schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import format_seconds
from ..plans import Plan, TaskKind, in_flight_events, name_of_part, submesh_names
from ._drawings import Segment, time_marks
from ._trace import planned_trace

_MOST_SEGMENTS = 3000
_MOST_SUBMESHES = 32
_KEPT = "activations in flight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemorySeries:
    """Memory of each device over the course of a step.

    Attributes:
        places: seconds; positions of operators for a program of an older plan file; ascending.
        parts: for each part by name, the bytes at each place; parts that stay for the whole step
            come first.
        marks: places, each with a text.
        who: words that say whose devices they are.
        steps: whether bytes stay constant from one place to the next.
        is_time: whether places are seconds.
    """

    places: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]
    marks: tuple[tuple[float, str], ...]
    who: str
    steps: bool
    is_time: bool = True


def memory_series(plan: Plan) -> MemorySeries | None:
    """The memory to draw: for one program as its prediction stores it, for a pipeline that of its
    fullest stage.

    None for plans of one program whose file is older than this part of predictions, and for
    pipelines without a backward pass, which keep no activations.
    """
    if plan.is_pipeline:
        return _fullest_stage(plan)
    curve = plan.prediction.memory_over_time
    if curve is None or not curve.parts:
        return None
    # The parts that stay for the whole step are drawn at the bottom.
    steadiest = sorted(curve.parts.items(), key=lambda item: (-min(item[1]), item[0]))
    places = curve.seconds or tuple(map(float, range(len(curve.phases))))
    marks, count = [], 0
    for phase, group in itertools.groupby(curve.phases):
        marks.append((places[count], phase))
        count += len(list(group))
    extent = places[-1] - places[0]
    marks = _spread(marks, extent)
    if curve.seconds:
        # Each phase with its time, and the end of the step.
        marks = [(s, f"{phase}, {format_seconds(s)}" if s else phase) for s, phase in marks]
        marks = _spread([*marks, (places[-1], format_seconds(places[-1]))], 1.5 * extent)
    return MemorySeries(
        places=places,
        parts={name_of_part(name): sizes for name, sizes in steadiest},
        marks=tuple(marks),
        who="",
        steps=False,
        is_time=bool(curve.seconds),
    )


def _spread(marks: Sequence[tuple[float, str]], extent: float) -> list[tuple[float, str]]:
    """The marks whose texts do not overlap: of marks too close to each other, the first is kept."""
    kept: list[tuple[float, str]] = []
    for place, text in marks:
        if not kept or place - kept[-1][0] > 0.08 * extent:
            kept.append((place, text))
    return kept


def _fullest_stage(plan: Plan) -> MemorySeries | None:
    """Memory of the fullest stage: state and temporaries are constant, and each micro-batch in
    flight adds its activations.
    """
    index, prediction = max(
        ((k, stage.prediction) for k, stage in enumerate(plan.stages) if stage.prediction),
        key=lambda item: item[1].peak_memory_bytes,
    )
    trace = planned_trace(plan)
    # If the number changes several times at one moment, the last value counts.
    held = {}
    for second, _, stage, count in in_flight_events(trace.events):
        if stage == index:
            held[second] = count
    if not held or not prediction.in_flight:
        return None
    at_first = held.pop(0.0, 0)
    places = [0.0, *held, trace.step_time_s]
    counts = [at_first, *held.values(), 0]
    # The prediction holds the activations at the moment with the most micro-batches in flight.
    each_bytes = prediction.memory_bytes.get(_KEPT, 0.0) / prediction.in_flight
    parts = {}
    for name, num_bytes in sorted(
        prediction.memory_bytes.items(), key=lambda item: item[0] == _KEPT
    ):
        if num_bytes:
            parts[name_of_part(name)] = (
                tuple(count * each_bytes for count in counts)
                if name == _KEPT
                else (num_bytes,) * len(places)
            )
    return MemorySeries(
        places=tuple(places),
        parts=parts,
        marks=tuple(time_marks(trace.step_time_s)),
        who=f" of stage {index}, the fullest",
        steps=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleRows:
    """Tasks of each submesh in order of time.

    Attributes:
        shown_s: seconds from the beginning of the step that the tasks cover.
        num_left_out: number of submeshes that are not drawn.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Segment, ...], ...]
    shown_s: float
    step_time_s: float
    num_left_out: int


def schedule_rows(plan: Plan) -> ScheduleRows:
    """The predicted schedule, from the beginning of the step as far as it can be drawn."""
    trace = planned_trace(plan)
    shown = min(plan.num_submeshes, _MOST_SUBMESHES)
    events = []
    for e in trace.events:
        if e.lane == "compute" and e.submesh < shown:
            events.append(e)
    events.sort(key=lambda event: event.end_s)
    splits_backward = any(event.kind == TaskKind.BACKWARD_WEIGHT for event in events)
    rows: list[list[Segment]] = [[] for _ in range(shown)]
    # In order of time, so that all submeshes are cut off at the same moment.
    for event in events[:_MOST_SEGMENTS]:
        kind = {
            TaskKind.FORWARD.value: "forward",
            TaskKind.BACKWARD_WEIGHT.value: "gradients of weights",
            "update": "update",
        }.get(str(event.kind), "backward for inputs" if splits_backward else "backward")
        which = f" of micro-batch {event.micro_batch}" if event.micro_batch >= 0 else ""
        time = format_seconds(event.end_s - event.start_s)
        rows[event.submesh].append(
            Segment(event.start_s, event.end_s, kind, f"{kind}{which}, stage {event.stage}: {time}")
        )
    return ScheduleRows(
        names=tuple(f"submesh {k}" for k in range(shown)),
        rows=tuple(map(tuple, rows)),
        shown_s=events[min(len(events), _MOST_SEGMENTS) - 1].end_s if events else 0.0,
        step_time_s=trace.step_time_s,
        num_left_out=len(submesh_names(plan)) - shown,
    )
