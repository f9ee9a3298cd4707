"""A step on a single example, worked out from its traces on two and on four.

A dim of size one is special to the code that writes traces: it broadcasts, it is squeezed. So the trace on one example
may be another program than the trace on many. The operators themselves know no such cases: each runs on one example
with the sizes that two and four of them let one expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core import CaptureError
from ..graph import Graph, Op


def one_example(two: Graph, four: Graph) -> Graph:
    """The graph of a step on one example, operator by operator that of `two`.

    Raises:
        CaptureError: the two are different programs, or some parameter does not follow the size of the batch.
    """
    if len(two.ops) != len(four.ops) or any(a.name != b.name for a, b in zip(two.ops, four.ops)):
        raise CaptureError(
            f"{two.name} is another program on 4 examples than on 2: its Python code looks at the size of the batch. "
            "Use fewer micro-batches."
        )
    values = tuple(replace(a, shape=_sizes(a.shape, b.shape)) for a, b in zip(two.values, four.values, strict=True))
    return replace(two, values=values, ops=tuple(_op(a, b) for a, b in zip(two.ops, four.ops)))


def _op(two: Op, four: Op) -> Op:
    if two.eqn is None:
        return two
    params = {}
    for name, value in two.params.items():
        found = _follow(value, four.params[name])
        if found is _UNKNOWN:
            raise CaptureError(
                f"`{two.name}` in {two.scope or 'the step'} cannot run on a single example: its parameter {name} does not "
                "follow the size of the batch. Use fewer micro-batches, or a larger batch."
            )
        params[name] = found
    return replace(two, params=params, eqn=_equation(two.eqn, four.eqn, params))


def _equation(two: Any, four: Any, params: Mapping[str, Any]) -> Any:
    from jax.extend.core import Var

    def variable(a: Any, b: Any) -> Any:
        if not hasattr(a.aval, "shape") or a.aval.shape == b.aval.shape:
            return a
        return Var(a.aval.update(shape=_sizes(a.aval.shape, b.aval.shape)))

    return two.replace(params=dict(params), outvars=[variable(a, b) for a, b in zip(two.outvars, four.outvars)])


class _Unknown:
    pass


_UNKNOWN = _Unknown()


def _follow(two: Any, four: Any) -> Any:
    """What a parameter is for one example, given what it is for two and four."""
    if type(two) is not type(four):
        return _UNKNOWN
    if isinstance(two, int) and not isinstance(two, bool):
        return two - (four - two) // 2
    if type(two) in (tuple, list):
        parts = [_follow(a, b) for a, b in zip(two, four)]
        return _UNKNOWN if len(two) != len(four) or any(p is _UNKNOWN for p in parts) else type(two)(parts)
    shapes = [_shapes(x) for x in (two, four)]
    if shapes[0] is not None:
        return two if shapes[0] == shapes[1] else _UNKNOWN
    return two if two is four or bool(two == four) or callable(two) else _UNKNOWN


def _shapes(value: Any) -> list[Any] | None:
    """Shapes that a program among the parameters takes and returns; None for anything else."""
    inner = getattr(value, "jaxpr", value)
    if not hasattr(inner, "invars"):
        return None
    return [getattr(v.aval, "shape", None) for v in (*inner.invars, *inner.outvars)]


def _sizes(two: tuple[int, ...], four: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - (b - a) // 2 for a, b in zip(two, four, strict=True))
