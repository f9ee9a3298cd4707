"""The compiler's account of the programs of a pipeline, stage by stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..compiled import StageStats, Stats, add_up, compiled_memory, find_collectives
from ._instructions import Run
from ._stage_memory import stage_memory

if TYPE_CHECKING:
    from ._pipeline import Pipeline


def pipeline_stats(pipeline: Pipeline) -> Stats:
    """Stats of all stages. With several processes all must call it."""
    compiled = pipeline.compile()
    counts = {
        k: sum(
            1
            for step in pipeline.instructions.steps
            if isinstance(step, Run) and step.function == k
        )
        for k in range(len(compiled))
    }
    memory = {k: compiled_memory(c.compiled) for k, c in enumerate(compiled) if c is not None}
    temps = {k: account.temp_bytes for k, account in memory.items()}
    aliases = {k: account.alias_bytes for k, account in memory.items()}
    donated = {k: c.donated for k, c in enumerate(compiled) if c is not None}
    sizes = pipeline.slot_bytes()
    stats = []
    for stage, context in enumerate(pipeline.contexts):
        functions = [
            k for k, c in enumerate(compiled) if c is not None and c.function.program.stage == stage
        ]
        mine = [c for c in compiled if c is not None and c.function.program.stage == stage]
        if not functions:
            continue
        names = [str(name) for name in context.mesh.axis_names]
        axis_sizes = [context.mesh.shape[name] for name in names]
        collectives = [
            use
            for k, c in zip(functions, mine, strict=True)
            for use in find_collectives(c.compiled.as_text(), names, axis_sizes)
            for _ in range(counts[k])
        ]
        over_time = stage_memory(
            pipeline.instructions,
            (stage,),
            sizes=sizes,
            temps=temps,
            aliases=aliases,
            donated=donated,
        )
        stats.append(
            StageStats(
                stage=stage,
                held_bytes=over_time.held_bytes,
                temp_bytes=max(temps[k] for k in functions),
                peak_bytes=over_time.peak_bytes,
                in_flight=over_time.in_flight,
                collectives=add_up(collectives),
                num_programs=len(functions),
                compile_s=sum(c.compile_s for c in mine),
            )
        )
    lower_s = sum(stage.lower_s for stage in compiled if stage is not None)
    return Stats(stages=pipeline.of_all_processes(stats), lower_s=lower_s)


def bytes_on_device(struct: Any) -> int:
    """Bytes of one shard of an array."""
    shard = struct.sharding.shard_shape(struct.shape)
    return int(math.prod(shard) * struct.dtype.itemsize)
