"""Aceso's performance model: iteration time and memory of each stage, from the database alone.

Every formula is Aceso's own, faults included; each fault is a flag of the judge, so that its effect
can be measured.

Reference: G. Liu, Y. Miao, Z. Lin, X. Shi, S. Maleki, F. Yang, Y. Bao, S. Wang, "Aceso: Efficient
Parallel DNN Training through Iterative Bottleneck Alleviation", EuroSys 2024, and the performance
model of its artifact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core import InputError
from ._chain import Layout, OperatorChain
from ._configuration import Configuration, StageConfiguration
from ._database import COLUMNS, Database, Transfers
from ._judge import ACESO, Faults, Judge

_COLUMN = {name: k for k, name in enumerate(COLUMNS)}
_NO_COLLECTIVE_MS = 100_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """The estimate of one stage. Compute and transfers are of one micro-batch, memory is of one
    device.

    Attributes:
        compute_ms: forward, backward and recomputed operators, tensor-parallel collectives
            included.
        transfer_ms: transfers into and out of the stage, and changes of layout inside it.
        busy_ms: iteration time if this were the slowest stage.
        state_mb: parameters, gradients and optimizer state.
        activations_mb: activations of all micro-batches in flight.
        reserved_mb: further memory of the allocator.
    """

    compute_ms: float
    transfer_ms: float
    busy_ms: float
    state_mb: float
    activations_mb: float
    reserved_mb: float

    @property
    def memory_mb(self) -> float:
        """Sum of state, activations and reserved memory."""
        return self.state_mb + self.activations_mb + self.reserved_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predictions for a configuration, with the measurements that they lack.

    Attributes:
        iteration_time_ms: `busy_ms` of the slowest stage.
        stages: estimates of the stages, in order.
        missing: measurements that were needed and are not in the database.
    """

    iteration_time_ms: float
    stages: tuple[StageEstimate, ...]
    missing: tuple[str, ...]


def evaluate_configuration(
    configuration: Configuration,
    chain: OperatorChain,
    database: Database,
    *,
    gpus_per_node: int,
    judge: Judge = ACESO,
) -> Estimate:
    """Iteration time and memory as the judge predicts them.

    Raises:
        InputError: the configuration does not fit the chain, or needs a micro-batch, degree or
            algorithm that was never measured; lists what was.
    """
    faults = judge.faults
    if configuration.num_operators != len(chain.operators):
        raise InputError(
            f"The configuration has {configuration.num_operators} operators in its stages, and the"
            f" chain has {len(chain.operators)}."
        )
    _require_measured(configuration, chain, database)
    count = judge.num_micro_batches(configuration.global_batch, configuration.micro_batch)
    if count < 1:
        raise InputError(
            f"The micro-batch of {configuration.micro_batch} samples is larger than the global"
            f" batch of {configuration.global_batch}."
        )
    missing: list[str] = []
    figures: list[tuple[float, float, StageEstimate]] = []
    first = device = 0
    for k, stage in enumerate(configuration.stages):
        view = _StageView(stage, chain, database, first, configuration.micro_batch)
        enters = database.within_nodes
        if device and device % gpus_per_node == 0:
            enters = database.between_nodes
        device += stage.num_devices
        leaves = database.between_nodes if device % gpus_per_node == 0 else database.within_nodes
        compute, transfer = view.compute_ms(), view.transfer_ms(enters, leaves, faults, missing)
        if judge.counts_update:
            # The update runs once in a step, but this figure will be multiplied by the number of
            # micro-batches.
            compute += view.update_ms(judge) / count
        held = judge.in_flight(len(configuration.stages) - 1 - k, count)
        figures.append((compute, transfer, view.memory(held, faults)))
        first += len(stage.tensor)
    total = sum(compute + transfer for compute, transfer, _ in figures)
    stages = tuple(
        StageEstimate(
            compute_ms=compute,
            transfer_ms=transfer,
            busy_ms=(compute + transfer) * (count - 1) + total,
            state_mb=memory.state_mb,
            activations_mb=memory.activations_mb,
            reserved_mb=memory.reserved_mb,
        )
        for compute, transfer, memory in figures
    )
    return Estimate(
        iteration_time_ms=max(stage.busy_ms for stage in stages),
        stages=stages,
        missing=tuple(dict.fromkeys(missing)),
    )


def _require_measured(
    configuration: Configuration, chain: OperatorChain, database: Database
) -> None:
    """Raise InputError if the database lacks operators, micro-batches, degrees or algorithms that
    a configuration uses.
    """
    unknown = sorted({o.name for o in chain.operators} - set(database.operators))
    if unknown:
        raise InputError(f"{database.model} has no measurements of {', '.join(unknown[:5])}.")
    tables = (
        ("micro-batch per data-parallel rank", database.micro_batches),
        ("tensor degree", database.tensor_degrees),
        ("algorithm", database.algorithms),
    )
    faults = []
    for k, stage in enumerate(configuration.stages):
        used = (
            {configuration.micro_batch // d for d in stage.data},
            set(stage.tensor),
            set(stage.algorithm),
        )
        for (what, measured), values in zip(tables, used, strict=True):
            if not values <= set(measured):
                wrong = ", ".join(map(str, sorted(values - set(measured))))
                faults.append(
                    f"stage {k} needs {what} {wrong}; measured are {', '.join(map(str, measured))}"
                )
    if faults:
        raise InputError(
            f"The configuration needs what {database.model} was not measured for:\n"
            + "\n".join(f"  - {f}" for f in faults)
        )


class _StageView:
    """Measurements of one stage: an array of operators by columns."""

    def __init__(
        self,
        stage: StageConfiguration,
        chain: OperatorChain,
        database: Database,
        first: int,
        micro_batch: int,
    ) -> None:
        self._stage, self._chain, self._database = stage, chain, database
        self._operators = chain.operators[first : first + len(stage.tensor)]
        self._data = np.array(stage.data)
        rank_batches = micro_batch // self._data
        self._index = (
            np.array([database.operators[o.name] for o in self._operators]),
            _places(rank_batches, database.micro_batches),
            _places(np.array(stage.tensor), database.tensor_degrees),
            _places(np.array(stage.algorithm), database.algorithms),
        )
        self._rows: NDArray[np.float64] = database.table[self._index]
        if np.isnan(self._rows).any():
            position = int(np.isnan(self._rows).any(axis=1).argmax())
            raise InputError(
                f"{self._operators[position].name} was not measured with micro-batch"
                f" {rank_batches[position]}, tensor degree {stage.tensor[position]} and"
                f" algorithm {stage.algorithm[position]}."
            )

    def column(self, name: str) -> NDArray[np.float64]:
        """A column of the database for the operators of the stage."""
        return self._rows[:, _COLUMN[name]]

    def compute_ms(self) -> float:
        """Forward, backward and recomputed operators of one micro-batch."""
        recomputed = self.column("forward-compute")[np.array(self._stage.recompute, bool)].sum()
        return (
            float(
                self.column("forward-compute").sum()
                + self.column("backward-compute").sum()
                + recomputed
            )
            / 1000
        )

    def transfer_ms(
        self, enters: Transfers, leaves: Transfers, faults: Faults, missing: list[str]
    ) -> float:
        """Transfers into and out of the stage, and changes of layout inside it, for one
        micro-batch.
        """
        output_mb = float(self.column("output_size")[-1])
        if faults.exit_by_first_degree:
            operator, batch, _, algorithm = (axis[-1] for axis in self._index)
            first = self._index[2][0]
            output_mb = float(
                self._database.table[operator, batch, first, algorithm, _COLUMN["output_size"]]
            )
        seconds = transfer_us(float(self.column("input_size")[0]), enters, faults) + transfer_us(
            output_mb, leaves, faults
        )
        inside = self._resharding_ms(faults, missing) if self._chain.resharding else 0.0
        return seconds / 1000 + inside

    def _resharding_ms(self, faults: Faults, missing: list[str]) -> float:
        # Layers repeat, so there are few distinct pairs of neighbours.
        state = np.ravel_multi_index(self._index, self._database.table.shape[:-1])
        state = state * (self._data.max() + 1) + self._data
        pairs = np.stack([state[:-1], state[1:]], axis=1)
        _, positions, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
        total = 0.0
        sizes = self.column("input_size")
        # In the order of the operators, so that missing measurements are listed in that order.
        for at in np.argsort(positions):
            k = int(positions[at]) + 1
            source, target = self._layout(k - 1, 1), self._layout(k, 0)
            if source == target:
                continue
            for kind, devices in collectives_between(source, target):
                total += int(counts[at]) * collective_ms(
                    self._database, kind, devices, float(sizes[k]), faults, missing
                )
        return total

    def _layout(self, k: int, side: int) -> tuple[int, ...]:
        layouts = self._operators[k].layouts
        layout: Layout = layouts[min(self._stage.algorithm[k], len(layouts) - 1)][side]
        degrees = {"1": 1, "tp": self._stage.tensor[k], "dp": self._stage.data[k]}
        return tuple(degrees[part] for part in layout)

    def update_ms(self, judge: Judge) -> float:
        """Time of the synchronisation of gradients between data-parallel ranks and of the optimizer
        step, both once in a step.
        """
        degrees, at = np.unique(self._data, return_inverse=True)
        per_mb = np.array(
            [
                judge.update_us_per_mb(self._database, int(degree), self._chain.copies_of_weights)
                for degree in degrees
            ]
        )
        return float((self.column("weights") * per_mb[at]).sum()) / 1000

    def memory(self, in_flight: int, faults: Faults) -> StageEstimate:
        """Memory of one device with so many micro-batches in flight, in MiB."""
        weights = float(self.column("weights").sum())
        activations_mb = self.column("activations") * np.array(
            [o.kept_share for o in self._operators]
        )
        saved, peak = self._recomputed(activations_mb)
        held = float(self.column("input_size")[0] + activations_mb.sum()) - saved
        last = -1 if faults.last_reserved_ignored else None
        reserved = sum(
            float(self.column(c)[:last].max(initial=0.0)) for c in ("fwd_reserved", "bwd_reserved")
        )
        return StageEstimate(
            compute_ms=0.0,
            transfer_ms=0.0,
            busy_ms=0.0,
            state_mb=self._chain.copies_of_weights * weights,
            activations_mb=held * in_flight + peak,
            reserved_mb=max(reserved, weights),
        )

    def _recomputed(self, kept: NDArray[np.float64]) -> tuple[float, float]:
        """MiB of one micro-batch's activations that recomputation saves, and their peak during
        recomputation.
        """
        flags = np.array(self._stage.recompute, bool)
        starts_layer = np.array([operator.starts_layer for operator in self._operators])
        # An operator's activations are freed only if the next operator of the same layer is
        # recomputed, too.
        follows = np.append(flags[1:] & ~starts_layer[1:], False)
        freed = np.where(flags & follows, kept, 0.0)
        sums = np.cumsum(freed)
        # The sum at the last operator before each run.
        before = np.maximum.accumulate(np.where(flags & follows, 0.0, sums))
        return float(freed.sum()), float((sums - before).max(initial=0.0))


def _places(values: NDArray[np.int64], measured: Sequence[int]) -> NDArray[np.int64]:
    """The position of each value among the measured ones."""
    distinct, at = np.unique(values, return_inverse=True)
    return np.array([measured.index(value) for value in distinct.tolist()])[at]


def transfer_us(size_mb: float, transfers: Transfers, faults: Faults) -> float:
    """Microseconds of a message between stages."""
    if size_mb <= 0:
        return 0.0
    bandwidths = transfers.bandwidths_gb_per_s
    if faults.coarse_bandwidths:
        index = int(math.log2(size_mb))
        index = min(index - 1 if index >= 1 else index, len(bandwidths) - 1)
        bandwidth = bandwidths[max(index, -len(bandwidths))]
    else:
        bandwidth = float(np.interp(math.log2(size_mb), np.log2(transfers.sizes_mb), bandwidths))
    return size_mb / (bandwidth * 0.001)


def collectives_between(source: Sequence[int], target: Sequence[int]) -> list[tuple[str, int]]:
    """The collectives of the forward and the backward pass that a change of layout needs; slicing
    costs nothing.

    A layout is the number of replicas, followed by the number of parts of each dim.
    """
    collectives: list[tuple[str, int]] = []
    grown = [(k, target[k] // source[k]) for k in range(1, len(source)) if target[k] > source[k]]
    shrunk = [(k, source[k] // target[k]) for k in range(1, len(source)) if target[k] < source[k]]
    if source[0] > target[0]:
        # Replicas become parts: a slice forward, all-gather backward.
        collectives.append(("all_gather", source[0] // target[0]))
    elif source[0] < target[0]:
        collectives.append(("all_gather", target[0] // source[0]))
    elif grown and shrunk:
        collectives += [("all_to_all", grown[0][1])] * 2
    return collectives


def collective_ms(
    database: Database, kind: str, devices: int, size_mb: float, faults: Faults, missing: list[str]
) -> float:
    """Milliseconds of a collective on `size_mb`, rounded to whole MiB or one less. If neither was
    measured, this is noted in `missing` and times are interpolated; with the fault
    `exact_collectives`, or without any measurement, the collective takes 100 s.
    """
    times: Mapping[int, float] = database.collectives.get((kind, devices), {})
    whole = round(size_mb)
    for size in (whole, whole - 1):
        if size in times:
            return times[size]
    missing.append(f"{kind} of {whole} MiB over {devices} devices")
    if faults.exact_collectives or not times:
        return _NO_COLLECTIVE_MS
    sizes = sorted(times)
    return float(np.interp(size_mb, sizes, [times[s] for s in sizes]))
