"""Resharding: the collectives that XLA's partitioner emits to bring an array from one split to
another.

Partial sums are finished first; a change of tiling remains (`_tilings.py`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Collection, Sequence

import msgspec

from ..cluster import SumCollective
from ._spec import PARTIAL, REPLICATED, Spec
from ._tilings import is_direct, steps, tiling

# Smallest row that is gathered by itself: its time is bandwidth, not latency.
_LEAST_ROW_BYTES = 2**20


def gathered_by_rows(
    length: int, rank: int, num_bytes: int, source: Spec, target: Spec, above_bytes: float
) -> bool:
    """True if an array that replaces another one is gathered along its first dim's rows, each into
    its place in the memory of the old array.

    A gather along another dim than the first leaves a copy with that dim in front. An array that is
    gathered whole is therefore held twice, and so, at the same time, are all others that are
    gathered at the end of a step.

    Args:
        length: of its first dim.
        rank: number of its dims.
        num_bytes: of the whole array.
        source, target: its split, and that of what it replaces.
        above_bytes: smaller arrays are gathered together with others instead.

    >>> [gathered_by_rows(32, 3, 2**30, (dim,), (-1,), 2**24) for dim in (1, 0)]
    [True, False]
    """
    if rank < 3 or num_bytes <= above_bytes or num_bytes < length * _LEAST_ROW_BYTES:
        return False
    pairs = list(zip(source, target, strict=True))
    return source != target and all(
        # Along the first dim tiles are whole rows: gathered at once they lie where they belong,
        # without a copy.
        s != 0 and (t == s or (s > 0 and t == REPLICATED))
        for s, t in pairs
    )


class Move(msgspec.Struct, frozen=True, kw_only=True):
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
    source: Spec, target: Spec, axis_sizes: tuple[int, ...], sums: SumCollective
) -> tuple[Move, ...] | None:
    """The collectives that turn `source` into `target`; None if nothing can (an array cannot become
    a partial sum).

    Args:
        axis_sizes: devices along each axis.
        sums: the collective that finishes partial sums whose result is split.

    >>> [m.kind for m in reshard((PARTIAL,), (0,), (8,), SumCollective.REDUCE_SCATTER)]
    ['reduce-scatter']
    >>> [m.kind for m in reshard((0, 0), (0, -1), (2, 4), SumCollective.REDUCE_SCATTER)]
    ['all-gather']
    """
    if source == target:
        return ()
    return _reshard(*_renumbered(source, target), axis_sizes, sums)


@functools.lru_cache(maxsize=1 << 14)
def _renumbered(source: Spec, target: Spec) -> tuple[Spec, Spec]:
    """Both specs with their dims and their sums renumbered without gaps, in the same order.

    The collectives depend on the order of dims alone, so that one entry of the cache serves arrays
    of all ranks.
    """
    dims = {}
    for k, d in enumerate(sorted({p for p in (*source, *target) if p >= 0})):
        dims[d] = k
    sums = {}
    for k, p in enumerate(sorted({p for p in (*source, *target) if p <= PARTIAL}, reverse=True)):
        sums[p] = PARTIAL - k
    names = {**dims, **sums, REPLICATED: REPLICATED}
    return tuple(names[p] for p in source), tuple(names[p] for p in target)


@functools.lru_cache(maxsize=1 << 16)
def _reshard(
    source: Spec, target: Spec, axis_sizes: tuple[int, ...], sums: SumCollective
) -> tuple[Move, ...] | None:
    """As `reshard`, for specs from `_renumbered`."""
    axes = range(len(axis_sizes))
    if any(target[a] <= PARTIAL and source[a] != target[a] for a in axes):
        return None
    now = list(source)
    moves: list[Move] = []

    summed = spec_after_sums(source, target, sums)

    def finish_sums(kind: str, chosen: tuple[int, ...]) -> None:
        group = math.prod(axis_sizes[a] for a in chosen)
        # Groups of one device move nothing.
        if group > 1:
            fraction = 1.0 / math.prod(axis_sizes[a] for a in axes if now[a] >= 0)
            moves.append(Move(kind=kind, axes=chosen, group=group, fraction=fraction))
        for a in chosen:
            now[a] = summed[a]

    reduced = [a for a in axes if now[a] <= PARTIAL and target[a] > PARTIAL]
    scattered = tuple(a for a in reduced if summed[a] >= 0)
    # Scattered sums come first: what follows then works on pieces and moves fewer bytes.
    finish_sums(sums.value, scattered)
    # The other sums are all-reduced, one after the other.
    for partial in sorted({now[a] for a in reduced if a not in scattered}):
        finish_sums("all-reduce", tuple(a for a in reduced if now[a] == partial))
    minor = minor_axes(source, summed)
    # Axes that stay partial count as replicated: each summand is resharded like the others.
    current = tiling(tuple(now), axis_sizes, minor)
    # No spec names a tiling with minor axes, so there are no intermediate specs to look for.
    for spec in (target,) if minor else intermediate_specs(tuple(now), target, axis_sizes):
        wanted = tiling(spec, axis_sizes)
        for step in steps(current, wanted):
            moves.append(
                Move(kind=step.kind, axes=step.axes, group=step.group, fraction=1.0 / step.tiles)
            )
        current = wanted
    return tuple(moves)


@functools.lru_cache(maxsize=1 << 16)
def intermediate_specs(source: Spec, target: Spec, axis_sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """The specs to constrain an array to, one after the other, on its way from `source` to
    `target`, which is the last.

    For some targets, the partitioner would gather the whole array ("involuntary full
    rematerialization"). Then the mesh axes change to their placement in the target one at a time,
    in the order whose collectives leave the fewest bytes on a device: a shortest path over specs.

    >>> intermediate_specs((-1, 0), (2, -1), (4, 2))
    ((2, 0), (2, -1))
    >>> intermediate_specs((0, -1), (1, -1), (4, 2))
    ((1, -1),)
    """
    tilings = {}
    for spec in itertools.product(*zip(source, target, strict=True)):
        tilings[spec] = tiling(spec, axis_sizes)
    if min((*source, *target)) <= PARTIAL or is_direct(tilings[source], tilings[target]):
        return (target,)
    reached: set[Spec] = set()
    # Ties are broken by the number of changes, then by the specs, so that the path does not depend
    # on the order of a set.
    queue: list[tuple[float, int, tuple[Spec, ...]]] = [(0.0, 0, (source,))]
    while queue:
        left, count, path = heapq.heappop(queue)
        here = path[-1]
        if here == target:
            return path[1:]
        if here in reached:
            continue
        reached.add(here)
        for spec in tilings.keys() - reached:
            if is_direct(tilings[here], tilings[spec]):
                more = sum(
                    ((step.group if step.kind == "all-gather" else 1) / step.tiles)
                    for step in steps(tilings[here], tilings[spec])
                )
                heapq.heappush(queue, (left + more, count + 1, (*path, spec)))
    return (target,)


def spec_after_sums(source: Spec, target: Spec, sums: SumCollective) -> Spec:
    """`source` with its sums finished: the first spec to constrain an array to on its way to
    `target`.

    A reduce-scatter leads to the target's split at once, but along one dim only: constrained to a
    split of several dims, XLA would all-reduce the whole array. So sums are scattered along one
    dim, whose tiles can be exchanged for those of others afterwards.

    Without reduce-scatters XLA all-reduces the whole array: once for each dim that the summed axes
    split in the target if it is constrained to the target's split, and once for each partial sum if
    to a replicated array. The spec with fewer all-reduces is taken. If the summed axes split only
    one dim, the other sums are finished on shards of it.
    """
    reduced = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s <= PARTIAL < t]
    kinds, dims = {source[a] for a in reduced}, {target[a] for a in reduced}
    summed = list(source)
    if sums is SumCollective.REDUCE_SCATTER:
        first = next((target[a] for a in reduced if target[a] >= 0), REPLICATED)
        for a in reduced:
            summed[a] = first if target[a] >= 0 else REPLICATED
    else:
        at_once = len(dims) == 1 or (len(kinds) > 1 and len(dims - {REPLICATED}) == 1)
        for a in reduced:
            summed[a] = target[a] if at_once else REPLICATED
    return tuple(summed)


def split_deferred_sums(
    source: Spec, target: Spec, deferred: Collection[int]
) -> tuple[tuple[Spec, Spec], tuple[Spec, Spec]]:
    """The change from `source` to `target` in two: that of each micro-batch's gradient, and that of
    their total, after the last micro-batch.

    Sums over the axes `deferred` are finished in the second, all as one. In the first each device's
    summand counts as replicated along these axes.

    >>> split_deferred_sums((PARTIAL, PARTIAL), (0, 1), (0,))
    (((-1, -2), (-1, 1)), ((-2, 1), (0, 1)))
    """
    axes = range(len(source))
    kept = {a for a in deferred if source[a] <= PARTIAL < target[a]}

    def of_summand(spec: Spec) -> Spec:
        return tuple(REPLICATED if a in kept else spec[a] for a in axes)

    total = tuple(PARTIAL if a in kept else target[a] for a in axes)
    return (of_summand(source), of_summand(target)), (total, target)


def minor_axes(source: Spec, summed: Spec) -> tuple[int, ...]:
    """The axes of a reduce-scatter that subdivide tiles of a later mesh axis, out of mesh order.

    A reduce-scatter along a dim that is already split cuts each device's own tile, so its axes
    become the minor ones. Constrained to mesh order instead, XLA gathers the operands.

    Args:
        summed: the spec behind the reduce-scatter.

    >>> minor_axes((PARTIAL, 0), (0, 0)), minor_axes((0, PARTIAL), (0, 0))
    ((0,), ())
    """
    axes = range(len(source))
    scattered = [a for a in axes if source[a] <= PARTIAL and summed[a] >= 0]
    # An earlier axis is the major one anyway.
    dims = set()
    for a in scattered:
        if any(source[b] == summed[a] for b in axes[a:]):
            dims.add(summed[a])
    return tuple(a for a in scattered if summed[a] in dims)


def result_fraction(move: Move, axis_sizes: Sequence[int]) -> float:
    """Bytes that leave the collective on each device, as a fraction of the whole array."""
    match move.kind:
        case "all-gather":
            return move.fraction * move.group
        case "reduce-scatter":
            return move.fraction / move.group
    return move.fraction
