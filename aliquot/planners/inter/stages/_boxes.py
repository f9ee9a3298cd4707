"""Minimise a sum plus weighted maxima, given a solver for the least sum under limits on the maxima.

Branch and bound over boxes of limits: the least sum at a box's upper limits, plus the weighted
lower limits, bounds the whole box. The solution at the upper limits is optimal for all limits above
its own maxima; the part of the box below is cut in two. For one maximum, this finds the same
optimum as Alpa's enumeration of all stage times as limits, without visiting all of them.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Solutions of the search, best first; no solution is better than `bound_s` or the caller's
    cutoff.

    `complete` is false if a limit on solves or their work ended the search.
    """

    solutions: tuple[StageSolution, ...]
    bound_s: float
    complete: bool
    solves: int


def minimise(
    solve: Solver,
    weights: Sequence[float],
    lows: Sequence[float],
    *,
    sum_low: float,
    cutoff_s: float,
    relative_gap: float,
    solve_limit: int,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Minimise the sum plus weighted maxima below a cutoff.

    Args:
        lows: no solution has smaller maxima.
        sum_low: none has a smaller sum.
        relative_gap: smaller improvements are not searched for.
        may_go_on: called between two solves; if false, the search ends as at `solve_limit`.
    """
    floor = sum_low + _dot(weights, lows)
    best, solutions, solves, ties, pruned = cutoff_s, list[StageSolution](), 0, 0, math.inf
    # (bound, tie, lower limits, upper limits, solution at these); the tie keeps the order of equal
    # bounds.
    boxes: list[tuple[float, int, tuple[float, ...], tuple[float, ...], StageSolution]] = []
    if floor >= _aim(best, relative_gap):
        return Outcome(solutions=(), bound_s=floor, complete=True, solves=0)

    def keep(lower: tuple[float, ...], upper: tuple[float, ...], answer: StageSolution) -> None:
        nonlocal pruned, ties
        bound = answer.sum_s + _dot(weights, lower)
        if bound >= _aim(best, relative_gap):
            pruned = min(pruned, bound)
        else:
            ties += 1
            heapq.heappush(boxes, (bound, ties, lower, upper, answer))

    def visit(lower: tuple[float, ...], upper: tuple[float, ...]) -> None:
        nonlocal best, solves
        solves += 1
        answer = solve(upper)
        if answer is not None:
            solutions.append(answer)
            best = min(best, answer.total_s(weights))
            keep(lower, upper, answer)

    visit(tuple(lows), (math.inf,) * len(weights))
    while boxes and boxes[0][0] < _aim(best, relative_gap) and solves < solve_limit and may_go_on():
        bound, _, lower, upper, answer = heapq.heappop(boxes)
        widths = [w * (high - low) for w, high, low in zip(weights, answer.maxima_s, lower)]
        k = widths.index(max(widths))
        # Above the second limit the box has nothing better than the best.
        middle = min(_middle(lower[k], answer.maxima_s[k]), lower[k] + (best - bound) / weights[k])
        if lower[k] < middle < answer.maxima_s[k]:
            visit(lower, _replaced(upper, k, middle))
            keep(_replaced(lower, k, middle), upper, answer)
        else:
            pruned = min(pruned, bound)
    solutions.sort(key=lambda f: f.total_s(weights))
    floors = [pruned, *(box[0] for box in boxes), *(f.total_s(weights) for f in solutions[:1])]
    return Outcome(
        solutions=tuple(solutions),
        bound_s=max(min(floors), floor),
        complete=not boxes or boxes[0][0] >= _aim(best, relative_gap),
        solves=solves,
    )


def _aim(best_s: float, relative_gap: float) -> float:
    """The step time that a better solution must stay below: smaller improvements are not searched
    for.
    """
    return best_s / (1 + relative_gap)


def _middle(low: float, high: float) -> float:
    """The middle of two limits; by ratio if they are far apart, and just below the upper one if
    they are close.

    The last decides in one step whether less is possible, since maxima take few distinct values.
    """
    if high - low < _CLOSE * high:
        return high * (1 - _JUST_BELOW)
    return math.sqrt(low * high) if 0 < 4 * low < high else (low + high) / 2


def _replaced(values: tuple[float, ...], k: int, value: float) -> tuple[float, ...]:
    return (*values[:k], value, *values[k + 1 :])


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(w * v for w, v in zip(weights, values) if w)
