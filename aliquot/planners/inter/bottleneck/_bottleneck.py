"""`Bottleneck`: stages by relief of the bottleneck, after Aceso."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....core import InfeasibleError, InputError, nearest
from ....cost import AbstractChain, ChainPlan
from ....plans import training_schedules
from ..._helper import HelperProcess
from .._base import (
    NO_LIMITS,
    AbstractInter,
    StageLimits,
    check_chains,
    check_num_stages,
    no_layout,
    starts_in,
)
from .._simulated import fastest, simulated
from ..grid import nothing_fits
from ._moves import Candidate, Neighbours, Variant
from ._relief import Relief


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck(AbstractInter):
    """Aceso's local search over stages: it begins with balanced stages, finds the one that is
    slowest or needs too much memory, and moves units, devices, degrees, recomputation or the
    micro-batch so that it is relieved.

    Stages take powers of two of a host's devices, or whole hosts. It proves no bound.

    Attributes:
        schedules: names of the schedules to choose from.
        num_stages: the number of stages (each chunk counts as one), or None for any.
        most_chunks: the most stages on one submesh, in interleaved schedules.
        max_steps: the most candidates from which moves are tried, over all chains.
        max_hops: the most moves in a row that need not improve.
        starts: number of balanced candidates to begin with, which differ in micro-batch, schedule
            or devices of their stages.
        simulated: the number of each schedule's best candidates that are simulated, and of the best
            with different devices; the fastest is the answer.

    Reference: G. Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
    Alleviation", EuroSys 2024.
    """

    schedules: tuple[str, ...] = ("1f1b", "zero-bubble", "interleaved-1f1b")
    num_stages: int | None = None
    most_chunks: int = 4
    max_steps: int = 200
    max_hops: int = 7
    starts: int = 10
    simulated: int = 3

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, got {value}"
            for name in (
                "num_stages",
                "most_chunks",
                "max_steps",
                "max_hops",
                "starts",
                "simulated",
            )
            if (value := getattr(self, name)) is not None and value < 1
        ]
        known = training_schedules()
        for name in self.schedules:
            if name not in known:
                faults.append(f"there is no schedule {name!r}: {nearest(name, known)}")
        if not self.schedules:
            faults.append(f"no schedule to choose from; known are {', '.join(known)}")
        if faults:
            raise InputError(f"Bottleneck cannot search: {'; '.join(faults)}.")

    method = "bottleneck"

    searches = True

    @property
    def asked_stages(self) -> int | None:
        return self.num_stages

    def check_limits(self, limits: StageLimits) -> None:
        """This planner supports all of them."""

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """`limits.faster_than_s` ends no search early."""
        schedules = (limits.schedule,) if limits.schedule else self.schedules
        num_stages = limits.num_stages or self.num_stages
        check_chains(chains)
        check_num_stages(chains[0], num_stages)
        # The smallest micro-batch first, as a move takes the next larger or smaller one.
        ordered = sorted(chains, key=lambda chain: -chain.num_micro_batches)
        variants = [
            Variant(number=k, chain=chain.under(schedule), schedule=schedule)
            for k, chain in enumerate(ordered)
            for schedule in schedules
        ]
        around = Neighbours(
            variants,
            most_stages=chains[0].num_units,
            most_chunks=self.most_chunks,
            num_stages=num_stages,
        )
        starts = starts_in(ordered, start, schedules, num_stages)
        relief = Relief(around)
        relief.run(
            starts=self.starts,
            max_steps=self.max_steps,
            max_hops=self.max_hops,
            begun=[candidate for plan in starts for candidate in _candidates(variants, plan)],
        )
        if not relief.scores and not starts:
            raise InfeasibleError(no_layout(chains[0], num_stages))
        ranked, plans = relief.ranked(), list(starts)
        # Counted for each schedule and once more for different devices, because closed forms err
        # differently for these.
        num_chosen, layouts = Counter[str](), dict[str, set[object]]()
        for candidate in ranked:
            schedule = variants[candidate.variant].schedule
            seen, layout = layouts.setdefault(schedule, set()), around.layout(candidate)
            is_new = layout not in seen and len(seen) < self.simulated
            is_among_first = num_chosen[schedule] < self.simulated
            if relief.scores[candidate].excess_bytes or not (is_new or is_among_first):
                continue
            num_chosen[schedule] += 1
            seen.add(layout)
            plans.append(relief.judged(candidate))
        best = fastest([simulated(ordered, plan) for plan in plans])
        if best is None:
            chain = variants[ranked[0].variant].chain
            if not np.isfinite(relief.scores[ranked[0]].excess_bytes):
                raise InfeasibleError(no_layout(chains[0], num_stages))
            raise nothing_fits([(relief.judged(ranked[0]), chain)], "pipeline that was tried")
        return replace(best, status="local search")


def _candidates(variants: Sequence[Variant], plan: ChainPlan) -> list[Candidate]:
    """A plan as a candidate, from which relief can go on; none if its stages do not lie on devices
    in order, or their units have options of their own.
    """
    devices = 0
    for stage in plan.stages:
        in_order = stage.first_device == devices % variants[0].chain.num_devices
        if not in_order or stage.unit_options:
            return []
        devices += variants[0].chain.options[stage.option].num_devices
    found = []
    for k, variant in enumerate(variants):
        if (
            variant.schedule == plan.schedule
            and variant.chain.num_micro_batches == plan.num_micro_batches
        ):
            found.append(
                Candidate(
                    variant=k,
                    options=tuple(stage.option for stage in plan.stages),
                    units=tuple(stage.last_unit - stage.first_unit for stage in plan.stages),
                    num_submeshes=plan.num_submeshes,
                )
            )
    return found
