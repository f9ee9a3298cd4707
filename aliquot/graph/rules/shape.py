"""Operators that move elements without computing: reshapes, transposes, slices, joins, sorts,
constants.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, Dims, HasShape, register_dim_rule
from .._traits import Moves, Traits, leading_size, same_parameters
from ._factors import Factors, merged, without

_ROW_BY_ROW = Traits(on_rows=same_parameters)


@register_dim_rule("reshape", traits=Traits(moves=Moves.RESHAPE, on_rows=leading_size("new_sizes")))
def _reshape(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims that are split or merged share factors; of each, only the major factor may be split over
    devices.

    A block of the major factor is a contiguous piece of both sides, so `(heads * size,) <-> (heads,
    size)` passes on a split of the heads: `(aB)->aB`. Blocks of a minor factor are scattered over
    the other side, so it stays whole unless devices exchange them. `dimensions` is the order in
    which the operand's dims are read.
    """
    shape, after = operands[0].shape, results[0]
    f = Factors()
    if math.prod(shape) == 0:
        # The leading dims that both sides have in common pass on their splits.
        same = 0
        while same < min(len(shape), len(after)) and shape[same] == after[same] != 0:
            same += 1
        lead = f.splits(shape[:same])
        old_dims, new_dims = f.wholes(shape[same:]), f.wholes(after[same:])
        return f.rule(((*lead, *old_dims),), ((*lead, *new_dims),), linear=(1,))
    order = params.get("dimensions") or tuple(range(len(shape)))
    before = tuple(shape[d] for d in order)
    old, new = ["1"] * len(before), ["1"] * len(after)
    runs = _groups(before, after)
    for left, right in runs:
        _refine(f, left, right, before, after, old, new)
    by_dim = dict(zip(order, old, strict=True))
    exchanged = []
    for left, right in runs:
        if len(left) + len(right) > 2:
            exchanged.append("".join((*(old[d] for d in left), *(new[d] for d in right))))
    read = tuple(by_dim[d] for d in range(len(shape)))
    return f.rule((read,), (tuple(new),), linear=(1,), exchanged=exchanged)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest partition of both shapes into runs of dims with equal products; dims of size one
    are left out.
    """
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    groups = []
    while left:
        run: tuple[list[int], list[int]] = ([left.pop(0)], [right.pop(0)])
        sizes = [before[run[0][0]], after[run[1][0]]]
        while sizes[0] != sizes[1]:
            side, rest, shape = (0, left, before) if sizes[0] < sizes[1] else (1, right, after)
            run[side].append(rest.pop(0))
            sizes[side] *= shape[run[side][-1]]
        groups.append(run)
    return groups


def _refine(
    f: Factors,
    left: list[int],
    right: list[int],
    before: Sequence[int],
    after: Sequence[int],
    old: list[str],
    new: list[str],
) -> None:
    """Assign factors to the dims of one run: the leading factor that both sides share may be split,
    the others stay whole.
    """
    shared = math.gcd(before[left[0]], after[right[0]])
    major = f.split(shared)
    cuts = _boundaries(before, left) | _boundaries(after, right) | {1, shared}
    ends = sorted(cuts)
    if not all(b % a == 0 for a, b in zip(ends, ends[1:])):
        # The two sides have no common refinement: after the shared factor, each side has its own
        # factors, which stay whole.
        for dims, shape, names in ((left, before, old), (right, after, new)):
            names[dims[0]] = merged(major, f.whole(shape[dims[0]] // shared))
            for d in dims[1:]:
                names[d] = f.whole(shape[d])
        return
    letters = {}
    for start, end in zip(ends, ends[1:]):
        letters[(start, end)] = major if end == shared else f.whole(end // start)
    for dims, shape, names in ((left, before, old), (right, after, new)):
        position = 1
        for d in dims:
            stop = position * shape[d]
            parts = [letters[s, e] for s, e in zip(ends, ends[1:]) if position <= s and e <= stop]
            names[d] = merged(*parts)
            position = stop


def _boundaries(shape: Sequence[int], dims: Sequence[int]) -> set[int]:
    """Products of the leading sizes of a run: the positions where its dims end."""
    return set(itertools.accumulate((shape[d] for d in dims), operator.mul))


@register_dim_rule(
    "broadcast_in_dim", traits=Traits(moves=Moves.REPEAT, on_rows=leading_size("shape"))
)
def _broadcast_in_dim(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """New dims, and dims that were of size one, are free."""
    f = Factors()
    after = f.splits(results[0])
    source = operands[0]
    before = tuple(
        "1" if size == 1 else after[d]
        for size, d in zip(source.shape, params["broadcast_dimensions"])
    )
    # The operands after the array are sizes of dynamic shapes.
    sizes = f.all_whole(operands[1:])
    return f.rule((before, *sizes), (after,), linear=(1,) + (0,) * len(sizes))


@register_dim_rule("squeeze", traits=Traits(moves=Moves.RESHAPE, on_rows=same_parameters))
def _squeeze(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Drops dims of size one."""
    f = Factors()
    before = f.splits(operands[0].shape)
    return f.rule((before,), (without(before, params["dimensions"]),), linear=(1,))


@register_dim_rule("transpose", traits=Traits(moves=Moves.TRANSPOSE, on_rows=same_parameters))
def _transpose(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Reorders dims."""
    f = Factors()
    before = f.splits(operands[0].shape)
    return f.rule((before,), (tuple(before[d] for d in params["permutation"]),), linear=(1,))


@register_dim_rule("rev", traits=_ROW_BY_ROW)
def _rev(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Reversed dims stay whole unless devices exchange their pieces: the first piece of one side is
    the last of the other.
    """
    f = Factors()
    dims = f.splits(operands[0].shape, params["dimensions"])
    reversed_dims = [dims[d] for d in params["dimensions"]]
    return f.rule((dims,), (dims,), linear=(1,), exchanged=reversed_dims)


def _cut(
    f: Factors, before: Sequence[int], after: Sequence[int], same: Sequence[bool] | None = None
) -> tuple[Dims, Dims]:
    """Dims of equal size pass on their splits; those that are cut or extended stay whole, with one
    factor for each side.
    """
    keep = same if same is not None else [True] * len(before)
    pairs = [f.pair(n, m, same=k) for n, m, k in zip(before, after, keep)]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _moved(before: Dims, after: Dims) -> list[tuple[str, str]]:
    """The factors of dims that `_cut` keeps whole, along which devices may exchange rows."""
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]


@register_dim_rule(
    "slice", traits=Traits(moves=Moves.SELECT, on_rows=leading_size("limit_indices"))
)
def _slice(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims of unchanged size pass on their splits."""
    f = Factors()
    before, after = _cut(f, operands[0].shape, results[0])
    return f.rule((before,), (after,), linear=(1,), exchanged=_moved(before, after))


@register_dim_rule("pad", traits=_ROW_BY_ROW)
def _pad(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims without padding pass on their splits. An unchanged size is not enough: padding may be
    negative on one side and positive on the other.
    """
    f = Factors()
    same = [tuple(config) == (0, 0, 0) for config in params["padding_config"]]
    before, after = _cut(f, operands[0].shape, results[0], same)
    return f.rule((before, ()), (after,), linear=(1, 1), exchanged=_moved(before, after))


@register_dim_rule(
    "dynamic_slice", traits=Traits(moves=Moves.SELECT, on_rows=leading_size("slice_sizes"))
)
def _dynamic_slice(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims taken in full pass on their splits, because any start is clamped to zero."""
    f = Factors()
    before, after = _cut(f, operands[0].shape, results[0])
    scalars = f.all_whole(operands[1:])
    return f.rule((before, *scalars), (after,), linear=(1,) + (0,) * len(scalars))


@register_dim_rule("dynamic_update_slice")
def _dynamic_update_slice(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims replaced in full pass on the splits of array and update; along the other dims, both stay
    whole.
    """
    f = Factors()
    array, update = _cut(f, operands[0].shape, operands[1].shape)
    scalars = f.all_whole(operands[2:])
    return f.rule((array, update, *scalars), (array,), linear=(1, 1) + (0,) * len(scalars))


@register_dim_rule("concatenate", traits=_ROW_BY_ROW)
def _concatenate(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """The joined dim stays whole in every array, unless devices exchange rows."""
    f = Factors()
    axis = params["dimension"]
    result = _whole_at(f, results[0], axis)
    arrays = tuple(_with(f, result, axis, o.shape[axis]) for o in operands)
    joined = [dims[axis] for dims in (*arrays, result)]
    return f.rule(arrays, (result,), linear=(1,) * len(operands), exchanged=[joined])


@register_dim_rule("split", traits=_ROW_BY_ROW)
def _split(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """The cut dim stays whole in every array, unless devices exchange rows."""
    f = Factors()
    axis = params["axis"]
    shape = operands[0].shape
    array = _whole_at(f, shape, axis)
    parts = tuple(_with(f, array, axis, shape[axis]) for shape in results)
    cut = [dims[axis] for dims in (array, *parts)]
    return f.rule((array,), parts, linear=(1,), exchanged=[cut])


def _whole_at(f: Factors, shape: Sequence[int], axis: int) -> Dims:
    """Dims of which one stays whole."""
    return _with(f, f.splits((*shape[:axis], 1, *shape[axis + 1 :])), axis, shape[axis])


def _with(f: Factors, dims: Dims, axis: int, size: int) -> Dims:
    """The dims with a new factor at `axis` that stays whole."""
    return (*dims[:axis], f.whole(size), *dims[axis + 1 :])


@register_dim_rule("stack")
def _stack(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Joins equal arrays along a new dim, which stays whole."""
    f = Factors()
    axis = params["axis"]
    dims = f.splits(operands[0].shape)
    result = (*dims[:axis], f.whole(len(operands)), *dims[axis:])
    return f.rule((dims,) * len(operands), (result,), linear=(1,) * len(operands))


@register_dim_rule("unstack")
def _unstack(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Cuts a dim, which stays whole, into arrays without it."""
    f = Factors()
    axis = params["axis"]
    dims = f.splits(results[0])
    array = (*dims[:axis], f.whole(len(results)), *dims[axis:])
    return f.rule((array,), (dims,) * len(results), linear=(1,))


@register_dim_rule("tile")
def _tile(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Dims of size one are broadcast, and free; longer ones that repeat stay whole, unless devices
    exchange rows.
    """
    f = Factors()
    before, after = [], []
    for size, tiled in zip(operands[0].shape, results[0]):
        old, new = ("1", f.split(tiled)) if size == 1 else f.pair(size, tiled, same=True)
        before.append(old)
        after.append(new)
    repeated = [pair for pair in _moved(tuple(before), tuple(after)) if "1" not in pair]
    return f.rule((tuple(before),), (tuple(after),), linear=(1,), exchanged=repeated)


def _fresh(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Arrays made without reading any: every dim is free."""
    f = Factors()
    return f.rule(f.all_whole(operands), (f.splits(results[0]),))


register_dim_rule("empty", "empty2")(_fresh)
register_dim_rule("iota", traits=Traits(numbers_rows=True, on_rows=leading_size("shape")))(_fresh)


@register_dim_rule("bitcast_convert_type", traits=_ROW_BY_ROW)
def _bitcast_convert_type(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A type of another width adds or drops a last dim, which stays whole."""
    f = Factors()
    before, after = operands[0].shape, results[0]
    shared = f.splits(min(before, after, key=len))
    return f.rule(
        ((*shared, *f.wholes(before[len(shared) :])),),
        ((*shared, *f.wholes(after[len(shared) :])),),
    )


@register_dim_rule("sort", traits=Traits(costly=True, on_rows=same_parameters))
def _sort(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Keys, and arrays that are sorted along with them; the sorted dim stays whole."""
    f = Factors()
    dims = f.splits(operands[0].shape, (params["dimension"],))
    return f.rule((dims,) * len(operands), (dims,) * len(results))


@register_dim_rule("top_k", "approx_top_k", traits=Traits(costly=True))
def _top_k(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Values and indices of the largest elements; the searched dim stays whole before and after."""
    f = Factors()
    shape = operands[0].shape
    axis = params.get("axis", params.get("reduction_dimension", -1)) % len(shape)
    before = _whole_at(f, shape, axis)
    after = _with(f, before, axis, results[0][axis])
    return f.rule((before,), (after,) * len(results))
