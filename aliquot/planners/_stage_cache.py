"""Cache of solved stages: proposals of a search often have stages in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..cost import PricedStage, Problem, StageOption
from ..graph import Extract, Graph
from ._base import StageDecision

Solved = tuple[StageDecision, PricedStage]


@dataclass(slots=True)
class CachedStage:
    """A stage's problem, with its solutions so far by submesh and mesh."""

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
        self._stages: dict[object, CachedStage] = {}

    def of(self, extract: Extract, make: Callable[[Graph], Problem]) -> CachedStage:
        """The entry of a stage, found by its operators: in another proposal, the same layers may
        have other operators, such as those of the update.
        """
        graph = extract.graph
        inputs = tuple([(item.path, item.value, item.role, item.output) for item in graph.inputs])
        outputs = tuple([output.path for output in graph.outputs])
        key = (
            extract.ops,
            extract.values,
            inputs,
            outputs,
            tuple([op.deferrable for op in graph.ops]),
        )
        if key not in self._stages:
            self._stages[key] = CachedStage(make(extract.graph))
        return self._stages[key]
