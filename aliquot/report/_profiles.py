"""Reports on a profile database: its contents, what a plan lacks in it, and fitted figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from ..cluster import MEASURED
from ..core import format_seconds
from ._charts import line_chart
from ._tables import Column, columns, table

_MOST_OUTLIERS = 10


def profiles_text(answer: Mapping[str, Any]) -> RenderableType:
    """Tables of a database's contents: kinds of measured programs, corrections of the cost model,
    and programs that are noisy or unlike their neighbours.

    Args:
        answer: as `describe_profiles` returns it.
    """
    by_devices: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in answer["kinds"]:
        by_devices.setdefault((row["devices"], row["grade"]), []).append(row)
    parts: list[RenderableType] = []
    for (devices, grade), rows in by_devices.items():
        parts.append(_programs(devices, grade, rows))
    if not parts:
        parts.append("It holds no measurements yet.")
    if answer["tables"]:
        parts.append(
            table(
                "Corrections of the cost model",
                answer["tables"],
                Column("priced as", "table"),
                Column("sizes", "sizes", number=True),
                Column("measured / modelled", "median_ratio", "{:.2f}".format, number=True),
                Column("error between sizes", "interpolation_error", _share, number=True),
            )
        )
    if answer["outliers"]:
        found = len(answer["outliers"])
        title = f"Outliers, the {_MOST_OUTLIERS} slowest of {found}"
        parts.append(
            table(
                title if found > _MOST_OUTLIERS else "Outliers",
                answer["outliers"][:_MOST_OUTLIERS],
                Column("program", "program"),
                # Left out if it would say the same in every row.
                Column("devices", "devices", shown=len({d for d, _ in by_devices}) > 1),
                Column("time", "seconds", format_seconds, number=True),
                Column("why", "reason"),
            )
        )
    return Group(*parts)


def _programs(devices: str, grade: str, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Table of the kinds of programs that were measured on the same devices."""
    alone = "" if grade == MEASURED else f", one device alone for many (grade {grade})"

    def of_measured(key: str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda row: row[key] if row["measured"] else None

    return table(
        f"Programs on {devices}{alone}",
        rows,
        Column("kind", "kind"),
        Column("programs", "measured", number=True),
        Column("failed", lambda row: row["failed"] or None, number=True),
        Column("shortest", of_measured("least_s"), format_seconds, number=True),
        Column("longest", of_measured("most_s"), format_seconds, number=True),
        Column("spread", of_measured("spread"), _share, number=True),
    )


def _share(value: float) -> str:
    return f"{value:.0%}"


def draw_profiles(curves: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write a chart for each family of curves. Returns the files.

    Args:
        curves: as `measured_curves` returns them, with the keys `file`, `title`, `horizontal`,
            `unit`, and `series`, the points of each curve by its name.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, names = [], list(itertools.chain(*(curve["series"] for curve in curves)))
    for curve in curves:
        points = sorted(set().union(*curve["series"].values()))
        series = {}
        for name, values in curve["series"].items():
            series[name] = list(map(values.get, points))
        line_chart(
            folder / f"{curve['file']}.png",
            title=curve["title"],
            horizontal=curve["horizontal"],
            unit=curve["unit"],
            points=points,
            series=series,
            among=names,
        )
        written.append(folder / f"{curve['file']}.png")
    return written


def check_text(answer: Mapping[str, Any]) -> RenderableType:
    """The share of a plan that was measured, and the operators that were not."""
    alone = answer["measured_compute_share"]
    also = f", another {alone:.0%} on one device alone (measured-compute)" if alone else ""
    lines = [
        (
            f"{answer['measured_share']:.0%} of the plan's compute and communication was"
            f" measured{also}, with a mean error of {answer['measured_error']:.0%}."
        ),
        (
            f"step time       {format_seconds(answer['step_time_s'])} with these measurements, "
            f"{format_seconds(answer['modelled_step_time_s'])} by the cost model alone"
        ),
        f"still to do     {answer['missing']} of {answer['operators']} operators",
    ]
    if not answer["most_wanted"]:
        return "\n".join(lines)
    wanted = answer["most_wanted"][:_MOST_OUTLIERS]
    return Group(
        "\n".join(lines), columns("Missing, most useful first", ("operator", "mesh"), wanted)
    )


def fit_text(answer: Mapping[str, Any]) -> RenderableType:
    """The fitted figures, and how well they predict measurements that were held out."""
    return Group(
        table(
            "Figures",
            [{"figure": name, **row} for name, row in answer["figures"].items()],
            Column("figure", "figure"),
            Column("before", "before", "{:.4g}".format, number=True),
            Column("fitted", "value", "{:.4g}".format, number=True),
            Column("from", "source"),
        ),
        table(
            "Median error on the sizes that were not fitted",
            answer["errors"],
            Column("of", "table"),
            Column("sizes", "sizes", number=True),
            Column("before", "before", _share, number=True),
            Column("after", "after", _share, number=True),
        ),
    )
