"""A search problem as a chain, which inter planners plan like the layers of a captured step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....cost import (
    AbstractChain,
    StageChoice,
    StageColumns,
    StageFigures,
    StageMemory,
    StageOption,
)
from .._configuration import StageConfiguration
from ._problem import SearchProblem
from ._quotes import Integers, UniformStages, quote_all, stage_memory_mb
from ._space import Floats

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredChain(AbstractChain):
    """The operators of a search problem, for micro-batches of one size.

    An option is a number of devices with a tensor and a data degree, which all operators of the
    stage have; `unit_options` say of each operator whether it is recomputed. Transfers count as a
    part of the stages at both of their ends, the update as a part of every micro-batch.

    Attributes:
        micro_batch: samples.
        uniform: prefix sums of stages, by number of devices.
        rows: for each option its number of devices, and its row in their prefix sums.
        work_us: [O, U + 1], prefix sums of the time of one micro-batch without recomputation.
    """

    unit_names: tuple[str, ...]
    options: tuple[StageOption, ...]
    num_micro_batches: int
    memory_limit_bytes: float
    num_hosts: int
    devices_per_host: int
    overlaps_transfers: bool = False
    micro_batch: int
    uniform: Mapping[int, UniformStages]
    rows: tuple[tuple[int, int], ...]
    work_us: Floats

    @classmethod
    def make(cls, problem: SearchProblem, micro_batch: int) -> MeasuredChain:
        """The chain of a problem for one of its micro-batch sizes."""
        uniform = quote_all(problem, micro_batch)
        rows, options = [], []
        for size, stages in uniform.items():
            for row, state in enumerate(stages.states):
                tensor, data = stages.space.states[state][:2]
                rows.append((size, row))
                options.append(
                    StageOption(
                        name=f"dp{data} tp{tensor}",
                        submesh=(1, size),
                        mesh_shape=(data, tensor),
                        dp=data,
                        tp=tensor,
                    )
                )
        return cls(
            unit_names=tuple(operator.name for operator in problem.chain.operators),
            options=tuple(options),
            num_micro_batches=problem.num_micro_batches(micro_batch),
            memory_limit_bytes=problem.memory_limit_mb * _MIB,
            num_hosts=problem.num_nodes,
            devices_per_host=problem.gpus_per_node,
            micro_batch=micro_batch,
            uniform=uniform,
            rows=tuple(rows),
            work_us=np.concatenate([stages.work_us[:, 0] for stages in uniform.values()]),
        )

    def least_s(self, option: Any, first: Any, last: Any) -> Floats:
        return np.asarray((self.work_us[option, last] - self.work_us[option, first]) / 1e6)

    def propose(
        self,
        option: int,
        first: int,
        last: int,
        *,
        first_device: int,
        memory: StageMemory,
    ) -> StageChoice | None:
        """The fastest way to run some layers, with the least recomputation that fits."""
        size, row = self.rows[option]
        uniform = self.uniform[size]
        _, (memory_mb,), (level,), (share,) = uniform.quote(
            np.array([row]),
            np.array([first]),
            np.array([last]),
            np.array([memory.in_flight]),
            self.links(np.array([first_device]), size),
            memory.limit_bytes / _MIB / memory.chunks,
        )
        if memory_mb * _MIB * memory.chunks > memory.limit_bytes:
            return None
        flags = uniform.flags(row, int(level), float(share), first, last)
        return StageChoice(
            first_unit=first,
            last_unit=last,
            option=option,
            first_device=first_device,
            unit_options=tuple(flags.astype(int).tolist()),
        )

    def quote(
        self, stages: Sequence[StageChoice], in_flight: Sequence[float], chunks: int = 1
    ) -> tuple[StageFigures, ...]:
        return tuple(
            [self._figures(s, kept, chunks) for s, kept in zip(stages, in_flight, strict=True)]
        )

    def quote_many(
        self,
        option: Integers,
        first: Integers,
        last: Integers,
        *,
        first_device: Integers,
        in_flight: Sequence[float],
        chunks: int = 1,
    ) -> StageColumns:
        kept = np.broadcast_to(np.asarray(in_flight), option.shape)
        sizes, rows = np.moveaxis(np.array(self.rows)[option], -1, 0)
        stage_us, memory_mb = np.zeros((2, *option.shape))
        for size in np.unique(sizes).tolist():
            at = sizes == size
            stage_us[at], memory_mb[at], *_ = self.uniform[size].quote(
                rows[at],
                first[at],
                last[at],
                kept[at],
                self.links(first_device[at], size),
                self.memory_limit_bytes / _MIB / chunks,
            )
        nothing = np.zeros(option.shape)
        # Schedules that split the backward pass gain nothing: no part of it can wait.
        return StageColumns(
            forward_s=stage_us / 1e6,
            backward_s=nothing,
            weight_gradient_s=nothing,
            exposed_s=stage_us / 1e6,
            once_s=nothing,
            transfer_s=nothing,
            peak_bytes=chunks * memory_mb * _MIB,
        )

    def find_fault(self, stage: StageChoice) -> str | None:
        if len(stage.unit_options) == stage.last_unit - stage.first_unit:
            return None
        return "does not say of each of its operators whether it is recomputed"

    def configured(self, stage: StageChoice) -> StageConfiguration:
        """A stage as configurations have it."""
        size, row = self.rows[stage.option]
        uniform, count = self.uniform[size], stage.last_unit - stage.first_unit
        tensor, data, algorithm = uniform.space.states[uniform.states[row]]
        return StageConfiguration(
            num_devices=size,
            tensor=(tensor,) * count,
            data=(data,) * count,
            algorithm=(algorithm,) * count,
            recompute=tuple([bool(flag) for flag in stage.unit_options]),
        )

    def links(self, first_device: Integers, size: int) -> Integers:
        """A row for each stage: whether the transfers into and out of it cross nodes."""
        entered = (first_device > 0) & (first_device % self.devices_per_host == 0)
        left = (first_device + size) % self.devices_per_host == 0
        return np.stack((entered, left), axis=-1).astype(np.int64)

    def _figures(self, stage: StageChoice, kept: float, chunks: int) -> StageFigures:
        size, row = self.rows[stage.option]
        uniform, state = self.uniform[size], self.uniform[size].states[row]
        space, first, last = uniform.space, stage.first_unit, stage.last_unit
        kinds = space.kinds[first:last]
        flags = np.zeros(len(space.kinds), bool)
        flags[first:last] = np.array(stage.unit_options, bool)
        recomputed_us = float(space.again_us[kinds, state][flags[first:last]].sum())
        (transfer_us,) = uniform.transfers_us(
            np.array([row]),
            np.array([first]),
            np.array([last]),
            self.links(np.array([stage.first_device]), size),
        )
        forward_us = float(space.again_us[kinds, state].sum())
        changes_us = float(space.edges_us[space.edge_of[first + 1 : last], state, state].sum())
        stage_us = float(space.busy_us[kinds, state].sum()) + recomputed_us + changes_us
        stage_us += float(transfer_us)
        none_mb, held_mb = (
            float(stage_memory_mb(space, state, flags, first, held)[last - first - 1])
            for held in (0, 1)
        )
        state_mb = space.state_copies * float(space.weights_mb[kinds, state].sum())
        held_mb = (held_mb - none_mb) * kept
        return StageFigures(
            forward_s=forward_us / 1e6,
            backward_s=(stage_us - forward_us) / 1e6,
            weight_gradient_s=0.0,
            exposed_s=stage_us / 1e6,
            once_s=0.0,
            transfer_s=0.0,
            in_flight=kept,
            state_bytes=state_mb * _MIB,
            held_bytes=held_mb * _MIB,
            working_bytes=(none_mb - state_mb) * _MIB,
            peak_bytes=chunks * (none_mb + held_mb) * _MIB,
        )
