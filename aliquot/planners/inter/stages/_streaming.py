"""`Streaming`: the stages with the least time between two calls that follow one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ....core import InputError
from ....cost import AbstractChain, Chain, ChainPlan, judge_stages, simulate_stages
from ..._helper import HelperProcess
from .._base import NO_LIMITS, AbstractInter, StageLimits, check_chains
from ._solve import StageDP

# So many that filling and draining the pipeline, once for all of them, hardly counts.
_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(AbstractInter):
    """Stages for a function without gradients whose calls follow one another: the first stage takes
    the next call as soon as it has done its part of this one.

    These are the stages that `inter` finds best for one call of 64 times as many micro-batches of
    the same size: the slowest stage then decides, and not the way through all of them. The step
    time of the answer is that of a single call.

    Attributes:
        inter: finds stages for their step time.
    """

    inter: AbstractInter = field(default_factory=lambda: StageDP(schedules=("1f1b",)))

    @property
    def asked_stages(self) -> int | None:
        return self.inter.asked_stages

    def for_one_search(self) -> AbstractInter:
        return replace(self, inter=self.inter.for_one_search())

    def check_limits(self, limits: StageLimits) -> None:
        self.inter.check_limits(limits)

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """`start` is ignored, as it was found for another aim.

        Raises:
            InputError: a chain whose number of micro-batches cannot be changed.
        """
        check_chains(chains)
        longer: list[AbstractChain] = []
        for chain in chains:
            if not isinstance(chain, Chain):
                raise InputError(
                    f"Streaming plans chains of layers, and this one is a {type(chain).__name__}:"
                    " its costs hold for one number of micro-batches. Use StageDP."
                )
            longer.append(replace(chain, num_micro_batches=_CALLS * chain.num_micro_batches))
        # A time for one call bounds nothing here.
        found = self.inter.solve(
            longer, limits=replace(limits, faster_than_s=math.inf), helper=helper
        )
        count = found.num_micro_batches // _CALLS
        (chain,) = (c for c in chains if c.num_micro_batches == count)
        plan = judge_stages(chain, found.stages, found.schedule, num_submeshes=found.num_submeshes)
        return simulate_stages(chain, plan)[0]
