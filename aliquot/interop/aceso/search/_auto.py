"""The planner `auto`: grid and bottleneck relief, then the exact search from their best
configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._configuration import Configuration
from ._bottleneck import Bottleneck
from ._exact import Exact
from ._grid import Grid
from ._problem import INTERRUPTED, OnProgress, SearchProblem, SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Runs the other planners one after another.

    Attributes:
        grid, bottleneck: run first.
        exact: begins with the best configurations of these.
    """

    grid: Grid = Grid(keep=2)
    bottleneck: Bottleneck = Bottleneck(keep=3, max_solved_operators=1_500, relieved=0)
    exact: Exact = Exact()

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Search; times and counts are sums over the planners."""
        configurations, seconds, scored = list(start), 0.0, 0
        for planner in (self.grid, self.bottleneck):
            result = planner.search(problem, on_progress=on_progress)
            configurations += [configuration for configuration, _ in result.best]
            seconds, scored = seconds + result.search_s, scored + result.scored
            if result.ended == INTERRUPTED:
                return replace(result, search_s=seconds, scored=scored)
        exact = self.exact
        if exact.budget_s is not None:
            exact = replace(exact, budget_s=max(exact.budget_s - seconds, 0.0))
        result = exact.search(problem, start=configurations, on_progress=on_progress)
        return replace(
            result,
            search_s=seconds + result.search_s,
            scored=scored + result.scored,
            best_found_at_s=seconds + result.best_found_at_s,
        )
