"""What the compiler says about the programs of a pipeline, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import format_bytes, format_seconds
from ._hlo import CompiledCollective, add_up, find_collectives
from ._instructions import Run
from ._stage_memory import stage_memory
from ._stats import compiled_memory

if TYPE_CHECKING:
    from ._pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """One stage. Bytes are those on each of its devices.

    Attributes:
        held_bytes: the most that arrays between programs take at any moment of a step: state, what micro-batches in
            flight have left, totals, what comes from other stages.
        temp_bytes: the most that a program needs beside its arguments and results.
        peak_bytes: the most of both at any moment.
        in_flight: the most micro-batches at once of which the stage holds something.
        collectives: those of one step, most bytes first.
        num_programs, compile_s: how many programs, and how long they took to compile.
    """

    stage: int
    held_bytes: int
    temp_bytes: int
    peak_bytes: int
    in_flight: int
    collectives: tuple[CompiledCollective, ...]
    num_programs: int
    compile_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStats:
    """A compiled pipeline."""

    stages: tuple[StageStats, ...]

    @property
    def compile_s(self) -> float:
        """Seconds to compile all programs."""
        return sum(stage.compile_s for stage in self.stages)

    def __str__(self) -> str:
        lines = [f"{sum(s.num_programs for s in self.stages)} programs compiled in {format_seconds(self.compile_s)}"]
        for s in self.stages:
            lines.append(
                f"stage {s.stage}: peak {format_bytes(s.peak_bytes)} on each device ({format_bytes(s.held_bytes)} held "
                f"between programs), at most {s.in_flight} micro-batches in flight"
            )
        return "\n".join(lines)


def pipeline_stats(pipeline: Pipeline) -> PipelineStats:
    """Stats of all stages. With several processes all must call it."""
    compiled = pipeline.compile()
    counts = {
        k: sum(1 for step in pipeline.instructions.steps if isinstance(step, Run) and step.function == k)
        for k in range(len(compiled))
    }
    memory = {k: compiled_memory(c.compiled) for k, c in enumerate(compiled) if c is not None}
    temps = {k: account.temp_bytes for k, account in memory.items()}
    aliases = {k: account.alias_bytes for k, account in memory.items()}
    donated = {k: c.donated for k, c in enumerate(compiled) if c is not None}
    sizes = pipeline.slot_bytes()
    found = []
    for stage, context in enumerate(pipeline.contexts):
        own = [k for k, c in enumerate(compiled) if c is not None and c.function.program.stage == stage]
        mine = [c for c in compiled if c is not None and c.function.program.stage == stage]
        if not own:
            continue
        names = [str(name) for name in context.mesh.axis_names]
        axis_sizes = [context.mesh.shape[name] for name in names]
        collectives = [
            use
            for k, c in zip(own, mine, strict=True)
            for use in find_collectives(c.compiled.as_text(), names, axis_sizes)
            for _ in range(counts[k])
        ]
        over_time = stage_memory(
            pipeline.instructions, (stage,), sizes=sizes, temps=temps, aliases=aliases, donated=donated
        )
        found.append(
            StageStats(
                stage=stage,
                held_bytes=over_time.held_bytes,
                temp_bytes=max(temps[k] for k in own),
                peak_bytes=over_time.peak_bytes,
                in_flight=over_time.in_flight,
                collectives=add_up(collectives),
                num_programs=len(own),
                compile_s=sum(c.compile_s for c in mine),
            )
        )
    return PipelineStats(stages=pipeline.of_all_processes(found))


def bytes_on_device(struct: Any) -> int:
    """Bytes of one shard of an array."""
    shard = struct.sharding.shard_shape(struct.shape)
    return int(math.prod(shard) * struct.dtype.itemsize)
