"""Predicted figures beside the compiler's own: memory by kind, and collectives by kind and axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from rich.console import Group, RenderableType

from ..core import format_bytes
from ..plans import Plan
from ._tables import columns


class Collective(Protocol):
    """One kind of collective in a compiled program; a `CollectiveUse` is one."""

    @property
    def kind(self) -> str:
        """Such as `all-reduce`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes it runs over."""

    @property
    def count(self) -> float:
        """How often in a step."""

    @property
    def num_bytes(self) -> float:
        """Bytes that all of them together return on each device."""


def compared(plan: Plan, memory_bytes: float | None, collectives: Iterable[Collective]) -> dict[str, Any]:
    """Predicted and compiled figures of one step on each device, as plain values ready for JSON.

    Args:
        plan: What was predicted.
        memory_bytes: What the compiler says the program needs at its worst moment; None if it does not say.
        collectives: What the compiled program holds.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for source, uses in (("predicted", plan.prediction.collectives), ("compiled", tuple(collectives))):
        for use in uses:
            row = rows.setdefault((use.kind, ", ".join(use.axes)), _NOTHING.copy())
            row[f"{source}_count"] += use.count
            row[f"{source}_bytes"] += use.num_bytes
    return {
        "memory": {"predicted_bytes": plan.prediction.peak_memory_bytes, "compiled_bytes": memory_bytes},
        "collectives": [{"kind": kind, "axes": axes, **row} for (kind, axes), row in sorted(rows.items())],
    }


_NOTHING = {"predicted_count": 0.0, "compiled_count": 0.0, "predicted_bytes": 0.0, "compiled_bytes": 0.0}


def comparison(figures: dict[str, Any]) -> RenderableType:
    """The figures of `compared` as a table."""
    memory = figures["memory"]
    rows: list[tuple[str, str, str, str, str, str]] = [
        ("memory, worst moment", "", "", "", *_pair(memory["predicted_bytes"], memory["compiled_bytes"]))
    ]
    for row in figures["collectives"]:
        rows.append(
            (
                row["kind"],
                row["axes"],
                f"{row['predicted_count']:g}",
                f"{row['compiled_count']:g}",
                *_pair(row["predicted_bytes"], row["compiled_bytes"]),
            )
        )
    header = ("on each device", "axes", "predicted count", "compiled count", "predicted bytes", "compiled bytes")
    return Group(columns("One step, predicted beside compiled", header, rows, right=(2, 3, 4, 5)))


def _pair(predicted: float, compiled: float | None) -> tuple[str, str]:
    return format_bytes(predicted), "not said" if compiled is None else format_bytes(compiled)
