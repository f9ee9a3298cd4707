"""Pictures for HTML pages, as inline SVG: bars, stacked areas over time, points with errors, and a
pipeline's schedule.

A colour means the same in every picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from ..core import format_seconds

# Colours that colour-blind readers can tell apart (Okabe and Ito), and lighter ones of the same
# hues.
_COLOURS = {
    "parameters": "#0072b2",
    "parameters, gradients and optimizer state": "#0072b2",
    "optimizer state": "#56b4e9",
    "gradients": "#e69f00",
    "activations": "#009e73",
    "activations in flight": "#009e73",
    "temporaries": "#cc79a7",
    "unreduced gradients": "#f7d08a",
    "gathered or resharded copies": "#d55e00",
    "batch": "#f0e442",
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "backward for inputs": "#e69f00",
    "gradients of weights": "#f7d08a",
    "update": "#7f7f7f",
    "compute": "#3b6ea5",
    "communication": "#d55e00",
    "exposed communication": "#d55e00",
    "copies to and from host memory": "#8c6d31",
    "transfers between stages": "#56b4e9",
    "pipeline bubble": "#999999",
}
_OTHERS = ("#999999", "#8c6d31", "#7b4173", "#637939", "#bcbd22")
_BAR_WIDTH = 160
_BAR_HEIGHT = 14
_WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 140, 16, 24, 34
_AREA_HEIGHT = 250
_ROW = 28
_GAP = 4
_LEAST_WIDTH = 0.4
# Width of a letter where texts are largest, on narrow screens.
_LETTER = 12.0
_FARTHEST_LIMIT = 2.5
"""A limit above so many times the highest value is not drawn, because the values would be too flat
to read.
"""


class Segment(NamedTuple):
    """A stretch of a row: its start and end on the axis, its kind, which decides its colour, and
    the text of its tooltip.
    """

    start: float
    end: float
    kind: str
    text: str


def colour_of(name: str, names: Sequence[str]) -> str:
    """The colour of a part of the memory or of a kind of task; a name without a fixed colour gets
    one by its position among such names in `names`.
    """
    if name in _COLOURS:
        return _COLOURS[name]
    unknown = [other for other in names if other not in _COLOURS]
    return _OTHERS[unknown.index(name) % len(_OTHERS)]


def bar(share: float, name: str, parts: Sequence[str] = ()) -> str:
    """A bar whose length is a share of the longest.

    Args:
        name: name of the bar's row.
        parts: names that have colours of their own; all others share one.
    """
    fill = f'fill="{colour_of(name, parts)}"' if name in parts else 'class="bar"'
    return (
        f'<svg width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}" role="img" aria-label="{escape(name)}:'
        f' {share:.0%}"><rect {fill} width="{_BAR_WIDTH * share:.1f}"'
        f' height="{_BAR_HEIGHT}"/></svg>'
    )


def areas(
    places: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    limit: tuple[float, str],
    format_value: Callable[[float], str],
    marks: Iterable[tuple[float, str]],
    label: str,
    steps: bool = False,
) -> str:
    """A stacked area chart over a horizontal axis, with a line at the limit and a legend.

    A limit far above all values is written as text instead of drawn.

    Args:
        places: places of the values on the axis, ascending; the axis runs from the first to the
            last.
        series: the values at the places, by name; the first series is at the bottom.
        limit: height of the horizontal line, and the text on it.
        format_value: makes the text of a value at the vertical axis.
        marks: places on the axis, each with a text.
        label: what the picture shows, for screen readers.
        steps: whether a value holds until the next place, instead of leading to the next value in a
            straight line.
    """
    totals = list(map(sum, zip(*series.values(), strict=True)))
    most, (height_of_limit, limit_text) = max(totals), limit
    is_near = height_of_limit <= _FARTHEST_LIMIT * most
    top = 1.06 * max(height_of_limit, most) if is_near else 1.15 * most
    first, extent = places[0], (places[-1] - places[0]) or 1.0

    def at(place: float, value: float) -> str:
        x = _LEFT + (place - first) / extent * (_WIDTH - _LEFT - _RIGHT)
        return f"{x:.1f},{_TOP + (1 - value / top) * _AREA_HEIGHT:.1f}"

    drawn = [_grid(top, format_value)]
    bottom = [0.0] * len(places)
    for name, values in series.items():
        upper = [below + value for below, value in zip(bottom, values, strict=True)]
        there = _corners(places, upper, steps)
        back = _corners(places, bottom, steps)[::-1]
        points = " ".join(at(place, value) for place, value in [*there, *back])
        drawn.append(
            f'<polygon points="{points}"'
            f' fill="{colour_of(name, list(series))}"><title>{escape(name)}</title></polygon>'
        )
        bottom = upper
    height = _TOP + _AREA_HEIGHT
    for place, text in _spaced(marks, (_WIDTH - _LEFT - _RIGHT) / extent, _LEFT):
        x = at(place, 0).partition(",")[0]
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{height + 5}" class="mark"/>')
        anchor = _anchor(float(x), text, _WIDTH - _RIGHT)
        drawn.append(
            f'<text x="{x}" y="{height + 20}" text-anchor="{anchor}">{escape(text)}</text>'
        )
    (left, y), right = at(places[0], height_of_limit).split(","), _WIDTH - _RIGHT
    if is_near:
        drawn.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" class="limit"/>')
        drawn.append(
            f'<text x="{right}" y="{float(y) - 4:.1f}"'
            f' text-anchor="end">{escape(limit_text)}</text>'
        )
    else:
        text = escape(f"{limit_text}, above the picture")
        drawn.append(f'<text x="{right}" y="{_TOP + 12}" text-anchor="end">{text}</text>')
    return _picture(_WIDTH, height + _BOTTOM, drawn, label, "chart") + legend(list(series))


def _corners(
    places: Sequence[float], values: Sequence[float], steps: bool
) -> list[tuple[float, float]]:
    corners = list(zip(places, values, strict=True))
    if not steps:
        return corners
    # Two corners for each value: where it begins, and where the next one does.
    held = zip(places[1:], values, strict=False)
    return list(itertools.chain(*zip(corners, [*held, corners[-1]], strict=True)))


def _grid(top: float, format_value: Callable[[float], str]) -> str:
    lines = []
    for value in round_ticks(top, binary=True):
        y = _TOP + (1 - value / top) * _AREA_HEIGHT
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        text = escape(format_value(value))
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(lines)


def round_ticks(top: float, *, binary: bool = False) -> list[float]:
    """Three to six round numbers from 0 up to `top`, in powers of 1024 if `binary`.

    >>> round_ticks(0.017), [value / 2**20 for value in round_ticks(9 * 2**20, binary=True)]
    ([0.0, 0.005, 0.01, 0.015], [0.0, 2.0, 4.0, 6.0, 8.0])
    """
    if top <= 0:
        return [0.0]
    unit = 1024.0 ** math.floor(math.log(top, 1024)) if binary else 1.0
    power = 10.0 ** math.floor(math.log10(top / unit / 3))
    step = next(n for n in (10, 5, 2, 1) if n * power * unit * 3 <= top) * power * unit
    return [round(k * step / unit / power, 6) * power * unit for k in range(int(top / step) + 1)]


def time_marks(extent_s: float) -> list[tuple[float, str]]:
    """Round seconds along an axis, each with its text, and the end of the axis."""
    ticks = [s for s in round_ticks(extent_s) if s < 0.85 * extent_s]
    return [(s, format_seconds(s)) for s in [*ticks, extent_s]]


def legend(names: Sequence[str]) -> str:
    """Each name beside its colour."""
    entries = ""
    for name in names:
        entries += (
            '<span><svg width="12" height="12"><rect width="12" height="12"'
            f' fill="{colour_of(name, names)}"/></svg> {escape(name)}</span>'
        )
    return f'<p class="legend">{entries}</p>'


def rows_over_time(
    names: Sequence[str],
    rows: Sequence[Sequence[Segment]],
    *,
    marks: Iterable[tuple[float, str]],
    label: str,
) -> str:
    """Rows of segments over a common axis, each after its name, and a legend of the kinds of
    segments.

    Args:
        names: one for each row.
        rows: segments of each row; the axis ends where the last of them does.
        marks: places on the axis, each with a text.
        label: what the picture shows, for screen readers.
    """
    segments = list(itertools.chain(*rows))
    extent = max((segment.end for segment in segments), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / extent
    height = _TOP + len(rows) * _ROW
    kinds = list(dict.fromkeys(segment.kind for segment in segments))
    drawn = []
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = _TOP + index * _ROW
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{y + _ROW - 10}" text-anchor="end">{escape(name)}</text>'
        )
        for segment in row:
            # A thin gap separates neighbours of one colour.
            width = max((segment.end - segment.start) * scale - _LEAST_WIDTH, _LEAST_WIDTH)
            drawn.append(
                f'<rect x="{_LEFT + segment.start * scale:.2f}" y="{y}" width="{width:.2f}"'
                f' height="{_ROW - _GAP}" fill="{colour_of(segment.kind, kinds)}">'
                f"<title>{escape(segment.text)}</title></rect>"
            )
    drawn += _axis(marks, scale, _LEFT, _TOP, height, "mark")
    return _picture(_WIDTH, height + _BOTTOM, drawn, label, "chart") + legend(kinds)


def _axis(
    marks: Iterable[tuple[float, str]], scale: float, left: int, top: int, bottom: int, kind: str
) -> Iterator[str]:
    """Lines from top to bottom at those marks whose texts do not meet, each with its text below."""
    for place, text in _spaced(marks, scale, left):
        x = left + place * scale
        anchor, y = _anchor(x, text, _WIDTH - _RIGHT), bottom + (20 if kind == "mark" else 26)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom + 5}" class="{kind}"/>'
        yield f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _anchor(x: float, text: str, right: float) -> str:
    """Whether a text begins or ends at a place, so that it stays within a picture."""
    return "end" if x + _LETTER * len(text) > right else "start"


def _spaced(
    marks: Iterable[tuple[float, str]], scale: float, left: float
) -> list[tuple[float, str]]:
    """The marks whose texts do not meet on the narrowest screen; the last one stays.

    Args:
        scale: units of the picture for one of the axis.
        left: where the axis begins in the picture.
    """
    kept: list[tuple[float, str]] = []
    free = math.inf
    for place, text in reversed(list(marks)):
        x, width = left + place * scale, _LETTER * len(text)
        start = x - width if _anchor(x, text, _WIDTH - _RIGHT) == "end" else x
        if start + width <= free:
            free = start - _LETTER
            kept.append((place, text))
    return kept[::-1]


def scatter(
    points: Sequence[tuple[float, float, float | None]],
    *,
    limit: float,
    format_x: Callable[[float], str],
    format_y: Callable[[float], str],
    names: tuple[str, str],
    label: str,
) -> str:
    """Numbered points over two axes, with a bar along the first for the error of each, and a line
    at the limit of the second. Points that lie on each other share their numbers.

    Args:
        points: for each its place on both axes, and its relative error; None for one not known.
        limit: on the second axis; 0 for none.
        names: of the axes.
        label: what the picture shows, for screen readers.
    """
    right = max(x * (1 + (error or 0.0)) for x, _, error in points) * 1.05 or 1.0
    top = max(limit, max(y for _, y, _ in points)) * 1.08 or 1.0
    height = _TOP + _AREA_HEIGHT
    scale = (_WIDTH - _LEFT - _RIGHT) / right

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x * scale, _TOP + (1 - y / top) * _AREA_HEIGHT

    ticks = [(x, format_x(x)) for x in round_ticks(right)]
    drawn = [_grid(top, format_y), *_axis(ticks, scale, _LEFT, _TOP, height, "grid")]
    if limit:
        y = at(0, limit)[1]
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>'
        )
    groups: list[tuple[float, float, list[int]]] = []
    for number, (px, py, error) in enumerate(points, 1):
        x, y = at(px, py)
        if error is not None:
            reach = error * px * scale
            drawn.append(
                f'<line x1="{x - reach:.1f}" x2="{x + reach:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
                ' class="error"/>'
            )
        near = next((g for g in groups if abs(g[0] - x) < 44 and abs(g[1] - y) < 30), None)
        if near:
            near[2].append(number)
        else:
            groups.append((x, y, [number]))
        fill = ' class="bar"' if error is not None else ' class="unknown"'
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7"{fill}/>')
    for x, y, numbers in groups:
        text = ", ".join(map(str, numbers))
        drawn.append(f'<text x="{x:.1f}" y="{y - 12:.1f}" text-anchor="middle">{text}</text>')
    return (
        f"{_picture(_WIDTH, height + _BOTTOM, drawn, label, 'chart')}"
        f"<p>From left to right: {escape(names[0])}; upwards: {escape(names[1])}.</p>"
    )


def bars_in_parts(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    marks: Sequence[tuple[float, str]],
    label: str,
    limit: float = 0.0,
) -> str:
    """Bars over a common axis, each below its name and made of parts, and a legend of the parts.

    Args:
        rows: the name of each bar, with the lengths of its parts.
        marks: places on the axis, each with a text; the axis ends at the longest bar, or at the
            limit.
        label: what the picture shows, for screen readers.
        limit: where a line is drawn; 0 for none.
    """
    extent = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    extent = max(extent, limit)
    scale, height = (_WIDTH - 2 * _RIGHT) / extent, len(rows) * 2 * _ROW
    lengths = itertools.chain(*(parts.items() for _, parts in rows))
    names = list(dict.fromkeys(part for part, length in lengths if length))
    drawn = list(_axis(marks, scale, _RIGHT, 0, height, "grid"))
    for index, (name, parts) in enumerate(rows):
        y, x = 2 * index * _ROW, float(_RIGHT)
        drawn.append(f'<text x="{_RIGHT}" y="{y + _ROW - 8}">{escape(name)}</text>')
        for part, length in parts.items():
            if not length:
                continue
            drawn.append(
                f'<rect x="{x:.2f}" y="{y + _ROW}" width="{length * scale:.2f}"'
                f' height="{_ROW - _GAP}" fill="{colour_of(part, names)}">'
                f"<title>{escape(part)}</title></rect>"
            )
            x += length * scale
    if limit:
        x = _RIGHT + limit * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height + 5}" class="limit"/>')
    return _picture(_WIDTH, height + _BOTTOM, drawn, label, "chart") + legend(names)


def _picture(width: int, height: int, drawn: Iterable[str], label: str, kind: str = "cells") -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" style="width:{width}px" role="img"'
        f' aria-label="{escape(label)}">'
        f"{''.join(drawn)}</svg>"
    )
