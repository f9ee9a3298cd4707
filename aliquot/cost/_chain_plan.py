"""Stages of a chain: what a list of them costs under a schedule, and what is wrong with it.

The closed forms are sums over stages plus weighted maxima over stages, each of sums over units: a shape that planners
search exactly and that `judge_stages` evaluates for any list of stages, whoever made it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, format_bytes, nearest
from ..plans import interleaved_in_flight, make_schedule
from ._chain import Chain, Stretches
from ._pipeline import StageCosts, simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SIMULATED = (
    "forward_s",
    "backward_s",
    "weight_gradient_s",
    "once_s",
    "transfer_s",
    "state_bytes",
    "working_bytes",
)
CHAIN_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """The units [first_unit, last_unit) under an option, on consecutive devices from `first_device`."""

    first_unit: int
    last_unit: int
    option: int
    first_device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What one stage costs: seconds of one micro-batch (`once_s`: of a step), bytes per device.

    `transfer_s` is that of the edge in front of it, in one direction; `in_flight` how many micro-batches it keeps at most;
    `peak_bytes` what a device needs all of whose chunks are like this one, if there are several.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    once_s: float
    transfer_s: float
    in_flight: float
    state_bytes: float
    held_bytes: float
    working_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """Stages with their schedule and what is known about them.

    Attributes:
        stages, figures: one entry each.
        num_submeshes: stage k runs on submesh k mod this; the number of stages unless they are interleaved.
        closed_form_s: step time by the schedule's closed form.
        step_time_s: the best knowledge of it: simulated where that was done, else the closed form.
        lower_bound_s: no choice of the space named by `bound_holds_for` has a smaller closed form; None: nothing proved.
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
        """How far the closed form lies above the bound, relative to it."""
        return None if self.lower_bound_s is None else self.closed_form_s / self.lower_bound_s - 1

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(figures.peak_bytes for figures in self.figures)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maximum:
    """A term `weight_s * max over stages of (sums, plus transfers)`; `sums` are prefix sums of shape [O, U + 1].

    `transfers` times the edge's transfer are added to each stage's, or, where transfers overlap with computing, `link`
    times it compete with them for the maximum.
    """

    sums: Floats
    weight: float
    transfers: float = 0.0
    link: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleForm:
    """A schedule's step time: the sum over stages of `sums` and `transfers` times each edge's, plus its maxima."""

    sums: Floats
    transfers: float
    maxima: tuple[Maximum, ...]


def schedule_form(schedule: str, stretches: Stretches, num_micro_batches: int, chunks: int = 1) -> ScheduleForm:
    """The closed form of a schedule's step time, with t = forward + backward of a stage and M micro-batches.

    * gpipe: sum t + (M - 1) (max forward + max backward): all forward passes stream through, then all backward ones.
    * 1f1b: sum t + (M - 1) max t.
    * zero-bubble (ZB-H1): sum e + max (M t - e), where e (`exposed_s`) is what a stage adds to the bubble: t less twice
      the weight gradient, which fills gaps while the pipeline fills and while it drains, but never more than fills them.
      With equal stages, M t + (S - 1) (forward + input gradient - weight gradient).
    * interleaved-1f1b with v chunks on each submesh: sum t / v + (M v - 1) max t over chunks. With equal chunks, the
      bubble is 1/v of that of 1f1b. Chunks that differ are taken to be as slow as the slowest, which is pessimistic.

    To each is added the largest once-a-step time. Transfers over the edge in front of a stage, both ways, belong to it.

    Reference: Huang et al., GPipe, 2019; Narayanan et al., Efficient large-scale language model training on GPU clusters
        using Megatron-LM, 2021, section 2.2; Qi et al., Zero bubble pipeline parallelism, 2023, section 2 and table 2.
    """
    times = stretches.forward_s + stretches.backward_s
    later = num_micro_batches - 1.0
    once = Maximum(sums=stretches.once_s, weight=float(chunks))
    match schedule:
        case "gpipe":
            passes = [
                Maximum(sums=sums, weight=later, transfers=1, link=1)
                for sums in (stretches.forward_s, stretches.backward_s)
            ]
            return ScheduleForm(sums=times, transfers=2, maxima=(*passes, once))
        case "1f1b":
            return ScheduleForm(
                sums=times, transfers=2, maxima=(Maximum(sums=times, weight=later, transfers=2, link=1), once)
            )
        case "zero-bubble":
            heaviest = Maximum(
                sums=num_micro_batches * times - stretches.exposed_s, weight=1, transfers=2 * later, link=later
            )
            return ScheduleForm(sums=stretches.exposed_s, transfers=2, maxima=(heaviest, once))
        case "interleaved-1f1b":
            slowest = Maximum(sums=times, weight=num_micro_batches * chunks - 1.0, transfers=2, link=1)
            return ScheduleForm(sums=times / chunks, transfers=2 / chunks, maxima=(slowest, once))
    raise _unknown(schedule)


def _unknown(schedule: str) -> InputError:
    return InputError(f"Unknown schedule {schedule!r}: {nearest(schedule, CHAIN_SCHEDULES)}")


def chain_in_flight(schedule: str, num_micro_batches: int, num_stages: int, num_submeshes: int) -> Floats:
    """[num_stages], the most micro-batches that each stage keeps between forward and backward, the running one included.

    All under gpipe; one for itself and each stage behind it under 1f1b; under zero-bubble as many as the first stage of
    1f1b, as later stages put off their weight gradients; interleaved stages as their lists of tasks say.

    Reference: Narayanan et al., 2021, section 2.2; Qi et al., 2023, section 2.2.
    """
    kept: Ints
    if schedule not in CHAIN_SCHEDULES:
        raise _unknown(schedule)
    match schedule:
        case "gpipe":
            kept = np.full(num_stages, num_micro_batches)
        case "zero-bubble":
            kept = np.full(num_stages, num_stages)
        case "1f1b":
            kept = np.arange(num_stages, 0, -1)
        case _:
            kept = np.array(_interleaved(num_stages, num_micro_batches, num_submeshes))
    return np.minimum(kept, num_micro_batches).astype(np.float64)


# Searches ask for the same ones again and again.
_interleaved = functools.lru_cache(maxsize=1024)(interleaved_in_flight)


def judge_stages(
    chain: Chain,
    stages: Sequence[StageChoice],
    schedule: str,
    *,
    num_submeshes: int | None = None,
    tables: Stretches | None = None,
) -> ChainPlan:
    """What stages cost under a schedule, by its closed form. Raises `InputError` for an unknown schedule.

    The stages are taken as they are: `find_stage_faults` tells what is wrong with them, memory included.

    Args:
        num_submeshes: fewer than stages where these are interleaved.
        tables: of the chain, where they are known.
    """
    tables = tables or Stretches.of(chain)
    count = len(stages)
    submeshes = num_submeshes or count
    chunks = count // submeshes
    form = schedule_form(schedule, tables, chain.num_micro_batches, chunks)
    first, last, option = _columns(stages)
    sums_s, maxima_s = measure_form(chain, form, stages)
    step_s = sums_s + sum(term.weight * value for term, value in zip(form.maxima, maxima_s))

    def of(sums: Floats) -> Floats:
        return np.asarray(sums[option, last] - sums[option, first])

    kept = chain_in_flight(schedule, chain.num_micro_batches, count, submeshes)
    columns: dict[str, Floats] = {
        "forward_s": of(tables.forward_s),
        "backward_s": of(tables.backward_s),
        "weight_gradient_s": of(tables.weight_gradient_s),
        "once_s": of(tables.once_s),
        "transfer_s": _edges_s(chain, stages),
        "in_flight": kept,
        "state_bytes": of(tables.state_bytes),
        "held_bytes": kept * of(tables.in_flight_bytes),
        "working_bytes": tables.working_bytes(option, first, last),
        "peak_bytes": tables.stage_bytes(option, first, last, kept, chunks),
    }
    return ChainPlan(
        stages=tuple(stages),
        figures=tuple(
            StageFigures(**{name: float(column[k]) for name, column in columns.items()}) for k in range(count)
        ),
        schedule=schedule,
        num_micro_batches=chain.num_micro_batches,
        num_submeshes=submeshes,
        closed_form_s=float(step_s),
        step_time_s=float(step_s),
    )


def measure_form(chain: Chain, form: ScheduleForm, stages: Sequence[StageChoice]) -> tuple[float, tuple[float, ...]]:
    """The sum of a closed form for these stages, and the value of each of its maxima, not weighted."""
    first, last, option = _columns(stages)
    edges = _edges_s(chain, stages)
    maxima = []
    for term in form.maxima:
        values = term.sums[option, last] - term.sums[option, first]
        both = np.maximum(values, term.link * edges) if chain.overlaps_transfers else values + term.transfers * edges
        maxima.append(float(both.max()))
    sums = form.sums[option, last] - form.sums[option, first] + form.transfers * edges
    return float(sums.sum()), tuple(maxima)


def _columns(stages: Sequence[StageChoice]) -> tuple[Ints, Ints, Ints]:
    """First units, last units and options."""
    rows = np.array([(s.first_unit, s.last_unit, s.option) for s in stages], np.int64)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _edges_s(chain: Chain, stages: Sequence[StageChoice]) -> Floats:
    """For each stage the transfer over the edge in front of it, in one direction; none in front of the first."""
    edges = np.zeros(len(stages))
    for k in range(1, len(stages)):
        ends = [_devices(chain, stage) for stage in stages[k - 1 : k + 1]]
        hosts = {(start + d) // chain.devices_per_host for start, size in ends for d in (0, size - 1)}
        sender, receiver = (size for _, size in ends)
        edges[k] = chain.transfer_s(chain.boundary_bytes[stages[k].first_unit - 1], sender, receiver, len(hosts) > 1)
    return edges


def simulate_stages(chain: Chain, plan: ChainPlan) -> tuple[ChainPlan, float]:
    """A plan with its step time by simulation, and the memory that its fullest device needs in it."""
    costs = {name: np.array([getattr(f, name) for f in plan.figures]) for name in _SIMULATED}
    kept = np.array([f.held_bytes / f.in_flight for f in plan.figures])
    times = simulate(
        make_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches, plan.num_submeshes),
        StageCosts(
            forward_s=costs["forward_s"],
            backward_input_s=costs["backward_s"] - costs["weight_gradient_s"],
            backward_weight_s=costs["weight_gradient_s"],
            update_s=costs["once_s"],
            transfer_s=costs["transfer_s"][1:],
            state_bytes=costs["state_bytes"],
            in_flight_bytes=kept,
            working_bytes=costs["working_bytes"],
            overlaps_transfers=chain.overlaps_transfers,
        ),
    )
    return replace(plan, step_time_s=times.step_time_s), float(times.peak_bytes.max())


def find_stage_faults(
    chain: Chain,
    stages: Sequence[StageChoice],
    schedule: str,
    *,
    num_submeshes: int | None = None,
    check_memory: bool = True,
    tables: Stretches | None = None,
) -> tuple[str, ...]:
    """Every reason why stages cannot be used: units, options, devices; one sentence each.

    Memory is looked at where nothing else is wrong, unless it need not be.
    """
    faults = []
    known = [s for s in stages if 0 <= s.option < len(chain.options)]
    faults += [f"there is no option {s.option}; there are {len(chain.options)}" for s in stages if s not in known]
    faults += _faulty_units(chain, stages)
    submeshes = num_submeshes or len(stages)
    if not stages or len(stages) % submeshes:
        faults.append(f"{len(stages)} stages cannot be dealt out to {submeshes} submeshes equally")
    if len(known) == len(stages) and len(stages) % submeshes == 0:
        faults += _faulty_devices(chain, stages, submeshes)
    if faults:
        return tuple(faults)
    tables = tables or Stretches.of(chain)
    ends = tables.last_end
    for k, s in enumerate(stages):
        if ends[s.option, s.first_unit] < s.last_unit:
            name, unit = chain.options[s.option].name, chain.unit_names[ends[s.option, s.first_unit]]
            faults.append(f"stage {k} cannot run {unit} with option {name!r}")
    if check_memory and not faults:
        figures = judge_stages(chain, stages, schedule, num_submeshes=num_submeshes, tables=tables).figures
        faults += [
            f"stage {k} needs {format_bytes(f.peak_bytes)} of {format_bytes(chain.memory_limit_bytes)} on each device"
            for k, f in enumerate(figures)
            if f.peak_bytes > chain.memory_limit_bytes
        ]
    return tuple(faults)


def _faulty_units(chain: Chain, stages: Sequence[StageChoice]) -> list[str]:
    faults, end = [], 0
    for k, s in enumerate(stages):
        if s.first_unit >= s.last_unit:
            faults.append(f"stage {k} has no units ([{s.first_unit}, {s.last_unit}))")
        if s.first_unit > end:
            faults.append(f"units {end} to {s.first_unit - 1} are in no stage before stage {k}")
        elif s.first_unit < end:
            faults.append(f"stage {k} begins at unit {s.first_unit}, but units before {end} are taken")
        end = max(end, s.last_unit)
    if end != chain.num_units:
        faults.append(f"the stages end at unit {end}, the chain at {chain.num_units}")
    return faults


def _faulty_devices(chain: Chain, stages: Sequence[StageChoice], num_submeshes: int) -> list[str]:
    faults = []
    users = np.zeros(chain.num_devices, np.int64)
    for k, s in enumerate(stages):
        size = chain.options[s.option].num_devices
        where = f"stage {k} on devices {s.first_device} to {s.first_device + size - 1}"
        if s.first_device < 0 or s.first_device + size > chain.num_devices:
            faults.append(f"{where} reaches outside the cluster's {chain.num_devices}")
        elif not chain.fits_at(s.first_device, size):
            faults.append(f"{where} straddles hosts of {chain.devices_per_host}")
        elif k < num_submeshes:
            users[s.first_device : s.first_device + size] += 1
        elif (s.first_device, size) != _devices(chain, stages[k % num_submeshes]):
            faults.append(f"{where} should be on those of stage {k % num_submeshes}, which it is interleaved with")
    faults += [f"device {d} is used by {users[d]} stages" for d in np.flatnonzero(users > 1)]
    if not faults and (unused := int((users == 0).sum())):
        faults.append(f"{unused} of the {chain.num_devices} devices are in no stage")
    return faults


def _devices(chain: Chain, stage: StageChoice) -> tuple[int, int]:
    return stage.first_device, chain.options[stage.option].num_devices
