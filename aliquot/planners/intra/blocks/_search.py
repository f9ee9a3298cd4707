"""Branch and bound over the options of ParallelBlocks.

The planner of the rest first solves with the options of every block open. Its solution mostly has
one option for each block, as anything else would have to communicate inside the block. If it does
not, the search branches on the options of one such block: one branch for each option that some of
its products follow, and one for all other options.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....cost import Problem
from .._base import AbstractIntra, AbstractSearch, IntraSolution, Ints, Space
from ._options import BlockOptions, allowed_by, restrict_blocks

_LIMIT = "limit of branches reached"


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
        branch_limit: int,
        notes: dict[str, Any] | None,
    ) -> None:
        self._problem, self._space, self._blocks, self._rest = problem, space, blocks, rest
        self._limit_bytes, self._ceiling_s, self._branch_limit = (
            memory_limit_bytes,
            ceiling_s,
            branch_limit,
        )
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
        """See `AbstractSearch.lower_bound_s`."""
        return self._open.lower_bound_s

    def start(self) -> float | None:
        """See `AbstractSearch.start`."""
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
                solution = self._solve(self._nearest(guess.picks, {}), self._ceiling_s)
                self._best = solution and replace(solution, lower_bound_s=self.lower_bound_s)
        return self._best

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """See `AbstractSearch.improve`."""
        best, count = self._best, itertools.count()
        limit_s = min(cutoff_s, self._ceiling_s, best.step_time_s if best else np.inf)
        root = self._open.improve(limit_s)
        self.gave_up = self._open.gave_up
        # A running number breaks ties, as solutions cannot be compared.
        waiting: list[tuple[float, int, dict[int, tuple[int, ...]], IntraSolution]] = []
        if root is not None:
            heapq.heappush(waiting, (root.lower_bound_s, next(count), {}, root))
        asked, status = 1, root.status if root else "optimal within the gap"
        lower_bound_s = root.lower_bound_s if root else self.lower_bound_s
        while waiting:
            lower_bound_s, _, left, solution = heapq.heappop(waiting)
            # What is left could improve by no more than the accepted gap.
            if lower_bound_s >= limit_s * (1 - self._rest.relative_gap):
                break
            split = self._split_apart(solution.picks)
            if split is None:
                if solution.step_time_s < limit_s:
                    best, limit_s = solution, solution.step_time_s
                continue
            # Round all blocks to one option each right away, for a solution to prune with.
            rounded = self._solve(self._nearest(solution.picks, left), limit_s)
            asked += 1
            if rounded is not None and rounded.step_time_s < limit_s:
                best, limit_s = rounded, rounded.step_time_s
            if lower_bound_s >= limit_s * (1 - self._rest.relative_gap):
                break
            branches = self._branches(split, solution.picks, left)
            if asked + len(branches) > self._branch_limit:
                status, self.gave_up = _LIMIT, True
                break
            for branch in branches:
                asked += 1
                child = self._solve({**left, split: branch}, limit_s)
                if child is not None:
                    # A branch has fewer choices than its parent, so the parent's bound also holds
                    # for it.
                    bound_s = max(lower_bound_s, child.lower_bound_s)
                    heapq.heappush(waiting, (bound_s, next(count), {**left, split: branch}, child))
        if best is not None and not self.gave_up:
            # All that could improve by more than the gap was searched.
            lower_bound_s = max(lower_bound_s, best.step_time_s * (1 - self._rest.relative_gap))
            status = "optimal within the gap" if self._rest.relative_gap else "optimal"
        if best is None or best.step_time_s >= min(cutoff_s, self._ceiling_s):
            return None
        self._best = replace(
            best, lower_bound_s=min(lower_bound_s, best.step_time_s), status=status
        )
        return self._best

    def least_memory(self) -> Ints:
        """See `AbstractSearch.least_memory`."""
        return self._open.least_memory()

    def _split_apart(self, picks: Ints) -> int | None:
        """The first block whose products follow no common option; None if there is none."""
        return next(
            (k for k, options in enumerate(self._blocks) if options.option_of(picks) is None), None
        )

    def _branches(
        self, split: int, picks: Ints, left: Mapping[int, tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The options left to a block, divided into branches: one for each option that some product
        follows, and one for all others.
        """
        options = left.get(split, tuple(range(len(self._blocks[split]))))
        followed = [o for o in self._blocks[split].followed(picks) if o in options]
        others = tuple(o for o in options if o not in followed)
        return [*[(o,) for o in followed], *([others] if others else [])]

    def _nearest(
        self, picks: Ints, left: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[int, ...]]:
        """For each block, the one of its remaining options that most of its products follow."""
        nearest = {}
        for k, options in enumerate(self._blocks):
            allowed = left.get(k, tuple(range(len(options))))
            followed = [o for o in options.followed(picks) if o in allowed]
            nearest[k] = (followed or list(allowed))[:1]
        return {k: tuple(options) for k, options in nearest.items()}

    def _solve(self, left: Mapping[int, tuple[int, ...]], ceiling_s: float) -> IntraSolution | None:
        space = restrict_blocks(self._space, self._blocks, left)
        if not allowed_by(space.allowed):
            return None
        return self._rest.solve(
            self._problem, space, memory_limit_bytes=self._limit_bytes, ceiling_s=ceiling_s
        )
