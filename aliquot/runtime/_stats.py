"""What the compiler says about a program: memory on each device, collectives, time to compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import format_bytes, format_seconds
from ._hlo import CompiledCollective, add_up, find_collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes on each device. `alias_bytes` of the outputs live in donated arguments.

    `peak_bytes` is what must fit at once: arguments, outputs that have no argument's place, and temporaries.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A compiled step.

    Attributes:
        memory: see there.
        collectives: by kind, axes and whether they stand in a loop, most bytes first.
        lower_s, compile_s: seconds it took to write the program down, and to compile it.
    """

    memory: CompiledMemory
    collectives: tuple[CompiledCollective, ...]
    lower_s: float
    compile_s: float

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"compiled in {format_seconds(self.compile_s)}",
            f"each device: arguments {format_bytes(memory.argument_bytes)}, "
            f"outputs {format_bytes(memory.output_bytes)} ({format_bytes(memory.alias_bytes)} of them in place), "
            f"temporaries {format_bytes(memory.temp_bytes)}, peak {format_bytes(memory.peak_bytes)}",
        ]
        for c in self.collectives:
            place = f"{','.join(c.axes) or '-'}{' in a loop' if c.in_loop else ''}"
            lines.append(f"{c.kind} over {place}: {c.count:g} times, {format_bytes(c.num_bytes)}")
        return "\n".join(lines)


def compiled_stats(
    compiled: Any, axis_names: Sequence[str], axis_sizes: Sequence[int], *, lower_s: float = 0.0, compile_s: float = 0.0
) -> Stats:
    """Stats of what `jax.jit(...).lower(...).compile()` returned, for a mesh whose devices are numbered row by row."""
    return Stats(
        memory=compiled_memory(compiled),
        collectives=add_up(find_collectives(compiled.as_text(), axis_names, axis_sizes)),
        lower_s=lower_s,
        compile_s=compile_s,
    )


def compiled_memory(compiled: Any) -> CompiledMemory:
    """The compiler's account of a program's memory on each device."""
    found = compiled.memory_analysis()
    arguments = int(found.argument_size_in_bytes)
    outputs = int(found.output_size_in_bytes)
    temporaries = int(found.temp_size_in_bytes)
    aliased = int(found.alias_size_in_bytes)
    return CompiledMemory(
        argument_bytes=arguments,
        output_bytes=outputs,
        temp_bytes=temporaries,
        alias_bytes=aliased,
        peak_bytes=arguments + outputs - aliased + temporaries,
    )
