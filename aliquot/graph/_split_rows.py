"""Operators on ranges of rows of stacked arrays, as far as their declarations permit.

An operator is local in the leading dim if rows `[a, b)` of its results need only rows `[a, b)` of
its stacked operands. A reduction over all rows is local except for a last operator that joins the
results of the ranges. An operator whose primitive does not declare how it runs on fewer rows
(`Traits.on_rows`) is assumed to mix rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ._rule import DimRule, Dims, declared_rule, traits_of
from ._traits import Rewrite, same_parameters
from ._types import Literal, Op, Value, result_shapes


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """How an operator runs on a range of rows.

    Attributes:
        operands: which operands hold rows; the others are needed whole.
        results: which results hold rows.
        rewrite: changes the parameters to the number of rows.
        join: name of the primitive that joins the results of the ranges if `results` hold no rows.
        counts_rows: whether the result numbers the rows, so that for a range its begin must be
            added.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    rewrite: Rewrite
    join: str = ""
    counts_rows: bool = False


def local_rule(op: Op, values: Sequence[Value], rows: int) -> Local | None:
    """How an operator runs on ranges of its `rows` rows; None if it mixes them, or if no operand or
    result has so many.
    """
    traits, declare = traits_of(op.name), declared_rule(op.name)
    if traits.on_rows is None or declare is None:
        return None
    operands = [i if isinstance(i, Literal) else values[i] for i in op.inputs]
    results = result_shapes(op, values)
    shapes = [*(o.shape for o in operands), *results]
    if not any(shape[:1] == (rows,) for shape in shapes):
        return None
    rule = declare(operands, results, op.params)
    if (
        traits.join
        and operands[0].shape[:1] == (rows,)
        and _leading(rule.operands[0]) not in _factors(rule.results)
    ):
        return Local(operands=(True,), results=(False,), rewrite=traits.on_rows, join=traits.join)
    if not results or any(shape[:1] != (rows,) for shape in results):
        return None
    stacked = _operands_with_rows(rule)
    # If no operand has rows, their number must be in the parameters.
    if stacked is None or (not any(stacked) and traits.on_rows is same_parameters):
        return None
    counts_rows = traits.numbers_rows and op.params["dimension"] == 0
    return Local(
        operands=stacked,
        results=(True,) * len(results),
        rewrite=traits.on_rows,
        counts_rows=counts_rows,
    )


def _operands_with_rows(rule: DimRule) -> tuple[bool, ...] | None:
    """Mask of operands led by the factor that leads all results; None if there is no such factor,
    or it must stay whole.
    """
    rows = _leading(rule.results[0])
    if not rows.islower() or any(_leading(dims) != rows for dims in rule.results):
        return None
    stacked = tuple(_leading(dims) == rows for dims in rule.operands)
    # If the factor also occurs in a merged dim, or in another dim, ranges of rows do not cut it.
    elsewhere = [dims[has_rows:] for dims, has_rows in zip(rule.operands, stacked, strict=True)]
    return None if any(rows in factors for factors in _factors(elsewhere)) else stacked


def _leading(dims: Dims) -> str:
    return dims[0] if dims else ""


def _factors(arrays: Sequence[Dims]) -> set[str]:
    return set(itertools.chain(*arrays))
