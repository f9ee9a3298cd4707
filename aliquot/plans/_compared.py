"""Predicted collectives of a step beside those of its compiled programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class Collective(Protocol):
    """One kind of collective in a compiled program. `CollectiveUse` matches this protocol."""

    @property
    def kind(self) -> str:
        """Such as `all-reduce`."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes it runs over."""

    @property
    def count(self) -> float:
        """Number of runs in a step."""

    @property
    def num_bytes(self) -> float:
        """Bytes of the results of all these runs together, on each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveComparison:
    """Collectives of one kind along some mesh axes in one step; bytes are what they leave on each
    device.
    """

    kind: str
    axes: tuple[str, ...]
    predicted_count: float
    compiled_count: float
    predicted_bytes: float
    compiled_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "axes": list(self.axes)}


def compare_collectives(
    predicted: Iterable[Collective], compiled: Iterable[Collective]
) -> tuple[CollectiveComparison, ...]:
    """Predicted and compiled collectives added up by kind and axes, most bytes first."""
    rows: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for side, uses in enumerate((predicted, compiled)):
        for use in uses:
            row = rows.setdefault((use.kind, tuple(use.axes)), [0.0] * 4)
            row[side] += use.count
            row[2 + side] += use.num_bytes
    comparisons = [
        CollectiveComparison(
            kind=kind,
            axes=axes,
            predicted_count=row[0],
            compiled_count=row[1],
            predicted_bytes=row[2],
            compiled_bytes=row[3],
        )
        for (kind, axes), row in rows.items()
    ]
    return tuple(
        sorted(
            comparisons, key=lambda r: (-max(r.predicted_bytes, r.compiled_bytes), r.kind, r.axes)
        )
    )
