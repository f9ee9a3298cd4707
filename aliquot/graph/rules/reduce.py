"""Reductions, and running reductions along a dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, DimRuleFn, HasShape, register_dim_rule, whole
from .._traits import Traits, same_parameters
from ._factors import Factors, without

# The kind of a reduction, and the primitive that joins two of its results.
_REDUCTIONS = {
    "reduce_sum": ("sum", "add"),
    "reduce_max": ("max", "max"),
    "reduce_min": ("min", "min"),
    "reduce_prod": ("prod", "mul"),
    "reduce_and": ("and", "and"),
    "reduce_or": ("or", "or"),
}


def _reduction(kind: str) -> DimRuleFn:
    """`y[i] = reduce_j x[i, j]`: kept dims stay parallel, reduced dims leave a partial result of
    this kind.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        f = Factors()
        dims = f.splits(operands[0].shape)
        kept = without(dims, params["axes"])
        return f.rule((dims,), (kept,), linear=(1,) if kind == "sum" else (), reduce=kind)

    return declare


for _name, (_kind, _join) in _REDUCTIONS.items():
    register_dim_rule(_name, traits=Traits(join=_join, on_rows=same_parameters))(_reduction(_kind))


def _collective(kind: str) -> DimRuleFn:
    """A collective over an axis of `vmap`: a reduction of each operand along some of its dims."""

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        if params.get("axis_index_groups") is not None:
            return whole(operands, results)
        f = Factors()
        before, after = [f.splits(o.shape) for o in operands], []
        for dims in before:
            after.append(without(dims, params["axes"]))
        linear = (1,) * len(operands) if kind == "sum" else ()
        return f.rule(before, after, linear=linear, reduce=kind)

    return declare


for _name, _kind in {"psum": "sum", "pmax": "max", "pmin": "min"}.items():
    register_dim_rule(_name)(_collective(_kind))


def _reduce_whole(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """Reductions whose partial results no collective combines: the reduced dims stay whole."""
    f = Factors()
    dims = f.splits(operands[0].shape, params["axes"])
    return f.rule((dims,), (without(dims, params["axes"]),))


register_dim_rule("argmax", "argmin", traits=Traits(on_rows=same_parameters))(_reduce_whole)
register_dim_rule("reduce_xor", traits=Traits(join="xor", on_rows=same_parameters))(_reduce_whole)


@register_dim_rule("reduce")
def _reduce(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A reduction by the user's own function: arrays first, then as many initial scalars."""
    f = Factors()
    axes = params["dimensions"]
    arrays = len(operands) // 2
    dims = f.splits(operands[0].shape, axes)
    return f.rule((dims,) * arrays + ((),) * arrays, (without(dims, axes),) * arrays)


def _running(linear: tuple[int, ...]) -> DimRuleFn:
    """`y[i] = reduce x[:i+1]`: each element needs those before it, so the dim stays whole."""

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        f = Factors()
        dims = f.splits(operands[0].shape, (params["axis"],))
        return f.rule((dims,), (dims,), linear=linear)

    return declare


_RUNNING = Traits(costly=True, on_rows=same_parameters)
register_dim_rule("cumsum", traits=_RUNNING)(_running((1,)))
register_dim_rule("cumprod", "cummax", "cummin", "cumlogsumexp", traits=_RUNNING)(_running(()))


def _pooling(linear: tuple[int, ...]) -> DimRuleFn:
    """Dims that the window passes one element at a time are parallel, the others stay whole.

    The general form takes arrays first, then as many initial scalars.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        f = Factors()
        before, after = _windowed(f, operands[0].shape, results[0], params)
        arrays = len(results)
        scalars = ((),) * (len(operands) - arrays)
        return f.rule((before,) * arrays + scalars, (after,) * arrays, linear=linear)

    return declare


register_dim_rule("reduce_window_sum")(_pooling((1,)))
register_dim_rule("reduce_window_max", "reduce_window_min", "reduce_window")(_pooling(()))


@register_dim_rule("select_and_gather_add")
def _select_and_gather_add(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """The tangent of a pooling maximum: for each window, the tangent at the position where the
    operand is largest.
    """
    f = Factors()
    before, after = _windowed(f, operands[0].shape, results[0], params)
    return f.rule((before, before), (after,), linear=(1, 0))


@register_dim_rule("select_and_scatter_add")
def _select_and_scatter_add(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """The gradient of a pooling maximum: each window's cotangent is added at the position where the
    operand is largest.
    """
    f = Factors()
    source, operand = operands
    whole, pooled = _windowed(f, operand.shape, source.shape, params)
    return f.rule((pooled, whole), (whole,), linear=(1, 0))


def _windowed(
    f: Factors, before: Sequence[int], after: Sequence[int], params: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dims before and after a window operator."""
    ones = (1,) * len(before)
    windows = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", ones),
        params.get("window_dilation", ones),
    )
    passes = [w == s == b == 1 and tuple(p) == (0, 0) for w, s, p, b, _ in windows]
    pairs = [f.pair(n, m, same=same) for n, m, same in zip(before, after, passes)]
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)
