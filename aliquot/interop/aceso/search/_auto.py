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
from ._problem import INTERRUPTED, OnProgress, SearchProblem, SearchResult, limit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Runs the other planners one after another.

    Attributes:
        grid, bottleneck: run first.
        exact: begins with the best configurations of these.
        budget_s: seconds after which all have ended; with None the result is deterministic.
    """

    grid: Grid = Grid(keep=2)
    bottleneck: Bottleneck = Bottleneck(keep=3, max_solved_operators=1_500, relieved=0)
    exact: Exact = Exact()
    budget_s: float | None = None

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Search; times and counts are sums over the planners. After an interrupt, or once time is
        up, the best configuration so far is the answer.
        """
        limit = limit_of(self.budget_s)
        configurations, scored, interrupted = list(start), 0, False
        for planner in (self.grid, self.bottleneck):
            if self.budget_s is not None:
                planner = replace(planner, budget_s=max(self.budget_s - limit.elapsed_s, 0.0))
            result = planner.search(problem, on_progress=on_progress)
            configurations += [configuration for configuration, _ in result.best]
            scored += result.scored
            interrupted = result.ended == INTERRUPTED
            if interrupted:
                break
        seconds, exact = limit.elapsed_s, self.exact
        if interrupted:
            # It only chooses among the configurations that were found.
            exact = replace(exact, budget_s=0.0)
        elif self.budget_s is not None:
            exact = replace(exact, budget_s=max(self.budget_s - seconds, 0.0))
        result = exact.search(problem, start=configurations, on_progress=on_progress)
        return replace(
            result,
            search_s=limit.elapsed_s,
            scored=scored + result.scored,
            best_found_at_s=seconds + result.best_found_at_s,
            ended=INTERRUPTED if interrupted else result.ended,
        )
