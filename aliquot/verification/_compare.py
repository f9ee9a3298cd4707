"""Collectives of a compiled program that its plan does not explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import format_bytes
from ..plans import CollectiveComparison as CollectiveComparison
from ..plans import CollectiveUse
from ..plans import compare_collectives as compare_collectives
from ..runtime import CompiledCollective
from ._text import INPUT

_TOLERANCE = 0.05
_NEGLIGIBLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class UnintendedCollective:
    """Collectives of one kind, axes and cause that no predicted one explains.

    `cause` is the operator, with its line, whose result they move; an input's path; or empty if the
    compiler does not say.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    num_bytes: float
    dtype: str
    cause: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "kind": self.kind,
            "axes": list(self.axes),
            "count": self.count,
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "cause": self.cause or None,
        }

    def __str__(self) -> str:
        where = f"{self.kind} over {', '.join(self.axes) or 'no axis'}"
        return (
            f"{where}: {self.count:g} times, {format_bytes(self.num_bytes)},"
            f" {self.cause or 'cause unknown'}"
        )


def unintended_collectives(
    predicted: Sequence[CollectiveUse],
    compiled: Sequence[CompiledCollective],
    paths: Sequence[str],
    axis_sizes: Mapping[str, int],
) -> tuple[UnintendedCollective, ...]:
    """Compiled collectives that no predicted one explains.

    The compiler merges collectives and reorders axes, so single ones cannot be matched. For each
    kind and axes that moves more bytes than predicted (by 5 %, and by 1 % of all that is
    predicted), collectives are listed until they make up the difference: first those whose size is
    no multiple of a predicted one's, and the largest first.

    A reduce-scatter is the first half of an all-reduce: where nothing reads more than a part of the
    sum, it takes the place of a predicted all-reduce.

    Args:
        paths: of the step's inputs, for causes that are inputs.
        axis_sizes: devices along each mesh axis.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005, section 4.5 (an all-reduce as a reduce-scatter and an all-gather).
    """
    budget: dict[tuple[str, tuple[str, ...]], float] = {}
    units: dict[tuple[str, tuple[str, ...]], set[int]] = {}
    for use in predicted:
        key = use.kind, tuple(use.axes)
        budget[key] = budget.get(key, 0.0) + use.num_bytes
        units.setdefault(key, set()).add(round(use.num_bytes / max(use.count, 1.0)))
    least = _NEGLIGIBLE * sum(budget.values())
    groups: dict[tuple[str, tuple[str, ...]], list[CompiledCollective]] = {}
    for each in compiled:
        groups.setdefault((each.kind, each.axes), []).append(each)
    for (kind, axes), num_bytes in list(budget.items()):
        if kind == "all-reduce":
            spared = max(
                0.0, num_bytes - sum(each.num_bytes for each in groups.get((kind, axes), ()))
            )
            half = "reduce-scatter", axes
            budget[half] = budget.get(half, 0.0) + spared / math.prod(axis_sizes[a] for a in axes)
    by_cause: dict[tuple[str, tuple[str, ...], str], list[CompiledCollective]] = {}
    for key, members in groups.items():
        allowed = budget.get(key, 0.0)
        excess = sum(each.num_bytes for each in members) - allowed
        if excess <= max(_TOLERANCE * allowed, least):
            continue
        known = units.get(key, set())
        # First those whose size no predicted one explains: they are the likelier culprits.
        order = sorted(members, key=lambda each: (_is_known(each, known), -each.num_bytes))
        for each in order:
            if excess <= least:
                break
            head, _, rest = each.label.partition(", and ")
            if head.startswith(INPUT) and head.removeprefix(INPUT).isdecimal():
                position = int(head.removeprefix(INPUT))
                head = paths[position] if position < len(paths) else head
            by_cause.setdefault((*key, (f"{head}, and {rest}" if rest else head)), []).append(each)
            excess -= each.num_bytes
    summed = []
    for (kind, axes, cause), members in by_cause.items():
        summed.append(
            UnintendedCollective(
                kind=kind,
                axes=axes,
                count=sum(each.count for each in members),
                num_bytes=sum(each.num_bytes for each in members),
                dtype=members[0].dtype,
                cause=cause,
            )
        )
    return tuple(
        sorted(summed, key=lambda each: (-each.num_bytes, each.kind, each.axes, each.cause))
    )


def _is_known(each: CompiledCollective, units: set[int]) -> bool:
    size = round(each.num_bytes / max(each.count, 1.0))
    # Any size is a multiple of a small enough unit, so that small units explain nothing.
    return any(unit and size % unit == 0 for unit in units if unit * 64 >= size)
