"""Branch and bound on the warm relaxation, for programs that are large.

A general solver of integer programs starts cold, and branches on single choices: that a node does
not take one of thirty choices hardly restricts it. Here a branch decides one factor of a node on
one mesh axis, which splits its choices in two, and with them those of all nodes that follow. A
branch takes a few hundred pivots from the relaxation above it.

Reference: A. H. Land, A. G. Doig, "An automatic method of solving discrete programming problems",
1960; T. Achterberg, T. Koch, A. Martin, "Branching rules revisited", Operations Research Letters,
2005 (branches are tried before one is chosen, and what they raise the bound by is remembered).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._highs import LIMIT, Basis, Outcome, Relaxation
from ._program import MIXED

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Branches tried before one is chosen: at the root, and below, where experience helps.
_TRIED_FIRST, _TRIED = 8, 2
# A solve costs as many pivots as this share of the rows before its first pivot, and each pivot on a
# restricted relaxation as much as several on the whole one.
_SOLVE_SHARE, _PIVOT_WEIGHT = 0.16, 6.0


class Split(NamedTuple):
    """Two halves of a node's columns, by one factor on one axis; `share` of the node is in the first."""

    node: int
    axis: int
    share: float
    halves: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A relaxation in which some columns are zero. `outcome` is None if it was not solved to the end."""

    excluded: Ints
    basis: Basis
    bound_s: float
    outcome: Outcome | None


@dataclass(slots=True, kw_only=True, eq=False)
class Tree:
    """A best-first search of branches below a relaxation.

    Attributes:
        columns, choices: of each node, its columns and the choices behind them, `(choices, axes)`.
        check: takes values without mixed choices, keeps the solution and returns true; or returns
            false after the program got further rows that exclude it; or None if it could exclude it
            by none.
        exceeded: adds rows that mixed values exceed; false if there are none.
        ceiling_s: returns the cost above which solutions are of no interest.
        work_left: pivots times rows that may be spent.
        bound_s: every solution below the ceiling costs at least this.
    """

    relaxation: Relaxation
    columns: Sequence[Ints]
    choices: Sequence[Ints]
    check: Callable[[Floats], bool | None]
    exceeded: Callable[[Floats], bool]
    ceiling_s: Callable[[], float]
    work_left: float
    bound_s: float
    solves: int = 0
    _gains: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def search(self, root: Outcome) -> None:
        """Raise `bound_s` until it reaches the ceiling or the work is spent."""
        basis, order = self.relaxation.basis(), itertools.count()
        first = Branch(excluded=np.zeros(0, np.int64), basis=basis, bound_s=root.bound_s, outcome=root)
        branches, closed_s, tried = [(first.bound_s, next(order), first)], np.inf, _TRIED_FIRST
        try:
            while branches:
                self.bound_s = max(self.bound_s, min(branches[0][0], closed_s, self.ceiling_s()))
                if self.bound_s >= self.ceiling_s() or self.bound_s >= closed_s or self.work_left <= 0:
                    return
                branch = heapq.heappop(branches)[2]
                if branch.outcome is None or self.exceeded(_values(branch.outcome)):
                    branch = self._solved(branch.excluded, branch, briefly=False)
                    if branch.outcome is None:
                        closed_s = min(closed_s, branch.bound_s)
                        continue
                    following = [branch]
                elif not self._splits(_values(branch.outcome)):
                    kept = self.check(_values(branch.outcome))
                    if kept is None:
                        closed_s = min(closed_s, branch.bound_s)
                    following = [self._solved(branch.excluded, branch, briefly=False)] if kept is False else []
                else:
                    following, tried = self._branches(branch, tried), _TRIED
                for one in following:
                    if one.bound_s < self.ceiling_s():
                        heapq.heappush(branches, (one.bound_s, next(order), one))
            self.bound_s = max(self.bound_s, min(closed_s, self.ceiling_s()))
        finally:
            self.relaxation.restrict(np.zeros(0, np.int64), basis)

    def _branches(self, branch: Branch, tried: int) -> list[Branch]:
        """Both sides of the best of a few splits."""
        assert branch.outcome is not None
        splits = sorted(self._splits(_values(branch.outcome)), key=self._expected, reverse=True)
        best: tuple[float, list[Branch]] | None = None
        for split in splits[:tried]:
            sides = [
                self._solved(np.concatenate((branch.excluded, half)), branch, briefly=True)
                for half in reversed(split.halves)
            ]
            gains = [min(side.bound_s, self.ceiling_s()) - branch.bound_s for side in sides]
            gain = min(gains) + 0.2 * max(gains)
            self._gains.setdefault(split[:2], []).append(gain)
            if best is None or gain > best[0]:
                best = gain, sides
            if self.work_left <= 0 or min(gains) >= self.ceiling_s() - branch.bound_s:
                break
        assert best is not None, "a branch with mixed choices has a split"
        return best[1]

    def _solved(self, excluded: Ints, above: Branch, *, briefly: bool) -> Branch:
        """A branch, solved from the one above it."""
        self.relaxation.restrict(excluded, above.basis)
        outcome = self.relaxation.solve(self.ceiling_s(), briefly=briefly)
        rows = self.relaxation.num_rows
        self.work_left -= _PIVOT_WEIGHT * outcome.work + _SOLVE_SHARE * rows**2
        self.solves += 1
        if outcome.status == LIMIT:
            return Branch(excluded=excluded, basis=above.basis, bound_s=above.bound_s, outcome=None)
        bound_s = np.inf if outcome.values is None else max(outcome.bound_s, above.bound_s)
        return Branch(excluded=excluded, basis=self.relaxation.basis(), bound_s=bound_s, outcome=outcome)

    def _expected(self, split: Split) -> float:
        """The gain to expect of a split: the mean so far, or as much as the best where nothing is known."""
        known = self._gains.get(split[:2])
        means = [sum(gains) / len(gains) for gains in self._gains.values()]
        gain = sum(known) / len(known) if known else max(means, default=1.0)
        return gain * min(split.share, 1 - split.share)

    def _splits(self, values: Floats) -> list[Split]:
        return list(splits(self.columns, self.choices, values))


def splits(columns: Sequence[Ints], choices: Sequence[Ints], values: Floats) -> Iterator[Split]:
    """All splits that exclude a mixture: those with some of a node's choices on either side."""
    for node, (mine, factors) in enumerate(zip(columns, choices, strict=True)):
        mixed = values[mine] > MIXED
        if np.count_nonzero(mixed) < 2:
            continue
        for axis in range(factors.shape[1]):
            taken = np.unique(factors[mixed, axis])
            # Two factors split the node in the same way, from either side.
            for factor in taken[: len(taken) if len(taken) > 2 else len(taken) - 1].tolist():
                inside = factors[:, axis] == factor
                share = float(values[mine[inside]].sum())
                yield Split(node, axis, share, (mine[inside], mine[~inside]))


def _values(outcome: Outcome) -> Floats:
    assert outcome.values is not None
    return outcome.values
