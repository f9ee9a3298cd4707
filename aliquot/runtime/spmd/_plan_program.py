"""Construction of a program from a plan: pins from its choices, and its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...cluster import Target
from ...cost import PlannedStep
from ...graph import Graph
from ...plans import StagePlan
from ...sharding import Choice, NodeGraph, Pins, make_pins, plan_micro_batches
from ._spmd import Program, build_program


def build_plan_program(step: PlannedStep, mesh: Any) -> Program:
    """The program of a plan of one program, on its mesh; one without devices serves to lower it.

    Args:
        mesh: a `Mesh`, or an `AbstractMesh`.

    Raises:
        CaptureError: the step does not decompose into the plan's micro-batches.
    """
    plan, graph = step.plan, step.graph
    (stage,), (planned,) = plan.stages, step.stages
    nodes = planned.problem.nodes
    waits = plan.sums_gradients_once
    pins = stage_pins(graph, nodes, planned.choices, stage, planned.problem.target, waits=waits)
    data_axes = stage.data_axes if waits else ()
    micro_batches = None
    if plan.num_micro_batches > 1:
        sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
        micro_batches = plan_micro_batches(
            graph,
            plan.num_micro_batches,
            num_groups=math.prod(sizes[axis] for axis in data_axes),
            semantics=plan.micro_batch_semantics,
            on_missing_rule=nodes.on_missing_rule,
        )
    return build_program(
        graph,
        pins,
        mesh,
        micro_batches=micro_batches,
        data_axes=data_axes,
        context_axes=stage.context_axes if waits else (),
        casts_once=stage.casts_once,
    )


def stage_pins(
    graph: Graph,
    nodes: NodeGraph,
    choices: Sequence[Choice],
    stage: StagePlan,
    target: Target,
    *,
    waits: bool,
) -> Pins:
    """Pins of a stage, as its target's compiler needs them. `waits`: whether gradients wait for the
    last micro-batch.
    """
    return make_pins(
        graph,
        nodes,
        choices,
        stage.mesh_shape,
        target,
        data_axes=[stage.axis_names.index(a) for a in stage.data_axes] if waits else [],
        context_axes=[stage.axis_names.index(a) for a in stage.context_axes] if waits else [],
        gathers_once=stage.gathers_once,
    )
