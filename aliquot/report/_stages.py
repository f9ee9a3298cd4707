"""The stages of a pipeline as tables: one row each where there is room, and what each kind of stage
holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from ..core import format_bytes
from ..plans import (
    MOMENTS_LEFT_OUT,
    Plan,
    StageTable,
    equal_stages,
    format_dims,
    stage_numbers,
    stage_remarks,
    stage_table,
    without_moments,
)
from ._tables import columns

_ARRAYS = 6
_KINDS = 6
_BETWEEN = 2


def stages(plan: Plan) -> RenderableType:
    """One row for each stage, with what must be known to read it."""
    return Group(_Stages(stage_table(plan)), *(Padding(line, (0, 0, 0, 2)) for line in stage_remarks(plan)), "")


def arrays_of_stages(plan: Plan) -> Iterator[Group]:
    """The largest inputs, once for all stages that hold equal ones."""
    kinds = list(equal_stages(plan))
    for numbers, groups in kinds[:_KINDS]:
        who = f"stage {numbers[0]}" if len(numbers) == 1 else f"each of stages {stage_numbers(numbers)}"
        rows = [
            (
                group.pattern,
                str(group.count),
                f"{group.dtype}[{', '.join(map(str, group.shape))}]",
                format_dims(group.dims),
                format_bytes(group.local_bytes),
            )
            for group in without_moments(groups)[:_ARRAYS]
        ]
        held = sum(group.count for group in groups)
        left_out = MOMENTS_LEFT_OUT if len(without_moments(groups)) < len(groups) else ""
        title = f"Largest of {held} inputs of {who}, by what each device holds{left_out}"
        yield columns(title, ("path", "count", "each", "split by axes", "on each device"), rows, right=(1, 4))
    if len(kinds) > _KINDS:
        others = sorted(number for numbers, _ in kinds[_KINDS:] for number in numbers)
        yield Group(Text(f"Stages {stage_numbers(others)} hold other arrays; --json lists them all."), "")


class _Stages:
    """One table, or two below one another where the terminal is narrow."""

    def __init__(self, table: StageTable) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table
        everything = tuple(range(len(table.header)))
        if self._width(everything) <= options.max_width:
            yield self._part("Stages (predicted)", everything)
        else:
            yield self._part("Stages", table.where)
            yield self._part("What they take (predicted)", table.what)

    def _part(self, title: str, positions: Sequence[int]) -> Group:
        header = [self._table.header[k] for k in positions]
        rows = [[row[k] for k in positions] for row in self._table.rows]
        right = [place for place, k in enumerate(positions) if k in self._table.right]
        return columns(title, header, rows, right=right, narrow=True)

    def _width(self, positions: Sequence[int]) -> int:
        cells = (self._table.header, *self._table.rows)
        return sum(max(len(row[k]) for row in cells) + _BETWEEN for k in positions)
