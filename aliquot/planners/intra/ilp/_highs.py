"""The solver HiGHS: a program's relaxation, warm-started after rows are added, and its integer
solution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import highspy
import numpy as np
from numpy.typing import NDArray

from ._layout import Choices
from ._program import Program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = NDArray[np.int32]

# Plain pivots (see `_pivot`) are up to twice as fast if a few operators or conversions cost far
# more than most: if the median is below this share of the largest cost, as on clusters of GPUs. On
# CPUs, where costs are similar, they do not terminate.
_SPREAD = 0.01
# Limit on pivots for each row. Where plain pivots are fast, they take 0.25 to 0.7 for each row.
_PIVOTS_PER_ROW = 1.0
# The limit after rows were added: the optimum is then mostly a few pivots away. If it is not,
# memory is short, and pivots take longest to prove that nothing fits; the interior-point method,
# although it starts cold, does so in seconds.
_PIVOTS_PER_ROW_AGAIN = 0.3
_PIVOTS_PER_ROW_BRIEFLY = 0.2
_FEWEST_PIVOTS = 10_000
_BARRIER_STEPS = 200
# A solve that takes so many seconds has stalled: with numerical trouble a single pivot is tried
# again and again, which no limit on pivots ends. Solves within their limits take a few seconds.
_STALLED_S = 15.0
# Pivots for each row that the solver of integer programs makes between two checks of limits, other
# work included.
_PIVOTS_PER_CHECK_AND_ROW = 0.1

# How far integer solutions may go beyond a limit, as a share of it.
_BEYOND_LIMITS = 1e-9
_INFEASIBLE = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)
_ANSWERS = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kObjectiveBound,
    *_INFEASIBLE,
)
LIMIT = "work limit reached"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The solver's result: a value for each column (None without a solution), and a lower bound of
    all solutions.

    `status` is "optimal", "infeasible", "enough" (the optimum is known to lie above a given value),
    "node limit reached" or `LIMIT`. After the last three, only the bound is proved. Only
    relaxations have reduced costs. `work` counts pivots times rows.
    """

    values: Floats | None
    bound_s: float
    status: str
    reduced_costs: Floats
    work: float = 0.0


def nothing_solved(work: float = 0.0) -> Outcome:
    """The outcome of a program without solutions, or before it was solved."""
    return Outcome(
        values=None, bound_s=np.inf, status="infeasible", reduced_costs=np.zeros(0), work=work
    )


def limit_reached(work: float = 0.0) -> Outcome:
    """The outcome of a program that was given up, about which nothing is known."""
    return Outcome(values=None, bound_s=-np.inf, status=LIMIT, reduced_costs=np.zeros(0), work=work)


class Relaxation:
    """The relaxation of a program, warm-started after rows were added.

    A solve takes at most about as many pivots as there are rows, then up to `_BARRIER_STEPS` steps
    of the interior-point method, and is given up with status `LIMIT` if neither is enough. Seconds
    end only what has stalled.
    `pivots_plainly` turns false for good once plain pivots reach their limit.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._solver, self._scale = _load(program, num_integer=0)
        self._num_rows, self._num_columns = len(program.lower), program.num_columns
        self._num_parts = len(program.rows)
        self._has_basis = False
        self.is_exact = True
        cost = np.concatenate(program.cost)
        paid = cost[cost > 0]
        # The median, not the mean, because the question is whether a few costs stand out.
        self.pivots_plainly = len(paid) > 0 and float(np.median(paid)) < _SPREAD * float(paid.max())

    def solve(
        self, enough_s: float = np.inf, *, briefly: bool = False, exactly: bool = True
    ) -> Outcome:
        """The optimum; or an outcome "enough" as soon as the optimum is known to lie above
        `enough_s`.

        With `briefly` the limit on pivots is small, for solves that are not essential. `is_exact`
        is false if a limit was reached before all shared conversions were paid in full; the bound
        holds all the same. Without `exactly` they are paid as far as the program has learned so
        far.
        """
        outcome = self._solve(enough_s, briefly)
        self.is_exact = exactly
        while exactly and outcome.values is not None and self._program.share(outcome.values):
            again = self._solve(enough_s, briefly)
            work = outcome.work + again.work
            self.is_exact = again.status != LIMIT
            outcome = replace(again if self.is_exact else outcome, work=work)
            if not self.is_exact:
                break
        return outcome

    def _solve(self, enough_s: float, briefly: bool) -> Outcome:
        """Solve the program as it is."""
        self._grow()
        self._solver.setOptionValue(
            # HiGHS takes its own number for infinity.
            "objective_bound",
            min(enough_s * self._scale, highspy.kHighsInf),
        )
        per_row = _PIVOTS_PER_ROW_AGAIN if self._has_basis else _PIVOTS_PER_ROW
        limit = max(int(per_row * self._num_rows), _FEWEST_PIVOTS)
        if briefly:
            limit = max(int(_PIVOTS_PER_ROW_BRIEFLY * self._num_rows), 1)
        pivots = 0
        if self.pivots_plainly:
            pivots += self._pivot(
                plainly=True, limit=min(limit, max(int(_PIVOTS_PER_ROW * self._num_rows), 1))
            )
            if self._solver.getModelStatus() not in _ANSWERS:
                # Without perturbed costs the simplex method may cycle.
                self.pivots_plainly = False
                # Pivots spent count towards the limit, of which at least half is left for weighted
                # pivots. After a warm start none is left: the interior-point method comes next.
                limit = 0 if self._has_basis else max(limit - pivots, limit // 2)
        if not self.pivots_plainly and limit:
            pivots += self._pivot(plainly=False, limit=limit)
        status = self._solver.getModelStatus()
        if status not in _ANSWERS and not briefly:
            # Either the limit was reached, or HiGHS reports an unbounded program. That cannot be,
            # as no cost and no column is negative, but HiGHS 1.15 says so of some programs that it
            # did not presolve.
            pivots += self._inside()
            status = self._solver.getModelStatus()
        work = float(pivots) * self._num_rows
        self._has_basis = status == highspy.HighsModelStatus.kOptimal
        if status == highspy.HighsModelStatus.kObjectiveBound:
            return Outcome(
                values=None, bound_s=enough_s, status="enough", reduced_costs=np.zeros(0), work=work
            )
        if status in _INFEASIBLE:
            return nothing_solved(work)
        if status != highspy.HighsModelStatus.kOptimal:
            return limit_reached(work)
        solution = self._solver.getSolution()
        return Outcome(
            values=np.array(solution.col_value),
            bound_s=self._solver.getInfo().objective_function_value / self._scale,
            status="optimal",
            reduced_costs=np.array(solution.col_dual) / self._scale,
            work=work,
        )

    @contextmanager
    def without(self, columns: Index) -> Iterator[None]:
        """A context in which some columns are fixed at 0; afterwards the basis is as before."""
        basis, zeros, has_basis = self._solver.getBasis(), np.zeros(len(columns)), self._has_basis
        self._solver.changeColsBounds(len(columns), columns, zeros, zeros)
        try:
            yield
        finally:
            self._solver.changeColsBounds(
                len(columns), columns, zeros, np.full(len(columns), highspy.kHighsInf)
            )
            self.go_to(basis)
            self._has_basis = has_basis

    @property
    def num_rows(self) -> int:
        """Rows of the solver's program."""
        return self._num_rows

    def basis(self) -> highspy.HighsBasis:
        """The basis that the next solve starts from."""
        return self._solver.getBasis()

    def go_to(self, basis: highspy.HighsBasis) -> None:
        """Return to a basis. Rows added since become basic (they are satisfied, or will be after a
        few pivots), and columns added since nonbasic.
        """
        rows = [highspy.HighsBasisStatus.kBasic] * (self._num_rows - len(basis.row_status))
        if rows:
            basis.row_status = [*basis.row_status, *rows]
        columns = [highspy.HighsBasisStatus.kLower] * (self._num_columns - len(basis.col_status))
        if columns:
            basis.col_status = [*basis.col_status, *columns]
        self._solver.setBasis(basis)

    def _pivot(self, *, plainly: bool, limit: int) -> int:
        """Run the simplex method; returns the number of pivots.

        Args:
            plainly: without edge weights and perturbed costs: most pivots are many times cheaper,
                but there are more.
        """
        for option, value in (
            ("simplex_dual_edge_weight_strategy", 0 if plainly else -1),
            ("dual_simplex_cost_perturbation_multiplier", 0.0 if plainly else 1.0),
            ("simplex_iteration_limit", limit),
            ("time_limit", self._solver.getRunTime() + _STALLED_S),
        ):
            self._solver.setOptionValue(option, value)
        self._solver.run()
        return max(0, int(self._solver.getInfo().simplex_iteration_count))

    def _inside(self) -> int:
        """Solve from scratch by the interior-point method, ending at a vertex; returns its cost in
        pivots.
        """
        # Where pivots failed once, they are not tried again on this program.
        self.pivots_plainly = False
        self._solver.clearSolver()
        limit = max(int(_PIVOTS_PER_ROW * self._num_rows), _FEWEST_PIVOTS)
        for option, value in (
            ("solver", "ipm"),
            ("presolve", "on"),
            ("ipm_iteration_limit", _BARRIER_STEPS),
            ("simplex_iteration_limit", limit),
            ("time_limit", self._solver.getRunTime() + _STALLED_S),
        ):
            self._solver.setOptionValue(option, value)
        self._solver.run()
        for option, value in (("solver", "choose"), ("presolve", "off")):
            self._solver.setOptionValue(option, value)
        # The method takes about as long as this many pivots.
        return int(_PIVOTS_PER_ROW_AGAIN * self._num_rows)

    def _grow(self) -> None:
        """Add the program's new columns and rows to the solver."""
        program, parts = self._program, slice(self._num_parts, None)
        # New columns and rows always bring entries, so without new entries nothing has grown.
        if len(program.rows) == self._num_parts:
            return
        rows, columns = np.concatenate(program.rows[parts]), np.concatenate(program.columns[parts])
        values = np.concatenate(program.values[parts])
        num_columns = program.num_columns - self._num_columns
        if num_columns:
            cost = np.concatenate(program.cost)[self._num_columns :] * self._scale
            # New columns have entries in old rows, and new rows in all columns: HiGHS takes them in
            # two calls.
            above = rows < self._num_rows
            starts, indices, entries = _by_column(
                rows[above],
                columns[above] - self._num_columns,
                values[above],
                shape=(self._num_rows, num_columns),
            )
            zeros, infinite = np.zeros(num_columns), np.full(num_columns, highspy.kHighsInf)
            self._solver.addCols(
                num_columns, cost, zeros, infinite, len(indices), starts[:-1], indices, entries
            )
        num_rows = len(program.lower) - self._num_rows
        if num_rows:
            below = rows >= self._num_rows
            starts, indices, entries = _by_column(
                columns[below],
                rows[below] - self._num_rows,
                values[below],
                shape=(program.num_columns, num_rows),
            )
            lower, upper = (
                _finite(np.array(bounds[self._num_rows :]))
                for bounds in (program.lower, program.upper)
            )
            self._solver.addRows(
                num_rows, lower, upper, len(indices), starts[:-1], indices, entries
            )
        self._num_rows, self._num_columns, self._num_parts = (
            len(program.lower),
            program.num_columns,
            len(program.rows),
        )


def solve_integers(
    program: Program,
    choices: Choices,
    *,
    node_limit: int,
    relative_gap: float,
    ceiling_s: float = np.inf,
    work_limit: float = np.inf,
) -> Outcome:
    """The best solution in which every node takes one choice, within a relative gap and limits on
    nodes of the tree and work.

    Solutions that cost more than `ceiling_s` are not searched for.
    """
    solver, scale = _load(program, num_integer=choices.num_integer)
    solver.setOptionValue("mip_max_nodes", node_limit)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    # The objective is scaled to 1e4, so that this is a rounding error.
    solver.setOptionValue("mip_abs_gap", 1e-6)
    if np.isfinite(ceiling_s):
        # A little above, so that a solution as cheap as the incumbent is still found.
        solver.setOptionValue("objective_bound", ceiling_s * scale * (1 + 1e-9))
    # HiGHS has limits on nodes and on time. But most of its work comes before the first node, and
    # time must not decide the result. So the work is estimated by counting the callbacks in which
    # it asks whether to stop.
    work_per_check = _PIVOTS_PER_CHECK_AND_ROW * float(len(program.lower)) ** 2
    checks = 0

    def check(event: highspy.highs.HighsCallbackEvent) -> None:
        nonlocal checks
        checks += 1
        if checks * work_per_check > work_limit:
            event.interrupt()

    solver.cbMipInterrupt.subscribe(check)
    solver.run()
    solver.cbMipInterrupt.unsubscribe(check)
    status, info = solver.getModelStatus(), solver.getInfo()
    work = checks * work_per_check
    if status == highspy.HighsModelStatus.kInfeasible:
        return nothing_solved(work)
    has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    names = {
        highspy.HighsModelStatus.kOptimal: "optimal",
        highspy.HighsModelStatus.kInterrupt: LIMIT,
    }
    return Outcome(
        values=np.array(solver.getSolution().col_value) if has_solution else None,
        bound_s=info.mip_dual_bound / scale,
        status=names.get(status, "node limit reached"),
        reduced_costs=np.zeros(0),
        work=work,
    )


def _load(program: Program, *, num_integer: int) -> tuple[highspy.Highs, float]:
    """A solver that holds a program, and the scale of its objective."""
    cost, lower, upper, rows, columns, values = program.arrays()
    # Costs are scaled, because steps last from microseconds to minutes and the solver's tolerances
    # are absolute.
    scale = 1e4 / max(float(np.abs(cost).max(initial=0.0)), 1e-30)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(lower)
    lp.col_cost_ = cost * scale
    lp.col_lower_ = np.zeros(len(cost))
    col_upper = np.full(len(cost), highspy.kHighsInf)
    col_upper[:num_integer] = 1.0
    lp.col_upper_ = col_upper
    lp.row_lower_ = _finite(lower)
    lp.row_upper_ = _finite(upper)
    if num_integer:
        # From release 1.12 on, HiGHS does not end presolving where a limit is the least that can
        # be met. This much is far below its tolerances.
        is_limit = (lower == -np.inf) & (upper > 0) & np.isfinite(upper)
        lp.row_upper_ = np.where(is_limit, upper * (1 + _BEYOND_LIMITS), lp.row_upper_)
    starts, indices, entries = _by_column(rows, columns, values, shape=(len(lower), len(cost)))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = indices
    lp.a_matrix_.value_ = entries
    if num_integer:
        kinds = [highspy.HighsVarType.kInteger] * num_integer
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(cost) - num_integer)
    solver = highspy.Highs()
    # One thread and one seed: results must not depend on the machine.
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    if not num_integer:
        # On these relaxations presolving takes as long as the simplex method afterwards, and saves
        # it next to nothing.
        solver.setOptionValue("presolve", "off")
    if solver.passModel(lp) == highspy.HighsStatus.kError:
        raise AssertionError("the solver refuses a program that was written for it")
    return solver, scale


def _by_column(
    rows: Ints, columns: Ints, values: Floats, *, shape: tuple[int, int]
) -> tuple[Index, Index, Floats]:
    """A sparse matrix by columns: where each column starts, the row of each entry, its value.

    Duplicate entries are summed: the solver would keep both, and has crashed on large programs with
    them.
    """
    key = columns * shape[0] + rows
    order = np.argsort(key, kind="stable")
    key = key[order]
    # Equal keys lie side by side after the sort.
    first = np.flatnonzero(np.diff(key, prepend=-1))
    key, entries = key[first], np.add.reduceat(values[order], first) if len(first) else values
    starts = np.searchsorted(key, np.arange(shape[1] + 1) * shape[0])
    return starts.astype(np.int32), (key % shape[0]).astype(np.int32), entries


def _finite(bounds: Floats) -> Floats:
    """Bounds with the solver's own infinity."""
    return np.clip(bounds, -highspy.kHighsInf, highspy.kHighsInf)
