"""`Chain`: a step as a sequence of units, where a stage costs the sum of its units.

Only working memory does not add up: a stage needs the maximum over its units, and all that they
recompute. A chain holds the figures of single units; `PrefixSums` derives those of any stretch of
units in constant time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cluster import Link
from ..core import InputError
from ..plans import ClosedForm, schedule_kind
from ._chain_base import (
    AbstractChain,
    StageChoice,
    StageColumns,
    StageFigures,
    StageMemory,
    StageOption,
)
from ._transfers import transfer_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NOT_GIVEN: Floats = np.zeros(0)
# Figures of each unit with each option.
UNIT_FIGURES = (
    "forward_s",
    "backward_s",
    "weight_gradient_s",
    "once_s",
    "state_bytes",
    "in_flight_bytes",
    "deferred_bytes",
    "working_bytes",
    "recomputed_bytes",
)
_SUMMED = (
    "forward_s",
    "backward_s",
    "weight_gradient_s",
    "exposed_s",
    "once_s",
    "state_bytes",
    "in_flight_bytes",
    "recomputed_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain(AbstractChain):
    """Units in order, with the costs of each under every option, for one number of micro-batches.

    Arrays of shape [U, O] hold a figure for each unit and option, per device where they are bytes.
    An option that cannot run a unit has infinite entries there.

    Attributes:
        unit_names: U names, such as "layers[3]".
        options: O ways to run a stage.
        num_micro_batches: number of micro-batches in a step.
        forward_s, backward_s: time of one micro-batch's passes.
        weight_gradient_s: the part of `backward_s` whose results nothing needs before the update.
        once_s: time spent once in a step: gradient synchronisation that is not hidden, and the
            update.
        state_bytes: parameters, gradients, optimizer state.
        in_flight_bytes: arrays that one micro-batch keeps from its forward to its backward pass.
        working_bytes: needed only while the unit runs; a stage needs the maximum over its units.
        deferred_bytes: arrays that one micro-batch keeps for its weight gradients in a schedule
            that defers these; by default `in_flight_bytes`.
        recomputed_bytes: arrays that the backward pass recomputes, while a task of the stage runs:
            a stage needs the sum over its units; by default none.
        boundary_bytes: [U], bytes of one micro-batch that cross a cut after the unit in one
            direction, summed over all devices; the mean of both directions where these differ.
            The last entry is not used.
        memory_limit_bytes: memory that a plan may use on each device.
        num_hosts, devices_per_host: size of the cluster.
        intra, inter: links of a device inside its host, and of a whole host to the others.
        overlaps_transfers: whether transfers between stages overlap with compute. If not, the
            transfers over the edge in front of a stage, in both directions, add to the time that
            the stage takes for each micro-batch.
        most_imbalance: the most by which the share that a stage has of the compute, as its option
            runs it, may differ from its share of the devices: with 0.5 neither exceeds 1.5 times
            the other.
    """

    unit_names: tuple[str, ...]
    options: tuple[StageOption, ...]
    num_micro_batches: int
    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    once_s: Floats
    state_bytes: Floats
    in_flight_bytes: Floats
    working_bytes: Floats
    boundary_bytes: Floats
    memory_limit_bytes: float
    num_hosts: int
    devices_per_host: int
    intra: Link
    inter: Link
    overlaps_transfers: bool = False
    most_imbalance: float = np.inf
    deferred_bytes: Floats = field(default_factory=lambda: _NOT_GIVEN)
    recomputed_bytes: Floats = field(default_factory=lambda: _NOT_GIVEN)

    def __post_init__(self) -> None:
        if self.deferred_bytes is _NOT_GIVEN:
            object.__setattr__(self, "deferred_bytes", self.in_flight_bytes)
        if self.recomputed_bytes is _NOT_GIVEN:
            object.__setattr__(self, "recomputed_bytes", np.zeros(self.working_bytes.shape))
        faults = [*_faulty_arrays(self), *_faulty_options(self)]
        if faults:
            raise InputError(
                "This chain cannot be planned:" + "".join(f"\n  - {fault}" for fault in faults)
            )

    @property
    def may_be_shorter(self) -> bool:
        """True if an option that runs a stretch of units also runs every shorter one as a stage:
        tables of its furthest ends then say all.
        """
        return bool(np.isinf(self.most_imbalance))

    def under(self, schedule: str) -> Chain:
        """The chain as it runs under a schedule.

        In a schedule that defers weight gradients, a micro-batch in flight waits either for its
        backward pass (and keeps `in_flight_bytes`) or for its weight gradients (and keeps
        `deferred_bytes`). Each is counted as if it kept the larger of the two.
        """
        if (
            not schedule_kind(schedule).splits_backward
            or (self.in_flight_bytes >= self.deferred_bytes).all()
        ):
            return self
        return _with_deferred_gradients(self)

    def transfer_s(
        self,
        num_bytes: ArrayLike,
        sender_devices: ArrayLike,
        receiver_devices: ArrayLike,
        crosses_hosts: ArrayLike,
    ) -> Floats:
        return transfer_seconds(
            num_bytes,
            sender_devices,
            receiver_devices,
            crosses_hosts,
            devices_per_host=self.devices_per_host,
            intra=self.intra,
            inter=self.inter,
        )

    def least_s(self, option: Any, first: Any, last: Any) -> Floats:
        tables = PrefixSums.of(self)
        both = tables.forward_s + tables.backward_s
        # Units that the option cannot run count as zero in the sums, so their stretches are set to
        # infinity here.
        runs = tables.runs(option, first, last)
        return np.asarray(np.where(runs, both[option, last] - both[option, first], np.inf))

    def propose(
        self,
        option: int,
        first: int,
        last: int,
        *,
        first_device: int,
        memory: StageMemory,
    ) -> StageChoice | None:
        tables = PrefixSums.of(self)
        if not tables.runs(option, first, last):
            return None
        needed_bytes = tables.stage_bytes(option, first, last, memory.in_flight, memory.chunks)
        if needed_bytes > memory.limit_bytes:
            return None
        return StageChoice(
            first_unit=first, last_unit=last, option=option, first_device=first_device
        )

    def quote(
        self, stages: Sequence[StageChoice], in_flight: Sequence[float], chunks: int = 1
    ) -> tuple[StageFigures, ...]:
        tables = PrefixSums.of(self)
        option, first, last, device = _columns(stages)
        kept = np.asarray(in_flight, np.float64)
        columns = {
            **_times(tables, option, first, last),
            "transfer_s": _edges_s(self, option, first, device),
            "in_flight": kept,
            "state_bytes": _span(tables.state_bytes, option, first, last),
            "held_bytes": kept * _span(tables.in_flight_bytes, option, first, last),
            "working_bytes": tables.working_bytes(option, first, last),
            "peak_bytes": tables.stage_bytes(option, first, last, kept, chunks),
        }
        rows = zip(*(column.tolist() for column in columns.values()))
        return tuple(StageFigures(**dict(zip(columns, row))) for row in rows)

    def quote_many(
        self,
        option: Ints,
        first: Ints,
        last: Ints,
        *,
        first_device: Ints,
        in_flight: Sequence[float],
        chunks: int = 1,
    ) -> StageColumns:
        tables = PrefixSums.of(self)
        peak_bytes = tables.stage_bytes(option, first, last, np.asarray(in_flight), chunks)
        runs = tables.runs(option, first, last)
        return StageColumns(
            **_times(tables, option, first, last),
            transfer_s=_edges_s(self, option, first, first_device),
            peak_bytes=np.where(runs, peak_bytes, np.inf),
        )

    def find_fault(self, stage: StageChoice) -> str | None:
        tables, option = PrefixSums.of(self), self.options[stage.option]
        if tables.runs(stage.option, stage.first_unit, stage.last_unit):
            return None
        whole = replace(self, most_imbalance=np.inf) if np.isfinite(self.most_imbalance) else self
        end = int(PrefixSums.of(whole).last_end[stage.option, stage.first_unit])
        if end >= stage.last_unit:
            return (
                f"has a share of the compute too far from its share of the devices with option"
                f" {option.name!r}"
            )
        return f"cannot run {self.unit_names[end]} with option {option.name!r}"


def _faulty_arrays(chain: Chain) -> list[str]:
    shape = (len(chain.unit_names), len(chain.options))
    faults = []
    if 0 in shape:
        faults.append(
            f"it has {shape[0]} units and {shape[1]} options; at least one of each is needed"
        )
    for name in (*UNIT_FIGURES, "boundary_bytes"):
        array = getattr(chain, name)
        wanted = shape[:1] if name == "boundary_bytes" else shape
        if array.shape != wanted:
            faults.append(f"`{name}` has shape {array.shape}, expected {wanted}")
        elif np.isnan(array).any() or (array < 0).any():
            faults.append(f"`{name}` has entries that are negative or no numbers")
    if not faults and (chain.weight_gradient_s > chain.backward_s * (1 + 1e-9)).any():
        faults.append("`weight_gradient_s` is a part of `backward_s` and exceeds it")
    if not faults and not np.isfinite(chain.boundary_bytes).all():
        faults.append("`boundary_bytes` has infinite entries")
    return faults


def _faulty_options(chain: Chain) -> list[str]:
    faults = [
        f"`{name}` is {getattr(chain, name)}, expected at least 1"
        for name in ("num_micro_batches", "num_hosts", "devices_per_host")
        if getattr(chain, name) < 1
    ]
    for option in chain.options:
        hosts, per_host = option.submesh
        if not (1 <= hosts <= chain.num_hosts and 1 <= per_host <= chain.devices_per_host):
            faults.append(
                f"option {option.name!r} wants {hosts}x{per_host} of"
                f" {chain.num_hosts}x{chain.devices_per_host}"
            )
        elif hosts > 1 and per_host < chain.devices_per_host:
            faults.append(
                f"option {option.name!r} uses {per_host} of {chain.devices_per_host} devices in"
                f" each of {hosts} hosts; a submesh of several hosts uses all of each"
            )
    return faults


def _balanced_ends(chain: Chain, sums_s: Floats) -> tuple[Ints, Ints]:
    """For each option and first unit, the first and the last end of a stage whose share of the
    compute is as close to its share of the devices as `most_imbalance` says.

    Args:
        sums_s: [O, U + 1], prefix sums of the seconds of the compute.
    """
    most = 1 + chain.most_imbalance
    ends = np.zeros((2, len(chain.options), chain.num_units), np.int64)
    for k, (option, sums) in enumerate(zip(chain.options, sums_s, strict=True)):
        fair_s = sums[-1] * option.num_devices / chain.num_devices
        near_s = 1e-9 * sums[-1]
        ends[0, k] = np.searchsorted(sums, sums[:-1] + fair_s / most - near_s)
        ends[1, k] = np.searchsorted(sums, sums[:-1] + fair_s * most + near_s, side="right") - 1
    return np.maximum(ends[0], np.arange(1, chain.num_units + 1)), ends[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixSums:
    """Tables that give the costs of any stretch of units [i, j) under any option in constant time.

    Figures that add up are stored as prefix sums of shape [O, U + 1]: a stretch costs `sums[o, j] -
    sums[o, i]`.

    Attributes:
        exposed_s: the idle time that a unit adds to a zero-bubble pipeline while it fills and
            drains: `forward + input gradient - min(weight gradient, forward, input gradient)`.
        first_end, last_end: [O, U], the smallest and the largest j for which the option can run
            all of [i, j); `last_end` is i if it cannot run unit i, or no such stage is balanced.
        working_tables: [K, O, U], a sparse table for range maxima: entry [k, o, u] is the largest
            `working_bytes` of the 2**k units from u on.
    """

    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    exposed_s: Floats
    once_s: Floats
    state_bytes: Floats
    in_flight_bytes: Floats
    recomputed_bytes: Floats
    first_end: Ints
    last_end: Ints
    working_tables: Floats

    @classmethod
    def of(cls, chain: Chain) -> PrefixSums:
        """The tables of a chain, in O(U log U) for each option; cached for the last few chains."""
        return _tables_of(chain)

    @classmethod
    def _computed(cls, chain: Chain) -> PrefixSums:
        # A unit that an option cannot run has infinite figures, which would make all prefix sums
        # after it infinite. They count as zero, and `last_end` says which stretches contain such a
        # unit.
        runs = np.isfinite(np.stack([getattr(chain, name).T for name in UNIT_FIGURES])).all(axis=0)
        figures = {name: np.where(runs, getattr(chain, name).T, 0.0) for name in UNIT_FIGURES}
        forward, weights = figures["forward_s"], figures["weight_gradient_s"]
        inputs = figures["backward_s"] - weights
        figures["exposed_s"] = forward + inputs - np.minimum(weights, np.minimum(forward, inputs))
        units = chain.num_units
        stops = np.where(runs, units, np.arange(units))
        # Scanned from the right: each unit takes the nearest stop at or after it.
        last_end = np.minimum.accumulate(stops[:, ::-1], axis=1)[:, ::-1].astype(np.int64)
        sums = {name: _prefix(figures[name]) for name in _SUMMED}
        first_end = np.broadcast_to(np.arange(1, units + 1), last_end.shape)
        if np.isfinite(chain.most_imbalance):
            balanced = _balanced_ends(chain, sums["forward_s"] + sums["backward_s"])
            first_end, last_end = balanced[0], np.minimum(last_end, balanced[1])
            last_end = np.where(last_end < first_end, np.arange(units), last_end)
        return cls(
            **sums,
            first_end=first_end,
            last_end=last_end,
            working_tables=_running_maxima(figures["working_bytes"]),
        )

    def runs(self, options: Any, first: Any, last: Any) -> NDArray[np.bool_]:
        """Whether options can run all of [first, last) as a stage. Arguments broadcast."""
        last = np.asarray(last)
        return np.asarray(
            (last <= self.last_end[options, first]) & (last >= self.first_end[options, first])
        )

    def working_bytes(self, options: Any, first: Any, last: Any) -> Floats:
        """The largest working memory of the units [first, last), at least one, and what all of
        them recompute. Arguments broadcast.
        """
        # Two stretches of 2**level units cover all of them, overlapping in the middle.
        # `frexp` gives the exponent of the largest power of two that is not above the length.
        level = np.frexp(np.asarray(last) - first)[1] - 1
        largest = np.maximum(
            self.working_tables[level, options, first],
            self.working_tables[level, options, last - (1 << level)],
        )
        recomputed = self.recomputed_bytes[options, last] - self.recomputed_bytes[options, first]
        return np.asarray(largest + recomputed)

    def stage_bytes(
        self, options: Any, first: Any, last: Any, in_flight: Any, chunks: int = 1
    ) -> Floats:
        """Memory per device of the stage [first, last): its state, the arrays that `in_flight`
        micro-batches keep, and its working memory.

        If a device runs several chunks, the figure is for a device whose chunks are all like this
        one. Chunks that each fit by this figure therefore also fit together.
        """
        state = self.state_bytes[options, last] - self.state_bytes[options, first]
        kept = self.in_flight_bytes[options, last] - self.in_flight_bytes[options, first]
        return np.asarray(
            chunks * (state + in_flight * kept + self.working_bytes(options, first, last))
        )


@functools.lru_cache(maxsize=16)
def _with_deferred_gradients(chain: Chain) -> Chain:
    """The chain under a schedule that defers weight gradients. Cached, so that equal calls return
    the same object: the tables of a chain are cached by its identity.
    """
    return replace(chain, in_flight_bytes=np.maximum(chain.in_flight_bytes, chain.deferred_bytes))


# Chains hash by identity, so a lookup is cheap. Every plan of a chain is judged by these tables.
@functools.lru_cache(maxsize=16)
def _tables_of(chain: Chain) -> PrefixSums:
    return PrefixSums._computed(chain)


def evaluate_form(
    chain: Chain, form: ClosedForm, stages: Sequence[StageChoice]
) -> tuple[float, tuple[float, ...]]:
    """The value of a closed form for given stages: its sum over stages, and each of its maxima,
    unweighted.

    Args:
        form: its arrays are prefix sums over the chain's units.
    """
    option, first, last, device = _columns(stages)
    edges = _edges_s(chain, option, first, device)
    maxima = []
    for term in form.maxima:
        values = term.sums[option, last] - term.sums[option, first]
        # A transfer that runs beside the tasks delays a stage only if it takes longer than they do.
        both = (
            np.maximum(values, term.link * edges)
            if chain.overlaps_transfers
            else values + term.transfers * edges
        )
        maxima.append(float(both.max()))
    sums = form.sums[option, last] - form.sums[option, first] + form.transfers * edges
    return float(sums.sum()), tuple(maxima)


def _columns(stages: Sequence[StageChoice]) -> tuple[Ints, Ints, Ints, Ints]:
    """Options, first units, last units and first devices of stages."""
    rows = [(s.option, s.first_unit, s.last_unit, s.first_device) for s in stages]
    option, first, last, device = np.array(rows, np.int64).T
    return option, first, last, device


def _span(sums: Floats, option: Ints, first: Ints, last: Ints) -> Floats:
    return np.asarray(sums[option, last] - sums[option, first])


def _times(tables: PrefixSums, option: Ints, first: Ints, last: Ints) -> dict[str, Floats]:
    """Seconds of stages, without transfers."""
    names = ("forward_s", "backward_s", "weight_gradient_s", "exposed_s", "once_s")
    times = {name: _span(getattr(tables, name), option, first, last) for name in names}
    # Rounding of the prefix sums could make this part exceed the whole backward pass.
    times["weight_gradient_s"] = np.minimum(times["weight_gradient_s"], times["backward_s"])
    return times


def _edges_s(chain: Chain, option: Ints, first: Ints, device: Ints) -> Floats:
    """For each stage the time of one transfer over the edge in front of it, in one direction; zero
    for first stages. Stages lie along the last axis.
    """
    edges = np.zeros(option.shape)
    sizes = chain.device_counts()[option]
    low, high = device // chain.devices_per_host, (device + sizes - 1) // chain.devices_per_host
    before, behind = np.s_[..., :-1], np.s_[..., 1:]
    # `boundary_bytes` belong to the unit before a cut: the last of the stage before.
    seconds = chain.transfer_s(
        chain.boundary_bytes[first[behind] - 1],
        sizes[before],
        sizes[behind],
        np.maximum(high[before], high[behind]) > np.minimum(low[before], low[behind]),
    )
    # Between stages on the same devices nothing is sent.
    moves = (device[before] != device[behind]) | (sizes[before] != sizes[behind])
    edges[behind] = np.where(moves, seconds, 0.0)
    return edges


def _prefix(figures: Floats) -> Floats:
    """Prefix sums along units, [O, U + 1], beginning with zero."""
    return np.concatenate([np.zeros((len(figures), 1)), np.cumsum(figures, axis=1)], axis=1)


def _running_maxima(figures: Floats) -> Floats:
    """Sparse table of maxima, [K, O, U]: each of the 2**k entries from a unit on, fewer at the
    end.
    """
    tables = [figures]
    while 1 << len(tables) <= figures.shape[1]:
        step = 1 << (len(tables) - 1)
        wider = tables[-1].copy()
        np.maximum(wider[:, :-step], tables[-1][:, step:], out=wider[:, :-step])
        tables.append(wider)
    return np.stack(tables)
