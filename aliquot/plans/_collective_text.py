"""Predicted communication as rows of a table, the most expensive first."""

from __future__ import annotations

import re

from ..core import counted, format_bytes, format_seconds
from ._plan import CollectiveUse, Plan
from ._section import Section, SectionKind
from ._stage_text import stage_numbers

_DIGITS = re.compile(r"\d+")
_HEADER = ("collective", "axes", "count", "total output", "total time", "of what")
_RIGHT = (2, 3, 4)


def collective_table(plan: Plan) -> Section:
    """Communication of a plan of one program; the last column says what it is for."""
    uses = sorted(plan.prediction.collectives, key=lambda use: -use.seconds)
    return Section(
        kind=SectionKind.COMMUNICATION,
        title=(
            f"The most expensive of {counted(len(uses), 'kind')} of collectives in a step"
            " (predicted)"
            if uses
            else "No communication is predicted."
        ),
        header=_HEADER,
        rows=tuple(map(_cells, uses)),
        right=_RIGHT,
        amounts=tuple(use.seconds for use in uses),
    )


def stage_collective_table(plan: Plan) -> Section:
    """Communication inside the stages of a pipeline; equal rows of several stages are joined."""
    by_kind: dict[object, tuple[list[int], CollectiveUse]] = {}
    for index, stage in enumerate(plan.stages):
        for use in stage.prediction.collectives if stage.prediction else ():
            key = (
                use.kind,
                use.axes,
                stage.mesh_shape,
                use.count,
                use.num_bytes,
                _DIGITS.sub("*", use.label),
            )
            by_kind.setdefault(key, ([], use))[0].append(index)
    entries = [(tuple(dict.fromkeys(numbers)), use) for numbers, use in by_kind.values()]
    entries = sorted(entries, key=lambda entry: -entry[1].seconds)
    return Section(
        kind=SectionKind.COMMUNICATION,
        title=(
            f"The most expensive of {counted(len(entries), 'kind')} of collectives within a stage"
            " in a step (predicted)"
            if entries
            else "No communication is predicted within stages."
        ),
        header=("stages", *_HEADER),
        rows=tuple((stage_numbers(numbers), *_cells(use)) for numbers, use in entries),
        right=tuple(position + 1 for position in _RIGHT),
        amounts=tuple(use.seconds for _, use in entries),
    )


def _cells(use: CollectiveUse) -> tuple[str, ...]:
    size, seconds = format_bytes(use.num_bytes), format_seconds(use.seconds)
    return use.kind, ", ".join(use.axes), f"{use.count:g}", size, seconds, use.label
