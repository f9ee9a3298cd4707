"""The interface of chains: units in order, ways to run stretches of them, and what these cost.

Nothing here knows about graphs: a chain can just as well be made of measurements or of another
system's tables.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """One way to run a stage: on how many devices, arranged how, split by what.

    Attributes:
        name: for people, such as "shard on 2x4, recompute".
        submesh: hosts, and devices used in each. A submesh of several hosts uses all devices of
            each.
        mesh_shape: of the logical mesh that these devices form.
        recompute: what the backward pass computes again: "none", or a policy's name.
        dp, tp: degrees of data and of tensor parallelism, where the option is a regular one; a
            planner that lays all stages out alike looks for these.
    """

    name: str
    submesh: tuple[int, int]
    mesh_shape: tuple[int, ...]
    recompute: str = "none"
    dp: int | None = None
    tp: int | None = None

    @property
    def num_devices(self) -> int:
        """Of the submesh."""
        return self.submesh[0] * self.submesh[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """The units [first_unit, last_unit) under an option, on consecutive devices from
    `first_device`.

    `unit_options` has an entry for each unit where units have options of their own, and is empty
    where they have none.
    """

    first_unit: int
    last_unit: int
    option: int
    first_device: int
    unit_options: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Costs of one stage: seconds of one micro-batch (`once_s`: of a step), bytes per device.

    Attributes:
        forward_s, backward_s: passes, with all that is exchanged within the stage.
        weight_gradient_s, exposed_s: see `plans.StageTimes`.
        once_s: gradient synchronisation that is not hidden, and the update.
        transfer_s: over the edge in front of the stage, in one direction.
        in_flight: micro-batches kept at most.
        state_bytes, held_bytes, working_bytes: parameters and the like; what micro-batches in
            flight keep; the rest.
        peak_bytes: of a device all of whose chunks are like this one, if there are several.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    exposed_s: float
    once_s: float
    transfer_s: float
    in_flight: float
    state_bytes: float
    held_bytes: float
    working_bytes: float
    peak_bytes: float


class AbstractChain(abc.ABC):
    """Units in order and the ways to run stretches of them, for one number of micro-batches.

    Planners over stages ask three things: the least time that a stretch can take, the fastest known
    stage over it that fits in memory, and exact figures of stages. Everything else is the chain's
    own matter: options for each unit, costs between units with different options, transfers that
    depend on what both sides choose, working memory of any form.

    Attributes:
        unit_names: U names, such as "layers[3]".
        options: O ways to lay out a stage.
        num_micro_batches: that a step is cut into.
        memory_limit_bytes: what each device may use.
        num_hosts, devices_per_host: of the cluster.
        overlaps_transfers: whether stages compute while arrays travel between them. If not, a
            stage's pace includes the transfers over the edge in front of it, both ways.
    """

    __slots__ = ()

    unit_names: tuple[str, ...]
    options: tuple[StageOption, ...]
    num_micro_batches: int
    memory_limit_bytes: float
    num_hosts: int
    devices_per_host: int
    overlaps_transfers: bool

    @abc.abstractmethod
    def least_s(self, option: Any, first: Any, last: Any) -> Floats:
        """Forward and backward time below which no stage of the units [first, last) gets with an
        option; arguments broadcast.

        Transfers to other stages are left out, and so is memory. Infinite where the option cannot
        run all of the units.
        """

    @abc.abstractmethod
    def propose(
        self,
        option: int,
        first: int,
        last: int,
        *,
        first_device: int,
        in_flight: float,
        limit_bytes: float,
        chunks: int = 1,
    ) -> StageChoice | None:
        """The fastest known way to run the units [first, last) as a stage that fits in memory; None
        if none is known.

        Args:
            limit_bytes: of each device, infinite where memory does not matter.
            in_flight: micro-batches that the stage keeps between forward and backward.
            chunks: stages that share its devices, each with an equal share of the memory.
        """

    @abc.abstractmethod
    def quote(
        self, stages: Sequence[StageChoice], in_flight: Sequence[float], chunks: int = 1
    ) -> tuple[StageFigures, ...]:
        """Exact figures of stages in order, each knowing its neighbours; `in_flight` as the
        schedule says for each.
        """

    @abc.abstractmethod
    def find_fault(self, stage: StageChoice) -> str | None:
        """The reason why a stage cannot be run whatever its memory, such as "cannot run layers[3]";
        None if it can.
        """

    def under(self, schedule: str) -> AbstractChain:
        """The chain with the memory that a schedule asks for; by default the same for all."""
        return self

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.unit_names)

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self.num_hosts * self.devices_per_host

    def device_counts(self) -> Ints:
        """[O], the number of devices of each option."""
        return np.array([option.num_devices for option in self.options], np.int64)

    def fits_at(self, first_device: int, num_devices: int) -> bool:
        """True if a submesh may begin at a device: within one host, or of whole hosts from the
        first device of one.
        """
        start = first_device % self.devices_per_host
        if first_device < 0 or first_device + num_devices > self.num_devices:
            return False
        # Whole hosts begin at the first device of one; smaller submeshes stay within one.
        return (
            start == 0
            if num_devices > self.devices_per_host
            else start + num_devices <= self.devices_per_host
        )
