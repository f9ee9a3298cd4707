"""The search of a planner that splits the products of a ParallelBlock together.

The planner of the rest solves with the options of every block open. Its solution mostly has one
option for each block, as anything else would have to communicate inside the block. Sometimes that
pays nevertheless: summing one product costs less than computing it on more devices, while other
products of its block need no sum. Such blocks are then rounded to the option that most of their
products follow, all at once if possible, otherwise one after another. A block for which the step
would take longer than the tolerance allows stays split apart.

Every product follows some option of its block in all of these, so the bound of the first solve
holds for whatever is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....cost import Problem
from .._base import AbstractIntra, AbstractSearch, IntraSolution, Ints, Space
from ._options import BlockOptions, allowed_by, restrict_blocks

_ROUNDING = 1e-9


class BlockSearch(AbstractSearch):
    """The search of one space; see the module's description."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        blocks: Sequence[BlockOptions],
        rest: AbstractIntra,
        *,
        memory_limit_bytes: float,
        ceiling_s: float,
        tolerance: float,
        solve_limit: int,
        notes: dict[str, Any] | None,
    ) -> None:
        self._problem, self._space, self._blocks, self._rest = problem, space, blocks, rest
        self._limit_bytes, self._ceiling_s = memory_limit_bytes, ceiling_s
        self._tolerance, self._solve_limit = tolerance, solve_limit
        self._open = rest.begin(
            problem,
            restrict_blocks(space, blocks, {}),
            memory_limit_bytes=memory_limit_bytes,
            ceiling_s=ceiling_s,
            notes=notes,
        )
        self._best: IntraSolution | None = None
        self._is_guessed = False
        self.gave_up = False

    @property
    def lower_bound_s(self) -> float:  # type: ignore[override]
        return self._open.lower_bound_s

    def start(self) -> float | None:
        return self._open.start()

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """See `AbstractSearch.bound`: that of the space with the options of every block open."""
        return self._open.bound(cutoff_s)

    @property
    def picks(self) -> Ints | None:
        """See `AbstractSearch.picks`; products of a block may follow different options."""
        return self._open.picks

    def incumbent(self) -> IntraSolution | None:
        """See `AbstractSearch.incumbent`: the incumbent with all options open, with each block
        rounded to the option that most of its products follow.
        """
        if not self._is_guessed:
            self._is_guessed = True
            guess = self._open.incumbent()
            if guess is not None:
                rounded = self._solve(self._nearest(guess.picks), self._ceiling_s)
                self._best = rounded and self._proved(rounded)
        return self._best

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """See `AbstractSearch.improve`; see the module's description for the steps."""
        best, end_s = self._best, min(cutoff_s, self._ceiling_s)
        limit_s = min(end_s, best.step_time_s if best else np.inf)
        found = self._open.improve(limit_s)
        self.gave_up = self._open.gave_up
        if found is not None and found.step_time_s < limit_s:
            nearest = self._nearest(found.picks)
            apart = [k for k, b in enumerate(self._blocks) if b.option_of(found.picks) is None]
            most_s = found.step_time_s * (1 + self._tolerance)
            if not apart:
                best = found
            elif (rounded := self._solve(nearest, min(most_s, limit_s))) is not None:
                best = rounded
            elif best is None or best.step_time_s > most_s:
                best, options = found, {k: o for k, o in nearest.items() if k not in apart}
                # A single one was tried above.
                for k in apart[: self._solve_limit] if len(apart) > 1 else ():
                    rounded = self._solve({**options, k: nearest[k]}, min(most_s, end_s))
                    if rounded is not None:
                        best, options = rounded, {**options, k: nearest[k]}
        if best is None or best.step_time_s >= end_s:
            return None
        self._best = best if best is found else self._proved(best)
        return self._best

    def least_memory(self) -> Ints:
        return self._open.least_memory()

    def _nearest(self, picks: Ints) -> dict[int, tuple[int, ...]]:
        """For each block the option that most of its products follow."""
        return {k: tuple(options.followed(picks)[:1]) for k, options in enumerate(self._blocks)}

    def _proved(self, rounded: IntraSolution) -> IntraSolution:
        """A solution with the bound, and the status that their gap proves."""
        bound_s = min(self.lower_bound_s, rounded.step_time_s)
        gap_s, status = rounded.step_time_s - bound_s, "rounded"
        if gap_s <= max(self._rest.relative_gap, _ROUNDING) * bound_s:
            status = "optimal" if gap_s <= _ROUNDING * bound_s else "optimal within the gap"
        return replace(rounded, lower_bound_s=bound_s, status=status)

    def _solve(
        self, options: Mapping[int, tuple[int, ...]], ceiling_s: float
    ) -> IntraSolution | None:
        """The best solution below a ceiling with these options of blocks; see `restrict_blocks`."""
        space = restrict_blocks(self._space, self._blocks, options)
        if not allowed_by(space.allowed):
            return None
        solution = self._rest.solve(
            self._problem, space, memory_limit_bytes=self._limit_bytes, ceiling_s=ceiling_s
        )
        return solution if solution and solution.step_time_s < ceiling_s else None
