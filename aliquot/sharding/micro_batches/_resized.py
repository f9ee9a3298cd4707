"""A step on a batch of another size, derived from its traces on two sizes, operator by operator:
sizes of arrays are extrapolated linearly.

That is quicker than another trace. It also avoids a special case: tracing treats dims of size one
differently (they broadcast, or are squeezed), so that the trace on one example may be another
program than the trace on many. Operators make no such difference: each can run on one example with
the sizes extrapolated from two larger batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from msgspec import structs

from ...core import CaptureError
from ...graph import Block, Call, Graph, Literal, Op

# How a number that the step's code writes down may grow with the size of its batch.
_POWERS = (1, -1, 2, -2, 0.5, -0.5)


def batch_size(graph: Graph) -> int:
    """Examples in the batch that a step was traced on."""
    return graph.batch_sizes[0]


def resized(small: Graph, large: Graph, size: int) -> Graph:
    """The graph of a step on `size` examples, operator by operator that of `small`.

    Its loops and regions keep the equations of `small`. Only those parts of them are ever read that
    do not depend on the size.

    Raises:
        CaptureError: the two are different programs, or something does not follow the size of the
            batch.
    """
    sizes = batch_size(small), batch_size(large)
    if _has_platforms(small):
        raise CaptureError(
            f"{small.name} holds a branch for each platform, which JAX runs at the size of its"
            " trace alone."
        )
    if len(small.ops) != len(large.ops) or any(
        a.name != b.name for a, b in zip(small.ops, large.ops)
    ):
        raise CaptureError(
            f"{small.name} is another program on {sizes[1]} examples than on {sizes[0]}: its Python"
            " code looks at the size of the batch. Use fewer micro-batches."
        )
    line = _Line(small=sizes[0], large=sizes[1], size=size)
    try:
        values = tuple(
            [
                a if a.shape == b.shape else structs.replace(a, shape=line.shape(a.shape, b.shape))
                for a, b in zip(small.values, large.values, strict=True)
            ]
        )
        ops = tuple([_op(a, b, line) for a, b in zip(small.ops, large.ops)])
    except _Irregular:
        raise CaptureError(
            f"{small.name} cannot be cut into micro-batches of {size} examples: an array's shape or"
            " the turns of a loop do not follow the size of the batch. Use fewer micro-batches."
        ) from None
    return replace(small, values=values, ops=ops)


def own_of_one(small: Graph, large: Graph, third: Graph) -> Graph:
    """The graph of a step on one example, operator by operator that of `small`, with the numbers
    that its Python code would write down there.

    These are derived from the traces `small` and `large`, and must be right for the `third`.

    Raises:
        CaptureError: the three are different programs, or something does not follow the size of the
            batch.
    """
    derived = resized(small, large, 1)
    if len(third.ops) != len(small.ops) or len(third.values) != len(small.values):
        raise CaptureError(f"{small.name} is another program on {batch_size(third)} examples.")
    sizes = batch_size(small), batch_size(large), batch_size(third)
    ops = []
    for op, *others in zip(derived.ops, small.ops, large.ops, third.ops, strict=True):
        # Loops and programs inside of an operator are kept as they are.
        kept = set()
        for other in others:
            kept.add((other.trips, *[str(p) for p in other.params.values() if _shapes(p)]))
        if len(kept) > 1 or len({len(other.inputs) for other in others}) > 1:
            raise _irregular(op)
        inputs = list(op.inputs)
        for k, operand in enumerate(inputs):
            given = [other.inputs[k] for other in others]
            literals = [one.value for one in given if isinstance(one, Literal)]
            if isinstance(operand, Literal) and len(literals) == len(given):
                value = _on_one(literals, sizes, operand.dtype)
                if value is None:
                    raise _irregular(op)
                inputs[k] = structs.replace(operand, value=value)
            elif literals:
                raise _irregular(op)
        ops.append(structs.replace(op, inputs=tuple(inputs)))
    constants = dict(small.constants)
    for index, constant in small.constants.items():
        given = [large.constants[index], third.constants[index]]
        # An array with a row for each example begins with the same rows at each size.
        rows = tuple(map(slice, derived.values[index].shape))
        if not all(
            other is constant or np.array_equal(np.asarray(other)[rows], np.asarray(constant)[rows])
            for other in given
        ):
            raise CaptureError(f"{small.name} holds an array that depends on the batch's size.")
        if constant.shape != derived.values[index].shape:
            constants[index] = np.asarray(constant)[rows]
    return replace(derived, ops=tuple(ops), constants=constants)


def _on_one(given: Sequence[Any], sizes: tuple[int, int, int], dtype: str) -> Any | None:
    """A number on one example, from its values on batches of three sizes: it is constant, grows
    with a power of the size, or lies on a straight line. None if it does none of these.
    """
    if all(bool(value == given[0]) for value in given):
        return given[0]
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return None
    # Numbers are rounded to their dtype.
    error = 1e-6 if jnp.dtype(dtype).itemsize >= 4 else 2.0**-7
    (a, b, c), (first, second, third) = sizes, map(float, given)
    # By each law, the numbers on `b`, `c` and one examples.
    laws = []
    for power in _POWERS:
        laws.append([first * (n / a) ** power for n in (b, c, 1)])
    laws.append([first + (second - first) * ((n - a) / (b - a)) for n in (b, c, 1)])
    for of_second, of_third, of_one in laws:
        if math.isclose(of_second, second, rel_tol=error) and math.isclose(
            of_third, third, rel_tol=error
        ):
            return np.asarray(of_one, dtype)[()]
    return None


def is_resizable(small: Graph, large: Graph, size: int) -> bool:
    """True if `resized` can derive the step on `size` examples, with loops that run as often as
    those of `small`. Does not derive it.
    """
    line = _line_through(small, large)
    if line is None:
        return False
    sized = replace(line, size=size, numbers=set())
    try:
        for a, b in line.numbers:
            sized.number(a, b)
    except _Irregular:
        return False
    return True


def _has_platforms(graph: Graph) -> bool:
    """True if the step holds a branch for each platform."""
    for call in calls_of(graph.body):
        if call.eqn.params.get("branches_platforms") is not None:
            return True
    return False


# A search asks for many sizes of one step.
@functools.lru_cache(maxsize=1)
def _line_through(small: Graph, large: Graph) -> _Line | None:
    """The extrapolation from two traces, with all pairs of numbers that differ between them; None
    if the traces are different programs, or the length of a loop depends on the size.
    """
    if (
        _has_platforms(small)
        or len(small.ops) != len(large.ops)
        or any(a.name != b.name or a.trips != b.trips for a, b in zip(small.ops, large.ops))
    ):
        return None
    # The pairs do not depend on the size that is extrapolated to; to this one it never fails.
    line = _Line(small=batch_size(small), large=batch_size(large), size=batch_size(small))
    try:
        for a, b in zip(small.values, large.values, strict=True):
            line.shape(a.shape, b.shape)
        for x, y in zip(small.ops, large.ops):
            _op(x, y, line)
    except (_Irregular, CaptureError):
        return None
    return line


def calls_of(block: Block) -> Iterator[Call]:
    """All structured operators of a block, outer ones first."""
    for item in block.items:
        if isinstance(item, Call):
            yield item
            for inner in item.blocks:
                yield from calls_of(inner)


class _Irregular(Exception):
    """Raised where something does not follow the size of the batch."""


def _irregular(op: Op) -> CaptureError:
    return CaptureError(
        f"`{op.name}` in {op.scope or 'the step'} cannot run on one example: a number in it does"
        " not follow the size of the batch. Use fewer micro-batches, or a larger batch."
    )


@dataclass(slots=True, kw_only=True)
class _Line:
    """Linear extrapolation of numbers to `size` from their values at two other sizes."""

    small: int
    large: int
    size: int
    # Equal layers share their equations.
    equations: dict[tuple[int, int], Any] = field(default_factory=dict)
    # Pairs of sizes that differ between the traces.
    numbers: set[tuple[int, int]] = field(default_factory=set)

    def number(self, small: int, large: int) -> int:
        """A number at `size`. Raises `_Irregular` if it is no natural number."""
        if small == large:
            return small
        self.numbers.add((small, large))
        change, rest = divmod((large - small) * (self.size - self.small), self.large - self.small)
        if rest or small + change < 0:
            # Only a natural number on the line through both traces is a size; otherwise the user's
            # code decides.
            raise _Irregular
        return small + change

    def shape(self, small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
        if len(small) != len(large):
            raise _Irregular
        return tuple([self.number(a, b) for a, b in zip(small, large)])

    def parameter(self, small: Any, large: Any) -> Any:
        """A parameter at `size`: numbers and what is made of them are extrapolated, all else must
        not differ.
        """
        if small is large:
            return small
        if type(small) is not type(large):
            raise _Irregular
        if isinstance(small, int) and not isinstance(small, bool):
            return self.number(small, large)
        if type(small) in (tuple, list):
            if len(small) != len(large):
                raise _Irregular
            # The very same object is kept where nothing changes, so that layers that share
            # equations go on sharing them.
            resized = [self.parameter(a, b) for a, b in zip(small, large)]
            return small if all(a is b for a, b in zip(resized, small)) else type(small)(resized)
        if hasattr(small, "shape") and hasattr(small, "update"):
            # JAX's description of an array.
            return (
                small
                if small.shape == large.shape
                else small.update(shape=self.shape(small.shape, large.shape))
            )
        if is_dataclass(small) and not isinstance(small, type):
            # Such as the grid of a kernel and how its blocks lie.
            before = {f.name: getattr(small, f.name) for f in fields(small) if f.init}
            after = {}
            for name, value in before.items():
                after[name] = self.parameter(value, getattr(large, name))
            return (
                small
                if all(after[name] is before[name] for name in before)
                else replace(small, **after)
            )
        shapes = [_shapes(small), _shapes(large)]
        if shapes[0] is not None:
            if shapes[0] != shapes[1]:
                raise _Irregular
        # Functions cannot be compared.
        elif not (bool(small == large) or callable(small)):
            raise _Irregular
        return small

    def equation(self, small: Any, large: Any, params: Mapping[str, Any]) -> Any:
        """JAX's equation with other parameters, operands and results."""

        def atom(a: Any, b: Any) -> Any:
            shape = getattr(a.aval, "shape", None)
            if shape is None or shape == b.aval.shape or not isinstance(a, Var):
                return a
            return Var(a.aval.update(shape=self.shape(shape, b.aval.shape)))

        from jax.extend.core import Var

        invars = [atom(a, b) for a, b in zip(small.invars, large.invars, strict=True)]
        outvars = [atom(a, b) for a, b in zip(small.outvars, large.outvars, strict=True)]
        return small.replace(params=dict(params), invars=invars, outvars=outvars)


def _op(small: Op, large: Op, line: _Line) -> Op:
    """An operator at the new size."""
    if small.trips != large.trips:
        # A loop over the batch runs another number of times at every size.
        small = structs.replace(small, trips=line.number(small.trips, large.trips))
    if small.eqn is None:
        return small
    key = id(small.eqn), id(large.eqn)
    equation = line.equations.get(key)
    if equation is None:
        equation = line.equations[key] = _equation(small, large, line)
    return (
        small
        if equation is small.eqn
        else structs.replace(small, params=equation.params, eqn=equation)
    )


def _equation(small: Op, large: Op, line: _Line) -> Any:
    """The JAX equation of an operator at the new size; the same object if it does not depend on
    it.
    """
    params = {}
    for name, value in small.params.items():
        try:
            params[name] = line.parameter(value, large.params[name])
        except _Irregular:
            raise CaptureError(
                f"`{small.name}` in {small.scope or 'the step'} cannot run on {line.size} examples:"
                f" its parameter {name} does not follow the size of the batch. Use fewer"
                " micro-batches, or a larger batch."
            ) from None
    atoms = zip(
        (*small.eqn.invars, *small.eqn.outvars),
        (*large.eqn.invars, *large.eqn.outvars),
        strict=True,
    )
    # An equation that does not depend on the size is kept, so that equal layers go on sharing it.
    alike = all(getattr(a.aval, "shape", None) == getattr(b.aval, "shape", None) for a, b in atoms)
    if alike and all(params[name] is value for name, value in small.params.items()):
        return small.eqn
    try:
        return line.equation(small.eqn, large.eqn, params)
    except _Irregular:
        raise CaptureError(
            f"`{small.name}` in {small.scope or 'the step'} cannot run on {line.size} examples: the"
            " shape of an array does not follow the size of the batch. Use fewer micro-batches, or"
            " a larger batch."
        ) from None


def _shapes(value: Any) -> list[Any] | None:
    """Shapes that a program among the parameters takes and returns; None for anything else."""
    inner = getattr(value, "jaxpr", value)
    if not hasattr(inner, "invars"):
        return None
    return [getattr(v.aval, "shape", None) for v in (*inner.invars, *inner.outvars)]
