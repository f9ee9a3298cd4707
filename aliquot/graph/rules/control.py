"""Rules of links between values inside a loop's body and those outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, HasShape, register_dim_rule
from ._factors import Factors


@register_dim_rule("scan_slice")
def _scan_slice(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A loop takes one slice after the other, so the leading dim stays whole."""
    f = Factors()
    inner = f.splits(results[0])
    return f.rule(((f.whole(operands[0].shape[0]), *inner),), (inner,), linear=(1,))


@register_dim_rule("scan_stack")
def _scan_stack(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A loop writes one slice after the other, so the leading dim stays whole."""
    f = Factors()
    inner = f.splits(operands[0].shape)
    return f.rule((inner,), ((f.whole(results[0][0]), *inner),), linear=(1,))
