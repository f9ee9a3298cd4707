"""Random keys and bits.

Threefry computes each element from the key and the element's position, so its bits are the same
however they are split. Other generators have a state, and stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, HasShape, register_dim_rule
from .._traits import Traits, same_parameters
from ._factors import Factors

_THREEFRY = "key<fry>"
_ROW_BY_ROW = Traits(on_rows=same_parameters)


def _random_bits(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Many numbers or keys from each key: the dims of the keys come first, the new ones are
    free.
    """
    f = Factors()
    keys = operands[0]
    batch = f.splits(keys.shape)
    new = results[0][len(batch) :]
    fresh = f.splits(new) if keys.dtype == _THREEFRY else f.wholes(new)
    return f.rule((batch,), ((*batch, *fresh),))


register_dim_rule("random_split", traits=_ROW_BY_ROW)(_random_bits)
register_dim_rule("random_bits", traits=Traits(costly=True, on_rows=same_parameters))(_random_bits)


@register_dim_rule("random_wrap", "random_unwrap", traits=_ROW_BY_ROW)
def _random_wrap(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Keys as arrays of words: the last dim holds the words of one key."""
    f = Factors()
    before, after = operands[0].shape, results[0]
    shared = f.splits(min(before, after, key=len))
    words = f.wholes(max(before, after, key=len)[len(shared) :])
    dims = [(*shared, *words) if len(shape) > len(shared) else shared for shape in (before, after)]
    return f.rule((dims[0],), (dims[1],))


@register_dim_rule(
    "random_seed", "random_clone", "random_fold_in", "threefry2x32", traits=_ROW_BY_ROW
)
def _each(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """One key, or one pair of words, for each element of the operands."""
    f = Factors()
    dims = f.splits(results[0])
    return f.rule(tuple(dims if o.shape else () for o in operands), (dims,) * len(results))
