"""`ILP`, and its search for the best choices on one mesh by an integer linear program: relax,
round, branch.

A program begins without memory rows. Each solution's memory over time is computed, and where it
exceeds the limit, a row for that moment is added and the program is solved again. Rows exclude only
what does not fit, so the bound holds with any number of them. Branching goes over the choices that
relaxations took, and then over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....cost import (
    MemoryModel,
    MemoryUse,
    Picked,
    Priced,
    Problem,
    evaluate,
    least_timeline,
    may_take_turns,
    memory_model,
    takes_turns,
)
from .._base import AbstractSearch, AbstractStepwise, IntraCosts, IntraSolution, Space
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
    mixed_timeline,
)
from ._prove import rules_out

_LAYOUTS = "layouts of integer programs"
_WORK = "work of integer programs"
# Share of the work limit for coarse solutions, since many problems are solved coarsely.
_COARSE_SHARE = 0.3
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The most rounds of adding memory rows. Each solves the relaxation again, and the last ones raise
# the bound only a little.
_MOST_ROUNDS = 30
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
# No integer program is started with less than this share of the limit on work.
_LEAST_SHARE = 0.1
_STATUS_IF_DEFERRED = "optimal if every deferrable product is deferred"


class Work:
    """The work left for branching, in pivots times rows, which all spaces of a problem share."""

    def __init__(self, limit: float) -> None:
        self.left = limit
        self._limit = limit

    @property
    def is_spent(self) -> bool:
        """True if too little work is left to start an integer program."""
        return self.left <= 0 or self.left < _LEAST_SHARE * self._limit


class Search(AbstractSearch):
    """The search of one priced problem; see `AbstractSearch` for the order of its steps.

    Whether weight gradients run at once or are deferred depends on all choices together, which rows
    cannot express. They first assume "at once" (`in_turn`), which needs the least memory. If the
    best choices defer them and then exceed the limit, rows assume "deferred" for good
    (`assumes_deferred`): solutions are still right, but the bound is not raised any more.

    Solutions that cost more than `ceiling_s` are not searched for. `notes` hold what the searches
    of other meshes share: the layouts of programs over one node graph, and the work that is left.

    Every relaxation has a limit of its own; branching draws on `work`. If a limit is reached, the
    bound is not raised, `gave_up` is true, and the status of the solution says so.

    Attributes:
        pruned, open_choices: the prices and the choices that may cost less than the ceiling.
        program, choices: the integer program over these, and what its columns stand for.
        relaxation: the relaxation of the program; `relaxed` is its last outcome, and `values` the
            solution of that outcome.
        times: the moments that have memory rows.
        excluded: choices that exceed the memory limit by less than the solver's tolerance.
        taken: for each node, a mask of the choices that some relaxation took.
        rounded: the last relaxation's solution, rounded to the largest shares; `integral` says
            whether it needed no rounding.
        is_undercharged: whether the solution of an integer program did not pay shared conversions
            in full; later ones then charge all of them.
        num_solves: programs solved so far.
        models: memory models, by `in_turn`.
        least: the program that minimises peak memory, made once memory is short; see `LeastPeak`.
    """

    def __init__(
        self,
        priced: Priced,
        allowed: Sequence[NDArray[np.bool_]],
        *,
        limit_bytes: float,
        planner: ILP | None = None,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> None:
        self.priced, self.allowed = priced, allowed
        self.ceiling_s, self.limit_bytes = ceiling_s, limit_bytes
        planner = planner or ILP()
        self.relative_gap, self.node_limit = planner.relative_gap, planner.node_limit
        # Spaces of one problem share their layouts and the work that is left.
        notes = {} if notes is None else notes
        self.layouts = notes.setdefault(_LAYOUTS, Layouts())
        self.work = notes.setdefault(_WORK, Work(planner.work_limit))
        self.pruned, self.open_choices = affordable(priced, allowed, ceiling_s)
        self.program, self.choices = build_program(self.pruned, self.open_choices, self.layouts)
        self.relaxation, self.relaxed = Relaxation(self.program), nothing_solved()
        self.least: LeastPeak | None = None
        self.models: dict[bool, MemoryModel] = {}
        self.in_turn, self.assumes_deferred = may_take_turns(priced), False
        self.times: list[int] = []
        self.excluded: list[Ints] = []
        self.taken = [np.zeros(len(node.choices), np.bool_) for node in priced.nodes]
        self.num_solves, self.lower_bound_s = 0, 0.0
        self.is_undercharged = False
        self.gave_up = self.started = self.searched_taken = self.integral = False
        self.values: Floats | None = None
        self.rounded: Picked | None = None

    @property
    def picked(self) -> Picked | None:
        return self.rounded

    def start(self) -> float | None:
        """The bound of the relaxation without memory rows."""
        # Relaxations take longest if nothing fits, so a simpler check comes first: whether the
        # arrays exceed the limit at some moment even with the smallest share of each.
        never_fits = False
        if np.isfinite(self.limit_bytes) and all(map(len, self.choices.allowed)):
            use = least_timeline(self.model_in_turn(self.in_turn), self.choices.allowed)
            never_fits = float(use.max()) > self.limit_bytes * (1 + 1e-9)
        self.values = None if never_fits else self._relax()
        self.started = True
        return self._bound_s()

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The bound of the relaxation with memory rows. One that has reached `cutoff_s` is not
        raised any further; `picked` is known even then.
        """
        if not self.started:
            self.start()
        for rounds in range(_MOST_ROUNDS + 1):
            bound_s = self._bound_s()
            if bound_s is None:
                return None
            self.lower_bound_s = bound_s = max(bound_s, self.lower_bound_s)
            values = self.values
            if values is None:
                self.rounded, self.integral = None, False
                return bound_s
            if bound_s >= cutoff_s or not np.isfinite(self.limit_bytes) or rounds == _MOST_ROUNDS:
                break
            num_times, model = len(self.times), self.model_in_turn(self.in_turn)
            if not self._add_rows(mixed_timeline(self.choices, self.priced, model, values)):
                break
            if self.least is None:
                self.least = LeastPeak(
                    self.pruned, self.open_choices, self.limit_bytes, self.layouts, exactly=False
                )
            for time in self.times[num_times:]:
                self.least.add(model, time)
            self.num_solves += 1
            # If no mixture of choices fits at all moments that have rows, nothing does.
            if self.least.exceeds_limit():
                self.values, self.relaxed = None, nothing_solved()
                continue
            # A bound above the cutoff prunes this space, so the relaxation may stop there.
            self.values = self._relax(cutoff_s * (1 + self.relative_gap))
        assert values is not None, "without values the loop has returned"
        self.rounded = self._decoded(self.choices, values)
        self.integral = self.relaxation.is_exact and not is_mixed(self.choices, values)
        return bound_s

    def incumbent(self) -> IntraSolution | None:
        """The relaxation's solution, rounded to the largest shares. If that does not fit, each node
        of which it mixes choices takes the one of them that needs the least memory at the moments
        of memory rows. None if neither fits.
        """
        if self.rounded is None:
            return None
        if self.integral:
            return self._solution_of(self.rounded, "optimal")
        if (solution := self._solution_of(self.rounded, "rounded")) is not None:
            return solution
        assert self.values is not None
        picks, use = self.rounded.picks.copy(), self._use_of_choices()
        for node, (columns, kept) in enumerate(
            zip(self.choices.columns, self.choices.allowed, strict=True)
        ):
            mixed = np.flatnonzero(self.values[columns] > MIXED)
            if len(mixed) > 1 and use:
                picks[node] = kept[mixed[np.argmin(sum(at[node][mixed] for at in use))]]
        return self._solution_of(replace(self.rounded, picks=picks), "rounded")

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """The best solution; also None if a limit ended the search before it found any."""
        best = self.incumbent()
        if self.integral and best is not None:
            return best
        if best is None and self.relaxed.status == LIMIT:
            best = self._solution_of(self.least_memory(), LIMIT)
        rounds = 0
        while self.lower_bound_s < cutoff_s:
            accepted_s = self.relative_gap * self.lower_bound_s
            if best is not None and best.step_time_s - self.lower_bound_s <= accepted_s:
                return self._with_status(best)
            ceiling = min(cutoff_s, best.step_time_s if best else np.inf)
            if not self.assumes_deferred and self._nothing_below(ceiling):
                self.lower_bound_s = ceiling
                return best and self._with_status(best, "infeasible")
            # First a quick search for a good solution, which prunes most of the search over all
            # choices.
            good = self._search_taken(ceiling)
            if good is not None:
                best = good
                continue
            rounds += 1
            if self.work.is_spent or rounds > _MOST_BRANCHINGS:
                self.gave_up = True
                best = best or self._solution_of(self.least_memory(), LIMIT)
                return best and self._with_status(best, LIMIT)
            program, choices = self.without_costly_choices(ceiling)
            outcome = self._branch(program, choices, ceiling, self.work.left)
            if not self.assumes_deferred:
                self.lower_bound_s = max(self.lower_bound_s, min(outcome.bound_s, ceiling))
            self.gave_up = self.gave_up or outcome.status not in ("optimal", "infeasible")
            if outcome.values is None:
                self.gave_up = self.gave_up or self.assumes_deferred
                return best and self._with_status(best, outcome.status)
            picked = self._decoded(choices, outcome.values)
            solution = self._solution_of(picked, outcome.status)
            unpaid = self._add_unpaid_excess(picked)
            self.is_undercharged = self.is_undercharged or unpaid
            if solution is None:
                # What the program now charges more for is not found again.
                changed = self._add_rows_for(picked) or unpaid or self._assume_deferred(picked)
                if not changed:
                    # These exceed the limit by less than the solver's tolerance, so no row excludes
                    # them.
                    exclude(self.program, self.choices, picked.picks)
                    self.excluded.append(picked.picks)
            else:
                if best is None or solution.step_time_s <= best.step_time_s:
                    best = solution
                if not unpaid:
                    return self._with_status(best, outcome.status)
            self.searched_taken = False
            if self._relax() is None:
                is_limited = self.relaxed.status == LIMIT
                return self._with_status(best, LIMIT) if best and is_limited else best
        return None

    def least_memory(self) -> Picked:
        """Choices found by relaxations that minimise memory, in turn at the moments of up to six
        peaks.
        """
        least = LeastPeak(self.priced, self.allowed, self.limit_bytes)
        first = np.array([int(np.flatnonzero(m)[0]) for m in self.allowed])
        picked = Picked(priced=self.priced, picks=first)
        model = self.model_in_turn(takes_turns(picked))
        moment, seen = model.under(picked).peak_moment, set[int]()
        alone = alive_bytes(least.choices, model, moment)[1]
        pairs = zip(least.choices.allowed, alone, strict=True)
        smallest = np.array([int(kept[np.argmin(sizes)]) for kept, sizes in pairs])
        picked = replace(picked, picks=smallest)
        while moment not in seen and len(seen) < 6:
            seen.add(moment)
            least.add(self.model_in_turn(self.in_turn), moment)
            self.num_solves += 1
            outcome = least.solve()
            assert outcome.status != "infeasible", "some choice exists when memory is unlimited"
            if outcome.values is None:
                break
            picked = self._decoded(least.choices, outcome.values)
            moment = self.memory_under(picked).peak_moment
        return picked

    def memory_under(self, picked: Picked) -> MemoryUse:
        """`picked.memory`, by a memory model that all choices share."""
        return self.model_in_turn(takes_turns(picked)).under(picked)

    def model_in_turn(self, in_turn: bool) -> MemoryModel:
        """The memory model for one order of deferrable products; see `takes_turns`."""
        if in_turn not in self.models:
            self.models[in_turn] = memory_model(self.priced, in_turn=in_turn)
        return self.models[in_turn]

    def without_costly_choices(self, best_s: float) -> tuple[Program, Choices]:
        """The program without choices whose reduced cost alone raises the bound above `best_s`
        (reduced-cost fixing).
        """
        if not np.isfinite(best_s) or self.relaxed.values is None:
            return self.program, self.choices
        room = best_s - self.relaxed.bound_s
        allowed = []
        for node, columns, kept in zip(
            self.priced.nodes, self.choices.columns, self.choices.allowed, strict=True
        ):
            mask = np.zeros(len(node.choices), bool)
            mask[kept[self.relaxed.reduced_costs[columns] <= room + 1e-12]] = True
            allowed.append(mask)
        # Groups that are added one by one, as solutions use them, would take an integer program
        # each.
        return self._restricted(allowed, exactly=self.is_undercharged)

    def _relax(self, enough_s: float = np.inf) -> Floats | None:
        """Solve the relaxation, or stop once its bound exceeds `enough_s`; returns its values, None
        if it has none.
        """
        self.num_solves += 1
        self.relaxed = self.relaxation.solve(enough_s)
        self.gave_up = self.gave_up or self.relaxed.status == LIMIT
        values = self.relaxed.values
        if values is not None:
            # For later searches among only the choices that relaxations take.
            for was_taken, columns, kept in zip(
                self.taken, self.choices.columns, self.choices.allowed, strict=True
            ):
                was_taken[kept[values[columns] > MIXED]] = True
        return values

    def _bound_s(self) -> float | None:
        """The bound of the last relaxation, or the one known before if that reached a limit; the
        ceiling if no solution is below it; None if there is no solution at all.
        """
        if self.relaxed.status == LIMIT:
            return self.lower_bound_s
        if self.values is None and self.relaxed.status != "enough":
            return self.ceiling_s if np.isfinite(self.ceiling_s) else None
        return min(self.relaxed.bound_s, self.ceiling_s)

    def _decoded(self, choices: Choices, values: Floats) -> Picked:
        return Picked(priced=self.priced, picks=decode(choices, values))

    def _solution_of(self, picked: Picked, status: str) -> IntraSolution | None:
        """The exact costs of choices; None if they do not fit. "optimal" ones that have no memory
        for casts of parameters, which the program takes for granted, are only "rounded".
        """
        memory = self.memory_under(picked)
        if memory.peak_bytes > self.limit_bytes * (1 + 1e-9):
            return None
        # The program counts casts of parameters once a step, for which there may be no memory.
        once = picked.casts_fit(self.limit_bytes, memory)
        seconds = evaluate(picked, casts_once=once).total_s
        if status == "optimal" and seconds > evaluate(picked).total_s:
            status = "rounded"
        costs = IntraCosts(step_time_s=seconds, peak_bytes=memory.peak_bytes)
        return IntraSolution(
            picked=picked, costs=costs, lower_bound_s=self.lower_bound_s, status=status
        )

    def _with_status(self, solution: IntraSolution, status: str = "optimal") -> IntraSolution:
        """A solution with the current bound, and the status that their gap proves."""
        gap = solution.step_time_s - self.lower_bound_s
        is_wide = gap > self.relative_gap * self.lower_bound_s
        is_proved = status == "infeasible" and not self.assumes_deferred
        if gap <= 1e-9 * self.lower_bound_s or is_proved:
            status = "optimal"
        elif status in ("optimal", "infeasible"):
            if_deferred = self.assumes_deferred and is_wide
            status = _STATUS_IF_DEFERRED if if_deferred else "optimal within the gap"
        return replace(solution, status=status, lower_bound_s=self.lower_bound_s)

    def _use_of_choices(self) -> list[list[Floats]]:
        """For each moment with a memory row, the bytes of each node's choices."""
        model = self.model_in_turn(self.in_turn)
        return [alive_bytes(self.choices, model, time)[1] for time in self.times]

    def _nothing_below(self, ceiling_s: float) -> bool:
        """True if the ceiling is close to the bound and a few branches prove that no solution lies
        between them.
        """
        if self.values is None or ceiling_s - self.lower_bound_s > _CLOSE * self.lower_bound_s:
            return False
        ruled_out, solves, work = rules_out(
            self.relaxation, self.choices.columns, self._use_of_choices(), self.values, ceiling_s
        )
        self.num_solves += solves
        self.work.left -= work
        return ruled_out

    def _search_taken(self, ceiling_s: float) -> IntraSolution | None:
        """A solution below a ceiling among the choices that some relaxation took; None if none was
        found. With so few choices the search is quick; programs with few rows do not need it.

        Reference: T. Berthold, "RENS: the optimal rounding", Mathematical Programming Computation,
        2014.
        """
        if len(self.program.lower) < _MANY_ROWS or self.searched_taken:
            return None
        self.searched_taken = True
        for _ in range(_MOST_TRIES):
            if self.work.is_spent or self.relaxed.values is None:
                break
            program, choices = self._restricted(self.taken, exactly=True)
            outcome = self._branch(program, choices, ceiling_s, _TAKEN_SHARE * self.work.left)
            if outcome.values is None:
                break
            picked = self._decoded(choices, outcome.values)
            solution = self._solution_of(picked, "rounded")
            if solution is not None:
                return solution if solution.step_time_s < ceiling_s else None
            if not self._add_rows_for(picked):
                break
            if self._relax() is not None and not self.assumes_deferred:
                self.lower_bound_s = max(self.lower_bound_s, min(self.relaxed.bound_s, ceiling_s))
        return None

    def _branch(
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
        self.work.left -= outcome.work
        return outcome

    def _add_rows(self, use: Floats) -> bool:
        """Add memory rows for up to three moments that exceed the limit most; True if there are
        any.

        Args:
            use: bytes at each moment.
        """
        over = np.flatnonzero(use > self.limit_bytes * (1 + 1e-9))
        over = np.setdiff1d(over, np.array(self.times, np.int64))
        if not len(over):
            return False
        # One moment for each stretch above the limit, as neighbouring moments hold the same arrays.
        stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        peaks = [int(part[np.argmax(use[part])]) for part in stretches]
        model = self.model_in_turn(self.in_turn)
        for time in sorted(peaks, key=lambda t: -use[t])[:3]:
            self.times.append(time)
            add_memory_row(self.program, self.choices, self.priced, model, time, self.limit_bytes)
        return True

    def _add_rows_for(self, picked: Picked) -> bool:
        """Add memory rows for moments when choices exceed the limit; True if any were added."""
        return self._add_rows(self.model_in_turn(self.in_turn).under(picked).over_time())

    def _add_unpaid_excess(self, picked: Picked) -> bool:
        """Add excess columns for the shared conversions that the program undercharges under these
        choices; True if there are any.
        """
        groups, uses = self.program.groups, np.zeros(len(self.program.groups.counts), np.int64)
        edges = zip(self.priced.graph.edges, self.priced.edges, picked.ends, strict=True)
        for edge, table, (s, t) in edges:
            number = groups.number.get((edge.share, (table.sources[s], table.targets[t])))
            if number is not None:
                uses[number] += 1
        return self.program.add_excess(np.flatnonzero((uses > 0) & (uses < groups.counts)))

    def _assume_deferred(self, picked: Picked) -> bool:
        """Let memory rows assume from now on that every deferrable product is deferred, if they
        have assumed "at once" and these choices defer. True if the choices then exceed the limit,
        so that rows were added.
        """
        if not self.in_turn or takes_turns(picked):
            return False
        self.in_turn, self.assumes_deferred, self.times = False, True, []
        return self._add_rows_for(picked)

    def _restricted(
        self, allowed: Sequence[NDArray[np.bool_]], *, exactly: bool
    ) -> tuple[Program, Choices]:
        """The program over some choices only, with the memory rows and exclusions so far.

        Args:
            exactly: charge all shared conversions in full, not only those that solutions used.
        """
        program, choices = build_program(self.pruned, allowed)
        groups, mine = program.groups.number, self.program
        if exactly:
            needed = list(range(len(groups)))
        else:
            needed = []
            for key, number in mine.groups.number.items():
                if number in mine.excess and key in groups:
                    needed.append(groups[key])
        program.add_excess(np.array(needed, np.int64))
        for time in self.times:
            model = self.model_in_turn(self.in_turn)
            add_memory_row(program, choices, self.pruned, model, time, self.limit_bytes)
        for picks in self.excluded:
            exclude(program, choices, picks)
        return program, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class ILP(AbstractStepwise):
    """Solve splits as an integer linear program.

    Attributes:
        relative_gap: accepted distance of a solution from the bound, relative to the bound; with 0,
            solutions are proved optimal.
        node_limit: nodes of the branch-and-bound tree on each mesh; the plan says if it is reached.
        work_limit: limit on branching, in pivots times rows, summed over all meshes; 20 to 40
            million take a second. The plan says if it is reached. Relaxations have limits of their
            own.
    """

    relative_gap: float = 1e-3
    node_limit: int = 2000
    # Three times as much gave no faster plan in 25 cases of `benchmarks/tight_memory.py`.
    work_limit: float = 1.5e8

    name = "shard"

    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> Search:
        return Search(
            space.priced,
            space.allowed,
            limit_bytes=memory_limit_bytes,
            planner=self,
            ceiling_s=ceiling_s,
            notes=notes,
        )

    def coarser(self, *, relative_gap: float, node_limit: int) -> ILP:
        return replace(
            self,
            relative_gap=max(self.relative_gap, relative_gap),
            node_limit=min(self.node_limit, node_limit),
            work_limit=_COARSE_SHARE * self.work_limit,
        )
