"""Building blocks of all reports: tables, sections with headings, and conversion to text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..core import broken, fitting_widths, wrapped
from ..plans import Section


def as_text(renderable: RenderableType, *, width: int = 120) -> str:
    """A report as plain text without colours, `width` columns wide."""
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def columns(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str | None]],
    *,
    right: Iterable[int] = (),
    narrow: bool = False,
) -> Group:
    """A table under a title. Columns whose positions are in `right` hold numbers and are aligned
    right; None is an empty cell.

    Columns are three spaces apart, two if `narrow`.
    """
    cells = [[cell or "" for cell in row] for row in rows]
    return Group(Text(title, style="bold"), _Columns(list(header), cells, frozenset(right), narrow))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table whose rows are data, such as those of an answer with `--json`.

    Attributes:
        heading: above it.
        of: a key of the row, an attribute of it, or a function of it.
        said: what is found there as text. None is an empty cell.
        number: whether it is aligned right.
        shown: whether it is there, as True or False or by what it is about.
    """

    heading: str
    of: str | Callable[[Any], Any]
    said: Callable[[Any], str] = str
    number: bool = False
    shown: object = True

    def cell(self, row: Any) -> str | None:
        """What is said of a row."""
        if callable(self.of):
            found = self.of(row)
        else:
            found = row.get(self.of) if isinstance(row, Mapping) else getattr(row, self.of)
        return None if found is None else self.said(found)


def table(title: str, rows: Iterable[Any], *of: Column, narrow: bool = False) -> Group:
    """Rows of data as a table under a title."""
    shown = [column for column in of if column.shown]
    cells = []
    for row in rows:
        cells.append([column.cell(row) for column in shown])
    return columns(
        title,
        [column.heading for column in shown],
        cells,
        right=[position for position, column in enumerate(shown) if column.number],
        narrow=narrow,
    )


class _Columns:
    """A table that adapts to the width in which it is printed: if it is too wide, headings and
    texts are broken at spaces and before dots, but numbers never.
    """

    def __init__(
        self, header: list[str], rows: list[list[str]], right: frozenset[int], narrow: bool
    ) -> None:
        self._header, self._rows, self._right, self._narrow = header, rows, right, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = self._narrow or _width(self._header, self._rows, 3) > options.max_width
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1)
        )
        flexible = [k for k in range(len(self._header)) if k not in self._right]
        available = options.max_width - (2 if narrow else 3) * len(self._header)
        heading = list(self._header)
        if narrow:
            for k in self._right:
                numbers = max((len(row[k]) for row in self._rows), default=0)
                width = max(numbers, *map(len, heading[k].split() or [""]))
                heading[k] = max(broken(heading[k], width), key=len)
        widths = fitting_widths([heading, *self._rows], flexible, available)
        for position, (name, width) in enumerate(zip(self._header, widths, strict=True)):
            flush = position in self._right
            table.add_column(
                Text("\n".join(broken(name, width))),
                justify="right" if flush else "left",
                overflow="fold",
                no_wrap=flush,
            )
        for row in self._rows:
            # As `Text`, because brackets in paths would be taken for markup.
            table.add_row(
                *(Text("\n".join(broken(cell, w))) for cell, w in zip(row, widths, strict=True))
            )
        yield table


class Facts:
    """Facts in two columns: names on the left, texts on the right."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._rows = list(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = max((len(name) for name, _ in self._rows), default=0) + 2
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows:
            table.add_row(Text(name), Text("\n".join(wrapped(value, options.max_width - margin))))
        yield table


class SectionTable:
    """A section of a plan as one table or, if that is too wide, as its parts one below another."""

    def __init__(self, section: Section, *, narrow: bool = False) -> None:
        self._section, self._narrow = section, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        section = self._section
        if not section.rows:
            yield Text(section.title, style="bold" if section.remarks else "")
        elif not section.parts or _width(section.header, section.rows, 2) <= options.max_width:
            yield columns(
                section.title,
                section.header,
                section.rows,
                right=section.right,
                narrow=self._narrow,
            )
        else:
            for title, positions in section.parts:
                part = section.columns(positions)
                yield columns(title, part.header, part.rows, right=part.right, narrow=self._narrow)
        for remark in section.remarks:
            yield Padding("\n".join(broken(remark, options.max_width - 2)), (0, 0, 0, 2))
        if section.remarks or not section.rows:
            yield ""


def _width(header: Sequence[str], rows: Iterable[Sequence[str]], space: int) -> int:
    """The columns of a table that is not broken anywhere, `space` behind each."""
    return sum(max(map(len, column)) + space for column in zip(header, *rows, strict=True))
