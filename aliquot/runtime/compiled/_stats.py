"""Figures of compiled programs: memory on each device, collectives, time to compile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core import InputError, format_bytes, format_seconds
from ._hlo import CompiledCollective, add_up, find_collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes on each device. `alias_bytes` of the outputs live in donated arguments.

    `peak_bytes` is what must fit at once: arguments, outputs that have no argument's place, and
    temporaries.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """One stage, or a step that is one program. Bytes are those on each of its devices.

    Attributes:
        held_bytes: the most that arrays held between programs take at any moment of a step: state,
            residuals of micro-batches in flight, running totals, arrays from other stages. For a
            step that is one program, its arguments and results.
        temp_bytes: the most that a program needs beside its arguments and results.
        peak_bytes: the most of both at any moment.
        in_flight: the most micro-batches of which the stage holds something at the same time.
        collectives: those of one step, most bytes first.
        num_programs, compile_s: how many programs, and how long they took to compile.
        memory: the compiler's account, of a step that is one program.
    """

    stage: int
    held_bytes: int
    temp_bytes: int
    peak_bytes: int
    in_flight: int
    collectives: tuple[CompiledCollective, ...]
    num_programs: int
    compile_s: float
    memory: CompiledMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A compiled step.

    Attributes:
        stages: one for a step that is one program.
        lower_s: seconds to lower the programs.
    """

    stages: tuple[StageStats, ...]
    lower_s: float

    @property
    def memory(self) -> CompiledMemory:
        """The compiler's account of one program. Raises `InputError` for a pipeline, which has
        several.
        """
        memory = self.stages[0].memory
        if memory is None:
            raise InputError(
                "A pipeline's memory is that of several programs: see .peak_bytes, and .stages for"
                " each stage."
            )
        return memory

    @property
    def peak_bytes(self) -> int:
        """Memory that must be free on the devices of the fullest stage."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """Collectives of all stages, added up by kind, axes and loop; most bytes first."""
        if len(self.stages) == 1:
            return self.stages[0].collectives
        return add_up(list(itertools.chain.from_iterable(s.collectives for s in self.stages)))

    @property
    def compile_s(self) -> float:
        """Seconds to compile all programs."""
        return sum(stage.compile_s for stage in self.stages)

    def __str__(self) -> str:
        programs = sum(stage.num_programs for stage in self.stages)
        what = f"{programs} programs compiled" if programs > 1 else "compiled"
        lines = [f"{what} in {format_seconds(self.compile_s)}"]
        for stage in self.stages:
            memory = stage.memory
            if memory is not None:
                lines.append(
                    f"each device: arguments {format_bytes(memory.argument_bytes)}, outputs"
                    f" {format_bytes(memory.output_bytes)} ({format_bytes(memory.alias_bytes)} of"
                    f" them in place), temporaries {format_bytes(memory.temp_bytes)}, peak"
                    f" {format_bytes(memory.peak_bytes)}"
                )
                for c in stage.collectives:
                    place = f"{','.join(c.axes) or '-'}{' in a loop' if c.in_loop else ''}"
                    lines.append(
                        f"{c.kind} over {place}: {c.count:g} time{'' if c.count == 1 else 's'},"
                        f" {format_bytes(c.num_bytes)}"
                    )
            else:
                lines.append(
                    f"stage {stage.stage}: peak {format_bytes(stage.peak_bytes)} on each device"
                    f" ({format_bytes(stage.held_bytes)} held between programs), at most"
                    f" {stage.in_flight} micro-batches in flight"
                )
        return "\n".join(lines)


def compiled_stats(
    compiled: Any,
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
    *,
    lower_s: float = 0.0,
    compile_s: float = 0.0,
) -> Stats:
    """Stats of the result of `jax.jit(...).lower(...).compile()`, for a mesh whose devices are
    numbered row by row.
    """
    memory = compiled_memory(compiled)
    stage = StageStats(
        stage=0,
        held_bytes=memory.peak_bytes - memory.temp_bytes,
        temp_bytes=memory.temp_bytes,
        peak_bytes=memory.peak_bytes,
        in_flight=1,
        collectives=add_up(find_collectives(compiled.as_text(), axis_names, axis_sizes)),
        num_programs=1,
        compile_s=compile_s,
        memory=memory,
    )
    return Stats(stages=(stage,), lower_s=lower_s)


def compiled_memory(compiled: Any) -> CompiledMemory:
    """The compiler's account of a program's memory on each device."""
    analysis = compiled.memory_analysis()
    arguments = int(analysis.argument_size_in_bytes)
    outputs = int(analysis.output_size_in_bytes)
    temporaries = int(analysis.temp_size_in_bytes)
    aliased = int(analysis.alias_size_in_bytes)
    return CompiledMemory(
        argument_bytes=arguments,
        output_bytes=outputs,
        temp_bytes=temporaries,
        alias_bytes=aliased,
        # Outputs that lie in donated arguments are counted among these already.
        peak_bytes=arguments + outputs - aliased + temporaries,
    )
