"""`Fixed`: the splits of data parallelism or of a stage of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....core import InputError
from ....cost import Problem
from .._base import AbstractIntra, AbstractRule, Space
from ..ilp import ILP
from ._restrict import batch_restriction, kinds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(AbstractRule):
    """Split the batch over all axes, and parameters and states as a stage of ZeRO does; another
    planner decides the rest.

    Attributes:
        zero_stage: 0 replicates everything but the batch (data parallelism), 2 splits optimizer
            state and gradients, 3 parameters too.
        gathers_once: whether stage 2 also splits parameters of which the step reads casts to a
            narrower type, and gathers these casts once in a step; see `StagePlan`.
        first_shard_axis: ZeRO splits over this mesh axis and those after it; 1 replicates over the
            first axis.
        rest: the planner of all other choices, such as those of temporary values of the update.
    """

    zero_stage: int = 0
    gathers_once: bool = False
    first_shard_axis: int = 0
    rest: AbstractIntra = field(default_factory=ILP)

    def __post_init__(self) -> None:
        if self.zero_stage not in (0, 2, 3):
            raise InputError(
                f"zero_stage={self.zero_stage}: pass 0 for data parallelism, 2 or 3 for ZeRO."
            )

    name = "fixed"

    def sharded(self, problem: Problem) -> frozenset[int]:
        """Nodes that it splits over its shard axes as far as they can be."""
        return kinds_of(problem).split_by_zero(self.zero_stage, gathers_once=self.gathers_once)

    def restrict(self, problem: Problem, space: Space) -> Space:
        """The choices of a space that follow the rule.

        Raises:
            InputError: the batch cannot be split over all devices.
        """
        shard_axes = frozenset(range(self.first_shard_axis, len(space.priced.axis_sizes)))
        rule = batch_restriction(
            problem,
            space.priced,
            kinds_of(problem),
            zero_stage=self.zero_stage,
            gathers_once=self.gathers_once,
            shard_axes=shard_axes,
        )
        return space.among(rule)
