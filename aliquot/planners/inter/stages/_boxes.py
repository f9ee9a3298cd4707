"""Minimise a sum plus weighted maxima, given a solver for the least sum under limits on the maxima.

Branch and bound over boxes of limits: the least sum at a box's upper limits, plus the weighted
lower limits, bounds the whole box. The solution at the upper limits is optimal for all limits above
its own maxima; the part of the box below is cut in two. For one maximum, this finds the same
optimum as Alpa's enumeration of all stage times as limits, without visiting all of them.

A solution better than the best known has no maximum above a limit that follows from that best and
the bound of its box. Every solve keeps to these limits: with smaller limits a solver has fewer
stages to consider. `first_solution` provides a best to begin with.

Reference: Zheng et al., Alpa, 2022, section 5.2 (the enumeration).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....cost import StageChoice

_CLOSE = 1e-2
_JUST_BELOW = 1e-10
# Multiples of the lower bounds of maxima under which a first solution is sought.
_SEEDS = (2.0, 8.0)
# Limits are computed from differences, which round.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """Stages with the sum of their closed form and its maxima."""

    stages: tuple[StageChoice, ...]
    sum_s: float
    maxima_s: tuple[float, ...]

    def total_s(self, weights: Sequence[float]) -> float:
        """The closed form."""
        return self.sum_s + _dot(weights, self.maxima_s)


Solver = Callable[[tuple[float, ...]], StageSolution | None]
"""The least sum whose maxima keep within limits; None if nothing does."""


class BoxSearch:
    """The search for the least sum plus weighted maxima of one solver, a solve at a time, so that
    searches can take turns.

    Args:
        lows: no solution has smaller maxima.
        sum_low: none has a smaller sum.
        relative_gap: smaller improvements are not searched for.
    """

    def __init__(
        self,
        solve: Solver,
        weights: Sequence[float],
        lows: Sequence[float],
        *,
        sum_low: float,
        relative_gap: float,
    ) -> None:
        self.num_solves = 0
        self._solve, self._weights, self._lows = solve, weights, tuple(lows)
        self._relative_gap = relative_gap
        self._floor_s = sum_low + _dot(weights, lows)
        self._begun = False
        self._num_boxes = 0
        # The least bound of all that was left out because it was no better, up to the gap, than the
        # best solution at that time.
        self._left_out_s = math.inf
        # (bound, tie, lower limits, upper limits, solution under the upper limits); the tie keeps
        # equal bounds in the order in which they came.
        self._boxes: list[
            tuple[float, int, tuple[float, ...], tuple[float, ...], StageSolution]
        ] = []

    @property
    def open_s(self) -> float:
        """A lower bound on what is still to be searched; infinite if nothing is."""
        if not self._begun:
            return self._floor_s
        return self._boxes[0][0] if self._boxes else math.inf

    @property
    def bound_s(self) -> float:
        """A lower bound on all solutions that are better than all of those given to `advance`."""
        return max(min(self.open_s, self._left_out_s), self._floor_s)

    def is_open(self, best_s: float) -> bool:
        """True if there may be a solution better than the best known by more than the gap."""
        return self.open_s < _aim(best_s, self._relative_gap)

    def advance(self, best_s: float) -> StageSolution | None:
        """Solve once more, and return the solution; None if there was none, or if the next box was
        closed without a solve.

        Args:
            best_s: the closed form of the best known solution, whoever found it; only better ones
                are sought.
        """
        if not self._begun:
            self._begun = True
            unlimited = (math.inf,) * len(self._weights)
            return self._visit(self._lows, unlimited, self._floor_s, best_s)
        bound, _, lower, upper, answer = heapq.heappop(self._boxes)
        widths = [w * (high - low) for w, high, low in zip(self._weights, answer.maxima_s, lower)]
        k = widths.index(max(widths))
        # With this maximum above the second limit, the box has nothing better than the best.
        middle = min(
            _middle(lower[k], answer.maxima_s[k]), lower[k] + (best_s - bound) / self._weights[k]
        )
        if not lower[k] < middle < answer.maxima_s[k]:
            self._left_out_s = min(self._left_out_s, bound)
            return None
        lesser = self._visit(lower, _replaced(upper, k, middle), bound, best_s)
        better_s = min(best_s, lesser.total_s(self._weights) if lesser else math.inf)
        self._keep(_replaced(lower, k, middle), upper, answer, better_s)
        return lesser

    def _visit(
        self, lower: tuple[float, ...], upper: tuple[float, ...], bound: float, best_s: float
    ) -> StageSolution | None:
        self.num_solves += 1
        answer = self._solve(_below(best_s, bound, self._weights, lower, upper))
        # What these limits exclude is no better than the best.
        self._left_out_s = min(self._left_out_s, best_s)
        if answer is not None:
            self._keep(lower, upper, answer, min(best_s, answer.total_s(self._weights)))
        return answer

    def _keep(
        self,
        lower: tuple[float, ...],
        upper: tuple[float, ...],
        answer: StageSolution,
        best_s: float,
    ) -> None:
        bound = answer.sum_s + _dot(self._weights, lower)
        if bound >= _aim(best_s, self._relative_gap):
            self._left_out_s = min(self._left_out_s, bound)
        else:
            self._num_boxes += 1
            heapq.heappush(self._boxes, (bound, self._num_boxes, lower, upper, answer))


def first_solution(
    solve: Solver,
    weights: Sequence[float],
    lows: Sequence[float],
    *,
    sum_low: float,
    cutoff_s: float,
) -> StageSolution | None:
    """A solution below a cutoff that is quick to find: one with maxima of at most a few times their
    lower bounds; None if there is none, although others may exist.
    """
    floor = sum_low + _dot(weights, lows)
    if floor >= cutoff_s or not any(lows):
        return None
    limits = _below(cutoff_s, floor, weights, lows, (math.inf,) * len(weights))
    for multiple in _SEEDS:
        near = tuple([min(multiple * low or math.inf, most) for low, most in zip(lows, limits)])
        found = solve(near)
        if found is not None or near == limits:
            return found
    return None


def _below(
    best_s: float,
    bound_s: float,
    weights: Sequence[float],
    lower: Sequence[float],
    upper: Sequence[float],
) -> tuple[float, ...]:
    """Upper limits within which every solution of a box lies that is better than the best.

    Args:
        bound_s: the bound of the box: its least sum plus its weighted lower limits.
    """
    spare_s = best_s - bound_s + _ROUNDING * best_s
    return tuple(
        min(high, low + spare_s / weight) if weight > 0 else high
        for weight, low, high in zip(weights, lower, upper, strict=True)
    )


def _aim(best_s: float, relative_gap: float) -> float:
    """The value that a better solution must stay below, as improvements within the gap are not
    searched for.
    """
    return best_s / (1 + relative_gap)


def _middle(low: float, high: float) -> float:
    """The middle of two limits; by ratio if they are far apart, and just below the upper one if
    they are close.

    The latter decides in one step whether less is possible, since maxima take few distinct values.
    """
    if high - low < _CLOSE * high:
        return high * (1 - _JUST_BELOW)
    return math.sqrt(low * high) if 0 < 4 * low < high else (low + high) / 2


def _replaced(values: tuple[float, ...], k: int, value: float) -> tuple[float, ...]:
    return (*values[:k], value, *values[k + 1 :])


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values) if w)
