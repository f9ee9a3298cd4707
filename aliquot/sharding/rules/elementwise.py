"""Operators that work element by element: every dim of the result is a dim of every operand, or of size one there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from .._rule import DimRule, DimRuleFn, HasShape, register_dim_rule

# How linear the result is in the operands; see `DimRule.linear`.
_JOINTLY_LINEAR = ("add", "add_any", "sub", "neg", "convert_element_type", "copy", "copy_p", "real", "imag", "conj", "tie")
_BILINEAR = ("mul",)
_LINEAR_IN_FIRST = ("div",)
_NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min ne nextafter not or population_count pow "
    "rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient tan "
    "tanh xor nan_to_num optimization_barrier reduce_precision"
).split()


def _elementwise(linear: int | None) -> DimRuleFn:
    """Operands of equal rank; dims of size one and scalars meet everything. `linear` None means none."""

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        shape = results[0]
        letters = ascii_lowercase[: len(shape)]
        dims = tuple(
            tuple("1" if size == 1 and shape[d] != 1 else letters[d] for d, size in enumerate(o.shape)) for o in operands
        )
        return DimRule(
            operands=dims,
            results=(tuple(letters),) * len(results),
            sizes=dict(zip(letters, shape, strict=True)),
            linear=_linear(linear, len(operands)),
        )

    return declare


def _linear(kind: int | None, count: int) -> tuple[int, ...]:
    match kind:
        case 1:
            return (1,) * count
        case 2:
            return tuple(range(1, count + 1))
        case 3:
            return (1,) + (0,) * (count - 1)
    return ()


register_dim_rule(*_JOINTLY_LINEAR)(_elementwise(1))
register_dim_rule(*_BILINEAR)(_elementwise(2))
register_dim_rule(*_LINEAR_IN_FIRST)(_elementwise(3))
register_dim_rule(*_NONLINEAR)(_elementwise(None))


@register_dim_rule("select_n")
def _select_n(operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]) -> DimRule:
    """`select_n(which, *cases)`: linear in the cases together, as long as `which` is the same everywhere."""
    rule = _elementwise(None)(operands, results, params)
    return DimRule(
        operands=rule.operands,
        results=rule.results,
        sizes=rule.sizes,
        linear=(0,) + (1,) * (len(operands) - 1),
    )
