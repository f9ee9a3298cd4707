"""Operators that work element by element: every dim of the result is a dim of every operand, or of
size one there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from .._rule import DimRule, DimRuleFn, HasShape, register_dim_rule
from .._traits import Moves, Traits, same_parameters

# How linear the result is in the operands; see `DimRule.linear`.
_JOINTLY_LINEAR = "complex conj imag real stop_gradient sub tie".split()
_BILINEAR = ("mul",)
_LINEAR_IN_FIRST = ("div",)
_NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos"
    " cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a"
    " igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min ne"
    " nextafter not one_minus_square or polygamma polynomial population_count pow reduce_precision"
    " regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic"
    " shift_right_logical sign sin sinh sqrt square tan tanh xor zeta"
).split()


def _elementwise(linear: int | None) -> DimRuleFn:
    """Operands of equal rank; dims of size one and scalars combine with any size. For `linear` see
    `_linear`; None means that the result is not linear.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        shape, count = results[0], len(operands)
        scales: tuple[int, ...] = ()
        match linear:
            case 1:
                scales = (1,) * count
            case 2:
                scales = tuple(range(1, count + 1))
            case 3:
                scales = (1,) + (0,) * (count - 1)
        letters = ascii_lowercase[: len(shape)]
        dims = []
        for operand in operands:
            pairs = zip(operand.shape, shape, letters)
            dims.append(tuple("1" if own == 1 != size else c for own, size, c in pairs))
        return DimRule(
            operands=tuple(dims),
            results=(tuple(letters),) * len(results),
            sizes=dict(zip(letters, shape, strict=True)),
            linear=scales,
        )

    return declare


_TRAITS = Traits(on_rows=same_parameters)
register_dim_rule("add", "add_any", traits=Traits(adds=True, on_rows=same_parameters))(
    _elementwise(1)
)
register_dim_rule("copy", traits=Traits(moves=Moves.COPY, on_rows=same_parameters))(_elementwise(1))
register_dim_rule("neg", traits=Traits(moves=Moves.NEGATE, on_rows=same_parameters))(
    _elementwise(1)
)
register_dim_rule(*_JOINTLY_LINEAR, traits=_TRAITS)(_elementwise(1))
register_dim_rule(*_BILINEAR, traits=_TRAITS)(_elementwise(2))
register_dim_rule(*_LINEAR_IN_FIRST, traits=_TRAITS)(_elementwise(3))
register_dim_rule(*_NONLINEAR, traits=_TRAITS)(_elementwise(None))


@register_dim_rule("select_n", traits=_TRAITS)
def _select_n(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """`select_n(which, *cases)`: linear in the cases together, as long as `which` is the same
    everywhere.
    """
    rule = _elementwise(None)(operands, results, params)
    return DimRule(
        operands=rule.operands,
        results=rule.results,
        sizes=rule.sizes,
        linear=(0,) + (1,) * (len(operands) - 1),
    )


@register_dim_rule("convert_element_type", traits=Traits(moves=Moves.CAST, on_rows=same_parameters))
def _convert_element_type(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Linear up to rounding, except where fractions are cut off or numbers become truth values."""
    before, after = operands[0].dtype, str(params["new_dtype"])
    keeps = after != "bool" and (_is_integral(before) or not _is_integral(after))
    return _elementwise(1 if keeps else None)(operands, results, params)


def _is_integral(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))
