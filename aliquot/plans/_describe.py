"""Text of `print(plan)`: facts and sections of a plan, laid out for a terminal or a pipe."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator

from ..core import broken, fitting_widths, wrapped
from ._facts import fact_rows, headline
from ._plan import Plan
from ._section import Section, SectionKind
from ._sections import PRINTED, sections

_WIDTH = 120
_LEAST_WIDTH = 60
_MARGIN = 25
# Left out of `print`: the facts already show the parts of memory, and the notes inferred rules.
_LEFT_TO_EXPLAIN = (SectionKind.MEMORY, SectionKind.INFERRED)


def describe(plan: Plan, width: int | None = None) -> str:
    """A plan as text: a headline, its predicted time and memory with their parts, the largest
    arrays, notes.

    Args:
        width: of a line; by default that of the terminal, where paths are broken at dots. In a
            pipe, tables are as wide as their contents.
    """
    known = width or shutil.get_terminal_size((0, 0)).columns
    fits = max(known, _LEAST_WIDTH) if known else None
    lines = [*broken(headline(plan), fits or _WIDTH)]
    for name, text in fact_rows(plan):
        first, *rest = wrapped(text, min(fits or _WIDTH, _WIDTH) - _MARGIN)
        lines += [f"  {name}".ljust(_MARGIN) + first, *(" " * _MARGIN + line for line in rest)]
    for section in sections(plan, PRINTED):
        if section.kind not in _LEFT_TO_EXPLAIN:
            lines += ["", *_laid_out(section, fits)]
    return "\n".join(lines)


def _laid_out(section: Section, width: int | None) -> Iterator[str]:
    lines = _table(section, None)
    if section.parts and width is not None and max(map(len, lines)) > width:
        for number, (title, positions) in enumerate(section.parts):
            yield from ["", title] if number else [title]
            yield from _table(section.columns(positions), width)
    else:
        yield from broken(section.title, width or _WIDTH)
        yield from _table(section, width)
    for remark in section.remarks:
        # In a pipe remarks stay on one line, so that programs can search for them.
        yield from (f"  {line}" for line in broken(remark, (width or len(remark) + 2) - 2))


def _table(section: Section, width: int | None) -> list[str]:
    """Aligned columns without lines. Where a row is wider than `width`, texts are broken at spaces
    and before dots.
    """
    if not section.rows:
        return []
    cells = [section.header, *section.rows]
    flexible = (
        [] if width is None else [k for k in range(len(section.header)) if k not in section.right]
    )
    widths = fitting_widths(cells, flexible, (width or 0) - 2 * len(section.header))
    lines = []
    for row in cells:
        parts = [broken(cell, w) for cell, w in zip(row, widths, strict=True)]
        for texts in itertools.zip_longest(*parts, fillvalue=""):
            padded = [
                t.rjust(w) if k in section.right else t.ljust(w)
                for k, (t, w) in enumerate(zip(texts, widths))
            ]
            lines.append("  " + "  ".join(padded).rstrip())
    return lines
