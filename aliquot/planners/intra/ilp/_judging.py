"""Exact costs of the choices that a search finds, and the statuses that bounds prove."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ....cost import MemoryModel, casts_fit, evaluate, memory_model, takes_turns, timeline
from .._base import IntraCosts, IntraSolution
from ._highs import LIMIT

if TYPE_CHECKING:
    from ._solve import Ints, Search

_STATUS_IF_DEFERRED = "optimal if every deferrable product is deferred"


def model_of(search: Search, picks: Ints) -> MemoryModel:
    """The memory model that holds for known choices."""
    return model_in_turn(search, takes_turns(search.priced, picks))


def model_in_turn(search: Search, in_turn: bool) -> MemoryModel:
    """The memory model for one order of deferrable products; see `takes_turns`."""
    if in_turn not in search.models:
        search.models[in_turn] = memory_model(search.priced, in_turn=in_turn)
    return search.models[in_turn]


def solution_of(search: Search, picks: Ints, status: str) -> IntraSolution | None:
    """The exact costs of picks; None if they do not fit. "optimal" picks that have no memory for
    casts of parameters, which the program takes for granted, are only "rounded".
    """
    peak = float(timeline(model_of(search, picks), search.priced, picks).max())
    if peak > search.limit_bytes * (1 + 1e-9):
        return None
    # The program counts casts of parameters once a step, for which there may be no memory.
    once = casts_fit(search.priced, picks, search.limit_bytes)
    seconds = evaluate(search.priced, picks, casts_once=once).total_s
    if status == "optimal" and seconds > evaluate(search.priced, picks).total_s:
        status = "rounded"
    costs = IntraCosts(step_time_s=seconds, peak_bytes=peak)
    return IntraSolution(
        picks=picks, costs=costs, lower_bound_s=search.lower_bound_s, status=status
    )


def with_status(search: Search, solution: IntraSolution, status: str = "optimal") -> IntraSolution:
    """A solution with the current bound, and the status that their gap proves."""
    gap = solution.step_time_s - search.lower_bound_s
    if gap <= 1e-9 * search.lower_bound_s or (
        status == "infeasible" and not search.assumes_deferred
    ):
        status = "optimal"
    elif (
        search.assumes_deferred
        and gap > search.relative_gap * search.lower_bound_s
        and status in ("optimal", "infeasible")
    ):
        status = _STATUS_IF_DEFERRED
    elif status in ("optimal", "infeasible"):
        status = "optimal within the gap"
    return replace(solution, status=status, lower_bound_s=search.lower_bound_s)


def bound_s(search: Search) -> float | None:
    """The bound of the last relaxation, or the one known before if that reached a limit; the
    ceiling if no solution is below it; None if there is no solution at all.
    """
    if search.relaxed.status == LIMIT:
        return search.lower_bound_s
    if search.values is None and search.relaxed.status != "enough":
        return search.ceiling_s if np.isfinite(search.ceiling_s) else None
    return min(search.relaxed.bound_s, search.ceiling_s)
