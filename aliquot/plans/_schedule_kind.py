"""The interface of schedules."""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Sequence
from typing import ClassVar

from ._closed_form import ClosedForm, StageTimes
from ._schedule import Lists, Schedule, round_robin


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
    return tuple(schedule.in_flight(stage) for stage in range(num_stages))
