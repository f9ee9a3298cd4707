"""Search for the best choices on one mesh by an integer linear program: relax, round, branch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....cost import (
    MemoryModel,
    Priced,
    evaluate,
    may_take_turns,
    memory_model,
    takes_turns,
    timeline,
)
from .._base import AbstractSearch, IntraCosts, IntraSolution
from ._affordable import affordable
from ._highs import LIMIT, Outcome, Relaxation, nothing_solved, solve_integers
from ._layout import Choices, Layouts
from ._least import LeastPeak
from ._program import (
    MIXED,
    Program,
    add_memory_row,
    alive_bytes,
    build_program,
    decode,
    exclude,
    is_mixed,
    least_timeline,
    mixed_timeline,
)
from ._prove import rules_out
from ._work import Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# If bound and ceiling differ by less than this share, a few branches may rule out all in between.
_CLOSE = 1e-3
_STATUS_IF_DEFERRED = "optimal if every deferrable product is deferred"
# Rounds of memory rows; each solves the relaxation again, and the last ones raise the bound little.
_MOST_ROUNDS = 30
# Integer programs of one search. Each has more rows than the last, or excludes one more solution.
_MOST_BRANCHINGS = 100
# Programs with fewer rows are searched over all choices at once, which is quick.
_MANY_ROWS = 1500
# Integer programs over the choices that relaxations took, each with a share of the remaining work.
_MOST_TRIES = 5
_TAKEN_SHARE = 0.25


class Search(AbstractSearch):
    """The search of one priced problem; see `AbstractSearch` for the order of its steps.

    Memory rows: a program begins without any. Each solution's memory over time is computed, and
    where it exceeds the limit, a row for that moment is added and the program is solved again. Rows
    only exclude what does not fit, so the bound holds with any number of them.

    Whether weight gradients run at once or are deferred depends on all choices together, which rows
    cannot express. They first assume "at once" (`_in_turn`), which needs the least memory. If the
    best choices defer them and then exceed the limit, rows assume "deferred" for good
    (`_assumes_deferred`): solutions are still right, but the bound is not raised any more.

    Solutions that cost more than `ceiling_s` are not searched for. `layouts` caches layouts
    of programs over the same node graph, for the searches of other meshes.

    Every relaxation has a limit of its own; branching draws on `work`. If a limit is reached, the
    bound is not raised, `gave_up` is true, and the status of the solution says so.
    """

    def __init__(
        self,
        priced: Priced,
        allowed: Sequence[NDArray[np.bool_]],
        *,
        limit_bytes: float,
        relative_gap: float = 1e-3,
        node_limit: int = 2000,
        ceiling_s: float = np.inf,
        layouts: Layouts | None = None,
        work: Work | None = None,
    ) -> None:
        self.priced = priced
        self.ceiling_s = ceiling_s
        self.limit_bytes = limit_bytes
        self.relative_gap = relative_gap
        self.node_limit = node_limit
        self.num_solves = 0
        self.lower_bound_s = 0.0
        self._work = work or Work(np.inf)
        self._allowed = allowed
        self._pruned, self._open_choices = affordable(priced, allowed, ceiling_s)
        self._program, self._choices = build_program(self._pruned, self._open_choices, layouts)
        self._relaxation = Relaxation(self._program)
        self._least: LeastPeak | None = None
        self._layouts = layouts
        self._models: dict[bool, MemoryModel] = {}
        self._in_turn = may_take_turns(priced)
        self._assumes_deferred = False
        self._times: list[int] = []
        self._excluded: list[Ints] = []
        self._relaxed = nothing_solved()
        self._taken = [np.zeros(len(node.choices), np.bool_) for node in priced.nodes]
        self.gave_up = self._started = self._searched_taken = self.integral = False
        self._values: Floats | None = None
        self._picks: Ints | None = None

    def model(self, picks: Ints) -> MemoryModel:
        """The memory model of known choices."""
        return self._model(takes_turns(self.priced, picks))

    def _model(self, in_turn: bool) -> MemoryModel:
        if in_turn not in self._models:
            self._models[in_turn] = memory_model(self.priced, in_turn=in_turn)
        return self._models[in_turn]

    def start(self) -> float | None:
        """The bound of the relaxation without memory rows, in seconds; None if no choice is
        possible. May run in a thread.
        """
        # A relaxation takes longest where nothing fits: check that first in a simpler way.
        self._values = None if self._never_fits() else self._relax()
        self._started = True
        return self._bound_s()

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The bound of the relaxation with memory rows, in seconds; None if nothing fits in memory.

        A bound above `cutoff_s` is not raised any further. `picks` are then known.
        """
        if not self._started:
            self.start()
        for rounds in range(_MOST_ROUNDS + 1):
            bound = self._bound_s()
            if bound is None:
                return None
            self.lower_bound_s = bound = max(bound, self.lower_bound_s)
            values = self._values
            if values is None:
                self._picks, self.integral = None, False
                return bound
            if bound >= cutoff_s or not np.isfinite(self.limit_bytes) or rounds == _MOST_ROUNDS:
                break
            num_times = len(self._times)
            model = self._model(self._in_turn)
            if not self._add_rows(mixed_timeline(self._choices, self.priced, model, values)):
                break
            if self._cannot_fit(self._times[num_times:]):
                self._values, self._relaxed = None, nothing_solved()
                continue
            # A bound above the cutoff prunes this space: no need to solve any further.
            self._values = self._relax(cutoff_s * (1 + self.relative_gap))
        assert values is not None, "without values the loop has returned"
        self._picks = decode(self._choices, values)
        self.integral = self._relaxation.is_exact and not is_mixed(self._choices, values)
        return bound

    def _never_fits(self) -> bool:
        """True if at some moment even the smallest share of every array exceeds the limit."""
        if not np.isfinite(self.limit_bytes) or not all(map(len, self._choices.allowed)):
            return False
        use = least_timeline(self._choices, self._model(self._in_turn))
        return float(use.max()) > self.limit_bytes * (1 + 1e-9)

    def _cannot_fit(self, times: Sequence[int]) -> bool:
        """True if no mixture of choices fits at the moments that have rows, new ones included.

        Args:
            times: new moments.
        """
        if self._least is None:
            self._least = LeastPeak(
                self._pruned, self._open_choices, self.limit_bytes, self._layouts, exactly=False
            )
        for time in times:
            self._least.add(self._model(self._in_turn), time)
        self.num_solves += 1
        return self._least.exceeds_limit()

    def _bound_s(self) -> float | None:
        """The bound of the last relaxation; the ceiling if no solution is below it; None if there
        is no solution at all.
        """
        if self._relaxed.status == LIMIT:
            return self.lower_bound_s
        if self._values is None and self._relaxed.status != "enough":
            return self.ceiling_s if np.isfinite(self.ceiling_s) else None
        return min(self._relaxed.bound_s, self.ceiling_s)

    @property
    def picks(self) -> Ints | None:
        """See `AbstractSearch.picks`: the relaxation's solution, rounded to the largest shares."""
        return self._picks

    def incumbent(self) -> IntraSolution | None:
        """See `AbstractSearch.incumbent`: the relaxation's solution, rounded to the largest shares
        or, if that does not fit, to the least memory; None if neither fits.
        """
        if self._picks is None:
            return None
        if self.integral:
            return self._solution(self._picks, "optimal")
        return self._solution(self._picks, "rounded") or self._solution(self._lightest(), "rounded")

    def _lightest(self) -> Ints:
        """Of the choices that the relaxation mixes, for each node the one that needs the least
        memory at the moments of memory rows.
        """
        assert self._picks is not None and self._values is not None
        picks, model = self._picks.copy(), self._model(self._in_turn)
        use = [alive_bytes(self._choices, model, time)[1] for time in self._times]
        for node, (columns, kept) in enumerate(
            zip(self._choices.columns, self._choices.allowed, strict=True)
        ):
            mixed = np.flatnonzero(self._values[columns] > MIXED)
            if len(mixed) > 1 and use:
                picks[node] = kept[mixed[np.argmin(sum(at[node][mixed] for at in use))]]
        return picks

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """See `AbstractSearch.improve`; None, too, if a limit ended the search without any."""
        best = self.incumbent()
        if self.integral and best is not None:
            return best
        if best is None and self._relaxed.status == LIMIT:
            best = self._solution(self.least_memory(), LIMIT)
        rounds = 0
        while self.lower_bound_s < cutoff_s:
            if (
                best is not None
                and best.step_time_s - self.lower_bound_s <= self.relative_gap * self.lower_bound_s
            ):
                return self._with_status(best)
            ceiling = min(cutoff_s, best.step_time_s if best else np.inf)
            if not self._assumes_deferred and self._nothing_below(ceiling):
                self.lower_bound_s = ceiling
                return best and self._with_status(best, "infeasible")
            # A good solution, quickly: it prunes most of the search over all choices.
            good = self._search_taken(ceiling)
            if good is not None:
                best = good
                continue
            rounds += 1
            if self._work.is_spent or rounds > _MOST_BRANCHINGS:
                self.gave_up = True
                return best and self._with_status(best, LIMIT)
            program, choices = self._without_costly_choices(ceiling)
            outcome = self._solve_integers(program, choices, ceiling, self._work.left)
            if not self._assumes_deferred:
                self.lower_bound_s = max(self.lower_bound_s, min(outcome.bound_s, ceiling))
            self.gave_up = self.gave_up or outcome.status not in ("optimal", "infeasible")
            if outcome.values is None:
                self.gave_up = self.gave_up or self._assumes_deferred
                return best and self._with_status(best, outcome.status)
            picks = decode(choices, outcome.values)
            solution, unpaid = self._solution(picks, outcome.status), self._add_unpaid_excess(picks)
            if solution is not None:
                if best is None or solution.step_time_s <= best.step_time_s:
                    best = solution
                if not unpaid:
                    return self._with_status(best, outcome.status)
            elif (
                not self._add_rows(timeline(self._model(self._in_turn), self.priced, picks))
                and not unpaid
                and not self._assume_deferred(picks)
            ):
                # It exceeds the limit by less than the solver's tolerance, so no row excludes it.
                exclude(self._program, self._choices, picks)
                self._excluded.append(picks)
            self._searched_taken = False
            if self._relax() is None:
                return (
                    best and self._with_status(best, LIMIT)
                    if self._relaxed.status == LIMIT
                    else best
                )
        return None

    def _search_taken(self, ceiling_s: float) -> IntraSolution | None:
        """A solution below a ceiling among the choices that some relaxation took; None if there is
        none. Few choices make this a quick search, needless for programs with few rows.

        Reference: T. Berthold, "RENS: the optimal rounding", Mathematical Programming Computation,
        2014.
        """
        if len(self._program.lower) < _MANY_ROWS or self._searched_taken:
            return None
        self._searched_taken = True
        for _ in range(_MOST_TRIES):
            if self._work.is_spent or self._relaxed.values is None:
                break
            program, choices = self._restricted(self._taken, exactly=True)
            outcome = self._solve_integers(
                program, choices, ceiling_s, _TAKEN_SHARE * self._work.left
            )
            if outcome.values is None:
                break
            picks = decode(choices, outcome.values)
            solution = self._solution(picks, "rounded")
            if solution is not None:
                return solution if solution.step_time_s < ceiling_s else None
            if not self._add_rows(timeline(self._model(self._in_turn), self.priced, picks)):
                break
            if self._relax() is not None and not self._assumes_deferred:
                self.lower_bound_s = max(self.lower_bound_s, min(self._relaxed.bound_s, ceiling_s))
        return None

    def _solve_integers(
        self, program: Program, choices: Choices, ceiling_s: float, work_limit: float
    ) -> Outcome:
        self.num_solves += 1
        outcome = solve_integers(
            program,
            choices,
            node_limit=self.node_limit,
            relative_gap=self.relative_gap,
            ceiling_s=ceiling_s,
            work_limit=work_limit,
        )
        self._work.left -= outcome.work
        return outcome

    def _nothing_below(self, ceiling_s: float) -> bool:
        """True if the ceiling is close to the bound and a few branches rule out all between."""
        if self._values is None or ceiling_s - self.lower_bound_s > _CLOSE * self.lower_bound_s:
            return False
        model = self._model(self._in_turn)
        use = [alive_bytes(self._choices, model, time)[1] for time in self._times]
        ruled_out, solves, work = rules_out(
            self._relaxation, self._choices.columns, use, self._values, ceiling_s
        )
        self.num_solves += solves
        self._work.left -= work
        return ruled_out

    def _relax(self, enough_s: float = np.inf) -> Floats | None:
        """Solve the relaxation, or stop once it is known to lie above `enough_s`; its values."""
        self.num_solves += 1
        self._relaxed = self._relaxation.solve(enough_s)
        self.gave_up = self.gave_up or self._relaxed.status == LIMIT
        values = self._relaxed.values
        if values is not None:
            self._note_taken(values)
        return values

    def _note_taken(self, values: Floats) -> None:
        """Remember the choices that a relaxation takes, for `_search_taken`."""
        for was_taken, columns, kept in zip(
            self._taken, self._choices.columns, self._choices.allowed, strict=True
        ):
            was_taken[kept[values[columns] > MIXED]] = True

    def _with_status(self, solution: IntraSolution, status: str = "optimal") -> IntraSolution:
        """A solution with the current bound, and the status that their gap proves."""
        gap = solution.step_time_s - self.lower_bound_s
        if gap <= 1e-9 * self.lower_bound_s or (
            status == "infeasible" and not self._assumes_deferred
        ):
            status = "optimal"
        elif (
            self._assumes_deferred
            and gap > self.relative_gap * self.lower_bound_s
            and status in ("optimal", "infeasible")
        ):
            status = _STATUS_IF_DEFERRED
        elif status in ("optimal", "infeasible"):
            status = "optimal within the gap"
        return replace(solution, status=status, lower_bound_s=self.lower_bound_s)

    def _assume_deferred(self, picks: Ints) -> bool:
        """Count every deferrable product as deferred from now on, if the rows took these choices to
        run them at once but they do not, and do not fit; True if so.
        """
        if not self._in_turn or takes_turns(self.priced, picks):
            return False
        self._in_turn, self._assumes_deferred, self._times = False, True, []
        return self._add_rows(timeline(self._model(False), self.priced, picks))

    def least_memory(self) -> Ints:
        """See `AbstractSearch.least_memory`: from relaxations that lower a few peaks in turn."""
        least = LeastPeak(self.priced, self._allowed, self.limit_bytes)
        first = np.array([int(np.flatnonzero(m)[0]) for m in self._allowed])
        use = timeline(self.model(first), self.priced, first)
        alone = alive_bytes(least.choices, self.model(first), int(np.argmax(use)))[1]
        picks = np.array(
            [
                int(kept[np.argmin(sizes)])
                for kept, sizes in zip(least.choices.allowed, alone, strict=True)
            ]
        )
        seen: set[int] = set()
        while (moment := int(np.argmax(use))) not in seen and len(seen) < 6:
            seen.add(moment)
            least.add(self._model(self._in_turn), moment)
            self.num_solves += 1
            outcome = least.solve()
            assert outcome.status != "infeasible", (
                "some choice always exists when memory is unlimited"
            )
            if outcome.values is None:
                break
            picks = decode(least.choices, outcome.values)
            use = timeline(self.model(picks), self.priced, picks)
        return picks

    def _solution(self, picks: Ints, status: str) -> IntraSolution | None:
        """The exact costs of picks; None if they do not fit."""
        peak = float(timeline(self.model(picks), self.priced, picks).max())
        if peak > self.limit_bytes * (1 + 1e-9):
            return None
        costs = IntraCosts(step_time_s=evaluate(self.priced, picks).total_s, peak_bytes=peak)
        return IntraSolution(
            picks=picks, costs=costs, lower_bound_s=self.lower_bound_s, status=status
        )

    def _excess_groups_in(self, groups: Mapping[tuple[int, Hashable], int]) -> Iterator[int]:
        """For another program, its numbers of the groups whose excess this one has."""
        for key, number in self._program.groups.number.items():
            if number in self._program.excess and key in groups:
                yield groups[key]

    def _add_unpaid_excess(self, picks: Ints) -> bool:
        """Add the excess of shared conversions that the program undercharges for these choices;
        True if there is any.
        """
        groups, uses = self._program.groups, np.zeros(len(self._program.groups.counts), np.int64)
        for edge, table in zip(self.priced.graph.edges, self.priced.edges, strict=True):
            source = table.sources[table.source_index[picks[edge.source]]]
            target = table.targets[table.target_index[picks[edge.target]]]
            number = groups.number.get((edge.share, (source, target)))
            if number is not None:
                uses[number] += 1
        return self._program.add_excess(np.flatnonzero((uses > 0) & (uses < groups.counts)))

    def _without_costly_choices(self, best_s: float) -> tuple[Program, Choices]:
        """The program without choices whose reduced cost alone raises the bound above `best_s`."""
        if not np.isfinite(best_s) or self._relaxed.values is None:
            return self._program, self._choices
        room = best_s - self._relaxed.bound_s
        allowed = []
        for node, columns, kept in zip(
            self.priced.nodes, self._choices.columns, self._choices.allowed, strict=True
        ):
            mask = np.zeros(len(node.choices), bool)
            mask[kept[self._relaxed.reduced_costs[columns] <= room + 1e-12]] = True
            allowed.append(mask)
        return self._restricted(allowed)

    def _restricted(
        self, allowed: Sequence[NDArray[np.bool_]], *, exactly: bool = False
    ) -> tuple[Program, Choices]:
        """The program over some choices only, with the memory rows and exclusions so far.

        Args:
            exactly: charge all shared conversions in full, not only those that solutions used.
        """
        program, choices = build_program(self._pruned, allowed)
        groups = program.groups.number
        needed = range(len(groups)) if exactly else self._excess_groups_in(groups)
        program.add_excess(np.array(list(needed), np.int64))
        for time in self._times:
            add_memory_row(
                program,
                choices,
                self._pruned,
                self._model(self._in_turn),
                time,
                self.limit_bytes,
            )
        for picks in self._excluded:
            exclude(program, choices, picks)
        return program, choices

    def _add_rows(self, use: Floats) -> bool:
        """Add memory rows for the three worst moments above the limit; True if there are any.

        Args:
            use: bytes at each moment.
        """
        over = np.flatnonzero(use > self.limit_bytes * (1 + 1e-9))
        over = np.setdiff1d(over, np.array(self._times, np.int64))
        if not len(over):
            return False
        # One moment for each stretch above the limit, as neighbouring moments hold the same arrays.
        stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        model = self._model(self._in_turn)
        peaks = sorted(
            (int(part[np.argmax(use[part])]) for part in stretches), key=lambda t: -use[t]
        )
        for time in peaks[:3]:
            self._times.append(time)
            add_memory_row(self._program, self._choices, self.priced, model, time, self.limit_bytes)
        return True
