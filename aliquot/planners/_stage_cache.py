"""Cache of solved stages: proposals of a search often have stages in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cost import PricedStage, Problem, StageOption
from ..graph import Extract, Graph, same_structure
from ._base import StageDecision

Solved = tuple[StageDecision, PricedStage]


@dataclass(slots=True)
class CachedStage:
    """A stage's problem, with its solutions so far by submesh and mesh."""

    extract: Extract
    problem: Problem
    _solutions: dict[object, Solved] = field(default_factory=dict)

    def solved(
        self, problem: Problem, option: StageOption, solve: Callable[[Problem, StageOption], Solved]
    ) -> Solved:
        """The cached solution, or that of `solve`, which is then cached. Raises what `solve`
        raises.

        Args:
            problem: the stage's problem on the submesh of the option.
        """
        # The memory limit depends on how many micro-batches are in flight, so it is part of the
        # key.
        key = option.submesh, option.mesh_shape, problem.memory_limit_bytes
        if key not in self._solutions:
            self._solutions[key] = solve(problem, option)
        return self._solutions[key]


class StageCache:
    """Solved stages of one step at one size of its micro-batches."""

    def __init__(self) -> None:
        self._stages: dict[tuple[int, ...], list[CachedStage]] = {}

    def of(
        self, extract: Extract, kinds: tuple[int, ...], make: Callable[[Graph], Problem]
    ) -> CachedStage:
        """The entry of a stage of the same structure, or a new one.

        Args:
            kinds: of the stage's layers. In another proposal, equal layers may have other
                operators, such as those of the update, or exchange other arrays.
        """
        known = self._stages.setdefault(kinds, [])
        for each in known:
            if same_structure(each.extract, extract):
                return each
        known.append(CachedStage(extract, make(extract.graph)))
        return known[-1]
