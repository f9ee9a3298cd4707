"""The compiler's account of the programs of a pipeline, stage by stage."""

from __future__ import annotations

import itertools
import math
from typing import Any

from ..compiled import (
    CompiledCollective,
    StageStats,
    Stats,
    add_up,
    compiled_memory,
    find_collectives,
)
from ..transport import exchange, report
from ._compile import CompiledPipeline
from ._instructions import Run
from ._pipeline import Pipeline
from ._stage_functions import Key
from ._stage_memory import stage_memory


def pipeline_stats(compiled_pipeline: CompiledPipeline) -> Stats:
    """Stats of all stages. With several processes all must call it."""
    pipeline, compiled = compiled_pipeline.pipeline, compiled_pipeline.stages
    counts = {}
    for k in range(len(compiled)):
        counts[k] = sum(
            1
            for step in pipeline.instructions.steps
            if isinstance(step, Run) and step.function == k
        )
    memory = {k: compiled_memory(c.compiled) for k, c in enumerate(compiled) if c is not None}
    temps = {k: account.temp_bytes for k, account in memory.items()}
    aliases = {k: account.alias_bytes for k, account in memory.items()}
    donated = {k: c.form.donated for k, c in enumerate(compiled) if c is not None}
    sizes = _slot_bytes(compiled_pipeline)
    stats = []
    for stage, context in enumerate(pipeline.contexts):
        functions = {
            k: c
            for k, c in enumerate(compiled)
            if c is not None and c.function.program.stage == stage
        }
        if not functions:
            continue
        names = [str(name) for name in context.mesh.axis_names]
        axis_sizes = [context.mesh.shape[name] for name in names]
        collectives: list[CompiledCollective] = []
        for k, c in functions.items():
            collectives += counts[k] * find_collectives(c.compiled.as_text(), names, axis_sizes)
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
                compile_s=sum(c.compile_s for c in functions.values()),
            )
        )
    lower_s = sum(stage.lower_s for stage in compiled if stage is not None)
    return Stats(stages=_of_all_processes(pipeline, stats), lower_s=lower_s)


def _of_all_processes(pipeline: Pipeline, stats: list[StageStats]) -> tuple[StageStats, ...]:
    """Stats of all stages, collected from the processes that have them."""
    if not pipeline.is_shared:
        return tuple(stats)
    report("step.stats()")
    of_all = itertools.chain.from_iterable(exchange(stats, list[StageStats]))
    by_stage = {item.stage: item for item in of_all}
    return tuple(by_stage[stage] for stage in sorted(by_stage))


def _slot_bytes(compiled: CompiledPipeline) -> dict[int, int]:
    """Bytes of each slot on each device of its stage."""
    shapes: dict[tuple[int, Key], Any] = {}
    for stage in compiled.stages:
        if stage is None:
            continue
        number = stage.function.program.stage
        for keys, structs in (
            (stage.function.takes, stage.form.arguments),
            (stage.function.gives, stage.shapes),
        ):
            for key, struct in zip(keys, structs):
                shapes[number, Key(key.form, key.value)] = struct
    return {
        slot: bytes_on_device(shapes[stage, key])
        for slot, (stage, key, _) in enumerate(compiled.pipeline.instructions.slots)
        if (stage, key) in shapes
    }


def bytes_on_device(struct: Any) -> int:
    """Bytes of one shard of an array in device memory."""
    if struct.sharding.memory_kind == "pinned_host":
        return 0
    shard = struct.sharding.shard_shape(struct.shape)
    return int(math.prod(shard) * struct.dtype.itemsize)
