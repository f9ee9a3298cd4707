"""The interface of chains: units in order, ways to run stretches of them, and what these cost.

Nothing here knows about graphs: a chain can just as well be made of measurements or of another
system's tables.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage keeps, and the memory that it has.

    Attributes:
        in_flight: micro-batches that it keeps between forward and backward.
        limit_bytes: memory of each device; infinite to ignore memory.
        chunks: number of stages that share its devices, each with an equal share of the memory.
    """

    in_flight: float
    limit_bytes: float
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """One way to run a stage: number and arrangement of its devices, and how it is split.

    Attributes:
        name: text for readers, such as "shard on 2x4, recompute".
        submesh: number of hosts, and of devices used in each. A submesh of several hosts uses all
            devices of each.
        mesh_shape: shape of the logical mesh that these devices form.
        recompute: what the backward pass recomputes: "none", or a policy's name.
        dp, tp: degrees of data and of tensor parallelism, if the option is a regular combination of
            them; read by planners that lay out all stages alike.
    """

    name: str
    submesh: tuple[int, int]
    mesh_shape: tuple[int, ...]
    recompute: str = "none"
    dp: int | None = None
    tp: int | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices of the submesh."""
        return self.submesh[0] * self.submesh[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """The units [first_unit, last_unit) under an option, on consecutive devices from
    `first_device`.

    `unit_options` has an entry for each unit if units have their own options; otherwise it is
    empty.
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
        forward_s, backward_s: passes, including all communication within the stage.
        weight_gradient_s, exposed_s: see `plans.StageTimes`.
        once_s: gradient synchronisation that is not hidden, and the update.
        transfer_s: over the edge in front of the stage, in one direction.
        in_flight: the most micro-batches in flight.
        state_bytes: parameters, gradients, optimizer state.
        held_bytes: arrays that all micro-batches in flight keep.
        working_bytes: the rest, needed only while a task runs: also what it recomputes.
        peak_bytes: of a device; if it runs several chunks, as if all of them were like this one.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageColumns:
    """Figures of the stages of many pipelines, as arrays [..., S]; see `StageFigures`.

    Where an option cannot run the units of a stage, `peak_bytes` is infinite and the times say
    nothing.
    """

    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    exposed_s: Floats
    once_s: Floats
    transfer_s: Floats
    peak_bytes: Floats


class AbstractChain(abc.ABC):
    """Units in order and the ways to run stretches of them, for one number of micro-batches.

    Inter planners ask a chain for three things: a lower bound on the time of a stretch (`least_s`),
    the fastest known stage over it that fits in memory (`propose`), and exact figures of stages
    (`quote`). Everything else is left to the chain: options for each unit, costs between units with
    different options, transfers that depend on the options on both sides, any model of working
    memory.

    Attributes:
        unit_names: U names, such as "layers[3]".
        options: O ways to lay out a stage.
        num_micro_batches: number of micro-batches in a step.
        memory_limit_bytes: memory that a plan may use on each device.
        num_hosts, devices_per_host: size of the cluster.
        overlaps_transfers: whether transfers between stages overlap with compute. If not, the
            transfers over the edge in front of a stage, in both directions, add to the time that
            the stage takes for each micro-batch.
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
        """Lower bound on the forward plus backward time of a stage of the units [first, last) under
        an option; arguments broadcast.

        Transfers to other stages and memory limits are ignored. Infinite where the option cannot
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
        memory: StageMemory,
    ) -> StageChoice | None:
        """The fastest known way to run the units [first, last) as a stage that fits in memory; None
        if none is known.

        Args:
            memory: what it keeps, and the memory that it has.
        """

    @abc.abstractmethod
    def quote(
        self, stages: Sequence[StageChoice], in_flight: Sequence[float], chunks: int = 1
    ) -> tuple[StageFigures, ...]:
        """Exact figures of all stages of a step, in order; each may depend on its neighbours.
        `in_flight` are the numbers that the schedule gives for the stages.
        """

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
        """Figures of many pipelines of S stages at once; every stage as `propose` finds it within
        `memory_limit_bytes`, or without a limit if it finds none within.

        Args:
            option, first, last, first_device: [N, S], for each pipeline its stages in order.
            in_flight: for each of the S stages.
        """
        shape = option.shape
        figures = {f.name: np.zeros(shape) for f in fields(StageColumns)}
        figures["peak_bytes"][:] = np.inf
        columns = [each.tolist() for each in (option, first, last, first_device)]
        for row, pipeline in enumerate(zip(*columns, strict=True)):
            stages = []
            for o, i, j, device, kept in zip(*pipeline, in_flight, strict=True):
                for limit_bytes in (self.memory_limit_bytes, math.inf):
                    memory = StageMemory(in_flight=kept, limit_bytes=limit_bytes, chunks=chunks)
                    choice = self.propose(o, i, j, first_device=device, memory=memory)
                    if choice is not None:
                        stages.append(choice)
                        break
            if len(stages) < shape[-1]:
                continue
            quoted = self.quote(stages, in_flight, chunks)
            for name, array in figures.items():
                array[row] = [getattr(each, name) for each in quoted]
        return StageColumns(**figures)

    @abc.abstractmethod
    def find_fault(self, stage: StageChoice) -> str | None:
        """The reason why a stage cannot be run whatever its memory, such as "cannot run layers[3]";
        None if it can.
        """

    def under(self, schedule: str) -> AbstractChain:
        """The chain with its memory figures adjusted to a schedule; by default the chain itself."""
        return self

    @property
    def num_units(self) -> int:
        """U, the number of units."""
        return len(self.unit_names)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self.num_hosts * self.devices_per_host

    def device_counts(self) -> Ints:
        """[O], the number of devices of each option."""
        return np.array([option.num_devices for option in self.options], np.int64)

    def fits_at(self, first_device: int, num_devices: int) -> bool:
        """True if a submesh of `num_devices` may begin at a device: it lies within one host, or is
        made of whole hosts and begins at the first device of one.
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
