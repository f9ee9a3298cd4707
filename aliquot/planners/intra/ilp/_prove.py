"""A short proof that no solution lies below a bound, by a few branches on the warm relaxation.

A general solver of integer programs starts cold: it presolves, solves the relaxation, searches for
cuts. If the relaxation is already close to the bound, it mostly mixes choices because of memory,
and branching on a few of them is enough.

Reference: A. H. Land, A. G. Doig, "An automatic method of solving discrete programming problems",
1960.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._highs import LIMIT, Relaxation
from ._program import MIXED

Floats = NDArray[np.float64]

# Relaxations to solve at most; beyond these, the general solver would be faster.
_MOST_SOLVES = 40


def rules_out(
    relaxation: Relaxation,
    columns: Sequence[NDArray[np.int64]],
    use: Sequence[Sequence[Floats]],
    values: Floats,
    bound_s: float,
) -> tuple[bool, int, float]:
    """True if a few relaxations prove that every solution costs at least `bound_s`; also their
    number and their work.

    Args:
        columns: of each node's choices.
        use: for each moment with a memory row, the bytes of each node's choices.
        values: the relaxation's solution, below the bound.
    """
    solves_left, work = _MOST_SOLVES, 0.0

    def proved(values: Floats) -> bool:
        nonlocal solves_left, work
        node = _mixed_most(columns, use, values)
        if node is None:
            return False
        # HiGHS takes column numbers as int32.
        of_node = columns[node].astype(np.int32)
        is_mixed = values[of_node] > MIXED
        # One branch for each mixed choice, the most likely to fail first, and one for all other
        # choices.
        branches = []
        for k in np.flatnonzero(is_mixed)[np.argsort(-values[of_node][is_mixed])]:
            branches.append(np.delete(of_node, k))
        if not is_mixed.all():
            branches.append(of_node[is_mixed])
        for excluded in branches:
            if solves_left == 0:
                return False
            solves_left -= 1
            with relaxation.without(excluded):
                outcome = relaxation.solve(bound_s)
                work += outcome.work
                # A limit proves nothing.
                if outcome.status == LIMIT:
                    return False
                if (
                    outcome.values is not None
                    and outcome.bound_s < bound_s
                    and not proved(outcome.values)
                ):
                    return False
        return True

    ruled_out = proved(values)
    return ruled_out, _MOST_SOLVES - solves_left, work


def _mixed_most(
    columns: Sequence[NDArray[np.int64]], use: Sequence[Sequence[Floats]], values: Floats
) -> int | None:
    """The node whose mixed choices differ most in memory; None if no node mixes choices."""
    best: tuple[float, int] | None = None
    for node, of_node in enumerate(columns):
        mixed = np.flatnonzero(values[of_node] > MIXED)
        if len(mixed) > 1:
            # Choices that differ in memory are what the memory rows mix.
            spread = max((float(np.ptp(at[node][mixed])) for at in use), default=0.0)
            if best is None or spread > best[0]:
                best = spread, node
    return None if best is None else best[1]
