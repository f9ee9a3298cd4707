"""Products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from .._rule import DimRule, HasShape, register_dim_rule


@register_dim_rule("dot_general")
def _dot_general(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """`out[batch, m, n] = sum_k lhs[batch, m, k] * rhs[batch, n, k]` with any number of each."""
    lhs, rhs = operands
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    letters = iter(ascii_lowercase)
    left = {}
    right = {}
    for a, b in zip((*lhs_batch, *lhs_contract), (*rhs_batch, *rhs_contract), strict=True):
        left[a] = right[b] = next(letters)
    out = [left[a] for a in lhs_batch]
    for dims, names in ((lhs, left), (rhs, right)):
        for d in range(len(dims.shape)):
            if d not in names:
                names[d] = next(letters)
                out.append(names[d])
    sizes = {left[d]: size for d, size in enumerate(lhs.shape)} | {right[d]: size for d, size in enumerate(rhs.shape)}
    return DimRule(
        operands=(tuple(left[d] for d in range(len(lhs.shape))), tuple(right[d] for d in range(len(rhs.shape)))),
        results=(tuple(out),),
        sizes=sizes,
        linear=(1, 2),
        contracts=True,
        flops_per_point=2.0,
    )
