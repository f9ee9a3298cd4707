"""What the tables of equality share: cases are compared one by one, and each is written down as
soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from _results import Journal, Report


def compare_all(
    chosen: argparse.Namespace,
    every: Sequence[Any],
    covering: Callable[[Sequence[Any]], Sequence[Any]],
    compare: Callable[[Any], dict[str, Any]],
) -> list[dict[str, Any]]:
    """The rows of all cases that were asked for.

    Args:
        every: all cases; `covering` chooses some of them for a quick run.
        compare: the row of a case: what it is, differences of `loss` and `leaf`, the `worst leaf`,
            whether it is `within` the bar.
    """
    journal = Journal(chosen.journal)
    cases = covering(every) if chosen.quick else every
    return [
        journal.row(str(case), functools.partial(compare, case))
        for case in cases
        if chosen.only in str(case)
    ]


def finish(report: Report, chosen: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Write or print the answer. Returns an exit code."""
    report.summary["beyond the bar"] = sum(not row["within"] for row in rows)
    report.tables = {"Cases": rows}
    return report.finish(chosen, met=all(row["within"] for row in rows))


def largest_differences(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Of a loss, and of a leaf."""
    return max((row["loss"] for row in rows), default=0.0), max(
        (row["leaf"] for row in rows), default=0.0
    )
