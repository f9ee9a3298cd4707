"""The solver: a program's relaxation, kept warm while rows are added to it, and its integer solution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from ._layout import Choices
from ._program import Program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = NDArray[np.int32]

# Plain pivots are quicker where a few operators or conversions cost far more than most (a median below this share of the
# largest cost: clusters of GPUs), at best by a factor of two. On CPUs, where costs are alike, they do not end.
_SPREAD = 0.01
# They take a quarter to 0.7 pivots a row where they are quick.
_PIVOTS_PER_ROW = 1.0

_ANSWERS = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kObjectiveBound,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What the solver answers: a value for each column (none if it found no solution), and a bound of every solution.

    `status` is "optimal", "infeasible", "node limit reached" or "enough"; only relaxations have reduced costs.
    """

    values: Floats | None
    bound_s: float
    status: str
    reduced_costs: Floats


def nothing_solved() -> Outcome:
    """What is known before anything was solved, or where there is no solution."""
    return Outcome(values=None, bound_s=np.inf, status="infeasible", reduced_costs=np.zeros(0))


class Relaxation:
    """The relaxation of a program. Solved again after rows were added, it starts from where it was.

    `pivots_plainly` says how, and turns false for good where that did not end in time.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._solver, self._scale = _load(program, num_integer=0)
        self._num_rows = len(program.lower)
        cost = np.concatenate(program.cost)
        paid = cost[cost > 0]
        self.pivots_plainly = len(paid) > 0 and float(np.median(paid)) < _SPREAD * float(paid.max())

    def solve(self, enough_s: float = np.inf) -> Outcome:
        """Its optimum; or, as soon as it is known to lie above `enough_s`, just that."""
        self._add_rows()
        self._solver.setOptionValue("objective_bound", min(enough_s * self._scale, highspy.kHighsInf))
        if self.pivots_plainly:
            self._pivot_plainly(True)
            self._solver.run()
            if self._solver.getModelStatus() == highspy.HighsModelStatus.kIterationLimit:
                # Without perturbed costs it may go around in circles.
                self.pivots_plainly = False
                self._pivot_plainly(False)
        if not self.pivots_plainly:
            self._solver.run()
        status = self._solver.getModelStatus()
        if status not in _ANSWERS:
            # No cost and no column is negative, so nothing is unbounded; yet HiGHS 1.15 says so of some that it did not presolve.
            self.pivots_plainly = False
            self._pivot_plainly(False)
            self._solver.clearSolver()
            self._solver.setOptionValue("presolve", "on")
            self._solver.run()
            self._solver.setOptionValue("presolve", "off")
            status = self._solver.getModelStatus()
        if status == highspy.HighsModelStatus.kObjectiveBound:
            return Outcome(values=None, bound_s=enough_s, status="enough", reduced_costs=np.zeros(0))
        if status != highspy.HighsModelStatus.kOptimal:
            return nothing_solved()
        found = self._solver.getSolution()
        return Outcome(
            values=np.array(found.col_value),
            bound_s=self._solver.getInfo().objective_function_value / self._scale,
            status="optimal",
            reduced_costs=np.array(found.col_dual) / self._scale,
        )

    @contextmanager
    def without(self, columns: Index) -> Iterator[None]:
        """As long as this lasts some columns are 0. Afterwards the solver is where it was."""
        basis, zeros = self._solver.getBasis(), np.zeros(len(columns))
        self._solver.changeColsBounds(len(columns), columns, zeros, zeros)
        try:
            yield
        finally:
            self._solver.changeColsBounds(len(columns), columns, zeros, np.full(len(columns), highspy.kHighsInf))
            self._solver.setBasis(basis)

    def _pivot_plainly(self, plainly: bool) -> None:
        """Whether to take the first price that offers itself: most pivots are many times cheaper then, but they are more."""
        limit = int(_PIVOTS_PER_ROW * self._num_rows) if plainly else highspy.kHighsIInf
        for option, value in (
            ("simplex_dual_edge_weight_strategy", 0 if plainly else -1),
            ("dual_simplex_cost_perturbation_multiplier", 0.0 if plainly else 1.0),
            ("simplex_iteration_limit", limit),
        ):
            self._solver.setOptionValue(option, value)

    def _add_rows(self) -> None:
        """Pass on the rows that the program got since."""
        if self._num_rows == len(self._program.lower):
            return
        _, lower, upper, rows, columns, values = self._program.arrays()
        for row in range(self._num_rows, len(lower)):
            mine = rows == row
            indices, place = np.unique(columns[mine], return_inverse=True)
            entries = np.bincount(place, values[mine], minlength=len(indices))
            bounds = _finite(np.array([lower[row], upper[row]])).tolist()
            self._solver.addRow(*bounds, len(indices), indices.astype(np.int32), entries)  # type: ignore[call-arg]
        self._num_rows = len(lower)


def solve_integers(
    program: Program, choices: Choices, *, node_limit: int, relative_gap: float, ceiling_s: float = np.inf
) -> Outcome:
    """The best solution in which every node takes one choice, up to a relative gap or a number of nodes of the tree.

    What costs more than `ceiling_s` need not be looked for.
    """
    solver, scale = _load(program, num_integer=choices.num_integer)
    solver.setOptionValue("mip_max_nodes", node_limit)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    solver.setOptionValue("mip_abs_gap", 1e-6)
    if np.isfinite(ceiling_s):
        solver.setOptionValue("objective_bound", ceiling_s * scale * (1 + 1e-9))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return nothing_solved()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Outcome(
        values=np.array(solver.getSolution().col_value) if found else None,
        bound_s=info.mip_dual_bound / scale,
        status="optimal" if status == highspy.HighsModelStatus.kOptimal else "node limit reached",
        reduced_costs=np.zeros(0),
    )


def _load(program: Program, *, num_integer: int) -> tuple[highspy.Highs, float]:
    """A solver that holds a program, and the scale of its objective."""
    cost, lower, upper, rows, columns, values = program.arrays()
    # Steps last from microseconds to minutes; the solver's tolerances are absolute.
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
    starts, indices, entries = _by_column(rows, columns, values, shape=(len(lower), len(cost)))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = indices
    lp.a_matrix_.value_ = entries
    if num_integer:
        kinds = [highspy.HighsVarType.kInteger] * num_integer
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(cost) - num_integer)
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    if not num_integer:
        # On these relaxations presolving takes as long as the simplex method afterwards, and saves it next to nothing.
        solver.setOptionValue("presolve", "off")
    if solver.passModel(lp) == highspy.HighsStatus.kError:
        raise AssertionError("the solver refuses a program that was written for it")
    return solver, scale


def _by_column(rows: Ints, columns: Ints, values: Floats, *, shape: tuple[int, int]) -> tuple[Index, Index, Floats]:
    """A sparse matrix column by column: where each column starts, the row of each entry, its value.

    What two parts of the program add to becomes one entry: the solver keeps both, and has crashed on large programs.
    """
    key = columns * shape[0] + rows
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    key, entries = key[first], np.add.reduceat(values[order], first) if len(first) else values
    starts = np.searchsorted(key, np.arange(shape[1] + 1) * shape[0])
    return starts.astype(np.int32), (key % shape[0]).astype(np.int32), entries


def _finite(bounds: Floats) -> Floats:
    """Bounds as the solver writes them."""
    return np.clip(bounds, -highspy.kHighsInf, highspy.kHighsInf)
