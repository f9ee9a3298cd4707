"""Sections of a plan as plain text in cells: terminals, notebooks and web pages render the same
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class SectionKind(StrEnum):
    """The parts of a plan that are shown, each as one section or several."""

    TRIED = "tried"
    STAGES = "stages"
    MEMORY = "memory"
    ARRAYS = "arrays"
    COMMUNICATION = "communication"
    INFERRED = "inferred"
    NOTES = "notes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A title, a table below it, and remarks below that; a section may have no table.

    Attributes:
        kind: the part of the plan that it shows.
        title: one line that says what the rows are.
        header: names of the columns.
        rows: one text for each column.
        right: positions of columns with numbers, which are aligned on their right.
        parts: tables that replace one too wide for a terminal: for each its title and the positions
            of its columns.
        remarks: lines below the table.
        amounts: numbers of the first rows, for drawing bars beside them; empty if bars would add
            nothing to the text.
    """

    kind: SectionKind
    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: tuple[int, ...] = ()
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    remarks: tuple[str, ...] = ()
    amounts: tuple[float, ...] = ()

    def first(self, most: int) -> Section:
        """The section with its first rows only."""
        return replace(self, rows=self.rows[:most], amounts=self.amounts[:most])

    def columns(self, positions: Sequence[int]) -> Section:
        """The section with some of its columns."""
        return replace(
            self,
            header=tuple(self.header[k] for k in positions),
            rows=tuple(tuple(row[k] for k in positions) for row in self.rows),
            right=tuple(place for place, k in enumerate(positions) if k in self.right),
            parts=(),
        )
