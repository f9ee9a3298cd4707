"""What a benchmark finds, in a folder: rows as they come, tables, charts, and a page that shows
them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError, Journal, write_atomic

if TYPE_CHECKING:
    from rich.console import RenderableType


class Results:
    """Rows, tables and charts of a benchmark.

    A command that was killed goes on in the same folder: rows that are there are not made again,
    but for those that failed.

    Args:
        folder: where they are kept, made here; None keeps and draws nothing.
        show: is given each table.
        title: of the page.

    Raises:
        InputError: the folder cannot be made, or its journal cannot be read.
    """

    def __init__(
        self, folder: Path | None, show: Callable[[RenderableType], None], *, title: str
    ) -> None:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder} cannot be made: {error.strerror}.") from None
        self.folder = folder
        self._show, self._title = show, title
        self._journal = Journal(None if folder is None else folder / "rows.jsonl")
        self._sections: list[str] = []

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row that is known and did not fail, or is made and kept now."""
        if self._journal.rows.get(key, {}).get("outcome") == "failed":
            del self._journal.rows[key]
        return self._journal.row(key, make)

    def bars(
        self,
        name: str,
        title: str,
        unit: str,
        groups: Sequence[str],
        series: Mapping[str, Sequence[float | None]],
        *,
        logarithmic: bool = False,
    ) -> None:
        """A chart with a group of bars for each of `groups`; see `bar_chart`."""
        if self.folder is None:
            return
        from ..report import bar_chart

        bar_chart(
            self.folder / f"{name}.png",
            title=title,
            unit=unit,
            groups=groups,
            series=series,
            logarithmic=logarithmic,
        )

    def lines(
        self,
        name: str,
        title: str,
        horizontal: str,
        unit: str,
        points: Sequence[float],
        series: Mapping[str, Sequence[float | None]],
    ) -> None:
        """A chart of lines; see `line_chart`."""
        if self.folder is None:
            return
        from ..report import line_chart

        line_chart(
            self.folder / f"{name}.png",
            title=title,
            horizontal=horizontal,
            unit=unit,
            points=points,
            series=series,
        )

    def table(
        self,
        name: str,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        note: str = "",
        *,
        shown: Sequence[str] = (),
        tabs: bool = False,
    ) -> None:
        """Rows under the headings of the first one, shown and written, on the page under the chart
        of the same name.

        Args:
            shown: the columns that are shown; by default all.
            tabs: whether the file is TSV, not CSV.
        """
        from ..report import columns

        heads = shown or tuple(rows[0])
        cells, numbers = [], set()
        for row in rows:
            cells.append([_shown(row[head]) for head in heads])
            numbers |= {k for k, head in enumerate(heads) if isinstance(row[head], int | float)}
        self._show(columns(title, heads, cells, right=numbers, narrow=True))
        if self.folder is None:
            return
        file = f"{name}.tsv" if tabs else f"{name}.csv"
        write_atomic(self.folder / file, as_table(rows, "\t" if tabs else ","))
        header = "".join(f"<th>{escape(head)}</th>" for head in heads)
        body = ""
        for texts in cells:
            body += "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
        drawn = (self.folder / f"{name}.png").exists()
        picture = f'<img src="{name}.png" alt="{escape(title)}">' if drawn else ""
        self._sections.append(
            f"<section><h2>{escape(title)}</h2><p>{escape(note)}</p>{picture}"
            f'<table><tr>{header}</tr>{body}</table><p><a href="{file}">{file}</a></p></section>'
        )

    def write_page(self) -> None:
        """Write `index.html` with all tables and their charts, and say where it is."""
        if self.folder is not None:
            title, body = escape(self._title), "\n".join(self._sections)
            write_atomic(
                self.folder / "index.html", _PAGE.replace("TITLE", title).replace("BODY", body)
            )
            self._show(f"\nwritten: {self.folder / 'index.html'}, with what it shows beside it")


def as_table(rows: Sequence[Mapping[str, Any]], separator: str) -> str:
    """Rows as separated values under the headings of the first one; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section { overflow-x: auto; }
img { max-width: 100%; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
</style></head><body><h1>TITLE</h1>
BODY
</body></html>
"""
