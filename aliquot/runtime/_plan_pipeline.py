"""From a plan with several stages to the pipeline that runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..cluster import Cluster, Target, target_for
from ..core import PlanMismatchError
from ..cost import decode_interior
from ..graph import Extract, Graph
from ..plans import Plan, StagePlan, make_schedule, require_match
from ..sharding import Choice, NodeGraph, Pin, Pins, Spec, StagedStep
from ._lowering import partition
from ._pipeline import Pipeline
from ._pipeline_step import StageSetup, build_pipeline
from ._plan_program import stage_pins
from ._step import make_mesh


def build_plan_pipeline(
    step: StagedStep, nodes: Sequence[NodeGraph], plan: Plan, devices: Sequence[Any] | None = None
) -> Pipeline:
    """The pipeline of a plan.

    Args:
        step: the step cut into the plan's stages.
        nodes: for each stage its decisions, those of the stage that it is like if there is one.
        devices: in the cluster's order; by default `jax.devices()`.

    Raises:
        PlanMismatchError: there are too few devices, the processes that have them cannot share the plan's hosts, or a
            stage's decisions are not those of its operators.
    """
    devices = jax.devices() if devices is None else devices
    needed = max(stage.first_device + math.prod(stage.mesh_shape) for stage in plan.stages)
    if len(devices) < needed:
        raise PlanMismatchError(
            f"the plan is for {needed} devices in {len(plan.stages)} stages, and there are {len(devices)}",
            asked="the plan does not fit these devices",
            advice="Plan for the devices at hand (Cluster.detect()), or on CPUs set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before starting Python.",
        )
    processes = len({device.process_index for device in devices})
    require_match(plan, num_processes=processes, asked="the plan does not fit these processes")
    meshes = [make_mesh(s.mesh_shape, s.axis_names, devices[s.first_device :]) for s in plan.stages]
    return pipeline_on(step, nodes, plan, meshes)


def pipeline_on(
    step: StagedStep,
    nodes: Sequence[NodeGraph],
    plan: Plan,
    meshes: Sequence[Any],
    processes: Sequence[frozenset[int]] | None = None,
) -> Pipeline:
    """The same on a mesh for each stage; on those without devices (`AbstractMesh`) it can be lowered, but not run.

    Args:
        processes: that have devices of each stage; must be given where meshes have none.
    """
    target = target_for(Cluster.from_dict(plan.cluster).device)
    setups = []
    for number, (stage, graph, mesh) in enumerate(zip(plan.stages, nodes, meshes, strict=True)):
        extract = step.extracts[number]
        choices = decode_interior(plan.stages[number if stage.like is None else stage.like], graph)
        waits = plan.num_micro_batches > 1
        setups.append(_setup(step.graph, extract, graph, choices, stage, mesh, target, waits))
    schedule = make_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches, plan.num_submeshes)
    return build_pipeline(
        step.graph,
        step.staging,
        setups,
        schedule,
        semantics=plan.micro_batch_semantics,
        recompute=frozenset(k for k, stage in enumerate(plan.stages) if stage.recompute),
        processes=processes,
    )


def _setup(
    graph: Graph,
    extract: Extract,
    nodes: NodeGraph,
    choices: Sequence[Choice],
    stage: StagePlan,
    mesh: Any,
    target: Target,
    waits: bool,
) -> StageSetup:
    own = stage_pins(extract.graph, nodes, choices, stage, target, waits=waits)
    taken = {i.value for i in graph.inputs}
    given: dict[int, PartitionSpec] = {}
    sent: dict[int, PartitionSpec] = {}
    for item, spec in zip(extract.graph.inputs, own.inputs, strict=True):
        value = extract.values[item.value]
        shape = extract.graph.values[item.value].shape
        (given if value in taken else sent)[value] = partition(mesh, spec, shape)
    for output, spec in zip(extract.graph.outputs, own.outputs, strict=True):
        if isinstance(output.value, int):
            value = extract.values[output.value]
            sent.setdefault(value, partition(mesh, spec, extract.graph.values[output.value].shape))
    return StageSetup(
        mesh=mesh,
        pins=_for_whole(graph, extract, own, len(stage.mesh_shape)),
        data_axes=stage.data_axes,
        given_specs=given,
        sent_specs=sent,
    )


def _for_whole(graph: Graph, extract: Extract, own: Pins, num_axes: int) -> Pins:
    """Pins of a part, by the operators of the whole step."""
    op_class = [-1] * len(graph.ops)
    for number, index in enumerate(extract.ops):
        op_class[index] = own.op_class[number]
    whole: Spec = (-1,) * num_axes
    by_value = {extract.values[i.value]: s for i, s in zip(extract.graph.inputs, own.inputs, strict=True)}
    pins: dict[int, Pin] = {number: pin for number, pin in own.by_class.items() if number >= 0}
    return Pins(
        by_class=pins,
        op_class=op_class,
        inputs=tuple(by_value.get(i.value, whole) for i in graph.inputs),
        outputs=tuple(whole for _ in graph.outputs),
        values={extract.values[v]: s for v, s in own.values.items()},
        totals={extract.values[v]: s for v, s in own.totals.items()},
        rows={extract.values[v]: (extract.values[old], made, kept) for v, (old, made, kept) in own.rows.items()},
    )
