"""The few pieces that all reports are made of: tables, headed sections, and their text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


def as_text(renderable: RenderableType, *, width: int = 120) -> str:
    """A report as plain text without colours, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
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
    """A table under a title; the columns whose positions are in `right` hold numbers. None is an
    empty cell.

    Between columns are three spaces, two if `narrow`.
    """
    flush = set(right)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
    for position, name in enumerate(header):
        table.add_column(
            Text(name), justify="right" if position in flush else "left", overflow="fold", no_wrap=position in flush
        )
    for row in rows:
        # Paths hold brackets, which would be taken for markup.
        table.add_row(*(Text(cell or "") for cell in row))
    return Group(Text(title, style="bold"), table)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names on the left, what there is to say on the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table
