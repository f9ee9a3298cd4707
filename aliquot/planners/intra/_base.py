"""The interface of intra planners, which choose a split for each operator among those open on one mesh."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...cluster import AXIS_NAMES
from ...cost import Priced, Problem, evaluate, known_memory, timeline

Ints = NDArray[np.int64]
Masks: TypeAlias = Sequence[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """The choices open on one mesh, with their prices: what an intra planner chooses from.

    Attributes:
        name: for people, such as "zero3" or "ilp, batch alone on x".
        priced: prices of every node's choices and of every conversion between them.
        allowed: for each node a mask over the rows of its table of choices.
    """

    name: str
    priced: Priced
    allowed: Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraCosts:
    """Cost of chosen splits, by the one judge (`cost.evaluate`): seconds of a step, bytes of the fullest moment."""

    step_time_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntraSolution:
    """Chosen splits with what is proved about them.

    Attributes:
        picks: for each node the row of its table of choices.
        costs: of these picks.
        lower_bound_s: no picks of the space that fit in memory take less; 0 if nothing is proved.
        status: how the search ended, such as "optimal", "optimal within the gap" or "rounded".
    """

    picks: Ints
    costs: IntraCosts
    lower_bound_s: float
    status: str

    @property
    def step_time_s(self) -> float:
        """Of the picks."""
        return self.costs.step_time_s

    @property
    def peak_bytes(self) -> float:
        """Of the picks."""
        return self.costs.peak_bytes


class AbstractSearch(abc.ABC):
    """A search of one space in steps, so that bounds of several spaces can be compared before any is searched to its end.

    Called in this order: `start`, `bound`, then `incumbent` and `improve`. `gave_up` says whether a
    limit on its work ended it.
    """

    lower_bound_s: float
    gave_up: bool

    @abc.abstractmethod
    def start(self) -> float | None:
        """A first lower bound in seconds; None if no picks are possible. May be called in a thread of its own."""

    @abc.abstractmethod
    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The lower bound in seconds, lifted no further than `cutoff_s`; None if nothing fits in memory."""

    @property
    @abc.abstractmethod
    def picks(self) -> Ints | None:
        """The best guess after `bound`, whether it fits in memory or not; None if there is none."""

    @abc.abstractmethod
    def incumbent(self) -> IntraSolution | None:
        """The best solution known after `bound`; None if none that fits is known yet."""

    @abc.abstractmethod
    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """Search to the end: the best solution; None if nothing fits, or nothing below `cutoff_s` was found."""

    @abc.abstractmethod
    def least_memory(self) -> Ints:
        """Picks that need little memory, to say how far from fitting a step is."""


class AbstractIntra(abc.ABC):
    """A way to split the operators of a step on one mesh. Frozen, pure and deterministic: no devices, clocks or files.

    A planner must say `name` and `solve`. Races between meshes, prices of layers and stages of
    pipelines go through `begin`, which by default solves at once; a planner that knows bounds
    before solutions has a search of its own there.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As plans and tables show it."""

    @abc.abstractmethod
    def solve(
        self, problem: Problem, space: Space, *, memory_limit_bytes: float, ceiling_s: float = np.inf
    ) -> IntraSolution | None:
        """The best picks of a space; None if nothing fits, or nothing takes less than `ceiling_s`.

        Args:
            problem: the step, which prices do not tell all of: roles of arrays, number of
                micro-batches.
            memory_limit_bytes: for each device, infinite where memory does not matter.
            ceiling_s: the step time of a solution known elsewhere.
        """

    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> AbstractSearch:
        """The search that `solve` makes, in steps.

        Args:
            notes: kept from one space of a problem to its next ones; a planner may put there what
                serves them all.
        """
        return SolvedAtOnce(self, problem, space, memory_limit_bytes=memory_limit_bytes, ceiling_s=ceiling_s)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """Names of the axes of a pipeline's stage: the one that splits the batch alone, and the other."""
        return AXIS_NAMES[:2]

    def stage_choices(
        self, problem: Problem, mesh_shape: tuple[int, ...], data_axes: frozenset[int]
    ) -> list[Ints] | None:
        """For each node the choices to price on a mesh of a pipeline's stage; none if the planner does not use that mesh.

        None, the default: `data_axes` split the batch alone, and the others parameters as far as they can.
        """
        return None

    def coarser(self, *, relative_gap: float, node_limit: int) -> AbstractIntra:
        """This planner for answers that need not be exact: with at least this gap and at most this much work."""
        return self

    def required_profiles(self, problem: Problem) -> tuple[str, ...]:
        """Names of measurements that it wants and the problem's cluster does not describe; none by default."""
        return ()

    @property
    def relative_gap(self) -> float:
        """Improvements by a smaller share of the step time are not looked for."""
        return 0.0


class SolvedAtOnce(AbstractSearch):
    """The search of a planner that knows no steps: everything is done when its bound is asked for."""

    def __init__(
        self, intra: AbstractIntra, problem: Problem, space: Space, *, memory_limit_bytes: float, ceiling_s: float
    ) -> None:
        self.lower_bound_s, self.gave_up = 0.0, False
        self._intra, self._problem, self._space = intra, problem, space
        self._limit_bytes, self._ceiling_s = memory_limit_bytes, ceiling_s
        self._solution: IntraSolution | None = None
        self._is_solved = False

    def start(self) -> float | None:
        """No bound is known yet."""
        return self.lower_bound_s

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The bound of the planner's solution; that of no solution where none takes less than the ceiling."""
        if not self._is_solved:
            self._solution = self._intra.solve(
                self._problem, self._space, memory_limit_bytes=self._limit_bytes, ceiling_s=self._ceiling_s
            )
            self._is_solved = True
        if self._solution is None:
            return self._ceiling_s if np.isfinite(self._ceiling_s) else None
        self.lower_bound_s = self._solution.lower_bound_s
        return self.lower_bound_s

    @property
    def picks(self) -> Ints | None:
        """The solution's."""
        return self._solution.picks if self._solution else None

    def incumbent(self) -> IntraSolution | None:
        """The solution."""
        return self._solution

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """The solution, if it takes less than `cutoff_s`."""
        return self._solution if self._solution and self._solution.step_time_s < cutoff_s else None

    def least_memory(self) -> Ints:
        """The planner's picks without a limit on memory, as far as it tells; else the first allowed choices."""
        free = self._intra.solve(self._problem, self._space, memory_limit_bytes=np.inf)
        return free.picks if free else np.array([int(np.argmax(mask)) for mask in self._space.allowed], np.int64)


def judge_picks(
    space: Space, picks: Ints, *, memory_limit_bytes: float, lower_bound_s: float = 0.0, status: str = "judged"
) -> IntraSolution | None:
    """Picks with what they cost by the one judge; None if they do not fit in memory or cannot be run."""
    peak_bytes = float(timeline(known_memory(space.priced, picks), space.priced, picks).max())
    step_time_s = evaluate(space.priced, picks).total_s
    if peak_bytes > memory_limit_bytes * (1 + 1e-9) or not np.isfinite(step_time_s):
        return None
    costs = IntraCosts(step_time_s=step_time_s, peak_bytes=peak_bytes)
    return IntraSolution(picks=picks, costs=costs, lower_bound_s=lower_bound_s, status=status)
