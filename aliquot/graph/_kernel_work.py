"""Arithmetic of Pallas kernels.

A kernel runs once for each point of its grid, and often computes only in some runs: attention skips
blocks that its mask hides. Where a run branches by its position in the grid, or by a table of
constants at its position, each branch counts as often as it is taken.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from numpy.typing import NDArray

from . import _jax_compat as compat
from ._rule import traits_of
from ._traits import Moves

# Operators that locate the kernel in its grid, or load and store.
_NO_ARITHMETIC = frozenset("get masked_load masked_swap program_id num_programs swap".split())
_EXPONENTIALS = frozenset(("exp", "exp2"))
# Conditions of larger grids are not evaluated.
_MOST_POINTS = 1 << 18
Known = NDArray[Any]
"""Values of a scalar: one, or one for each point of the grid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What all runs of a kernel compute.

    Attributes:
        flops: floating-point operations.
        unconditional: the same if each run took all of its branches.
        products: matrix products on the longest path through a run; those in a loop count once.
        exponentials: whether there are any.
    """

    flops: float
    unconditional: float
    products: int
    exponentials: bool


def kernel_arithmetic(
    params: Mapping[str, Any], grid: Sequence[int], tables: Sequence[Any]
) -> Arithmetic:
    """The arithmetic of a `pallas_call`.

    Args:
        params: of its equation.
        tables: values of the operands that come first and choose blocks; None where unknown.
    """
    body, _ = compat.open_body(params["jaxpr"])
    # A kernel numbers the dims of its grid without those that `vmap` has added.
    added = set(params["grid_mapping"].vmapped_dims)
    sizes = [size for g, size in enumerate(grid) if g not in added]
    if math.prod(sizes) <= _MOST_POINTS:
        places: list[Known] = [axis.reshape(-1) for axis in np.indices(sizes)]
    else:
        places = []
    reader = _Reader(places=places, sizes=sizes)
    of_refs = {}
    for var, table in zip(body.invars, tables, strict=False):
        if table is not None:
            of_refs[var] = np.asarray(table)
    reader.read(body, of_refs, np.ones(()), 1.0)
    runs = math.prod(grid)
    products, exponentials = _path(body)
    return Arithmetic(
        flops=reader.flops * runs,
        unconditional=reader.unconditional * runs,
        products=products,
        exponentials=exponentials,
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reader:
    """Adds up the operators of a kernel, and evaluates its scalars as far as they are known before
    it runs.

    Attributes:
        places: for each dim of the grid the positions of all points; empty if there are too many.
        sizes: of the dims of the grid.
        flops, unconditional: so far, of an average run.
    """

    places: Sequence[Known]
    sizes: Sequence[int]
    flops: float = 0.0
    unconditional: float = 0.0

    def read(
        self, body: Any, known: Mapping[Any, Known], share: Known, times: float
    ) -> list[Known | None]:
        """Read one body; returns its results as far as they are known.

        Args:
            known: values of its operands, and contents of tables.
            share: 1 for each point of the grid that runs the body, else 0.
            times: how often each of these runs it.
        """
        values = dict(known)

        def value(atom: Any) -> Known | None:
            return np.asarray(atom.val) if compat.is_literal(atom) else values.get(atom)

        for eqn in body.eqns:
            flops = _flops(eqn) * times
            self.flops += flops * float(np.mean(share))
            self.unconditional += flops
            given = list(map(value, eqn.invars))
            for var, made in zip(eqn.outvars, self._run(eqn, given, share, times), strict=False):
                if made is not None:
                    values[var] = made
        return list(map(value, body.outvars))

    def _run(
        self, eqn: Any, given: Sequence[Known | None], share: Known, times: float
    ) -> Sequence[Known | None]:
        """Results of one operator that are known."""
        name, params = eqn.primitive.name, eqn.params
        match name:
            case "program_id":
                return self.places[params["axis"] : params["axis"] + 1]
            case "num_programs":
                return [np.asarray(self.sizes[params["axis"]])]
            case "get":
                return [_entry(eqn, given)]
            case "cond":
                branches, index = params["branches"], given[0]
                if index is not None:
                    index = np.clip(index.astype(np.int64), 0, len(branches) - 1)
                for number, branch in enumerate(branches):
                    taken = np.ones(()) if index is None else index == number
                    self._inside(branch, given[1:], share * taken, times)
                return []
            case "scan":
                num_consts, _ = compat.scan_counts(params)
                constant = given[:num_consts]
                self._inside(params["jaxpr"], constant, share, times * params["length"])
                return []
        bodies: list[Any] = []
        for param in params.values():
            parts = param if isinstance(param, tuple | list) else (param,)
            bodies += filter(compat.holds_jaxpr, parts)
        if len(bodies) == 1 and len(compat.open_body(bodies[0])[0].invars) == len(given):
            return self._inside(bodies[0], given, share, times)
        for part in bodies:
            self._inside(part, [], share, times)
        function = _SCALARS.get(name)
        if any(v is None for v in given) or eqn.outvars[0].aval.shape:
            return []
        if name == "convert_element_type" and given[0] is not None:
            return [given[0].astype(params["new_dtype"])]
        return [] if function is None else [np.asarray(function(*given))]

    def _inside(
        self, body: Any, given: Sequence[Known | None], share: Known, times: float
    ) -> list[Known | None]:
        opened, constants = compat.open_body(body)
        known = {}
        for var, value in zip(opened.invars, given, strict=False):
            if value is not None:
                known[var] = value
        known |= {var: np.asarray(c) for var, c in zip(opened.constvars, constants, strict=False)}
        return self.read(opened, known, share, times)


def _entry(eqn: Any, given: Sequence[Known | None]) -> Known | None:
    """The entry of a table that a run reads; None if table or place are unknown."""
    table, places = given[0], given[1:]
    if table is None or any(place is None for place in places):
        return None
    # One indexer, whose indices are positions, each an operand or a constant.
    indexers = jax.tree.leaves(jax.tree.unflatten(eqn.params["tree"], places))
    if len(indexers) != table.ndim or eqn.outvars[0].aval.shape:
        return None
    entry: Known = table[tuple(np.clip(i, 0, n - 1) for i, n in zip(indexers, table.shape))]
    return entry


def _quotient(a: Known, b: Known) -> Known:
    """As XLA divides: integers towards zero."""
    if np.issubdtype(a.dtype, np.integer):
        whole: Known = np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))
        return whole
    return np.divide(a, b)


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _quotient,
    "neg": operator.neg,
    "abs": np.abs,
    "sign": np.sign,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int64), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}


def _path(body: Any) -> tuple[int, bool]:
    """Products on the longest path through a body, and whether it has exponentials."""
    products, exponentials = 0, False
    for eqn in body.eqns:
        products += eqn.primitive.name == "dot_general"
        exponentials |= eqn.primitive.name in _EXPONENTIALS
        inner = list(map(_path, jaxprs_in_params(eqn.params)))
        products += max((count for count, _ in inner), default=0)
        exponentials |= any(found for _, found in inner)
    return products, exponentials


def _flops(eqn: Any) -> float:
    """Floating-point operations of one operator: two for each term of a product, else one for each
    element of its largest array. Scalars only say where and whether to compute.
    """
    traits = traits_of(eqn.primitive.name)
    free = eqn.primitive.name in _NO_ARITHMETIC or traits.numbers_rows
    free = free or (traits.moves is not None and traits.moves is not Moves.NEGATE)
    if free or any(map(compat.holds_jaxpr, eqn.params.values())):
        return 0.0
    largest = max(
        (math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)), default=0
    )
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        summed = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return 2.0 * float(summed * math.prod(eqn.outvars[0].aval.shape))
    return float(largest) if largest > 1 else 0.0
