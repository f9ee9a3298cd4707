"""Completion of a search by integer programs: branch and bound over all choices, and over those
that relaxations took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....cost import timeline
from .._base import IntraSolution
from ._bounds import incumbent, least_memory, relax
from ._highs import LIMIT, Outcome, solve_integers
from ._judging import model_in_turn, solution_of, with_status
from ._layout import Choices
from ._program import Program, alive_bytes, decode, exclude
from ._prove import rules_out
from ._rows import add_rows, add_unpaid_excess, assume_deferred, restricted, without_costly_choices

if TYPE_CHECKING:
    from ._solve import Ints, Search

# If bound and ceiling differ by less than this share, a few branches may prove that no solution
# lies between them.
_CLOSE = 1e-3
# The most integer programs of one search. Each has more rows than the last, or excludes one more
# solution.
_MOST_BRANCHINGS = 100
# Programs with fewer rows are solved over all choices directly, which is quick.
_MANY_ROWS = 1500
# The most integer programs over only the choices that relaxations took, and the share of the
# remaining work that each may use.
_MOST_TRIES = 5
_TAKEN_SHARE = 0.25


def improve(search: Search, cutoff_s: float = np.inf) -> IntraSolution | None:
    """See `AbstractSearch.improve`; also None if a limit ended the search before it found any
    solution.
    """
    best = incumbent(search)
    if search.integral and best is not None:
        return best
    if best is None and search.relaxed.status == LIMIT:
        best = solution_of(search, least_memory(search), LIMIT)
    rounds = 0
    while search.lower_bound_s < cutoff_s:
        if (
            best is not None
            and best.step_time_s - search.lower_bound_s
            <= search.relative_gap * search.lower_bound_s
        ):
            return with_status(search, best)
        ceiling = min(cutoff_s, best.step_time_s if best else np.inf)
        if not search.assumes_deferred and _nothing_below(search, ceiling):
            search.lower_bound_s = ceiling
            return best and with_status(search, best, "infeasible")
        # First a quick search for a good solution, which prunes most of the search over all
        # choices.
        good = _search_taken(search, ceiling)
        if good is not None:
            best = good
            continue
        rounds += 1
        if search.work.is_spent or rounds > _MOST_BRANCHINGS:
            search.gave_up = True
            best = best or solution_of(search, least_memory(search), LIMIT)
            return best and with_status(search, best, LIMIT)
        program, choices = without_costly_choices(search, ceiling)
        outcome = _branch(search, program, choices, ceiling, search.work.left)
        if not search.assumes_deferred:
            search.lower_bound_s = max(search.lower_bound_s, min(outcome.bound_s, ceiling))
        search.gave_up = search.gave_up or outcome.status not in ("optimal", "infeasible")
        if outcome.values is None:
            search.gave_up = search.gave_up or search.assumes_deferred
            return best and with_status(search, best, outcome.status)
        picks = decode(choices, outcome.values)
        solution = solution_of(search, picks, outcome.status)
        unpaid = add_unpaid_excess(search, picks)
        search.is_undercharged = search.is_undercharged or unpaid
        if solution is None:
            _rule_out(search, picks, unpaid)
        else:
            if best is None or solution.step_time_s <= best.step_time_s:
                best = solution
            if not unpaid:
                return with_status(search, best, outcome.status)
        search.searched_taken = False
        if relax(search) is None:
            return (
                best and with_status(search, best, LIMIT)
                if search.relaxed.status == LIMIT
                else best
            )
    return None


def _rule_out(search: Search, picks: Ints, unpaid: bool) -> None:
    """Change the program so that picks that do not fit in memory are not found again.

    Args:
        unpaid: whether the program now charges more for them than before, which changes it already.
    """
    if _add_rows_for(search, picks) or unpaid or assume_deferred(search, picks):
        return
    # The picks exceed the limit by less than the solver's tolerance, so no row excludes them.
    exclude(search.program, search.choices, picks)
    search.excluded.append(picks)


def _add_rows_for(search: Search, picks: Ints) -> bool:
    """Add memory rows for moments when picks exceed the limit; True if any were added."""
    use = timeline(model_in_turn(search, search.in_turn), search.priced, picks)
    return add_rows(search, use)


def _search_taken(search: Search, ceiling_s: float) -> IntraSolution | None:
    """A solution below a ceiling among the choices that some relaxation took; None if none was
    found. With so few choices the search is quick; programs with few rows do not need it.

    Reference: T. Berthold, "RENS: the optimal rounding", Mathematical Programming Computation,
    2014.
    """
    if len(search.program.lower) < _MANY_ROWS or search.searched_taken:
        return None
    search.searched_taken = True
    for _ in range(_MOST_TRIES):
        if search.work.is_spent or search.relaxed.values is None:
            break
        program, choices = restricted(search, search.taken, exactly=True)
        outcome = _branch(search, program, choices, ceiling_s, _TAKEN_SHARE * search.work.left)
        if outcome.values is None:
            break
        picks = decode(choices, outcome.values)
        solution = solution_of(search, picks, "rounded")
        if solution is not None:
            return solution if solution.step_time_s < ceiling_s else None
        if not _add_rows_for(search, picks):
            break
        if relax(search) is not None and not search.assumes_deferred:
            search.lower_bound_s = max(search.lower_bound_s, min(search.relaxed.bound_s, ceiling_s))
    return None


def _nothing_below(search: Search, ceiling_s: float) -> bool:
    """True if the ceiling is close to the bound and a few branches prove that no solution lies
    between them.
    """
    if search.values is None or ceiling_s - search.lower_bound_s > _CLOSE * search.lower_bound_s:
        return False
    model = model_in_turn(search, search.in_turn)
    use = [alive_bytes(search.choices, model, time)[1] for time in search.times]
    ruled_out, solves, work = rules_out(
        search.relaxation, search.choices.columns, use, search.values, ceiling_s
    )
    search.num_solves += solves
    search.work.left -= work
    return ruled_out


def _branch(
    search: Search, program: Program, choices: Choices, ceiling_s: float, work_limit: float
) -> Outcome:
    search.num_solves += 1
    outcome = solve_integers(
        program,
        choices,
        node_limit=search.node_limit,
        relative_gap=search.relative_gap,
        ceiling_s=ceiling_s,
        work_limit=work_limit,
    )
    search.work.left -= outcome.work
    return outcome
