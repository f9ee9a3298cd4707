"""Loss curves drawn with characters for a terminal, several in one frame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ..core import InputError

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARKS = "ox+*"
_BRAILLE = 0x2800


def loss_chart(
    series: Mapping[str, Sequence[float]],
    *,
    steps: int | None = None,
    width: int = 64,
    height: int = 10,
) -> str:
    """A chart of curves over the number of the step, all on one scale.

    The first curve is a fine line of braille dots; marks over it show each further curve, so two
    curves that agree appear as one marked line.

    Args:
        series: Values by name; numbers that are not finite are left out.
        steps: The number of the last step, where values are not those of each step.
        width, height: Of the frame, in characters.

    Raises:
        InputError: There is nothing to draw.
    """
    finite = list(filter(math.isfinite, itertools.chain(*series.values())))
    if not finite:
        raise InputError("a chart needs at least one finite value, got none.")
    low, high = min(finite), max(finite)
    length = max(map(len, series.values()))
    frame = _Frame(
        low=low, high=high if high > low else low + 1.0, length=length, width=width, height=height
    )
    last = length - 1 if steps is None else steps
    names = list(series)
    frame.line(series[names[0]])
    for name, mark in zip(names[1:], _MARKS, strict=False):
        frame.marks(series[name], mark)
    legend = [
        f"⠒ {names[0]}",
        *(f"{mark} {name}" for name, mark in zip(names[1:], _MARKS, strict=False)),
    ]
    return "\n".join(
        [
            *frame.rows(),
            f"{'':>8}  {'step 0':<{max(width - 8, 6)}}{last:>8}",
            f"{'':>8}  {'   '.join(legend)}",
        ]
    )


class _Frame:
    """A grid of characters, each of two by four dots."""

    def __init__(self, *, low: float, high: float, length: int, width: int, height: int) -> None:
        self._low, self._high, self._length = low, high, length
        self._width, self._height = width, height
        self._dots = [[0] * width for _ in range(height)]
        self._marks = [[""] * width for _ in range(height)]

    def line(self, values: Sequence[float]) -> None:
        """Draw values, joined by straight lines."""
        points = [(self._x(i, 2), self._y(v, 4)) for i, v in enumerate(values) if math.isfinite(v)]
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for k in range(steps + 1):
                x, y = round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)
                self._dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def marks(self, values: Sequence[float], mark: str) -> None:
        """Put a mark at a dozen or so of the values."""
        every = max(1, len(values) // 12)
        for i, value in list(enumerate(values))[::every]:
            if math.isfinite(value):
                self._marks[self._y(value, 1)][self._x(i, 1)] = mark

    def rows(self) -> list[str]:
        """The frame as lines, with the scale on the left."""
        lines = []
        for row in range(self._height):
            value = self._high - (self._high - self._low) * row / max(self._height - 1, 1)
            label = f"{value:8.3f}" if row % 3 == 0 or row == self._height - 1 else " " * 8
            cells = (
                m or (chr(_BRAILLE + d) if d else " ")
                for m, d in zip(self._marks[row], self._dots[row])
            )
            lines.append(f"{label} ┤{''.join(cells)}".rstrip())
        return lines

    def _x(self, index: int, per_cell: int) -> int:
        return round(index / max(self._length - 1, 1) * (self._width * per_cell - 1))

    def _y(self, value: float, per_cell: int) -> int:
        return round(
            (self._high - value) / (self._high - self._low) * (self._height * per_cell - 1)
        )
