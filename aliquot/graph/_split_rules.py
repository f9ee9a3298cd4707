"""Which operators can run on a range of rows of stacked arrays, and on what terms.

An operator is local in the leading dim when rows `[a, b)` of its results need no other rows of its stacked operands
than `[a, b)`. A reduction over all rows is local up to one last sum of the ranges' results. What has no rule here mixes
rows, as far as we know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ._types import Literal, Op, Operand, Value

Shape: TypeAlias = tuple[int, ...]
Rewrite: TypeAlias = Callable[[Mapping[str, Any], int], dict[str, Any]]
"""Parameters of an equation and the number of rows of a range -> parameters of the same equation on that range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """How an operator runs on a range of rows.

    Attributes:
        operands: which operands hold rows; the others are needed whole.
        results: which results hold rows.
        rewrite: changes the parameters to the number of rows; None if they do not speak of it.
        combine: name of the operator that joins the ranges' results where `results` hold no rows.
        counts_rows: whether the result numbers the rows, so that a range must add where it begins.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    rewrite: Rewrite | None = None
    combine: str | None = None
    counts_rows: bool = False


_ELEMENTWISE = frozenset(
    (
        "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex "
        "conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge "
        "gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to "
        "max min mul name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow "
        "random_clone random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt "
        "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub "
        "tan tanh threefry2x32 tie xor zeta"
    ).split()
)
_REDUCTIONS = {
    "reduce_sum": "add",
    "reduce_prod": "mul",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
# Rows stay rows whatever happens inside them; what their parameters speak of is checked by the table below.
_ROW_BY_ROW: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "argmax": lambda p: 0 not in p["axes"],
    "argmin": lambda p: 0 not in p["axes"],
    "bitcast_convert_type": lambda p: True,
    "concatenate": lambda p: p["dimension"] != 0,
    "cumlogsumexp": lambda p: p["axis"] != 0,
    "cummax": lambda p: p["axis"] != 0,
    "cummin": lambda p: p["axis"] != 0,
    "cumprod": lambda p: p["axis"] != 0,
    "cumsum": lambda p: p["axis"] != 0,
    "random_bits": lambda p: True,
    "random_split": lambda p: True,
    "random_unwrap": lambda p: True,
    "random_wrap": lambda p: True,
    "rev": lambda p: 0 not in p["dimensions"],
    "sort": lambda p: p["dimension"] != 0,
    "split": lambda p: p["axis"] != 0,
    "squeeze": lambda p: 0 not in p["dimensions"],
    "transpose": lambda p: p["permutation"][0] == 0,
}


def local_rule(op: Op, values: Sequence[Value], rows: int) -> Local | None:
    """How an operator runs on a range of `rows` rows; None if it mixes them, or if nothing in it has that many."""
    operands = [_shape(i, values) for i in op.inputs]
    results = [values[o].shape if o >= 0 else None for o in op.outputs]
    if not any(shape and shape[0] == rows for shape in (*operands, *results)):
        return None
    name, params = op.name, op.params
    if name in _ELEMENTWISE:
        return _elementwise(operands, results, rows)
    if name in _REDUCTIONS:
        return _reduction(name, params, operands, results, rows)
    if name in _ROW_BY_ROW:
        return _row_by_row(operands, results, rows) if operands[0] and _ROW_BY_ROW[name](params) else None
    special = _SPECIAL.get(name)
    return special(params, operands, results, rows) if special and None not in results else None


def _shape(operand: Operand, values: Sequence[Value]) -> Shape:
    return operand.shape if isinstance(operand, Literal) else values[operand].shape


def _has_rows(shape: Shape | None, rows: int) -> bool:
    # A result that nothing names is as good as one that fits.
    return shape is None or shape[:1] == (rows,)


def _elementwise(operands: Sequence[Shape], results: Sequence[Shape | None], rows: int) -> Local | None:
    if not all(_has_rows(shape, rows) for shape in results):
        return None
    rank = max(len(shape) for shape in operands)
    stacked = tuple(len(shape) == rank and shape[0] == rows for shape in operands)
    rest = [shape for shape, has in zip(operands, stacked, strict=True) if not has]
    if any(shape and (len(shape) != rank or shape[0] != 1) for shape in rest):
        return None
    return Local(operands=stacked, results=(True,) * len(results))


def _row_by_row(operands: Sequence[Shape], results: Sequence[Shape | None], rows: int) -> Local | None:
    if not all(_has_rows(shape, rows) for shape in (*operands, *results)):
        return None
    return Local(operands=(True,) * len(operands), results=(True,) * len(results))


def _reduction(
    name: str, params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape | None], rows: int
) -> Local | None:
    if not _has_rows(operands[0], rows) or results[0] is None:
        return None
    over_rows = 0 in params["axes"]
    return Local(operands=(True,), results=(not over_rows,), combine=_REDUCTIONS[name] if over_rows else None)


_Special: TypeAlias = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Any], int], Local | None]


def _with_leading(key: str) -> Rewrite:
    """A rewrite of the shape that stands under `key`."""
    return lambda params, rows: {**params, key: (rows, *params[key][1:])}


def _broadcast_in_dim(
    params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int
) -> Local | None:
    if not _has_rows(results[0], rows):
        return None
    leads = 0 in params["broadcast_dimensions"] and operands[0][0] == rows
    rest = (False,) * (len(operands) - 1)
    return Local(operands=(leads, *rest), results=(True,), rewrite=_with_leading("shape"))


def _iota(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int) -> Local | None:
    if operands or not _has_rows(results[0], rows):
        return None
    return Local(
        operands=(), results=(True,), rewrite=_with_leading("shape"), counts_rows=int(params["dimension"]) == 0
    )


def _reshape(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int) -> Local | None:
    if params.get("dimensions") is not None or len(operands) != 1:
        return None
    if not (_has_rows(operands[0], rows) and _has_rows(results[0], rows)):
        return None
    return Local(operands=(True,), results=(True,), rewrite=_with_leading("new_sizes"))


def _slice(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int) -> Local | None:
    # All rows of the operand must be all rows of the result.
    if not (_has_rows(operands[0], rows) and _has_rows(results[0], rows)):
        return None
    return Local(operands=(True,), results=(True,), rewrite=_with_leading("limit_indices"))


def _dynamic_slice(
    params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int
) -> Local | None:
    if not (_has_rows(operands[0], rows) and _has_rows(results[0], rows)):
        return None
    starts = (False,) * (len(operands) - 1)
    return Local(operands=(True, *starts), results=(True,), rewrite=_with_leading("slice_sizes"))


def _pad(params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int) -> Local | None:
    if not _has_rows(operands[0], rows) or tuple(params["padding_config"][0]) != (0, 0, 0):
        return None
    return Local(operands=(True, False), results=(True,))


def _dot_general(
    params: Mapping[str, Any], operands: Sequence[Shape], results: Sequence[Shape], rows: int
) -> Local | None:
    (left_contracted, _), (left_batch, right_batch) = params["dimension_numbers"]
    if not _has_rows(operands[0], rows):
        return None
    if left_batch:
        # Batch dims lead the result, in their order.
        batched = left_batch[0] == 0 and right_batch[0] == 0
        return Local(operands=(True, True), results=(True,)) if batched else None
    return None if 0 in left_contracted else Local(operands=(True, False), results=(True,))


_SPECIAL: dict[str, _Special] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
}
