"""Construction of a pipeline from a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ...core import PlanMismatchError
from ...cost import PlannedStage, PlannedStep
from ...graph import Extract, Graph, ValueId
from ...plans import Plan, StagePlan, require_busy_processes, require_match
from ...sharding import Pin, Pins, Spec
from ..spmd import make_mesh, partition, require_kernels, stage_pins
from ._pipeline import Pipeline, build_pipeline
from ._stage_functions import StageSetup


def build_plan_pipeline(step: PlannedStep, devices: Sequence[Any] | None = None) -> Pipeline:
    """The pipeline of a plan.

    Args:
        devices: in the cluster's order; by default `jax.devices()`.

    Raises:
        PlanMismatchError: there are too few devices, or the processes that have them cannot share
            the plan's hosts.
    """
    plan = step.plan
    devices = jax.devices() if devices is None else devices
    require_devices(plan, devices)
    require_kernels(step.graph, devices)
    meshes = [make_mesh(s.mesh_shape, s.axis_names, devices[s.first_device :]) for s in plan.stages]
    return pipeline_on(step, meshes)


def require_devices(plan: Plan, devices: Sequence[Any]) -> None:
    """Refuse devices that are too few for a pipeline's plan, or processes that it cannot use.
    Raises `PlanMismatchError`.
    """
    needed = max(stage.first_device + math.prod(stage.mesh_shape) for stage in plan.stages)
    if len(devices) < needed:
        raise PlanMismatchError(
            f"the plan is for {needed} devices in {len(plan.stages)} stages, and there are"
            f" {len(devices)}",
            asked="the plan does not fit these devices",
            advice=(
                "Plan for the devices at hand (Cluster.detect()), or on CPUs set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before starting Python."
            ),
        )
    require_busy_processes(plan, devices)
    processes = len({device.process_index for device in devices})
    require_match(plan, num_processes=processes, asked="the plan does not fit these processes")


def pipeline_on(
    step: PlannedStep, meshes: Sequence[Any], processes: Sequence[frozenset[int]] | None = None
) -> Pipeline:
    """The pipeline of a plan on a mesh for each stage; on meshes without devices (`AbstractMesh`)
    it can be lowered, but not run.

    Args:
        processes: for each stage those that have its devices; must be given where meshes have no
            devices.
    """
    plan, staged = step.plan, step.staged
    assert staged is not None
    waits = plan.sums_gradients_once
    setups = []
    of_stages = zip(staged.extracts, step.stages, plan.stages, meshes, strict=True)
    for extract, stage, planned, mesh in of_stages:
        setups.append(_setup(staged.graph, extract, stage, planned, mesh, waits=waits))
    return build_pipeline(staged.graph, step.cut(), setups, plan.tasks, processes=processes)


def _setup(
    graph: Graph,
    extract: Extract,
    stage: PlannedStage,
    planned: StagePlan,
    mesh: Any,
    *,
    waits: bool,
) -> StageSetup:
    """Mesh and splits of a stage, in terms of the whole step. `waits`: whether gradients wait for
    the last micro-batch.
    """
    problem = stage.problem
    pins = stage_pins(
        extract.graph, problem.nodes, stage.choices, planned, problem.target, waits=waits
    )
    taken = {i.value for i in graph.inputs}
    given: dict[ValueId, PartitionSpec] = {}
    sent: dict[ValueId, PartitionSpec] = {}
    for item, spec in zip(extract.graph.inputs, pins.inputs, strict=True):
        value = extract.values[item.value]
        shape = extract.graph.values[item.value].shape
        (given if value in taken else sent)[value] = partition(mesh, spec, shape)
    for output, spec in zip(extract.graph.outputs, pins.outputs, strict=True):
        if isinstance(output.value, int):
            value = extract.values[output.value]
            # Splits of a stage's inputs win: a value that only passes through keeps its split.
            sent.setdefault(value, partition(mesh, spec, extract.graph.values[output.value].shape))
    return StageSetup(
        mesh=mesh,
        pins=_for_whole(graph, extract, pins, len(planned.mesh_shape)),
        data_axes=planned.data_axes,
        context_axes=planned.context_axes if waits else (),
        given_specs=given,
        sent_specs=sent,
    )


def _for_whole(graph: Graph, extract: Extract, part_pins: Pins, num_axes: int) -> Pins:
    """The pins of a stage, indexed by the operators and values of the whole step."""
    op_class = [-1] * len(graph.ops)
    for number, index in enumerate(extract.ops):
        op_class[index] = part_pins.op_class[number]
    whole: Spec = (-1,) * num_axes
    inputs = [extract.values[item.value] for item in extract.graph.inputs]
    by_value = dict(zip(inputs, part_pins.inputs, strict=True))
    pins: dict[int, Pin] = {k: pin for k, pin in part_pins.by_class.items() if k >= 0}
    rows = {}
    for value, (old, rows_made, kept) in part_pins.rows.items():
        rows[extract.values[value]] = extract.values[old], rows_made, kept
    return Pins(
        by_class=pins,
        op_class=op_class,
        inputs=tuple(by_value.get(i.value, whole) for i in graph.inputs),
        outputs=(whole,) * len(graph.outputs),
        values={extract.values[v]: s for v, s in part_pins.values.items()},
        totals={extract.values[v]: s for v, s in part_pins.totals.items()},
        rows=rows,
        token_sums=part_pins.token_sums,
    )
