"""Solve a program with HiGHS: its relaxation first, branching only where that is not integral."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from ....cost import Priced, evaluate, memory_model, timeline
from ._program import Choices, Program, add_memory_row, build_program, conversion_columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_INTEGRAL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The best choices found, with what is proved about them.

    `lower_bound_s` bounds every choice that fits in memory, from below. `status` is "optimal", or names the limit that
    stopped the search.
    """

    picks: Ints
    step_time_s: float
    lower_bound_s: float
    peak_bytes: float
    status: str
    num_variables: int
    num_solves: int


class Search:
    """The search for one priced problem, in two steps so that a planner can compare bounds of several before it branches.

    Memory rows are added where a solution violates them, until none is violated. Each row is exact at its moment, so that
    the bound of fewer rows holds, and a solution that fits everywhere is one of the whole problem.
    """

    def __init__(
        self,
        priced: Priced,
        allowed: Sequence[NDArray[np.bool_]],
        *,
        limit_bytes: float,
        relative_gap: float = 1e-3,
        node_limit: int = 2000,
    ) -> None:
        self.priced = priced
        self.limit_bytes = limit_bytes
        self.relative_gap = relative_gap
        self.node_limit = node_limit
        self.num_solves = 0
        self._allowed = allowed
        self._program, self._choices = build_program(priced, allowed)
        self._model = memory_model(priced)
        self._times: list[int] = []

    def relax(self) -> float | None:
        """The bound of the relaxation, in seconds; None if nothing fits in memory. Keeps the best rounding."""
        while True:
            self._outcome = self._optimize(self._program, self._choices, relaxed=True)
            if self._outcome is None:
                return None
            self.lower_bound_s = self._outcome.bound_s
            use = self._fractional_timeline(self._outcome.values)
            if not self._add_rows(use):
                break
        self._picks = _decode(self._choices, self._outcome.values)
        self.integral = not _is_fractional(self._choices, self._outcome.values)
        return self.lower_bound_s

    def rounded(self) -> Solution | None:
        """The relaxation's solution, rounded; None if that does not fit."""
        return self._solution(self._picks, "optimal" if self.integral else "rounded")

    def branch(self, cutoff_s: float = np.inf) -> Solution | None:
        """The best choices, after `relax`. None if nothing fits, or nothing below `cutoff_s` can exist."""
        best = self.rounded()
        if self.integral and best is not None:
            return best
        while self.lower_bound_s < cutoff_s:
            if best is not None and best.step_time_s - self.lower_bound_s <= self.relative_gap * self.lower_bound_s:
                return self._solution(best.picks, "optimal within the gap")
            program, choices = self._without_hopeless(min(cutoff_s, best.step_time_s if best else np.inf))
            outcome = self._optimize(program, choices, relaxed=False)
            if outcome is None:
                return best
            self.lower_bound_s = max(self.lower_bound_s, min(outcome.bound_s, best.step_time_s if best else np.inf))
            picks = _decode(choices, outcome.values)
            if not self._add_rows(timeline(self._model, self.priced, picks)):
                found = self._solution(picks, outcome.status)
                assert found is not None
                return found if best is None or found.step_time_s <= best.step_time_s else best
            self._outcome = self._optimize(self._program, self._choices, relaxed=True)
            if self._outcome is None:
                return best
        return None

    def least_memory(self) -> Ints:
        """The choices that need least memory, as far as the relaxation and a few moments tell."""
        program, choices = build_program(self.priced, self._allowed)
        program.cost = [np.zeros_like(part) for part in program.cost]
        peak = int(program.add_columns(np.ones(1))[0])
        use = timeline(self._model, self.priced, np.array([int(np.flatnonzero(m)[0]) for m in self._allowed]))
        seen: set[int] = set()
        picks = np.zeros(0, np.int64)
        while (moment := int(np.argmax(use))) not in seen and len(seen) < 6:
            seen.add(moment)
            add_memory_row(program, choices, self.priced, self._model, moment, self.limit_bytes)
            row = len(program.upper) - 1
            program.upper[row] -= 1.0
            program.add_entries(np.array([row]), np.array([peak]), -1.0)
            outcome = self._optimize(program, choices, relaxed=True)
            assert outcome is not None, "some choice always exists when memory is unlimited"
            picks = _decode(choices, outcome.values)
            use = timeline(self._model, self.priced, picks)
        return picks

    def _solution(self, picks: Ints, status: str) -> Solution | None:
        peak = float(timeline(self._model, self.priced, picks).max())
        if peak > self.limit_bytes * (1 + 1e-9):
            return None
        return Solution(
            picks=picks,
            step_time_s=evaluate(self.priced, picks).total_s,
            lower_bound_s=self.lower_bound_s,
            peak_bytes=peak,
            status=status,
            num_variables=self._program.num_columns,
            num_solves=self.num_solves,
        )

    def _without_hopeless(self, best_s: float) -> tuple[Program, Choices]:
        """The program without choices whose reduced cost alone lifts the bound above a known solution."""
        assert self._outcome is not None
        if not np.isfinite(best_s):
            return self._program, self._choices
        room = best_s - self._outcome.bound_s
        allowed = []
        for node, columns, kept in zip(self.priced.nodes, self._choices.columns, self._choices.allowed, strict=True):
            mask = np.zeros(len(node.choices), bool)
            mask[kept[self._outcome.reduced_costs[columns] <= room + 1e-12]] = True
            allowed.append(mask)
        program, choices = build_program(self.priced, allowed)
        for time in self._times:
            add_memory_row(program, choices, self.priced, self._model, time, self.limit_bytes)
        return program, choices

    def _add_rows(self, use: Floats) -> bool:
        """Rows for the worst moments above the limit; whether there were any."""
        over = np.flatnonzero(use > self.limit_bytes * (1 + 1e-7))
        over = np.setdiff1d(over, np.array(self._times, np.int64))
        if not len(over):
            return False
        # The worst moment, and the worst of each other stretch that is over the limit.
        stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
        peaks = sorted((int(part[np.argmax(use[part])]) for part in stretches), key=lambda t: -use[t])
        for time in peaks[:3]:
            self._times.append(time)
            add_memory_row(self._program, self._choices, self.priced, self._model, time, self.limit_bytes)
        return True

    def _fractional_timeline(self, values: Floats) -> Floats:
        """Bytes over time under a fractional solution."""
        change = np.zeros(self._model.num_times + 1)
        for r, local in zip(self._model.residents, self._model.local_bytes, strict=True):
            if r.node < 0:
                num_bytes = float(local[0])
            else:
                num_bytes = float(values[self._choices.columns[r.node]] @ local[self._choices.allowed[r.node]])
            np.add.at(change, r.births, num_bytes)
            np.subtract.at(change, r.deaths + 1, num_bytes)
        for conversion in self._model.conversions:
            columns, weights = conversion_columns(self._choices, self.priced, conversion)
            num_bytes = float(values[columns] @ weights)
            if num_bytes:
                np.add.at(change, conversion.births, num_bytes)
                np.subtract.at(change, conversion.deaths + 1, num_bytes)
        return np.asarray(np.cumsum(change)[:-1], np.float64)

    def _optimize(self, program: Program, choices: Choices, *, relaxed: bool) -> _Outcome | None:
        self.num_solves += 1
        return _optimize(program, choices, self.node_limit, self.relative_gap, relaxed=relaxed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    values: Floats
    bound_s: float
    status: str
    reduced_costs: Floats


def _optimize(
    program: Program, choices: Choices, node_limit: int, relative_gap: float, *, relaxed: bool
) -> _Outcome | None:
    cost, lower, upper, rows, columns, values = program.arrays()
    # Steps last from microseconds to minutes; the solver's tolerances are absolute.
    scale = 1e4 / max(float(np.abs(cost).max()), 1e-30)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(lower)
    lp.col_cost_ = cost * scale
    lp.col_lower_ = np.zeros(len(cost))
    col_upper = np.full(len(cost), highspy.kHighsInf)
    col_upper[: choices.num_integer] = 1.0
    lp.col_upper_ = col_upper
    lp.row_lower_ = np.where(np.isinf(lower), -highspy.kHighsInf, lower)
    lp.row_upper_ = np.where(np.isinf(upper), highspy.kHighsInf, upper)
    order = np.lexsort((rows, columns))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(columns, minlength=len(cost))))).astype(np.int32)
    lp.a_matrix_.index_ = rows[order].astype(np.int32)
    lp.a_matrix_.value_ = values[order]
    if not relaxed:
        kinds = [highspy.HighsVarType.kInteger] * choices.num_integer
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(cost) - choices.num_integer)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_max_nodes", node_limit)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    solver.setOptionValue("mip_abs_gap", 1e-6)
    solver.passModel(lp)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    info = solver.getInfo()
    if not relaxed and info.primal_solution_status != 2:
        return None
    bound = info.objective_function_value if relaxed else info.mip_dual_bound
    found = solver.getSolution()
    return _Outcome(
        values=np.array(found.col_value),
        bound_s=bound / scale,
        status="optimal" if status == highspy.HighsModelStatus.kOptimal else "node limit reached",
        reduced_costs=np.array(found.col_dual) / scale if relaxed else np.zeros(0),
    )


def _decode(choices: Choices, values: Floats) -> Ints:
    return np.array(
        [
            int(allowed[int(np.argmax(values[columns]))])
            for columns, allowed in zip(choices.columns, choices.allowed, strict=True)
        ],
        np.int64,
    )


def _is_fractional(choices: Choices, values: Floats) -> bool:
    x = values[: choices.num_integer]
    return bool(np.any(np.minimum(x, 1 - x) > _INTEGRAL))
