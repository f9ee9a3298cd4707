"""Lower bounds of a search, from relaxations of its integer program, and the choices that follow
from these by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....cost import least_timeline, timeline
from .._base import IntraSolution
from ._highs import LIMIT, nothing_solved
from ._judging import bound_s, model_in_turn, model_of, solution_of
from ._least import LeastPeak
from ._program import MIXED, alive_bytes, decode, is_mixed, mixed_timeline
from ._rows import add_rows

if TYPE_CHECKING:
    from ._solve import Floats, Ints, Search

# The most rounds of adding memory rows. Each solves the relaxation again, and the last ones raise
# the bound only a little.
_MOST_ROUNDS = 30


def start(search: Search) -> float | None:
    """The bound of the relaxation without memory rows, in seconds; None if no choice is
    possible. May run in a thread.
    """
    # Relaxations take longest if nothing fits, so a simpler check comes first.
    search.values = None if _never_fits(search) else relax(search)
    search.started = True
    return bound_s(search)


def raise_bound(search: Search, cutoff_s: float = np.inf) -> float | None:
    """The bound of the relaxation with memory rows, in seconds; None if nothing fits in memory.

    A bound that has reached `cutoff_s` is not raised any further; `picks` are known even then.
    """
    if not search.started:
        start(search)
    for rounds in range(_MOST_ROUNDS + 1):
        bound = bound_s(search)
        if bound is None:
            return None
        search.lower_bound_s = bound = max(bound, search.lower_bound_s)
        values = search.values
        if values is None:
            search.rounded, search.integral = None, False
            return bound
        if bound >= cutoff_s or not np.isfinite(search.limit_bytes) or rounds == _MOST_ROUNDS:
            break
        num_times = len(search.times)
        model = model_in_turn(search, search.in_turn)
        if not add_rows(search, mixed_timeline(search.choices, search.priced, model, values)):
            break
        if _cannot_fit(search, search.times[num_times:]):
            search.values, search.relaxed = None, nothing_solved()
            continue
        # A bound above the cutoff prunes this space, so the relaxation may stop there.
        search.values = relax(search, cutoff_s * (1 + search.relative_gap))
    assert values is not None, "without values the loop has returned"
    search.rounded = decode(search.choices, values)
    search.integral = search.relaxation.is_exact and not is_mixed(search.choices, values)
    return bound


def relax(search: Search, enough_s: float = np.inf) -> Floats | None:
    """Solve the relaxation, or stop once its bound exceeds `enough_s`; returns its values, None if
    it has none.
    """
    search.num_solves += 1
    search.relaxed = search.relaxation.solve(enough_s)
    search.gave_up = search.gave_up or search.relaxed.status == LIMIT
    values = search.relaxed.values
    if values is not None:
        _note_taken(search, values)
    return values


def _never_fits(search: Search) -> bool:
    """True if at some moment the arrays exceed the limit even with the smallest share of each."""
    if not np.isfinite(search.limit_bytes) or not all(map(len, search.choices.allowed)):
        return False
    use = least_timeline(model_in_turn(search, search.in_turn), search.choices.allowed)
    return float(use.max()) > search.limit_bytes * (1 + 1e-9)


def _cannot_fit(search: Search, times: Sequence[int]) -> bool:
    """True if no mixture of choices fits at all moments that have rows.

    Args:
        times: the moments whose rows are new.
    """
    if search.least is None:
        search.least = LeastPeak(
            search.pruned, search.open_choices, search.limit_bytes, search.layouts, exactly=False
        )
    for time in times:
        search.least.add(model_in_turn(search, search.in_turn), time)
    search.num_solves += 1
    return search.least.exceeds_limit()


def _note_taken(search: Search, values: Floats) -> None:
    """Mark the choices that a relaxation takes, for later searches among only these."""
    for was_taken, columns, kept in zip(
        search.taken, search.choices.columns, search.choices.allowed, strict=True
    ):
        was_taken[kept[values[columns] > MIXED]] = True


def incumbent(search: Search) -> IntraSolution | None:
    """See `AbstractSearch.incumbent`: the relaxation's solution, rounded to the largest shares
    or, if that does not fit, to the least memory; None if neither fits.
    """
    if search.rounded is None:
        return None
    if search.integral:
        return solution_of(search, search.rounded, "optimal")
    return solution_of(search, search.rounded, "rounded") or solution_of(
        search, _lightest_picks(search), "rounded"
    )


def _lightest_picks(search: Search) -> Ints:
    """The rounded choices, but where the relaxation mixes choices of a node, the one of them that
    needs the least memory at the moments of memory rows.
    """
    assert search.rounded is not None and search.values is not None
    picks, model = search.rounded.copy(), model_in_turn(search, search.in_turn)
    use = [alive_bytes(search.choices, model, time)[1] for time in search.times]
    for node, (columns, kept) in enumerate(
        zip(search.choices.columns, search.choices.allowed, strict=True)
    ):
        mixed = np.flatnonzero(search.values[columns] > MIXED)
        if len(mixed) > 1 and use:
            picks[node] = kept[mixed[np.argmin(sum(at[node][mixed] for at in use))]]
    return picks


def least_memory(search: Search) -> Ints:
    """See `AbstractSearch.least_memory`: found by relaxations that minimise memory, in turn at the
    moments of up to six peaks.
    """
    least = LeastPeak(search.priced, search.allowed, search.limit_bytes)
    first = np.array([int(np.flatnonzero(m)[0]) for m in search.allowed])
    use = timeline(model_of(search, first), search.priced, first)
    alone = alive_bytes(least.choices, model_of(search, first), int(np.argmax(use)))[1]
    picks = np.array(
        [
            int(kept[np.argmin(sizes)])
            for kept, sizes in zip(least.choices.allowed, alone, strict=True)
        ]
    )
    seen: set[int] = set()
    while (moment := int(np.argmax(use))) not in seen and len(seen) < 6:
        seen.add(moment)
        least.add(model_in_turn(search, search.in_turn), moment)
        search.num_solves += 1
        outcome = least.solve()
        assert outcome.status != "infeasible", "some choice always exists when memory is unlimited"
        if outcome.values is None:
            break
        picks = decode(least.choices, outcome.values)
        use = timeline(model_of(search, picks), search.priced, picks)
    return picks
