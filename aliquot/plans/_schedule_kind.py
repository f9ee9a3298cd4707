"""The interface of schedules, and closed forms of their step time: a sum over stages plus weighted
maxima over stages.

Planners can search such a formula exactly, and evaluate it for any list of stages. A schedule
states it for arrays of any shape whose entries add up along the units of a chain: figures of
stages, or prefix sums over units.
"""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from ._schedule import Lists, Schedule, round_robin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


class StageTimes(Protocol):
    """Seconds of stages, or prefix sums of them over units; arrays of one shape.

    Attributes:
        forward_s, backward_s: passes of one micro-batch.
        weight_gradient_s: the part of `backward_s` whose results nothing needs before the update.
        exposed_s: the idle time that a stage adds to a zero-bubble pipeline while it fills and
            drains: `forward + input gradient - min(weight gradient, forward, input gradient)`.
        once_s: once in a step: gradient synchronisation that is not hidden, and the update.
    """

    @property
    def forward_s(self) -> Floats: ...
    @property
    def backward_s(self) -> Floats: ...
    @property
    def weight_gradient_s(self) -> Floats: ...
    @property
    def exposed_s(self) -> Floats: ...
    @property
    def once_s(self) -> Floats: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maximum:
    """A term `weight * max over stages of (sums + transfers * edge)`, where `edge` is the time of a
    transfer over the edge in front of the stage.

    If transfers overlap with compute, it is `weight * max over stages of max(sums, link * edge)`.
    """

    sums: Floats
    weight: float
    transfers: float = 0.0
    link: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedForm:
    """A schedule's step time: the sum over stages of `sums + transfers * edge`, plus the weighted
    `maxima`. For `edge` see `Maximum`.
    """

    sums: Floats
    transfers: float
    maxima: tuple[Maximum, ...]

    def parts_s(self, edges_s: Floats, *, overlaps: bool) -> tuple[Floats, tuple[Floats, ...]]:
        """The sum over stages, and the value of each maximum, unweighted. Stages lie along the last
        axis.

        Args:
            edges_s: for each stage the transfer over the edge in front of it, in one direction.
            overlaps: whether transfers between stages overlap with compute.
        """
        import numpy as np

        maxima = []
        for term in self.maxima:
            both = (
                np.maximum(term.sums, term.link * edges_s)
                if overlaps
                else term.sums + term.transfers * edges_s
            )
            maxima.append(np.asarray(both.max(-1)))
        return np.asarray((self.sums + self.transfers * edges_s).sum(-1)), tuple(maxima)

    def total_s(self, edges_s: Floats, *, overlaps: bool) -> Floats:
        """The step time, for stages along the last axis."""
        import numpy as np

        sums_s, maxima_s = self.parts_s(edges_s, overlaps=overlaps)
        return np.asarray(
            sums_s + sum(term.weight * value for term, value in zip(self.maxima, maxima_s))
        )


class Keeps(enum.StrEnum):
    """What determines, besides the number of micro-batches, how many of them a stage keeps between
    forward and backward. The fewer cases it distinguishes, the faster are searches over stages.
    """

    ALL = "every micro-batch"
    BEHIND = "the number of stages behind it"
    STAGES = "the number of all stages"
    PLACE = "its place and the number of all stages"


class AbstractScheduleKind(abc.ABC):
    """A schedule for any numbers of stages, micro-batches and submeshes. Frozen, without state.

    Attributes:
        name: its key in `SCHEDULES`, also used in plans and on the command line.
        trains: whether it has backward tasks; only such schedules are planned.
        interleaves: whether it runs several stages on each submesh. Otherwise planners give each
            stage its own.
        splits_backward: whether it defers gradients of weights.
        keeps: what `in_flight` depends on.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    interleaves: ClassVar[bool] = False
    splits_backward: ClassVar[bool] = False
    keeps: ClassVar[Keeps] = Keeps.PLACE

    @abc.abstractmethod
    def tasks(self, num_stages: int, num_micro_batches: int, num_submeshes: int) -> Lists:
        """The tasks of each submesh in order, with stages placed as `placement` says. All numbers
        are at least 1.
        """

    @abc.abstractmethod
    def closed_form(self, times: StageTimes, num_micro_batches: int, chunks: int = 1) -> ClosedForm:
        """The step time as a formula. Each schedule states its own, with t = forward + backward.

        All add the largest once-a-step time of any stage. Transfers over the edge in front of a
        stage, both ways, belong to this stage.

        Args:
            times: of stages, or of units as prefix sums.
            chunks: number of stages that each submesh runs.
        """

    def placement(self, num_stages: int, num_submeshes: int) -> tuple[int, ...]:
        """The submesh of each stage. The first stages are on submeshes 0, 1, ..., until each
        submesh has one.
        """
        return round_robin(num_stages, num_submeshes)

    def in_flight(
        self, num_stages: int, num_micro_batches: int, num_submeshes: int
    ) -> Sequence[int]:
        """The most micro-batches that each stage keeps between forward and backward, the running
        one included.
        """
        return _counted(self, num_stages, num_micro_batches, num_submeshes)


# Cached, because searches ask for the same schedules again and again.
@functools.lru_cache(maxsize=1024)
def _counted(
    kind: AbstractScheduleKind, num_stages: int, num_micro_batches: int, num_submeshes: int
) -> tuple[int, ...]:
    schedule = Schedule(
        name=kind.name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_submeshes=num_submeshes,
        lists=kind.tasks(num_stages, num_micro_batches, num_submeshes),
        placement=kind.placement(num_stages, num_submeshes),
    )
    return tuple(map(schedule.in_flight, range(num_stages)))
