"""Text of `print(plan)`: facts and sections of a plan, laid out for a terminal or a pipe."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..core import broken, fitting_widths, wrapped
from ._answer import spoken
from ._facts import bound, fact_rows
from ._plan import Plan
from ._section import Section, SectionKind
from ._sections import BRIEF, PRINTED, sections

_WIDTH = 120
_LEAST_WIDTH = 60
_MARGIN = 25
# Left out of `print`: the facts already show the parts of memory, and the notes inferred rules.
_LEFT_TO_EXPLAIN = (SectionKind.MEMORY, SectionKind.INFERRED)
# Only where everything is asked for.
_DETAILS = (SectionKind.ARRAYS, SectionKind.COMMUNICATION)
# Facts that say why this plan; they come first.
_WHY = ("runner-up", "bound", "largest costs")
_COSTS = (
    "step time (predicted)",
    "time between calls",
    "throughput",
    "MFU counts",
    "expected error",
)
_MORE = "Arrays and collectives: plan --all, aliquot explain, or plan.describe(every=True)."


def describe(plan: Plan, width: int | None = None, *, every: bool = False) -> str:
    """A plan as text: what to do in three lines, why, what else was tried, where time and memory
    go, how each axis is used, and notes.

    Args:
        width: of a line; by default that of the terminal, where paths are broken at dots. In a
            pipe, tables are as wide as their contents.
        every: also the largest arrays and the most expensive collectives.
    """
    lines, fits, prose = _head(plan, width)
    rows: dict[str, list[tuple[str, str]]] = {}
    last = ""
    for name, text in fact_rows(plan):
        # Rows without a name continue the one before.
        last = name or last
        rows.setdefault(last, []).append((name, text))
    shown = [each for each in sections(plan, PRINTED) if each.kind not in _LEFT_TO_EXPLAIN]
    tried = [each for each in shown if each.kind == SectionKind.TRIED]
    reasons = itertools.chain(*(rows.pop(name, []) for name in _WHY))
    lines += ["", *_facts(reasons, prose)]
    for section in tried:
        lines += ["", *_laid_out(section, fits)]
    costs = itertools.chain(*(rows.pop(name, []) for name in _COSTS))
    lines += ["", *_facts([*costs, *itertools.chain(*rows.values())], prose)]
    for section in shown:
        if section not in tried and (every or section.kind not in _DETAILS):
            lines += ["", *_laid_out(section, fits)]
    return "\n".join(lines if every else [*lines, "", *wrapped(_MORE, prose)])


def brief(plan: Plan, width: int | None = None) -> str:
    """A plan in about fifteen lines: what to do in three, its bound, and the fastest of what else
    was tried; arguments as for `describe`.
    """
    lines, fits, prose = _head(plan, width)
    lines += ["", *_facts([("bound", bound(plan))], prose)]
    for section in sections(plan, BRIEF):
        if section.kind == SectionKind.TRIED:
            lines += ["", *_laid_out(replace(section, remarks=()), fits)]
    return "\n".join(lines)


def _head(plan: Plan, width: int | None) -> tuple[list[str], int | None, int]:
    """The first lines, the width of tables, None for that of their contents, and that of texts."""
    known = width or shutil.get_terminal_size((0, 0)).columns
    fits = max(known, _LEAST_WIDTH) if known else None
    prose = min(fits or _WIDTH, _WIDTH)
    what, *rest = spoken(plan)
    lines = broken(what, fits or _WIDTH)
    for text in rest:
        for line in wrapped(text, prose - 2):
            lines.append(f"  {line}")
    return lines, fits, prose


def _facts(rows: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    for name, text in rows:
        first, *rest = wrapped(text, width - _MARGIN)
        yield f"  {name}".ljust(_MARGIN) + first
        yield from (" " * _MARGIN + line for line in rest)


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
            padded = []
            for k, (t, w) in enumerate(zip(texts, widths)):
                padded.append(t.rjust(w) if k in section.right else t.ljust(w))
            lines.append("  " + "  ".join(padded).rstrip())
    return lines
