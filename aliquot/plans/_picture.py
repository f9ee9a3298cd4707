"""The mesh of a plan as a picture: its devices, and along which axis what is split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from ._answer import device_noun
from ._axis_roles import roles_of_axes
from ._plan import Plan, StagePlan
from ._stage_text import device_range

_CELL, _SMALL_CELL = 44, 26
_FEW = 8
_MOST_COLUMNS, _MOST_ROWS = 16, 8
_LEFT, _LINE = 24, 20
_LETTER = 6.6
_MOST_LETTERS = 56
# The same in a page, in a notebook and as an image on its own, in light and in dark.
_STYLE = (
    ".mesh{font:12px system-ui,sans-serif}.mesh text{fill:#1c2733}.mesh .device{fill:#dbe7f3;"
    "stroke:#3b6ea5}.mesh .axis{stroke:#d55e00;fill:none;stroke-width:2}.mesh .head{fill:#d55e00}"
    "@media(prefers-color-scheme:dark){.mesh text{fill:#e3e8ee}.mesh .device{fill:#2b4763;"
    "stroke:#6ca6e0}.mesh .axis{stroke:#ff9f5a}.mesh .head{fill:#ff9f5a}}"
)


def mesh_picture(plan: Plan, stage: StagePlan | None = None) -> str:
    """An SVG of a stage's devices as numbered cells, with an arrow along each axis and its role.

    The last axis runs along the rows, all others down. Of many devices the first are drawn.

    Args:
        stage: one of the plan's stages; by default the first.
    """
    stage = stage or plan.stages[0]
    roles = list(roles_of_axes(plan, stage))
    columns = roles[-1].size if roles else 1
    first, stop = device_range(stage)
    rows = max((stop - first) // columns, 1)
    shown = min(columns, _MOST_COLUMNS), min(rows, _MOST_ROWS)
    cell = _CELL if shown[0] <= _FEW else _SMALL_CELL
    labels = [] if roles else [f"one {device_noun(plan)}"]
    for role in roles:
        arrow = "→" if role is roles[-1] else "↓"
        label = f"{arrow} {role.name} ({role.size}{role.where}): {role.kind}"
        labels.append(label if len(label) <= _MOST_LETTERS else f"{label[: _MOST_LETTERS - 1]}…")
    top = len(labels) * _LINE + (_LINE if roles else 4)
    wide, high = shown[0] * cell, shown[1] * (cell - 8)
    cut = (shown[0] < columns, shown[1] < rows)
    width = max(_LEFT + wide + 30, round(max(map(len, labels)) * _LETTER) + 8)
    drawn = [
        f'<text x="4" y="{_LINE * k + 14}">{escape(text)}</text>' for k, text in enumerate(labels)
    ]
    drawn += _cells(first, columns, shown, cell, top)
    if roles:
        drawn.append(_arrow(_LEFT, top - 9, _LEFT + wide - 4, top - 9))
    if len(roles) > 1:
        drawn.append(_arrow(_LEFT - 12, top, _LEFT - 12, top + high - 6))
    if any(cut):
        left_out = stop - first - shown[0] * shown[1]
        text = f"and {left_out} more {device_noun(plan)}s"
        drawn.append(f'<text x="{_LEFT}" y="{top + high + 14}">{text}</text>')
    height = top + high + (_LINE if any(cut) else 2)
    names = "; ".join(labels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mesh" viewBox="0 0 {width} {height}"'
        f' style="width:{width}px;max-width:100%" role="img" aria-label="{escape(names)}">'
        f"<style>{_STYLE}</style>{''.join(drawn)}</svg>"
    )


def _cells(first: int, columns: int, shown: tuple[int, int], cell: int, top: int) -> Iterator[str]:
    """The devices that are shown, each a rounded cell with its number."""
    for row in range(shown[1]):
        for column in range(shown[0]):
            x, y = _LEFT + column * cell, top + row * (cell - 8)
            number = first + row * columns + column
            yield (
                f'<rect class="device" x="{x}" y="{y}" width="{cell - 4}" height="{cell - 12}"'
                f' rx="4"/><text x="{x + cell / 2 - 2:.0f}" y="{y + cell / 2 - 2:.0f}"'
                f' text-anchor="middle">{number}</text>'
            )


def _arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    """An arrow to the right or down."""
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    there = f"translate({x2},{y2}) rotate({angle:.0f})"
    return (
        f'<path class="axis" d="M{x1},{y1} L{x2},{y2}"/>'
        f'<path class="head" d="M0,0 l-9,-4 v8 z" transform="{there}"/>'
    )
