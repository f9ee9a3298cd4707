"""Equations of a split graph that no trace contains: traced equations at another number of rows,
and joints, which cut, concatenate or combine pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex
from jax.extend.core import primitives

from . import _jax_compat as compat
from ._split_rows import Local

_PRIMITIVES: Mapping[str, Any] = {
    "add": primitives.add_p,
    "mul": primitives.mul_p,
    "max": primitives.max_p,
    "min": primitives.min_p,
    "and": primitives.and_p,
    "or": primitives.or_p,
    "xor": primitives.xor_p,
    "slice": primitives.slice_p,
    "concatenate": primitives.concatenate_p,
}


def with_rows(aval: Any, rows: int) -> Any:
    """The type of an array with another number of rows."""
    return aval.update(shape=(rows, *aval.shape[1:]))


class Equations:
    """Makes equations. Ranges with equally many rows share one object, so that their equations can
    be compared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def on_rows(self, eqn: Any, rule: Local, rows: int) -> Any:
        """An equation that is local in the leading dim, for `rows` rows."""
        known = self._known.get((id(eqn), rows))
        if known is None:
            known = eqn.replace(
                invars=[
                    _on_rows(v, rows) if has else v
                    for v, has in zip(eqn.invars, rule.operands, strict=True)
                ],
                outvars=[
                    _on_rows(v, rows) if has else v
                    for v, has in zip(eqn.outvars, rule.results, strict=True)
                ],
                params=rule.rewrite(eqn.params, rows),
            )
            self._known[id(eqn), rows] = known
        return known

    def scan_on_rows(self, eqn: Any, rows: int) -> Any:
        """A scan over `rows` rows."""
        known = self._known.get((id(eqn), rows))
        if known is None:
            params = eqn.params
            num_consts, carried = compat.scan_counts(params)
            first = num_consts + carried
            known = eqn.replace(
                invars=[*eqn.invars[:first], *(_on_rows(v, rows) for v in eqn.invars[first:])],
                outvars=[
                    *eqn.outvars[:carried],
                    *(_on_rows(v, rows) for v in eqn.outvars[carried:]),
                ],
                # A scan cannot be unrolled by more turns than it has.
                params={**params, "length": rows, "unroll": min(params["unroll"], rows)},
            )
            self._known[id(eqn), rows] = known
        return known


def joint(
    like: Any, name: str, operands: Sequence[Any], result: Any, params: Mapping[str, Any]
) -> Any:
    """A new equation of the types `operands -> result`, under the user's line and the context of
    another one.
    """
    return like.replace(
        invars=list(map(jex.Var, operands)),
        outvars=[jex.Var(result)],
        primitive=_PRIMITIVES[name],
        params=dict(params),
        # Joints have no effects, even if the equation whose line they carry has.
        effects=frozenset(),
    )


def _on_rows(var: Any, rows: int) -> Any:
    return var if compat.is_dropped(var) else jex.Var(with_rows(var.aval, rows))
