"""Checks at run time, as `equinox.error_if` writes them: a `cond` with one branch that returns its
arrays and one that calls into Python to raise an error.

The raising branch never returns, but its results have the shapes of all arrays that the check
guards. Here they are replaced by scalars that are broadcast to these shapes, so that a check
prevents neither splits nor micro-batches, each of which checks its own examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _jax_compat as compat

_RAISING_MODULE = "equinox._errors"
_RAISES = 1


def is_check(eqn: Any) -> bool:
    """True if an equation is such a check: it returns its operands, or raises."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return False
    body, _ = compat.open_body(eqn.params["branches"][_RAISES])
    return any(map(raises, body.eqns))


def opened_branches(eqn: Any) -> list[tuple[Any, Sequence[Any]]]:
    """The open jaxprs of the branches of a `cond`, with their constants; the raising branch of a
    check computes with scalars in place of arrays, and broadcasts them at its end.
    """
    branches = list(map(compat.open_body, eqn.params["branches"]))
    if not is_check(eqn):
        return branches
    body, consts = branches[_RAISES]

    def run(*operands: Any) -> list[Any]:
        known = dict(zip([*body.constvars, *body.invars], [*consts, *operands], strict=True))
        numbers: dict[Any, Any] = {}
        for inner in filter(raises, body.eqns):
            given = [a.val if compat.is_literal(a) else known[a] for a in inner.invars]
            # The callback raises before it returns anything, so it may promise any shape.
            scalars = tuple(aval.update(shape=()) for aval in inner.params["result_avals"])
            results = inner.primitive.bind(*given, **{**inner.params, "result_avals": scalars})
            known.update(zip(inner.outvars, results, strict=True))
            numbers.update((number.dtype, number) for number in results)
        return [jnp.broadcast_to(numbers[v.aval.dtype], v.aval.shape) for v in body.outvars]

    # Some result may not come from the raising callback: not the form that Equinox writes.
    with contextlib.suppress(KeyError):
        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
        branches[_RAISES] = compat.open_body(jax.make_jaxpr(run)(*structs))
    return branches


def raises(eqn: Any) -> bool:
    """True if an equation calls into Python to raise the error of a check; it never returns."""
    if eqn.primitive.name != "pure_callback":
        return False
    function = getattr(eqn.params["callback"], "callback_func", None)
    return getattr(function, "__module__", "") == _RAISING_MODULE


@jax.custom_batching.custom_vmap
def any_row(index: Any) -> Any:
    """The index of the branch that a check takes, or of the message that it shows; under vmap, the
    largest over all rows.

    Otherwise vmap would give the `cond` a predicate for each row, and run both branches, and raise.
    """
    return index


@any_row.def_vmap
def _any_row(axis_size: int, in_batched: Sequence[bool], index: Any) -> tuple[Any, bool]:
    return any_row(index.max(axis=0) if in_batched[0] else index), False
