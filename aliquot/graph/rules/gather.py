"""Lookups and updates by index.

A gather with one indexed dim is a product with one-hot rows: the dim is contracted, since each
device looks up the rows that it holds and the results are summed. Its transpose, the scatter, keeps
the scattered dim and contracts the dims of the index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, DimRuleFn, Dims, HasShape, register_dim_rule
from .._traits import Traits
from ._factors import Factors

_COSTLY = Traits(costly=True)


@register_dim_rule("gather", traits=_COSTLY)
def _gather(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """`out[i, f] = table[index[i], f]`: `i` and `f` are parallel, a single indexed dim is
    contracted.
    """
    f = Factors()
    table, index = operands
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    offsets = []
    for d in range(len(table.shape)):
        if d not in numbers.collapsed_slice_dims and d not in batching:
            offsets.append(d)
    rows = f.splits(index.shape[:-1])
    array, window = _array_and_window(
        f, table.shape, taken, numbers.start_index_map, batching, rows
    )
    place = dict(zip(numbers.offset_dims, offsets))
    row = iter(rows)
    result = tuple(window[place[d]] if d in place else next(row) for d in range(len(results[0])))
    # Rows outside the table are filled with a constant. Unless that is zero, NaN or undefined, the
    # result is not linear.
    fill = params.get("fill_value")
    linear = (1, 0) if fill is None or fill == 0 or fill != fill else ()
    return f.rule(
        (array, (*rows, *f.wholes(index.shape[-1:]))), (result,), linear=linear, contracts=True
    )


def _scatter(linear: tuple[int, ...], reduce: str | None) -> DimRuleFn:
    """`out = array; out[index[i], f] (+)= updates[i, f]`: the scattered dim is parallel; updates
    are whole along it.

    The dims of the index leave partial results of the kind `reduce`, in which the array itself
    counts once. With None, a later update overwrites an earlier one, so their order matters and the
    dims of the index stay whole.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        f = Factors()
        array, index, updates = operands
        numbers = params["dimension_numbers"]
        batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
        row_sizes = index.shape[:-1]
        rows = tuple(
            f.split(n) if reduce is not None or d in batching.values() else f.whole(n)
            for d, n in enumerate(row_sizes)
        )
        windows = []
        for d in range(len(array.shape)):
            if d not in numbers.inserted_window_dims and d not in batching:
                windows.append(d)
        place = dict(zip(numbers.update_window_dims, windows))
        taken = [1] * len(array.shape)
        for d, source in place.items():
            taken[source] = updates.shape[d]
        indexed = numbers.scatter_dims_to_operand_dims
        dims, window = _array_and_window(f, array.shape, taken, indexed, batching, rows)
        row = iter(rows)
        update_dims = tuple(
            window[place[d]] if d in place else next(row) for d in range(len(updates.shape))
        )
        return f.rule(
            (dims, (*rows, *f.wholes(index.shape[-1:])), update_dims),
            (dims,),
            linear=linear,
            reduce=reduce or "sum",
            contracts=True,
        )

    return declare


# `scatter-sub` could leave partial sums, too, but XLA gathers its updates.
register_dim_rule("scatter", "scatter-sub", traits=_COSTLY)(_scatter((1, 0, 1), None))
register_dim_rule("scatter-add", traits=_COSTLY)(_scatter((1, 0, 1), "sum"))
register_dim_rule("scatter-mul", traits=_COSTLY)(_scatter((1, 0, 0), "prod"))
register_dim_rule("scatter-min", traits=_COSTLY)(_scatter((), "min"))
register_dim_rule("scatter-max", traits=_COSTLY)(_scatter((), "max"))


def _array_and_window(
    f: Factors,
    shape: Sequence[int],
    taken: Sequence[int],
    indexed: Sequence[int],
    batching: Mapping[int, int],
    rows: Dims,
) -> tuple[Dims, Dims]:
    """Factors of the array that is indexed, and of the window that each index takes from it.

    Batching dims are dims of the index. Dims taken in full pass on their split, because their start
    can only be zero. A single dim of which an index takes one element may be split; with several
    such dims, or with longer windows, the elements of one index would lie on more than one device,
    so both sides stay whole.
    """
    single = [d for d in indexed if taken[d] == 1 and shape[d] > 1]
    array, window = [], []
    for d, size in enumerate(shape):
        if d in batching:
            before, after = rows[batching[d]], "1"
        elif [d] == single:
            before, after = f.split(size), "1"
        else:
            before, after = f.pair(size, taken[d], same=True)
        array.append(before)
        window.append(after)
    return tuple(array), tuple(window)
