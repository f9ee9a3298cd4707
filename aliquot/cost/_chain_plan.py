"""Lists of stages of a chain: their cost under a schedule, and why a list cannot be used.

`judge_stages` evaluates a schedule's closed form for any list of stages, whoever made it, with the
chain's own figures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ..core import format_bytes
from ..plans import make_schedule, schedule_kind
from ._chain_base import AbstractChain, StageChoice, StageFigures
from ._pipeline import StageCosts, simulate

Floats = NDArray[np.float64]
_SIMULATED = (
    "forward_s",
    "backward_s",
    "weight_gradient_s",
    "once_s",
    "transfer_s",
    "state_bytes",
    "working_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """Stages with their schedule, cost and lower bound.

    Attributes:
        stages, figures: one entry for each stage.
        num_submeshes: number of submeshes: that of stages, or fewer if stages are interleaved; the
            schedule places the stages on them.
        closed_form_s: step time by the schedule's closed form.
        step_time_s: step time by simulation if the plan was simulated, else by the closed form.
        lower_bound_s: lower bound on the closed form of all choices in the space named by
            `bound_holds_for`; None if none was proved.
        status: how the search ended.
    """

    stages: tuple[StageChoice, ...]
    figures: tuple[StageFigures, ...]
    schedule: str
    num_micro_batches: int
    num_submeshes: int
    closed_form_s: float
    step_time_s: float
    lower_bound_s: float | None = None
    bound_holds_for: str = ""
    status: str = "judged"

    @property
    def gap(self) -> float | None:
        """How far the closed form lies above the lower bound, relative to the bound."""
        return None if self.lower_bound_s is None else self.closed_form_s / self.lower_bound_s - 1

    @property
    def submesh_bytes(self) -> tuple[float, ...]:
        """For each submesh the memory of a device, at most: of interleaved stages, which run one at
        a time, the largest working memory counts.
        """
        if self.num_submeshes == len(self.stages):
            return tuple(figures.peak_bytes for figures in self.figures)
        kind = schedule_kind(self.schedule)
        placement = kind.placement(len(self.stages), self.num_submeshes)
        kept, working = [0.0] * self.num_submeshes, [0.0] * self.num_submeshes
        for figures, submesh in zip(self.figures, placement, strict=True):
            kept[submesh] += figures.state_bytes + figures.held_bytes
            working[submesh] = max(working[submesh], figures.working_bytes)
        return tuple(a + b for a, b in zip(kept, working, strict=True))

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(self.submesh_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Times:
    """Seconds of stages, for closed forms."""

    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    exposed_s: Floats
    once_s: Floats


def chain_in_flight(
    schedule: str, num_micro_batches: int, num_stages: int, num_submeshes: int
) -> Floats:
    """[num_stages], the most micro-batches in flight in each stage. Raises `InputError` for an
    unknown schedule.
    """
    kept = schedule_kind(schedule).in_flight(num_stages, num_micro_batches, num_submeshes)
    return np.asarray(kept, np.float64)


def judge_stages(
    chain: AbstractChain,
    stages: Sequence[StageChoice],
    schedule: str,
    *,
    num_submeshes: int | None = None,
) -> ChainPlan:
    """Evaluate the closed form of a schedule for given stages. Raises `InputError` for an unknown
    schedule.

    The stages are not checked: `find_stage_faults` does that, memory included.

    Args:
        num_submeshes: fewer than stages if these are interleaved; by default one for each.
    """
    chain = chain.under(schedule)
    submeshes = num_submeshes or len(stages)
    # Where stages are too few for as many on each submesh, the last submeshes have one less.
    chunks = -(-len(stages) // submeshes)
    kept = chain_in_flight(schedule, chain.num_micro_batches, len(stages), submeshes)
    figures = chain.quote(stages, kept.tolist(), chunks)
    times = _Times(
        **{f.name: np.array([getattr(row, f.name) for row in figures]) for f in fields(_Times)}
    )
    form = schedule_kind(schedule).closed_form(times, chain.num_micro_batches, chunks)
    edges_s = np.array([row.transfer_s for row in figures])
    step_s = float(form.total_s(edges_s, overlaps=chain.overlaps_transfers))
    return ChainPlan(
        stages=tuple(stages),
        figures=figures,
        schedule=schedule,
        num_micro_batches=chain.num_micro_batches,
        num_submeshes=submeshes,
        closed_form_s=step_s,
        step_time_s=step_s,
    )


def simulate_stages(chain: AbstractChain, plan: ChainPlan) -> tuple[ChainPlan, float]:
    """The plan with its step time by simulation, and the peak memory of its fullest device in the
    simulation.
    """
    seconds, peak_bytes = _simulated(
        plan.figures,
        plan.schedule,
        plan.num_micro_batches,
        plan.num_submeshes,
        chain.overlaps_transfers,
    )
    return replace(plan, step_time_s=seconds), peak_bytes


# Searches under other limits and from other starts propose the same stages again.
@functools.lru_cache(maxsize=256)
def _simulated(
    figures: tuple[StageFigures, ...],
    schedule: str,
    num_micro_batches: int,
    num_submeshes: int,
    overlaps_transfers: bool,
) -> tuple[float, float]:
    """Step time and peak memory of stages in the simulation."""
    costs = {name: np.array([getattr(f, name) for f in figures]) for name in _SIMULATED}
    # Figures count all micro-batches in flight; the simulation takes the bytes of one.
    kept = np.array([f.held_bytes / f.in_flight for f in figures])
    times = simulate(
        make_schedule(schedule, len(figures), num_micro_batches, num_submeshes),
        StageCosts(
            forward_s=costs["forward_s"],
            backward_input_s=costs["backward_s"] - costs["weight_gradient_s"],
            backward_weight_s=costs["weight_gradient_s"],
            update_s=costs["once_s"],
            # The first stage has no edge in front of it.
            transfer_s=costs["transfer_s"][1:],
            state_bytes=costs["state_bytes"],
            in_flight_bytes=kept,
            working_bytes=costs["working_bytes"],
            overlaps_transfers=overlaps_transfers,
        ),
    )
    return times.step_time_s, float(times.peak_bytes.max())


def find_stage_faults(
    chain: AbstractChain,
    stages: Sequence[StageChoice],
    schedule: str,
    *,
    num_submeshes: int | None = None,
    check_memory: bool = True,
) -> tuple[str, ...]:
    """Every reason why stages cannot be used: units, options, devices; one sentence each.

    Memory is checked last, only if nothing else is wrong and `check_memory` is set.
    """
    faults = []
    # Devices are checked only if every option exists, since the option gives their number.
    known = [s for s in stages if 0 <= s.option < len(chain.options)]
    faults += [
        f"there is no option {s.option}; there are {len(chain.options)}"
        for s in stages
        if s not in known
    ]
    faults += _faulty_units(chain, stages)
    submeshes = num_submeshes or len(stages)
    enough = 1 <= submeshes <= len(stages)
    if not enough:
        faults.append(f"{len(stages)} stages cannot be dealt out to {submeshes} submeshes")
    if len(known) == len(stages) and enough:
        faults += _faulty_devices(
            chain, stages, schedule_kind(schedule).placement(len(stages), submeshes)
        )
    if faults:
        return tuple(faults)
    faults += [f"stage {k} {fault}" for k, s in enumerate(stages) if (fault := chain.find_fault(s))]
    if check_memory and not faults:
        plan = judge_stages(chain, stages, schedule, num_submeshes=num_submeshes)
        what = "stage" if submeshes == len(stages) else "submesh"
        faults += [
            f"{what} {k} needs {format_bytes(needed)} of {format_bytes(chain.memory_limit_bytes)}"
            " on each device"
            for k, needed in enumerate(plan.submesh_bytes)
            if needed > chain.memory_limit_bytes
        ]
    return tuple(faults)


def _faulty_units(chain: AbstractChain, stages: Sequence[StageChoice]) -> list[str]:
    faults, end = [], 0
    for k, s in enumerate(stages):
        if s.first_unit >= s.last_unit:
            faults.append(f"stage {k} has no units ([{s.first_unit}, {s.last_unit}))")
        if s.first_unit > end:
            faults.append(f"units {end} to {s.first_unit - 1} are in no stage before stage {k}")
        elif s.first_unit < end:
            faults.append(
                f"stage {k} begins at unit {s.first_unit}, but units before {end} are taken"
            )
        end = max(end, s.last_unit)
    if end != chain.num_units:
        faults.append(f"the stages end at unit {end}, the chain at {chain.num_units}")
    return faults


def _faulty_devices(
    chain: AbstractChain, stages: Sequence[StageChoice], placement: Sequence[int]
) -> list[str]:
    faults = []
    devices = [(s.first_device, chain.options[s.option].num_devices) for s in stages]
    users = np.zeros(chain.num_devices, np.int64)
    for k, s in enumerate(stages):
        size = chain.options[s.option].num_devices
        where = f"stage {k} on devices {s.first_device} to {s.first_device + size - 1}"
        if s.first_device < 0 or s.first_device + size > chain.num_devices:
            faults.append(f"{where} reaches outside the cluster's {chain.num_devices}")
        elif not chain.fits_at(s.first_device, size):
            faults.append(f"{where} straddles hosts of {chain.devices_per_host}")
        # Stages that share a submesh count as one user of its devices.
        elif placement[k] == k:
            users[s.first_device : s.first_device + size] += 1
        elif devices[k] != devices[placement[k]]:
            faults.append(
                f"{where} should be on those of stage {placement[k]}, which it is interleaved with"
            )
    faults += [f"device {d} is used by {users[d]} stages" for d in np.flatnonzero(users > 1)]
    if not faults and (unused := int((users == 0).sum())):
        faults.append(f"{unused} of the {chain.num_devices} devices are in no stage")
    return faults
