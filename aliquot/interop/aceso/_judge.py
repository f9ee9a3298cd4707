"""Performance models: Aceso's own with its faults, and one without these faults that also counts
the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...core import InputError
from ._database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults of Aceso's performance model. All are on by default; each can be mended alone.

    Attributes:
        exit_by_first_degree: the output of a stage has the tensor degree of its first operator
            instead of its last.
        coarse_bandwidths: transfers have the bandwidth of the next smaller measured size, and those
            below 1 MiB one from the other end of the table; mended, bandwidths are interpolated and
            small messages have that of the smallest measured size.
        exact_collectives: a collective of a size that was not measured takes 100 s; mended, times
            are interpolated.
        uncapped_in_flight: a stage holds a micro-batch for each stage after it, even if there are
            fewer micro-batches.
        last_reserved_ignored: the reserved memory of the last operator of a stage does not count.
        partial_batch_dropped: samples left over by micro-batches that do not divide the batch are
            dropped; mended, they count as a whole micro-batch.
    """

    exit_by_first_degree: bool = True
    coarse_bandwidths: bool = True
    exact_collectives: bool = True
    uncapped_in_flight: bool = True
    last_reserved_ignored: bool = True
    partial_batch_dropped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A performance model over a measured database.

    Attributes:
        name: as on the command line.
        faults: Aceso's faults that it has.
        counts_update: whether it counts the synchronisation of gradients and the optimizer step,
            which Aceso leaves out; they run once in a step, and each micro-batch is charged its
            share.
        memory_bandwidth_gb_per_s: at which the optimizer reads and writes its state. The database
            has no such measurement; the default is the share of a V100's 900 GB/s (data sheet) that
            element-wise kernels reach.
    """

    name: str
    faults: Faults = field(default_factory=Faults)
    counts_update: bool = False
    memory_bandwidth_gb_per_s: float = 750.0

    def num_micro_batches(self, global_batch: int, micro_batch: int) -> int:
        """Number of micro-batches in a step."""
        batches = global_batch / micro_batch
        return math.floor(batches) if self.faults.partial_batch_dropped else math.ceil(batches)

    def in_flight(self, behind: int, num_micro_batches: int) -> int:
        """Number of micro-batches that a stage holds if so many stages come after it."""
        return behind + 1 if self.faults.uncapped_in_flight else min(behind + 1, num_micro_batches)

    def update_us_per_mb(
        self, database: Database, data_degree: int, copies_of_weights: float
    ) -> float:
        """Microseconds, for each MiB of weights on a device, of the all-reduce of gradients and the
        optimizer step.

        The all-reduce has the rate of the largest one that was measured over as many devices; if
        there is none, that of a ring over the links within a node. The optimizer reads and writes
        all of its state once.
        """
        optimizer = 2 * copies_of_weights / (self.memory_bandwidth_gb_per_s * 0.001)
        if data_degree == 1:
            return optimizer
        times = database.collectives.get(("all_reduce", data_degree))
        if times and max(times):
            largest = max(times)
            return optimizer + 1000 * times[largest] / largest
        ring = 2 * (data_degree - 1) / data_degree
        return optimizer + ring / (max(database.within_nodes.bandwidths_gb_per_s) * 0.001)


ACESO = Judge(name="aceso")

JUDGES = {
    "aceso": ACESO,
    "aliquot": Judge(
        name="aliquot",
        faults=Faults(
            exit_by_first_degree=False,
            coarse_bandwidths=False,
            exact_collectives=False,
            uncapped_in_flight=False,
            last_reserved_ignored=False,
            partial_batch_dropped=False,
        ),
        counts_update=True,
    ),
}
"""Judges by name: Aceso's own, and one without its faults that also counts the update."""


def find_judge(name: str) -> Judge:
    """A judge by name. Raises `InputError`."""
    if name not in JUDGES:
        raise InputError(f"There is no judge {name!r}. Judges are {', '.join(JUDGES)}.")
    return JUDGES[name]
