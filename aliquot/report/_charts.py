"""Charts as PNG files: bars in groups, and lines over a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import MissingExtraError

_DASHES = ("-", "--", ":", "-.")
_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_MOST_DIGITS = 10_000
# Colours that colour-blind readers can tell apart (Okabe and Ito).
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#009e73", "#cc79a7")


def bar_chart(
    path: Path,
    *,
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    logarithmic: bool = False,
) -> None:
    """Write a bar chart, with a group of bars for each of `groups` and in it a bar for each series.

    Args:
        unit: label of the vertical axis.
        series: by name, one value for each group; None and 0 leave a gap.
        logarithmic: whether the vertical axis is logarithmic.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure, axes = _figure(title, unit)
    width = 0.8 / len(series)
    for k, (name, values) in enumerate(series.items()):
        places, heights = [], []
        for i, value in enumerate(values):
            if value:
                places.append(i + (k - (len(series) - 1) / 2) * width)
                heights.append(value)
        bars = axes.bar(places, heights, width, label=name, color=_COLOURS[k % len(_COLOURS)])
        axes.bar_label(bars, fmt=lambda value: f"{value:.3g}", fontsize=7, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    if logarithmic:
        axes.set_yscale("log")
    axes.margins(y=0.18)
    _finish(figure, axes, path)


def line_chart(
    path: Path,
    *,
    title: str,
    horizontal: str,
    unit: str,
    points: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    among: Sequence[str] = (),
) -> None:
    """Write a line chart with logarithmic axes; the horizontal one is marked in powers of two, the
    vertical one with plain numbers of its unit.

    Args:
        horizontal, unit: labels of the axes.
        series: by name, one value for each point; None and 0 leave a gap.
        among: the names of all charts that belong together, in which a name has one colour.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure, axes = _figure(title, unit)
    from matplotlib.ticker import FuncFormatter, LogLocator

    names = list(dict.fromkeys([*among, *series]))
    for name, values in series.items():
        k = names.index(name)
        places, heights = [], []
        for point, value in zip(points, values, strict=True):
            if value:
                places.append(point)
                heights.append(value)
        axes.plot(
            places,
            heights,
            marker="o",
            label=name,
            color=_COLOURS[k % len(_COLOURS)],
            # If there are more lines than colours, dashes tell them apart.
            linestyle=_DASHES[k // len(_COLOURS) % len(_DASHES)],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    first, last = (round(math.log2(point)) for point in (min(points), max(points)))
    step = max(math.ceil((last - first) / 7), 1)
    ticks, texts = [], []
    for power in range(first, last + 1, step):
        ticks.append(2.0**power)
        # Large ones have a binary prefix, such as `64 Ki`.
        if ticks[-1] < _MOST_DIGITS:
            texts.append(f"{ticks[-1]:g}")
        else:
            texts.append(f"{2 ** (power % 10)} {_PREFIXES[power // 10]}")
    axes.set_xticks(ticks, texts)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(horizontal)
    _finish(figure, axes, path)


def _figure(title: str, unit: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("plot", "matplotlib") from None
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
