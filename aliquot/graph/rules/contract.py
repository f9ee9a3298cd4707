"""Rules of matrix products (`dot_general`) and of grouped ones (`ragged_dot_general`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from .._rule import DimRule, Dims, HasShape, register_dim_rule
from .._traits import Traits, same_parameters
from ._factors import Factors


@register_dim_rule(
    "dot_general", traits=Traits(multiplies=True, costly=True, on_rows=same_parameters)
)
def _dot_general(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """`out[batch, m, n] = sum_k lhs[batch, m, k] * rhs[batch, n, k]`.

    `batch`, `m`, `n` and `k` each stand for any number of dims.
    """
    lhs, rhs = operands
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    letters = iter(ascii_lowercase)
    left = {}
    right = {}
    for a, b in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        left[a] = right[b] = next(letters)
    # The order of the result's dims: batch, then the remaining dims of the left operand, then those
    # of the right.
    out = [left[a] for a in lhs_batch]
    for dims, names in ((lhs, left), (rhs, right)):
        for d in range(len(dims.shape)):
            if d not in names:
                names[d] = next(letters)
                out.append(names[d])
    left_dims, right_dims = _in_order(left), _in_order(right)
    return DimRule(
        operands=(left_dims, right_dims),
        results=(tuple(out),),
        sizes=dict(zip((*left_dims, *right_dims), (*lhs.shape, *rhs.shape), strict=True)),
        linear=(1, 2),
        contracts=True,
        flops_per_point=2.0,
    )


def _in_order(names: Mapping[int, str]) -> Dims:
    """The names of all dims of an operand."""
    return tuple([names[d] for d in range(len(names))])


@register_dim_rule("ragged_dot_general", traits=Traits(costly=True))
def _ragged_dot_general(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A grouped product: consecutive rows of `lhs` form groups, such as tokens sorted by expert.

    Two forms occur in training:

    - `out[m, n] = sum_k lhs[m, k] * rhs[group(m), k, n]`: one matrix for each group. The group dim
      of `rhs` is never split, because XLA gathers all matrices.
    - `out[g, k, n] = sum_m lhs[m, k] * rhs[m, n]` over the rows of group `g`: the gradient of these
      matrices. Its group dim may be split.

    The dim of `group_sizes` is never split: each device needs all sizes to find where the rows of
    a group begin.
    """
    lhs, rhs, group_sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    f = Factors()
    # The factor of each operand's dims; a summed or batch dim has the same factor in both.
    left = {d: f.split(lhs.shape[d]) for d in (*lhs_batch, *lhs_contract)}
    right = dict(zip((*rhs_batch, *rhs_contract), left.values(), strict=True))
    batch = tuple(left[d] for d in lhs_batch)
    groups = f.whole(group_sizes.shape[-1])
    right |= dict.fromkeys(numbers.rhs_group_dimensions, groups)
    # If the rows are summed, the result begins with a dim of groups. Its factor differs from
    # `groups`, so that the result can be split while `group_sizes` stays whole.
    out = [*([f.split(group_sizes.shape[-1])] if ragged in lhs_contract else []), *batch]
    columns = 1
    for array, names in ((lhs, left), (rhs, right)):
        for d, size in enumerate(array.shape):
            if d not in names:
                names[d] = f.split(size)
                out.append(names[d])
                columns *= size if array is rhs else 1
    # JAX takes group sizes either for each index of the batch dims, or one row for all.
    leading = (
        batch if len(group_sizes.shape) == len(batch) + 1 else f.wholes(group_sizes.shape[:-1])
    )
    # Each row is multiplied only by its group's matrix, so the work does not grow with the number
    # of groups, although groups are a factor.
    flops = 2.0 * math.prod(lhs.shape) * columns
    return f.rule(
        (_in_order(left), _in_order(right), (*leading, groups)),
        (tuple(out),),
        linear=(1, 2, 0),
        contracts=True,
        flops_per_point=flops / max(math.prod(f.sizes.values()), 1),
    )
