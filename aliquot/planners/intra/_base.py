"""The interface of intra planners, which choose a split for each operator on one mesh."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ...cluster import AXIS_NAMES, LogicalMesh
from ...cost import Picked, Priced, Problem, evaluate

Ints = NDArray[np.int64]
Masks: TypeAlias = Sequence[NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """The choices on one mesh that an intra planner may take, with their prices.

    Attributes:
        name: the name that people read, such as "zero3" or "shard, x only for the batch".
        priced: prices of every node's choices and of every conversion between them.
        allowed: for each node, a mask over the rows of its table of choices.
    """

    name: str
    priced: Priced
    allowed: Masks

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh."""
        return self.priced.mesh

    @property
    def choices(self) -> Sequence[Ints]:
        """For each node, `(choices, axes)`."""
        return [node.choices for node in self.priced.nodes]

    @property
    def has_choices(self) -> bool:
        """True if every node has a choice left."""
        return all(mask.any() for mask in self.allowed)

    @classmethod
    def whole(cls, name: str, priced: Priced) -> Space:
        """All choices that are priced."""
        masks = [np.ones(len(node.choices), bool) for node in priced.nodes]
        return cls(name=name, priced=priced, allowed=masks)

    def among(self, masks: Masks) -> Space:
        """The choices that some masks allow, too."""
        return replace(self, allowed=[a & b for a, b in zip(self.allowed, masks, strict=True)])


@dataclass(frozen=True, kw_only=True, eq=False)
class TooLarge:
    """A space in which nothing fits: it is priced only if a message asks how much memory it lacks.

    Attributes:
        name, mesh, choices, allowed: as of `Space`.
        price: makes the prices.
    """

    name: str
    mesh: LogicalMesh
    choices: Sequence[Ints]
    allowed: Masks
    price: Callable[[], Priced]

    @functools.cached_property
    def priced(self) -> Priced:
        return self.price()

    @property
    def as_space(self) -> Space:
        """The same with prices."""
        return Space(name=self.name, priced=self.priced, allowed=self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraCosts:
    """Costs of chosen splits: the step time by `cost.evaluate`, and the peak memory of a device."""

    step_time_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntraSolution:
    """Chosen splits with a lower bound.

    Attributes:
        picked: the choices that were made.
        costs: of these choices.
        lower_bound_s: a lower bound on the step time of all choices of the space that fit in
            memory; 0 if nothing is proved.
        status: how the search ended, such as "optimal", "optimal within the gap" or "rounded".
    """

    picked: Picked
    costs: IntraCosts
    lower_bound_s: float
    status: str

    @property
    def step_time_s(self) -> float:
        """Step time under the choices, in seconds."""
        return self.costs.step_time_s

    @property
    def peak_bytes(self) -> float:
        """Peak memory of a device under the choices, in bytes."""
        return self.costs.peak_bytes


class AbstractSearch(abc.ABC):
    """A search of one space, in steps, so that a race can compare the bounds of several spaces
    before it completes any search.

    Methods are called in this order: `start`, `bound`, then `incumbent` and `improve`. `gave_up` is
    true if a limit on work ended the search.
    """

    lower_bound_s: float
    gave_up: bool

    @abc.abstractmethod
    def start(self) -> float | None:
        """A first lower bound in seconds; None if no choices are possible. May be called in another
        thread.
        """

    @abc.abstractmethod
    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The lower bound in seconds; None if nothing fits in memory. Work on the bound stops once
        it reaches `cutoff_s`.
        """

    @property
    @abc.abstractmethod
    def picked(self) -> Picked | None:
        """The best choices after `bound`, whether they fit in memory or not; None without any."""

    @abc.abstractmethod
    def incumbent(self) -> IntraSolution | None:
        """The best solution known after `bound` that fits in memory; None if there is none yet."""

    @abc.abstractmethod
    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """Complete the search: the best solution; None if nothing fits, or nothing takes less than
        `cutoff_s`.
        """

    @abc.abstractmethod
    def least_memory(self) -> Picked:
        """Choices that need little memory, for messages on how much memory a step lacks."""


class AbstractIntra(abc.ABC):
    """A way to split the operators of a step on one mesh. Frozen, pure and deterministic: no
    devices, clocks or files.

    A planner defines `name` and `solve`. Races between meshes, the pricing of layers and the
    solution of pipeline stages call `begin`, which by default returns a search that calls `solve`;
    a planner that knows bounds before solutions returns a search of its own.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name that plans and tables show."""

    @property
    def gathers_once(self) -> bool:
        """Whether casts of parameters are gathered once in a step; see `StagePlan`."""
        return False

    @abc.abstractmethod
    def solve(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
    ) -> IntraSolution | None:
        """The best solution of a space; None if nothing fits, or takes less than `ceiling_s`.

        Args:
            problem: the step, with what prices do not say: roles of arrays, number of
                micro-batches.
            memory_limit_bytes: the limit of each device; infinite if memory does not matter.
            ceiling_s: the step time of the incumbent, from another search.
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
        """A search in steps for what `solve` returns.

        Args:
            notes: a dictionary for all spaces of a problem, where a planner may keep what serves
                them all.
        """
        return SolvedAtOnce(
            self, problem, space, memory_limit_bytes=memory_limit_bytes, ceiling_s=ceiling_s
        )

    @property
    def ways_beside_tensor(self) -> int:
        """Of the devices of a pipeline's stage that do not split the batch, how many always split
        something else than weights, over hosts too.
        """
        return 1

    def stage_axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes of the mesh of a pipeline's stage with `shape[0]` devices
        that split only the batch and `shape[1]` others: first the axis of those, then the rest.
        """
        return tuple(zip(AXIS_NAMES[:2], shape, strict=True))

    def stage_choices(
        self, problem: Problem, mesh_shape: tuple[int, ...], data_axes: frozenset[int]
    ) -> list[Ints] | None:
        """For each node, the choices to price on the mesh of a pipeline's stage; an empty list if
        the planner does not use that mesh.

        None, the default, means that `data_axes` split only the batch, and the other axes split
        parameters as far as possible.
        """
        return None

    def as_allowed(self, priced: Priced) -> Priced:
        """Prices of the choices on the mesh of a pipeline's stage as this planner may use them:
        infinite for conversions that it must not take; by default as they are.
        """
        return priced

    @property
    def stage_imbalance(self) -> float:
        """The most by which the share that a pipeline's stage has of the compute may differ from
        its share of the devices; infinite by default.
        """
        return np.inf

    def coarser(self, *, relative_gap: float, node_limit: int) -> AbstractIntra:
        """This planner with at least this gap and at most this many branch-and-bound nodes, for
        answers that need not be exact; by default itself.
        """
        return self

    def required_profiles(self, problem: Problem) -> tuple[str, ...]:
        """Names of measurements that this planner needs and the problem's cluster lacks; none by
        default.
        """
        return ()

    @property
    def bound_holds_for(self) -> str:
        """The name of the plans among which bounds of this planner hold, if it considers only some
        of a space's; empty by default.
        """
        return ""

    @property
    def relative_gap(self) -> float:
        """The smallest improvement that is searched for, as a share of the step time."""
        return 0.0


class AbstractStepwise(AbstractIntra):
    """A planner whose `begin` returns a search of its own, which `solve` takes to its end."""

    @abc.abstractmethod
    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> AbstractSearch: ...

    def solve(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
    ) -> IntraSolution | None:
        search = self.begin(
            problem, space, memory_limit_bytes=memory_limit_bytes, ceiling_s=ceiling_s
        )
        return search.improve(ceiling_s) if search.bound() is not None else None


class AbstractRule(AbstractStepwise):
    """A planner that narrows what may be chosen; another, `rest`, decides among what is left."""

    rest: AbstractIntra

    @property
    def relative_gap(self) -> float:
        return self.rest.relative_gap

    def restrict(self, problem: Problem, space: Space) -> Space:
        """The choices of a space that follow the rule; all, where the space holds no others."""
        return space

    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> AbstractSearch:
        def begin(space: Space) -> AbstractSearch:
            limits = {"memory_limit_bytes": memory_limit_bytes, "ceiling_s": ceiling_s}
            return self.rest.begin(problem, space, **limits, notes=notes)

        ruled = self.restrict(problem, space)
        return begin(ruled) if ruled.has_choices else NotSearched(space, begin, None)

    def coarser(self, *, relative_gap: float, node_limit: int) -> Self:
        rest = self.rest.coarser(relative_gap=relative_gap, node_limit=node_limit)
        # Every rule is a dataclass.
        return cast(Self, replace(cast(Any, self), rest=rest))

    def required_profiles(self, problem: Problem) -> tuple[str, ...]:
        return self.rest.required_profiles(problem)


class SolvedAtOnce(AbstractSearch):
    """The search of a planner that solves in one call; `bound` makes that call."""

    def __init__(
        self,
        intra: AbstractIntra,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float,
    ) -> None:
        self.lower_bound_s, self.gave_up = 0.0, False
        self._intra, self._problem, self._space = intra, problem, space
        self._limit_bytes, self._ceiling_s = memory_limit_bytes, ceiling_s
        self._solution: IntraSolution | None = None
        self._is_solved = False

    def start(self) -> float | None:
        """Zero: no bound is known before `bound` solves."""
        return self.lower_bound_s

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        """The bound of the planner's solution; if there is none below the ceiling, the ceiling."""
        if not self._is_solved:
            self._solution = self._intra.solve(
                self._problem,
                self._space,
                memory_limit_bytes=self._limit_bytes,
                ceiling_s=self._ceiling_s,
            )
            self._is_solved = True
        if self._solution is None:
            return self._ceiling_s if np.isfinite(self._ceiling_s) else None
        self.lower_bound_s = self._solution.lower_bound_s
        return self.lower_bound_s

    @property
    def picked(self) -> Picked | None:
        """The choices of the solution."""
        return self._solution.picked if self._solution else None

    def incumbent(self) -> IntraSolution | None:
        """The solution."""
        return self._solution

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        """The solution, if it takes less than `cutoff_s`."""
        return self._solution if self._solution and self._solution.step_time_s < cutoff_s else None

    def least_memory(self) -> Picked:
        """The planner's choices without a memory limit; the first allowed ones if there are
        none.
        """
        free = self._intra.solve(self._problem, self._space, memory_limit_bytes=np.inf)
        if free:
            return free.picked
        picks = np.array([int(np.argmax(mask)) for mask in self._space.allowed], np.int64)
        return Picked(priced=self._space.priced, picks=picks)


class NotSearched(AbstractSearch):
    """A space that is not searched: nothing in it fits, or nothing is fast enough to be of use.

    Args:
        begin: begins the search, for messages on how much memory a step lacks.
        bound_s: a lower bound in seconds; None if nothing fits.
    """

    def __init__(
        self,
        space: Space | TooLarge,
        begin: Callable[[Space], AbstractSearch],
        bound_s: float | None,
    ) -> None:
        self.lower_bound_s, self.gave_up = bound_s or 0.0, False
        self._space, self._begin, self._bound_s = space, begin, bound_s

    def start(self) -> float | None:
        return self._bound_s

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        return self._bound_s

    @property
    def picked(self) -> Picked | None:
        return None

    def incumbent(self) -> IntraSolution | None:
        return None

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        return None

    def least_memory(self) -> Picked:
        """Those of the search that did not begin, for which the space is priced."""
        space = self._space
        return self._begin(space.as_space if isinstance(space, TooLarge) else space).least_memory()


def judge_picks(
    space: Space,
    picks: Ints,
    *,
    memory_limit_bytes: float,
    lower_bound_s: float = 0.0,
    status: str = "judged",
) -> IntraSolution | None:
    """Picks as a solution, with their costs; None if they do not fit in memory or cannot be run."""
    picked = Picked(priced=space.priced, picks=picks)
    peak_bytes = picked.memory.peak_bytes
    step_time_s = evaluate(picked, casts_once=picked.casts_fit(memory_limit_bytes)).total_s
    # The tolerance covers rounding between the judge's sums and a solver's.
    if peak_bytes > memory_limit_bytes * (1 + 1e-9) or not np.isfinite(step_time_s):
        return None
    costs = IntraCosts(step_time_s=step_time_s, peak_bytes=peak_bytes)
    return IntraSolution(picked=picked, costs=costs, lower_bound_s=lower_bound_s, status=status)
