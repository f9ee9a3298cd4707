"""`ILP`: splits by integer linear programming."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....cost import Problem
from .._base import AbstractStepwise, Space
from ._layout import Layouts
from ._search import Search, Work

_LAYOUTS = "layouts of integer programs"
_WORK = "work of integer programs"
# Share of the work limit for coarse solutions, since many problems are solved coarsely.
_COARSE_SHARE = 0.3


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

    @property
    def name(self) -> str:
        return "shard"

    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> Search:
        # Spaces of one problem share their layouts and the work that is left.
        return Search(
            space.priced,
            space.allowed,
            limit_bytes=memory_limit_bytes,
            relative_gap=self.relative_gap,
            node_limit=self.node_limit,
            ceiling_s=ceiling_s,
            layouts=None if notes is None else notes.setdefault(_LAYOUTS, Layouts()),
            work=({} if notes is None else notes).setdefault(_WORK, Work(self.work_limit)),
        )

    def coarser(self, *, relative_gap: float, node_limit: int) -> ILP:
        return replace(
            self,
            relative_gap=max(self.relative_gap, relative_gap),
            node_limit=min(self.node_limit, node_limit),
            work_limit=_COARSE_SHARE * self.work_limit,
        )
