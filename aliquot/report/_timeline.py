"""A pipeline's predicted schedule, drawn in characters: a line for each submesh, time from left to
right.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..core import format_seconds
from ..plans import Plan, TaskKind, TraceEvent
from ._trace import planned_trace

_DIGITS = "0123456789"
_LETTERS = "abcdefghij"
_UPDATE, _WEIGHTS, _IDLE = "U", "w", "."
_SHARE_OF_BEGINNING = 0.6
# Columns of the shortest forward task: enough to tell it from its neighbours.
_COLUMNS_OF_TASK = 2
_MOST_SUBMESHES = 32


class Timeline:
    """The schedule as text that fits the width in which it is printed.

    If a step is too long to show its tasks, only its beginning and its end are drawn.
    """

    def __init__(self, plan: Plan) -> None:
        trace = planned_trace(plan)
        self._events = [e for e in trace.events if e.lane == "compute"]
        self._num_submeshes = plan.num_submeshes
        self._splits_backward = any(e.kind == TaskKind.BACKWARD_WEIGHT for e in self._events)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("Schedule (predicted)", style="bold")
        for line in self.lines(options.max_width):
            yield Text(line, no_wrap=True)

    def lines(self, width: int) -> list[str]:
        """The drawing, no wider than `width`."""
        end_s = max((e.end_s for e in self._events), default=0.0)
        shown = range(min(self._num_submeshes, _MOST_SUBMESHES))
        names = [f"  {k} " if self._num_submeshes < 10 else f"  {k:>2} " for k in shown]
        room = max(width - len(names[-1]), 20)
        shortest_s = min(
            (e.end_s - e.start_s for e in self._events if e.kind == TaskKind.FORWARD), default=end_s
        )
        # A step that is short enough is drawn whole, in no more columns than its tasks need.
        column_s = max(end_s / room, shortest_s / _COLUMNS_OF_TASK)
        # If tasks would blur in a drawing of the whole step, its middle is left out, and five
        # columns mark the gap.
        if end_s / room >= shortest_s / _COLUMNS_OF_TASK * (1 + 1e-9):
            column_s = shortest_s / _COLUMNS_OF_TASK
            first = int((room - 5) * _SHARE_OF_BEGINNING)
            last = room - 5 - first
            parts = [(0.0, first), (end_s - last * column_s, last)]
        else:
            parts = [(0.0, min(room, round(end_s / column_s)))]
        by_submesh: list[list[TraceEvent]] = [[] for _ in range(self._num_submeshes)]
        for event in self._events:
            by_submesh[event.submesh].append(event)
        lines = []
        for name, events in zip(names, by_submesh):
            drawn = [_drawn(events, since, columns, column_s) for since, columns in parts]
            lines.append(name + " ... ".join(drawn))
        if len(shown) < self._num_submeshes:
            lines.append(f"  and {self._num_submeshes - len(shown)} more submeshes")
        weights = f", {_WEIGHTS} gradients of weights" if self._splits_backward else ""
        legend = (
            f"  a line for each submesh; a column: {format_seconds(column_s)}",
            f"  0-9 forward of a micro-batch (its last digit), a-j backward of 0-9{weights}",
            f"  {_UPDATE} update, {_IDLE} waits"
            + ("; ... leaves out the middle, which repeats" if parts[1:] else ""),
        )
        return [*lines, *legend, ""]


def _drawn(events: Sequence[TraceEvent], since_s: float, columns: int, column_s: float) -> str:
    """A line with one character for each column: the sign of the task that runs then."""
    line = [_IDLE] * columns
    for event in events:
        first = max(0, round((event.start_s - since_s) / column_s))
        last = min(columns, round((event.end_s - since_s) / column_s))
        if event.kind == TaskKind.FORWARD:
            sign = _DIGITS[event.micro_batch % 10]
        elif event.kind == TaskKind.BACKWARD_WEIGHT:
            sign = _WEIGHTS
        else:
            sign = _LETTERS[event.micro_batch % 10] if event.micro_batch >= 0 else _UPDATE
        # Negative ends, of tasks before what is drawn, would count from its end.
        if first < last:
            line[first:last] = [sign] * (last - first)
    return "".join(line)
