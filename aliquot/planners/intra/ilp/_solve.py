"""Solve a program with HiGHS: its relaxation first, branching only where that is not integral."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from ....cost import MemoryModel, Priced, evaluate, memory_model, timeline
from ._program import Choices, Program, add_memory_row, build_program

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


def solve(
    priced: Priced,
    allowed: Sequence[NDArray[np.bool_]],
    *,
    limit_bytes: float,
    node_limit: int = 2000,
    cutoff_s: float = np.inf,
) -> Solution | None:
    """The choices with the least step time that fit in `limit_bytes` per device; None if none do.

    Memory rows are added where they are violated, until none is: each is exact at its moment, so that a solution of fewer
    rows that fits is a solution of all. Stops early, with None, once the bound shows that `cutoff_s` cannot be beaten.
    """
    program, choices = build_program(priced, allowed)
    model = memory_model(priced)
    rows: set[int] = set()
    solves = 0
    while True:
        outcome = _optimize(program, choices, node_limit, relaxed=True)
        solves += 1
        if outcome is None or outcome.bound_s >= cutoff_s:
            return None
        status, bound = "optimal", outcome.bound_s
        picks = _decode(choices, outcome.values)
        fractional = _is_fractional(choices, outcome.values)
        if fractional and not _violated(model, priced, picks, limit_bytes, rows):
            outcome = _optimize(program, choices, node_limit, relaxed=False)
            solves += 1
            if outcome is None:
                return None
            status, bound = outcome.status, outcome.bound_s
            picks = _decode(choices, outcome.values)
        new = _violated(model, priced, picks, limit_bytes, rows)
        if not new:
            use = timeline(model, priced, picks)
            return Solution(
                picks=picks,
                step_time_s=evaluate(priced, picks).total_s,
                lower_bound_s=bound,
                peak_bytes=float(use.max()),
                status=status,
                num_variables=program.num_columns,
                num_solves=solves,
            )
        for time in new:
            rows.add(time)
            add_memory_row(program, choices, priced, model, time, limit_bytes)


def _violated(model: MemoryModel, priced: Priced, picks: Ints, limit_bytes: float, known: set[int]) -> list[int]:
    """The worst moments at which choices need more than there is, a few at a time."""
    use = timeline(model, priced, picks)
    over = np.flatnonzero(use > limit_bytes * (1 + 1e-9))
    over = np.array([t for t in over[np.argsort(-use[over], kind="stable")] if int(t) not in known], np.int64)
    return [int(t) for t in over[:1]] + [int(t) for t in over[len(over) // 2 : len(over) // 2 + 1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    values: Floats
    bound_s: float
    status: str


def _optimize(program: Program, choices: Choices, node_limit: int, *, relaxed: bool) -> _Outcome | None:
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
    solver.setOptionValue("mip_rel_gap", 1e-9)
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
    name = "optimal" if status == highspy.HighsModelStatus.kOptimal else "node limit reached"
    return _Outcome(values=np.array(solver.getSolution().col_value), bound_s=bound / scale, status=name)


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
