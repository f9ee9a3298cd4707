"""`ManualStages`: stages that a user gives, checked and priced like those of any planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core import InfeasibleError, InputError, PlanMismatchError, nearest
from ...cost import (
    AbstractChain,
    ChainPlan,
    StageChoice,
    chain_in_flight,
    find_stage_faults,
    judge_stages,
    simulate_stages,
)
from ...plans import GIVEN_LAYOUT, SCHEDULES, training_schedules
from .._helper import HelperProcess
from ._base import NO_LIMITS, AbstractInter, StageLimits, check_chains, proposed

_ASKED = "these stages cannot be used"
_ADVICE = (
    "Stages take [first, last) units in order, every device once, and a submesh lies in one host or"
    " is whole hosts."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualStages(AbstractInter):
    """Stages as given: for each its units and its option, and optionally the first device.

    Attributes:
        boundaries: for each stage its units [first, last).
        options: for each stage the name of an option, or its position among the chain's.
        first_devices: for each stage, its first device; None puts submeshes one after the other.
        schedule: the name of the pipeline's schedule.
        num_submeshes: fewer than stages if these are interleaved; None for as many as stages.
        num_micro_batches: selects one of the chains; None takes the fastest.
    """

    boundaries: tuple[tuple[int, int], ...]
    options: tuple[str | int, ...]
    first_devices: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    num_submeshes: int | None = None
    num_micro_batches: int | None = None

    def __post_init__(self) -> None:
        faults = []
        schedules = training_schedules()
        if self.schedule not in schedules:
            faults.append(
                f"unknown schedule {self.schedule!r}: {nearest(self.schedule, schedules)}"
            )
        for name in ("options", "first_devices"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.boundaries):
                faults.append(
                    f"{len(self.boundaries)} stages have {len(values)} {name.replace('_', ' ')}"
                )
        if self.num_submeshes is not None and self.num_submeshes < 1:
            faults.append(f"{self.num_submeshes} submeshes were asked for; there is at least 1")
        shared = self.num_submeshes not in (None, len(self.boundaries))
        if shared and self.schedule in schedules and not SCHEDULES[self.schedule].interleaves:
            interleaved = " or ".join(name for name in schedules if SCHEDULES[name].interleaves)
            faults.append(
                f"schedule {self.schedule!r} runs each stage on a submesh of its own; try"
                f" {interleaved}"
            )
        if faults:
            raise PlanMismatchError(faults, asked=_ASKED, advice=_ADVICE)

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """The stages are given; `start` is ignored.

        Raises:
            PlanMismatchError: Units left out or in two stages, devices used twice or beyond the
                cluster, unknown options.
            InfeasibleError: Only memory is short; names each stage that has too little.
        """
        self.check_limits(limits)
        check_chains(chains)
        candidates = [c for c in chains if self.num_micro_batches in (None, c.num_micro_batches)]
        if not candidates:
            counts = ", ".join(str(c.num_micro_batches) for c in chains)
            raise InputError(
                f"{self.num_micro_batches} micro-batches were asked for; there are chains for"
                f" {counts}."
            )
        plans: list[ChainPlan] = []
        too_large: list[tuple[float, AbstractChain, tuple[str, ...]]] = []
        for chain in candidates:
            stages = self._stages(chain)
            # Other faults first: memory can only be computed for stages that can run.
            if faults := find_stage_faults(
                chain, stages, self.schedule, num_submeshes=self.num_submeshes, check_memory=False
            ):
                raise PlanMismatchError(faults, asked=_ASKED, advice=_ADVICE)
            plan = judge_stages(chain, stages, self.schedule, num_submeshes=self.num_submeshes)
            faults = find_stage_faults(
                chain, stages, self.schedule, num_submeshes=self.num_submeshes
            )
            if faults:
                too_large.append((plan.peak_bytes, chain, faults))
            else:
                plans.append(simulate_stages(chain, plan)[0])
        if not plans:
            peak_bytes, chain, faults = min(too_large, key=lambda entry: entry[0])
            listed = "".join(f"\n  - {fault}" for fault in faults)
            raise InfeasibleError(
                f"These stages do not fit, with {chain.num_micro_batches} micro-batches:{listed}\n"
                "  Move units to stages with room, or choose options that recompute or split more,"
                " or more micro-batches.",
                required_bytes=int(peak_bytes),
                available_bytes=int(chain.memory_limit_bytes),
            )
        return replace(min(plans, key=lambda plan: plan.step_time_s), status=GIVEN_LAYOUT)

    def _stages(self, chain: AbstractChain) -> list[StageChoice]:
        names = [option.name for option in chain.options]
        faults = []
        for k, o in enumerate(self.options):
            if isinstance(o, str) and o not in names:
                faults.append(f"stage {k} has an unknown option {o!r}: {nearest(o, names)}")
        faults += [
            f"stage {k} has option {o}, but there are {len(names)}, from 0 on"
            for k, o in enumerate(self.options)
            if not isinstance(o, str) and not 0 <= o < len(names)
        ]
        if faults:
            raise PlanMismatchError(faults, asked=_ASKED, advice=_ADVICE)
        options = [names.index(o) if isinstance(o, str) else o for o in self.options]
        firsts = self.first_devices or self._one_behind_the_other(
            [chain.options[o].num_devices for o in options]
        )
        stages = [
            StageChoice(first_unit=i, last_unit=j, option=o, first_device=d)
            for (i, j), o, d in zip(self.boundaries, options, firsts)
        ]
        # Options of units can be chosen only if all stages are possible; `solve` reports the
        # faults.
        count, submeshes = len(stages), self.num_submeshes or len(stages)
        whole = stages and all(0 <= s.first_unit < s.last_unit <= chain.num_units for s in stages)
        if not whole or count < submeshes:
            return stages
        in_flight = chain_in_flight(
            self.schedule, chain.num_micro_batches, count, submeshes
        ).tolist()
        chosen = []
        for stage, kept in zip(stages, in_flight):
            # The fastest options for its units.
            choice = proposed(
                chain,
                stage.option,
                stage.first_unit,
                stage.last_unit,
                first_device=stage.first_device,
                in_flight=kept,
                chunks=-(-count // submeshes),
            )
            chosen.append(choice or stage)
        return chosen

    def _one_behind_the_other(self, sizes: list[int]) -> list[int]:
        submeshes = self.num_submeshes or len(sizes)
        placement = SCHEDULES[self.schedule].placement(len(sizes), submeshes)
        # Interleaved stages take the devices of the first stage on their submesh.
        return [sum(sizes[:place]) for place in placement]
