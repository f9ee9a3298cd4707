"""Predicted communication as rows of a table, the most expensive first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core import format_bytes, format_seconds
from ._plan import CollectiveUse, Plan
from ._stage_text import stage_numbers

_DIGITS = re.compile(r"\d+")
_HEADER = ("kind", "axes", "count", "bytes", "time", "what")
_RIGHT = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """One row for each kind of communication, as text; the last cell says what for. `right` are
    columns with numbers.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...]


def collective_table(plan: Plan) -> CollectiveTable:
    """Communication of a plan that is one program."""
    uses = sorted(plan.prediction.collectives, key=lambda use: -use.seconds)
    return CollectiveTable(header=_HEADER, rows=tuple(_cells(use) for use in uses), right=_RIGHT)


def stage_collective_table(plan: Plan) -> CollectiveTable:
    """Communication inside the stages of a pipeline; what is equal in several stages once."""
    return CollectiveTable(
        header=("stages", *_HEADER),
        rows=tuple((stage_numbers(numbers), *_cells(use)) for numbers, use in _stage_collectives(plan)),
        right=tuple(position + 1 for position in _RIGHT),
    )


def _cells(use: CollectiveUse) -> tuple[str, ...]:
    size, seconds = format_bytes(use.num_bytes), format_seconds(use.seconds)
    return use.kind, ", ".join(use.axes), f"{use.count:g}", size, seconds, use.label


def _stage_collectives(plan: Plan) -> list[tuple[tuple[int, ...], CollectiveUse]]:
    by_kind: dict[object, tuple[list[int], CollectiveUse]] = {}
    for index, stage in enumerate(plan.stages):
        for use in stage.prediction.collectives if stage.prediction else ():
            key = (use.kind, use.axes, stage.mesh_shape, use.count, use.num_bytes, _DIGITS.sub("*", use.label))
            by_kind.setdefault(key, ([], use))[0].append(index)
    entries = [(tuple(dict.fromkeys(numbers)), use) for numbers, use in by_kind.values()]
    return sorted(entries, key=lambda entry: -entry[1].seconds)
