"""The least peak memory: a program that ignores seconds and minimises the largest use of memory
over a few moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....cost import MemoryModel, Priced
from ._highs import Outcome, Relaxation
from ._layout import Choices, Layouts
from ._program import add_memory_row, build_program

# A peak above this share of the limit exceeds it by more than the solver's tolerances.
_CLEARLY = 1 + 1e-6


class LeastPeak:
    """The least peak memory of mixed choices over the moments that were added, as a share of a
    limit.

    Without seconds in the objective, a solve takes a fraction of the pivots and proves quickly that
    nothing fits, which takes the full program longest. Unless `exactly`, copies that several edges
    share are counted only in part: a lower bound, which is enough for such a proof.
    """

    def __init__(
        self,
        priced: Priced,
        allowed: Sequence[NDArray[np.bool_]],
        limit_bytes: float,
        layouts: Layouts | None = None,
        *,
        exactly: bool = True,
    ) -> None:
        self.choices: Choices
        self._priced, self._limit_bytes = priced, limit_bytes
        self._program, self.choices = build_program(priced, allowed, layouts)
        # Seconds are left out, so that the peak alone is minimised.
        self._program.cost = [np.zeros_like(part) for part in self._program.cost]
        self._peak = int(self._program.add_columns(np.ones(1))[0])
        self._exactly = exactly
        self._relaxation = Relaxation(self._program)

    def add(self, model: MemoryModel, time: int) -> None:
        """Add a moment."""
        add_memory_row(self._program, self.choices, self._priced, model, time, self._limit_bytes)
        row = len(self._program.upper) - 1
        # `use <= limit * peak` in place of `use <= limit`.
        self._program.upper[row] -= 1.0
        self._program.add_entries(np.array([row]), np.array([self._peak]), -1.0)
        if self._exactly:
            # All excess columns at once: without seconds, many mixtures are equally good, and with
            # a few columns at a time the solver would go through them all.
            self._program.add_excess(np.arange(len(self._program.groups.counts)))

    def solve(self) -> Outcome:
        """The least peak, with the values of the columns."""
        return self._relaxation.solve(exactly=False)

    def exceeds_limit(self) -> bool:
        """True if it is proved that the least peak exceeds the limit."""
        # A bound just above the limit settles the question; the optimum itself is not needed.
        outcome = self._relaxation.solve(_CLEARLY, exactly=False)
        return outcome.status in ("enough", "infeasible") or (outcome.bound_s > _CLEARLY)
