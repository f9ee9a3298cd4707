"""A short proof that nothing lies below a bound: a few branches on the warm relaxation.

A general solver begins anew for an integer program: it presolves, solves the relaxation, looks for cuts. Where the relaxation
is all but at the bound already, what it mixes is mostly what needs memory, and a few choices settle it.

Reference: A. H. Land, A. G. Doig, "An automatic method of solving discrete programming problems", 1960.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._highs import LIMIT, Relaxation

Floats = NDArray[np.float64]

_MIXED = 1e-6
# By then the general solver has an answer.
_MOST_SOLVES = 40


def rules_out(
    relaxation: Relaxation,
    columns: Sequence[NDArray[np.int64]],
    use: Sequence[Sequence[Floats]],
    values: Floats,
    bound_s: float,
) -> tuple[bool, int, float]:
    """Whether every choice costs at least `bound_s`, as far as a few relaxations tell, how many these were, and their work.

    Args:
        columns: of each node's choices.
        use: for moments when memory is short, what each node's choices take then, in bytes.
        values: the relaxation's solution, below the bound.
    """
    left, work = _MOST_SOLVES, 0.0

    def proved(values: Floats) -> bool:
        nonlocal left, work
        node = _mixed_most(columns, use, values)
        if node is None:
            return False
        own = columns[node].astype(np.int32)
        taken = values[own] > _MIXED
        # One branch for each choice that is mixed, those that may fail first, and one for all others.
        branches = [np.delete(own, k) for k in np.flatnonzero(taken)[np.argsort(-values[own][taken])]]
        if not taken.all():
            branches.append(own[taken])
        for excluded in branches:
            if left == 0:
                return False
            left -= 1
            with relaxation.without(excluded):
                found = relaxation.solve(bound_s)
                work += found.work
                if found.status == LIMIT:
                    return False
                if found.values is not None and found.bound_s < bound_s and not proved(found.values):
                    return False
        return True

    ruled_out = proved(values)
    return ruled_out, _MOST_SOLVES - left, work


def _mixed_most(columns: Sequence[NDArray[np.int64]], use: Sequence[Sequence[Floats]], values: Floats) -> int | None:
    """Of the nodes with several choices at once the one whose choices differ most in memory; None if there is none."""
    best: tuple[float, int] | None = None
    for node, own in enumerate(columns):
        mixed = np.flatnonzero(values[own] > _MIXED)
        if len(mixed) > 1:
            spread = max((float(np.ptp(at[node][mixed])) for at in use), default=0.0)
            if best is None or spread > best[0]:
                best = spread, node
    return None if best is None else best[1]
