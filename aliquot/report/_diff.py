"""The difference of two plans as tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..core import format_bytes, format_bytes_per_s, format_flops_per_s, format_seconds
from ..plans import Change, PlanDiff, stage_numbers
from ._tables import columns

_INDEX = re.compile(r"(?<=layers\[)\d+(?=\])")
_STAGE = re.compile(r"^stage (\d+) ")


def difference(changes: PlanDiff, before: str, after: str) -> RenderableType:
    """Changes from the plan called `before` to the plan called `after`.

    Equal changes in several layers or stages are one row.
    """
    if changes.identical:
        return Text(f"{before} and {after} decide and predict the same.")
    parts: list[RenderableType] = []
    if changes.decisions:
        parts.append(_table("What they decide", changes.decisions, before, after))
    if changes.predictions:
        parts.append(
            _table(
                "What they are predicted to cost on each device", changes.predictions, before, after
            )
        )
    return Group(*parts)


def _table(title: str, changes: Sequence[Change], before: str, after: str) -> Group:
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for change in changes:
        key = (
            _STAGE.sub("stage * ", _INDEX.sub("*", change.subject)),
            _shown(change.subject, change.before),
            _shown(change.subject, change.after),
            _relative(change),
        )
        merged.setdefault(key, []).append(change.subject)
    rows = [
        (_together(what, subjects), old, new, relative)
        for (what, old, new, relative), subjects in merged.items()
    ]
    return columns(title, ("what", before, after, "change"), rows, right=(3,))


def _together(what: str, subjects: Sequence[str]) -> str:
    """One name for equal changes of several subjects, which `what` is with `*` for what differs."""
    if len(subjects) == 1:
        return subjects[0]
    matches = [_STAGE.match(subject) for subject in subjects]
    numbers = sorted({int(match[1]) for match in matches if match})
    if len(numbers) == len(subjects):
        return f"stages {stage_numbers(numbers)} {what.removeprefix('stage * ')}"
    return f"{what} ({len(subjects)} of them)"


def _shown(subject: str, value: str | int | float | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if subject.endswith("bytes_per_s"):
            return format_bytes_per_s(value)
        if "flops_per_s" in subject:
            return format_flops_per_s(value)
        if subject.endswith("_s"):
            return format_seconds(value)
        if subject.endswith("_bytes"):
            return format_bytes(value)
        if subject.endswith("bubble"):
            return f"{value:.1%}"
        return f"{value:g}"
    return str(value)


def _relative(change: Change) -> str:
    if (
        not (isinstance(change.before, int | float) and isinstance(change.after, int | float))
        or not change.before
    ):
        return ""
    return f"{change.after / change.before - 1:+.1%}"
