"""Search for the best choices on one mesh by an integer linear program: relax, round, branch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....cost import MemoryModel, Priced, may_take_turns
from .._base import AbstractSearch, IntraSolution
from ._affordable import affordable
from ._bounds import incumbent, least_memory, raise_bound, start
from ._branching import improve
from ._highs import Relaxation, nothing_solved
from ._layout import Layouts
from ._least import LeastPeak
from ._program import build_program
from ._work import Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Search(AbstractSearch):
    """The search of one priced problem; see `AbstractSearch` for the order of its steps.

    It holds what is known so far. Functions of other files take the steps: they raise the bound
    (`raise_bound`), add rows to the program (`add_rows`) and complete the search (`improve`).

    Whether weight gradients run at once or are deferred depends on all choices together, which rows
    cannot express. They first assume "at once" (`in_turn`), which needs the least memory. If the
    best choices defer them and then exceed the limit, rows assume "deferred" for good
    (`assumes_deferred`): solutions are still right, but the bound is not raised any more.

    Solutions that cost more than `ceiling_s` are not searched for. `layouts` caches layouts of
    programs over one node graph and is shared with the searches of other meshes.

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
        relative_gap: float = 1e-3,
        node_limit: int = 2000,
        ceiling_s: float = np.inf,
        layouts: Layouts | None = None,
        work: Work | None = None,
    ) -> None:
        self.priced, self.allowed = priced, allowed
        self.ceiling_s, self.limit_bytes = ceiling_s, limit_bytes
        self.relative_gap, self.node_limit = relative_gap, node_limit
        self.layouts, self.work = layouts, work or Work(np.inf)
        self.pruned, self.open_choices = affordable(priced, allowed, ceiling_s)
        self.program, self.choices = build_program(self.pruned, self.open_choices, layouts)
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
        self.rounded: Ints | None = None

    def start(self) -> float | None:
        """See `AbstractSearch.start`: the bound of the relaxation without memory rows."""
        return start(self)

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """See `AbstractSearch.bound`: the bound of the relaxation with memory rows."""
        return raise_bound(self, cutoff_s)

    @property
    def picks(self) -> Ints | None:
        """See `AbstractSearch.picks`: the relaxation's solution, rounded to the largest shares."""
        return self.rounded

    def incumbent(self) -> IntraSolution | None:
        return incumbent(self)

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """See `AbstractSearch.improve`; also None if a limit ended the search without any."""
        return improve(self, cutoff_s)

    def least_memory(self) -> Ints:
        return least_memory(self)
