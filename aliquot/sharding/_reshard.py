"""From one split of an array to another, as the list of collectives that XLA's partitioner emits
for it.

Partial sums are resolved where they arise; what remains is a change of tiling (`_tilings.py`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ._spec import PARTIAL, REPLICATED, Spec
from ._tilings import Step, is_direct, steps, tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective among groups of `group` devices along some mesh axes (by position).

    `kind` is "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute";
    `fraction` of the whole array's bytes enters it on each device.
    """

    kind: str
    axes: tuple[int, ...]
    group: int
    fraction: float


@functools.lru_cache(maxsize=1 << 18)
def reshard(
    source: Spec, target: Spec, axis_sizes: tuple[int, ...], reduce_scatter: bool
) -> tuple[Move, ...] | None:
    """The collectives that turn `source` into `target`; None if nothing can (an array cannot become
    a partial sum).

    Args:
        axis_sizes: devices along each axis.
        reduce_scatter: whether sums that become split are reduce-scattered, or all-reduced and
            sliced.

    >>> [m.kind for m in reshard((PARTIAL,), (0,), (8,), True)]
    ['reduce-scatter']
    >>> [m.kind for m in reshard((0, 0), (0, -1), (2, 4), True)]
    ['all-gather']
    """
    if source == target:
        return ()
    return _reshard(*_in_order(source, target), axis_sizes, reduce_scatter)


@functools.lru_cache(maxsize=1 << 14)
def _in_order(source: Spec, target: Spec) -> tuple[Spec, Spec]:
    """The same change with its dims and its sums numbered from the first: only their order
    matters.
    """
    # Numbering dims from the first makes prices of one change serve arrays of all ranks.
    dims = {d: k for k, d in enumerate(sorted({p for p in (*source, *target) if p >= 0}))}
    sums = {
        p: PARTIAL - k
        for k, p in enumerate(sorted({p for p in (*source, *target) if p <= PARTIAL}, reverse=True))
    }
    names = {**dims, **sums, REPLICATED: REPLICATED}
    return tuple(names[p] for p in source), tuple(names[p] for p in target)


@functools.lru_cache(maxsize=1 << 16)
def _reshard(
    source: Spec, target: Spec, axis_sizes: tuple[int, ...], reduce_scatter: bool
) -> tuple[Move, ...] | None:
    axes = range(len(axis_sizes))
    if any(target[a] <= PARTIAL and source[a] != target[a] for a in axes):
        return None
    now = list(source)
    moves: list[Move] = []

    landed = landing(source, target, reduce_scatter)

    def resolve(kind: str, chosen: tuple[int, ...]) -> None:
        group = math.prod(axis_sizes[a] for a in chosen)
        # Groups of one device move nothing.
        if group > 1:
            fraction = 1.0 / math.prod(axis_sizes[a] for a in axes if now[a] >= 0)
            moves.append(Move(kind=kind, axes=chosen, group=group, fraction=fraction))
        for a in chosen:
            now[a] = landed[a]

    reduced = [a for a in axes if now[a] <= PARTIAL and target[a] > PARTIAL]
    scattered = tuple(a for a in reduced if landed[a] >= 0)
    # Scattered sums come first: what follows then works on pieces and moves fewer bytes.
    resolve("reduce-scatter" if reduce_scatter else "all-reduce", scattered)
    # What is left is finished sum by sum.
    for kind in sorted({now[a] for a in reduced if a not in scattered}):
        resolve("all-reduce", tuple(a for a in reduced if now[a] == kind))
    # Axes that stay partial hold what the others do, side by side.
    behind = scattered_behind(source, landed)
    arrived = tiling(tuple(now), axis_sizes, behind)
    # Behind a reduce-scatter along a minor axis the array has a tiling that no spec names, so no
    # way between specs is looked for.
    for spec in (target,) if behind else way(tuple(now), target, axis_sizes):
        wanted = tiling(spec, axis_sizes)
        for step in steps(arrived, wanted):
            moves.append(
                Move(kind=step.kind, axes=step.axes, group=step.group, fraction=1.0 / step.tiles)
            )
        arrived = wanted
    return tuple(moves)


@functools.lru_cache(maxsize=1 << 16)
def way(source: Spec, target: Spec, axis_sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """The splits that an array should be asked for, one after the other, to get from one to
    another; the last is `target`.

    Where the partitioner finds no way but to gather the array, axes change their places one after
    the other: of all such ways that it finds step by step, the one whose collectives leave the
    fewest bytes on a device.

    >>> way((-1, 0), (2, -1), (4, 2))
    ((2, 0), (2, -1))
    >>> way((0, -1), (1, -1), (4, 2))
    ((1, -1),)
    """
    tilings = {
        spec: tiling(spec, axis_sizes)
        for spec in itertools.product(*zip(source, target, strict=True))
    }
    if min((*source, *target)) <= PARTIAL or is_direct(tilings[source], tilings[target]):
        return (target,)
    reached: set[Spec] = set()
    waiting: list[tuple[float, int, tuple[Spec, ...]]] = [(0.0, 0, (source,))]
    # Ties are broken by the number of changes, then by the specs, so that the way does not depend
    # on the order of a set.
    while waiting:
        left, count, path = heapq.heappop(waiting)
        here = path[-1]
        if here == target:
            return path[1:]
        if here in reached:
            continue
        reached.add(here)
        for spec in tilings.keys() - reached:
            if is_direct(tilings[here], tilings[spec]):
                more = sum(_leaves(step) for step in steps(tilings[here], tilings[spec]))
                heapq.heappush(waiting, (left + more, count + 1, (*path, spec)))
    return (target,)


def _leaves(step: Step) -> float:
    """Fraction of the array that a collective leaves on each device."""
    return (step.group if step.kind == "all-gather" else 1) / step.tiles


def landing(source: Spec, target: Spec, reduce_scatter: bool) -> Spec:
    """`source` with its sums finished: the split that an array should be asked for first, on its
    way to `target`.

    A compiler with a reduce-scatter is asked for the target's split at once, but for one dim only:
    asked for several, XLA all-reduces the whole array, where tiles of one dim can still be
    exchanged for those of another. One without all-reduces the whole array for each dim that the
    sums' axes shall split, or, asked for a whole array, for each sum that a product left: whichever
    is fewer. If only one dim is split, the other sums are finished on its shards.
    """
    reduced = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s <= PARTIAL < t]
    kinds, dims = {source[a] for a in reduced}, {target[a] for a in reduced}
    landed = list(source)
    if reduce_scatter:
        # One dim at a time: asked to scatter sums along two dims, XLA all-reduces the whole array.
        first = next((target[a] for a in reduced if target[a] >= 0), REPLICATED)
        for a in reduced:
            landed[a] = first if target[a] >= 0 else REPLICATED
    else:
        at_once = len(dims) == 1 or (len(kinds) > 1 and len(dims - {REPLICATED}) == 1)
        for a in reduced:
            landed[a] = target[a] if at_once else REPLICATED
    return tuple(landed)


def waiting_apart(
    source: Spec, target: Spec, waiting: Collection[int]
) -> tuple[tuple[Spec, Spec], tuple[Spec, Spec]]:
    """The change from `source` to `target` in two, where sums over some axes wait: of each summand,
    and of their sum.

    Along the axes `waiting` each device keeps a summand of its own, in the first change as if it
    were whole there.

    >>> waiting_apart((PARTIAL, PARTIAL), (0, 1), (0,))
    (((-1, -2), (-1, 1)), ((-2, 1), (0, 1)))
    """
    axes = range(len(source))
    kept = {a for a in waiting if source[a] <= PARTIAL < target[a]}

    def each(spec: Spec) -> Spec:
        return tuple(REPLICATED if a in kept else spec[a] for a in axes)

    summed = tuple(source[a] if a in kept else target[a] for a in axes)
    return (each(source), each(target)), (summed, target)


def scattered_behind(source: Spec, landed: Spec) -> tuple[int, ...]:
    """The axes whose sums were scattered along a dim that a later axis of the mesh had split:
    theirs are the minor tiles.

    A reduce-scatter cuts each device's own tile. Asked for another order, XLA gathers the operands
    instead.

    >>> scattered_behind((PARTIAL, 0), (0, 0)), scattered_behind((0, PARTIAL), (0, 0))
    ((0,), ())
    """
    axes = range(len(source))
    scattered = [a for a in axes if source[a] <= PARTIAL and landed[a] >= 0]
    # Only axes that split the dim after a scattered one matter: an earlier one is major already.
    dims = {landed[a] for a in scattered if any(source[b] == landed[a] for b in axes[a:])}
    return tuple(a for a in scattered if landed[a] in dims)


def result_fraction(move: Move, axis_sizes: Sequence[int]) -> float:
    """Bytes that leave the collective on each device, as a fraction of the whole array."""
    match move.kind:
        case "all-gather":
            return move.fraction * move.group
        case "reduce-scatter":
            return move.fraction / move.group
    return move.fraction
