"""Export of a pipeline's programs for a compiler elsewhere, without devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from jax.sharding import AbstractMesh, AxisType

from ...cluster import Cluster
from ...cost import PlannedStep
from ._instructions import Run
from ._pipeline import Pipeline
from ._pipeline_stats import bytes_on_device
from ._plan_pipeline import pipeline_on
from ._stage_forms import Known, StageForm, form_of
from ._stage_functions import Form, Key
from ._stage_memory import StageMemory, stage_memory

# What an argument is called that is no input of the step.
_WHAT = {
    Form.GIVEN: "a constant",
    Form.LOCAL: "a residual",
    Form.TOTAL: "a running total",
    Form.HANDED_ON: "state that micro-batches hand on",
}
_LEFT = "what another program left"


class StageExport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One program of a stage.

    Attributes:
        name: such as `stage 1 backward`.
        stage: the stage that runs it.
        form: what is compiled.
        sources: for each argument that another program returns in a split of the compiler's choice:
            which export that is, and the position among its results; None for other arguments.
        paths: what each argument is, for messages.
        runs: how often a step runs it.
    """

    name: str
    stage: int
    form: StageForm
    sources: tuple[tuple[int, int] | None, ...]
    paths: tuple[str, ...]
    runs: int


def abstract_pipeline(step: PlannedStep) -> Pipeline:
    """The pipeline of a plan on meshes without devices, as it would be with one process for each
    host.
    """
    plan = step.plan
    per_host = Cluster.from_dict(plan.cluster).devices_per_host
    meshes, processes = [], []
    for s in plan.stages:
        kinds = (AxisType.Auto,) * len(s.mesh_shape)
        meshes.append(AbstractMesh(tuple(s.mesh_shape), tuple(s.axis_names), axis_types=kinds))
        devices = range(s.first_device, s.first_device + math.prod(s.mesh_shape))
        processes.append(frozenset(device // per_host for device in devices))
    return pipeline_on(step, meshes, processes)


def export_stages(pipeline: Pipeline) -> tuple[StageExport, ...]:
    """All programs of a pipeline, in an order in which they can be compiled."""
    known: Known = {}
    made_by: dict[tuple[int, Key], tuple[int, int]] = {}
    paths = {Key(Form.GIVEN, item.value): item.path for item in pipeline.graph.inputs}
    runs = [step.function for step in pipeline.instructions.steps if isinstance(step, Run)]
    exports = []
    for k, function in enumerate(pipeline.functions):
        stage = function.program.stage
        form = form_of(pipeline, k, known)
        sources = []
        for key, struct in zip(function.takes, form.arguments, strict=True):
            # The compiler chooses the splits of arrays that one program of a stage leaves to
            # another.
            is_open = struct.sharding is None
            sources.append(made_by[stage, Key(key.form, key.value)] if is_open else None)
        exports.append(
            StageExport(
                name=function.program.name,
                stage=stage,
                form=form,
                sources=tuple(sources),
                paths=tuple(paths.get(key, _WHAT.get(key.form, _LEFT)) for key in function.takes),
                runs=runs.count(k),
            )
        )
        for position, key in enumerate(function.gives):
            made_by[stage, Key(key.form, key.value)] = k, position
    return tuple(exports)


def exported_memory(
    pipeline: Pipeline,
    exports: Sequence[StageExport],
    stages: Sequence[int],
    *,
    out_bytes: Sequence[Sequence[int]],
    temps: Sequence[int],
    aliases: Sequence[int],
) -> StageMemory:
    """Memory over a step on the devices of some stages.

    Args:
        exports: all of the pipeline's.
        stages: those that share the devices.
        out_bytes: for each export the bytes of each result on each device.
        temps, aliases: for each export the bytes of its temporaries, and of results in the place of
            arguments.
    """
    size: dict[tuple[int, Key], int] = {}
    for export, results in zip(exports, out_bytes, strict=True):
        function = export.form.function
        for key, struct in zip(function.takes, export.form.arguments, strict=True):
            if struct.sharding is not None:
                size[export.stage, Key(key.form, key.value)] = bytes_on_device(struct)
        for key, num_bytes in zip(function.gives, results, strict=True):
            size[export.stage, Key(key.form, key.value)] = num_bytes
    sizes = {}
    for slot, (stage, key, _) in enumerate(pipeline.instructions.slots):
        if (stage, key) in size:
            sizes[slot] = size[stage, key]
    return stage_memory(
        pipeline.instructions,
        stages,
        sizes=sizes,
        temps=dict(enumerate(temps)),
        aliases=dict(enumerate(aliases)),
        donated={k: export.form.donated for k, export in enumerate(exports)},
    )
