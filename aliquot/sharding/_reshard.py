"""From one split of an array to another, as the list of collectives that XLA's partitioner emits for it.

Order: partial sums are resolved where they arise, then all-to-alls, permutes, all-gathers, and local slices last. Which
changes cost a permute, and which axes leave a dim in one collective, was read off programs compiled for CPU and GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ._spec import PARTIAL, REPLICATED, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective over some mesh axes (by position). `fraction` of the whole array's bytes enters it on each device.

    `kind` is "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
    """

    kind: str
    axes: tuple[int, ...]
    fraction: float


@functools.lru_cache(maxsize=1 << 18)
def reshard(source: Spec, target: Spec, axis_sizes: tuple[int, ...], reduce_scatter: bool) -> tuple[Move, ...] | None:
    """The collectives that turn `source` into `target`; None if nothing can (an array cannot become a partial sum).

    Args:
        axis_sizes: devices along each axis.
        reduce_scatter: whether the target's compiler emits one, or an all-reduce and a slice.

    >>> [m.kind for m in reshard((PARTIAL,), (0,), (8,), True)]
    ['reduce-scatter']
    >>> [m.kind for m in reshard((0, 0), (0, -1), (2, 4), True)]
    ['all-gather']
    """
    if source == target:
        return ()
    axes = range(len(axis_sizes))
    if any(target[a] == PARTIAL and source[a] != PARTIAL for a in axes):
        return None
    now = list(source)
    moves: list[Move] = []

    def fraction() -> float:
        return 1.0 / math.prod(axis_sizes[a] for a in axes if now[a] >= 0)

    def take(kind: str, chosen: tuple[int, ...]) -> None:
        moves.append(Move(kind=kind, axes=chosen, fraction=fraction()))
        for a in chosen:
            now[a] = target[a]

    reduced = tuple(a for a in axes if now[a] == PARTIAL and target[a] != PARTIAL)
    scattered = tuple(a for a in reduced if target[a] >= 0 and reduce_scatter)
    if scattered:
        take("reduce-scatter", scattered)
    if len(reduced) > len(scattered):
        take("all-reduce", tuple(a for a in reduced if a not in scattered))
    permuted = False
    pairs = {(now[a], target[a]) for a in axes if now[a] >= 0 and target[a] >= 0 and now[a] != target[a]}
    for pair in sorted(pairs):
        moving = tuple(a for a in axes if (now[a], target[a]) == pair)
        # The minor axes of a dim leave it freely; a major one must change places first.
        permuted |= any(now[b] == pair[0] and b > max(moving) for b in axes)
        permuted |= any(now[b] == pair[1] and b > min(moving) for b in axes)
        take("all-to-all", moving)
    for dim in {now[a] for a in axes if now[a] >= 0}:
        leaving = tuple(a for a in axes if now[a] == dim and target[a] == REPLICATED)
        coming = tuple(a for a in axes if now[a] == REPLICATED and target[a] == dim)
        if leaving and coming and _product(leaving, axis_sizes) == _product(coming, axis_sizes):
            # One axis takes another's place on a dim: shards only change owners.
            take("collective-permute", leaving + coming)
        elif leaving:
            permuted |= any(now[b] == dim and b > min(leaving) and b not in leaving for b in axes)
    if permuted:
        moves.append(Move(kind="collective-permute", axes=tuple(axes), fraction=fraction()))
    gathered = tuple(a for a in axes if now[a] >= 0 and target[a] == REPLICATED)
    if gathered:
        take("all-gather", gathered)
    sliced = [a for a in axes if now[a] != target[a]]
    displaced = any(now[b] == target[a] and b > a for a in sliced for b in axes)
    for a in sliced:
        now[a] = target[a]
    if displaced:
        moves.append(Move(kind="collective-permute", axes=tuple(axes), fraction=fraction()))
    return tuple(moves)


def _product(axes: Sequence[int], axis_sizes: Sequence[int]) -> int:
    return math.prod(axis_sizes[a] for a in axes)


def result_fraction(move: Move, axis_sizes: Sequence[int]) -> float:
    """Bytes that leave the collective on each device, as a fraction of the whole array."""
    count = _product(move.axes, axis_sizes)
    match move.kind:
        case "all-gather":
            return move.fraction * count
        case "reduce-scatter":
            return move.fraction / count
    return move.fraction
