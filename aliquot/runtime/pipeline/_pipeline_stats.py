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
from ..spmd import axis_names
from ..transport import exchange, report
from ._compile import CompiledPipeline
from ._instructions import Run
from ._stage_forms import StageForm
from ._stage_functions import Key
from ._stage_memory import stage_memory


def pipeline_stats(compiled_pipeline: CompiledPipeline) -> Stats:
    """Stats of all stages. With several processes all must call it."""
    pipeline, compiled = compiled_pipeline.pipeline, compiled_pipeline.stages
    runs = [step.function for step in pipeline.instructions.steps if isinstance(step, Run)]
    temps, aliases, donated = {}, {}, {}
    by_stage: dict[int, dict[int, StageForm]] = {}
    for k, form in enumerate(compiled):
        if form is not None:
            account = compiled_memory(form.compiled)
            temps[k], aliases[k], donated[k] = account.temp_bytes, account.alias_bytes, form.donated
            by_stage.setdefault(form.function.program.stage, {})[k] = form
    sizes = _slot_bytes(compiled_pipeline)
    stats = []
    for stage, functions in sorted(by_stage.items()):
        mesh = pipeline.contexts[stage].mesh
        names, axis_sizes = axis_names(mesh), list(mesh.shape.values())
        collectives: list[CompiledCollective] = []
        for k, c in functions.items():
            collectives += runs.count(k) * find_collectives(c.compiled.as_text(), names, axis_sizes)
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
    if pipeline.is_shared:
        # Each process has its own stages.
        report("step.stats()")
        of_all = itertools.chain.from_iterable(exchange(stats, list[StageStats]))
        stats_of = {item.stage: item for item in of_all}
        stats = [stats_of[stage] for stage in sorted(stats_of)]
    return Stats(stages=tuple(stats), lower_s=lower_s)


def _slot_bytes(compiled: CompiledPipeline) -> dict[int, int]:
    """Bytes of each slot on each device of its stage."""
    shapes: dict[tuple[int, Key], Any] = {}
    for form in compiled.stages:
        if form is None:
            continue
        keys = (*form.function.takes, *form.function.gives)
        for key, struct in zip(keys, (*form.arguments, *form.results), strict=True):
            shapes[form.function.program.stage, Key(key.form, key.value)] = struct
    sizes = {}
    for slot, (stage, key, _) in enumerate(compiled.pipeline.instructions.slots):
        if (stage, key) in shapes:
            sizes[slot] = bytes_on_device(shapes[stage, key])
    return sizes


def bytes_on_device(struct: Any) -> int:
    """Bytes of one shard of an array in device memory."""
    if struct.sharding.memory_kind == "pinned_host":
        return 0
    shard = struct.sharding.shard_shape(struct.shape)
    return int(math.prod(shard) * struct.dtype.itemsize)
