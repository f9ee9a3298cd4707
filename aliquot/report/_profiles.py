"""Reports on a profile database: its contents, what a plan lacks in it, and fitted figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from ..cluster import MEASURED
from ..core import format_seconds
from ._charts import line_chart
from ._tables import columns

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
    parts: list[RenderableType] = [
        _programs(devices, grade, rows) for (devices, grade), rows in by_devices.items()
    ]
    if not parts:
        parts.append("It holds no measurements yet.")
    if answer["tables"]:
        tables = [
            (
                row["table"],
                str(row["sizes"]),
                f"{row['median_ratio']:.2f}",
                f"{row['interpolation_error']:.0%}",
            )
            for row in answer["tables"]
        ]
        header = ("priced as", "sizes", "measured / modelled", "error between sizes")
        parts.append(columns("Corrections of the cost model", header, tables, right=(1, 2, 3)))
    if answer["outliers"]:
        # The column of devices is left out if it would say the same in every row.
        several = len({row["devices"] for row in answer["kinds"]}) > 1
        rows = [
            (
                row["program"],
                *((row["devices"],) if several else ()),
                format_seconds(row["seconds"]),
                row["reason"],
            )
            for row in answer["outliers"][:_MOST_OUTLIERS]
        ]
        header = ("program", *(("devices",) if several else ()), "time", "why")
        found = len(answer["outliers"])
        title = f"Outliers, the {_MOST_OUTLIERS} slowest of {found}"
        parts.append(
            columns(
                title if found > _MOST_OUTLIERS else "Outliers",
                header,
                rows,
                right=(len(header) - 2,),
            )
        )
    return Group(*parts)


def _programs(devices: str, grade: str, rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Table of the kinds of programs that were measured on the same devices."""
    alone = "" if grade == MEASURED else f", one device alone for many (grade {grade})"
    return columns(
        f"Programs on {devices}{alone}",
        ("kind", "programs", "failed", "shortest", "longest", "spread"),
        [
            (
                row["kind"],
                str(row["measured"]),
                str(row["failed"] or ""),
                format_seconds(row["least_s"]) if row["measured"] else "",
                format_seconds(row["most_s"]) if row["measured"] else "",
                f"{row['spread']:.0%}" if row["measured"] else "",
            )
            for row in rows
        ],
        right=range(1, 6),
    )


def draw_profiles(curves: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write a chart for each family of curves. Returns the files.

    Args:
        curves: as `measured_curves` returns them, with the keys `file`, `title`, `horizontal`,
            `unit`, and `series`, the points of each curve by its name.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, names = [], [name for curve in curves for name in curve["series"]]
    for curve in curves:
        points = sorted({point for values in curve["series"].values() for point in values})
        line_chart(
            folder / f"{curve['file']}.png",
            title=curve["title"],
            horizontal=curve["horizontal"],
            unit=curve["unit"],
            points=points,
            series={
                name: [values.get(point) for point in points]
                for name, values in curve["series"].items()
            },
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
    rows = [(text, mesh) for text, mesh in answer["most_wanted"][:_MOST_OUTLIERS]]
    return Group(
        "\n".join(lines), columns("Missing, most useful first", ("operator", "mesh"), rows)
    )


def fit_text(answer: Mapping[str, Any]) -> RenderableType:
    """The fitted figures, and how well they predict measurements that were held out."""
    rows = [
        (name, f"{row['before']:.4g}", f"{row['value']:.4g}", row["source"])
        for name, row in answer["figures"].items()
    ]
    errors = [
        (row["table"], str(row["sizes"]), f"{row['before']:.0%}", f"{row['after']:.0%}")
        for row in answer["errors"]
    ]
    return Group(
        columns("Figures", ("figure", "before", "fitted", "from"), rows, right=(1, 2)),
        columns(
            "Median error on the sizes that were not fitted",
            ("of", "sizes", "before", "after"),
            errors,
            right=(1, 2, 3),
        ),
    )
