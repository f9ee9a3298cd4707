"""Verification of a pipeline, stage by stage: every program is compiled for its stage's own
devices, and equal ones once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..cluster import Cluster
from ..cost import PlannedStep
from ..plans import ArrayInterface, Plan, StagePlan, device_range, grouped_arrays
from ..runtime import (
    CompiledCollective,
    StageExport,
    StageMemory,
    abstract_pipeline,
    export_stages,
    exported_memory,
)
from ._compare import compare_collectives, unintended_collectives
from ._compile import CompiledProgram, Compiler
from ._process import Progress
from ._program import portable_stage
from ._targets import CompileTarget, resolve_target
from ._text import INPUT
from ._verify import ProgramVerification, StageVerification, Verification, remarks_on


def verify_pipeline(
    planned: PlannedStep,
    *,
    target: str | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Verification:
    """Compile the programs of all stages of a plan; see `verify_plan`."""
    plan = planned.plan
    assert planned.staged is not None
    step = planned.staged
    cluster = Cluster.from_dict(plan.cluster)
    chosen = resolve_target(target, cluster, limit_bytes=plan.prediction.memory_limit_bytes)
    tell = progress or (lambda line: None)
    most = max(math.prod(stage.mesh_shape) for stage in plan.stages)
    with Compiler(chosen, num_devices=most, progress=tell, cache=cache) as compiler:
        # Starting takes seconds, in which the programs are exported here.
        compiler.start()
        tell("exporting the programs")
        pipeline = abstract_pipeline(planned)
        exports = export_stages(pipeline)
        programs = _compile_all(plan, exports, cluster, chosen, compiler)

    def memory(stages: Sequence[int]) -> StageMemory:
        return exported_memory(
            pipeline,
            exports,
            stages,
            out_bytes=[
                p.compiled.out_bytes or (0,) * len(e.form.results)
                for e, p in zip(exports, programs, strict=True)
            ],
            temps=[p.compiled.temp_bytes for p in programs],
            aliases=[p.compiled.alias_bytes for p in programs],
        )

    # Inputs as the stages keep them: arrays that are stacked over layers may lie in pieces.
    inputs = []
    for item in step.graph.inputs:
        value = step.graph.values[item.value]
        inputs.append(
            ArrayInterface(
                path=item.path, shape=value.shape, dtype=value.dtype, memory=value.memory.value
            )
        )
    every = range(len(plan.stages))
    verified = []
    for number in every:
        positions = []
        for k, export in enumerate(exports):
            if export.stage == number and export.runs:
                positions.append(k)
        verified.append(
            _stage(
                plan,
                number,
                inputs,
                [exports[k] for k in positions],
                [programs[k] for k in positions],
                memory([number]),
            )
        )
    devices: set[int] = set()
    for stage in plan.stages:
        devices.update(range(*device_range(stage)))
    together = []
    for s in range(plan.num_submeshes):
        together.append([k for k in every if pipeline.schedule.submesh_of(k) == s])
    return Verification(
        target=chosen,
        num_devices=len(devices),
        limit_bytes=chosen.limit_bytes,
        predicted_step_time_s=plan.prediction.step_time_s,
        predicted_compute_s=plan.prediction.compute_s,
        stages=tuple(verified),
        submesh_bytes=tuple(
            # Stages on the same devices hold their arrays there at the same time.
            max([float(memory(stages).peak_bytes), *(verified[k].compiled_bytes for k in stages)])
            for stages in together
        ),
        remarks=remarks_on(cluster, chosen, [p.compiled for p in programs]),
    )


def _compile_all(
    plan: Plan,
    exports: Sequence[StageExport],
    cluster: Cluster,
    target: CompileTarget,
    compiler: Compiler,
) -> list[ProgramVerification]:
    """Compile every program, in order: a program takes arrays of earlier ones in the splits that
    the compiler chose for those.
    """
    verified: list[ProgramVerification] = []
    known: dict[tuple[str, int], ProgramVerification] = {}
    for export in exports:
        if not export.runs:
            verified.append(
                ProgramVerification(
                    name=export.name, runs=0, compiled=CompiledProgram(target=target)
                )
            )
            continue
        stage = plan.stages[export.stage]
        per_host = _devices_per_host(stage, cluster.devices_per_host)
        program = portable_stage(export, stage, target.platform)
        dims = list(program.in_dims)
        for position, source in enumerate(export.sources):
            if source is not None:
                producer, output = source
                # The split of results of a program that was refused stays open.
                chosen = verified[producer].compiled.out_dims
                dims[position] = chosen[output] if chosen else None
        program = replace(program, in_dims=tuple(dims))
        same = known.get((program.fingerprint, per_host))
        if same is None:
            compiled = compiler.compile(program, devices_per_host=per_host, name=export.name)
            verified.append(
                ProgramVerification(name=export.name, runs=export.runs, compiled=compiled)
            )
            known[program.fingerprint, per_host] = verified[-1]
        else:
            verified.append(replace(same, name=export.name, runs=export.runs, same_as=same.name))
    return verified


def _devices_per_host(stage: StagePlan, per_host: int) -> int:
    """Number of a stage's devices in each host; where hosts have unequal numbers of them, that of
    the largest equal pieces.

    >>> from types import SimpleNamespace as Stage
    >>> places = ((0, 16), (4, 4), (4, 8), (6, 4))
    >>> [_devices_per_host(Stage(first_device=f, mesh_shape=(n,)), 8) for f, n in places]
    [8, 4, 4, 2]
    """
    count, offset = math.prod(stage.mesh_shape), stage.first_device % per_host
    return count if offset + count <= per_host else math.gcd(per_host, offset, count)


def _stage(
    plan: Plan,
    number: int,
    inputs: Sequence[ArrayInterface],
    exports: Sequence[StageExport],
    programs: Sequence[ProgramVerification],
    memory: StageMemory,
) -> StageVerification:
    stage = plan.stages[number]
    predicted = stage.prediction
    assert predicted is not None
    used = list(_collectives(exports, programs))
    refused = [p.compiled for p in programs if p.compiled.refusal]
    here = [each for each in inputs if each.path in stage.shardings]
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    arguments, temporaries = memory.parts["arguments"], memory.parts["temporaries"]
    # Seconds of a program that was compiled once for several stages count once.
    compiled_programs = [p.compiled for p in programs if not p.same_as]
    return StageVerification(
        predicted_bytes=predicted.peak_memory_bytes,
        predicted_parts=dict(predicted.memory_bytes),
        predicted_host_bytes=sum(predicted.host_memory_bytes.values()),
        argument_bytes=sum(
            group.local_bytes for group in grouped_arrays(here, stage, stage.shardings)
        ),
        compiled=CompiledProgram(
            target=programs[0].compiled.target,
            argument_bytes=arguments,
            output_bytes=memory.peak_bytes - arguments - temporaries,
            temp_bytes=temporaries,
            needed_bytes=max((c.needed_bytes or 0.0 for c in refused), default=None),
            collectives=tuple(used),
            cycles=sum(p.runs * p.compiled.cycles for p in programs),
            modelled_compute_s=sum(p.runs * p.compiled.modelled_compute_s for p in programs),
            unpriced_calls=sum(p.runs * p.compiled.unpriced_calls for p in programs),
            compile_s=sum(c.compile_s for c in compiled_programs),
            refusal=refused[0].refusal if refused else "",
            cached=all(c.cached for c in compiled_programs),
        ),
        collectives=compare_collectives(predicted.collectives, used) if not refused else (),
        unintended=(
            unintended_collectives(predicted.collectives, used, (), sizes) if not refused else ()
        ),
        held={kind: float(num_bytes) for kind, num_bytes in memory.parts.items()},
        programs=tuple(programs),
    )


def _collectives(
    exports: Iterable[StageExport], programs: Iterable[ProgramVerification]
) -> Iterable[CompiledCollective]:
    """The collectives of a step, with causes that name inputs by their paths."""
    for export, program in zip(exports, programs, strict=True):
        names = {f"{INPUT}{position}": path for position, path in enumerate(export.paths)}
        for each in program.compiled.collectives:
            head, comma, rest = each.label.partition(", and ")
            yield replace(
                each,
                count=each.count * program.runs,
                num_bytes=each.num_bytes * program.runs,
                label=f"{names.get(head, head)}{comma}{rest}",
            )
