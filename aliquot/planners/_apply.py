"""Plan and step -> `PlannedStep`: the step cut as the plan says, with the plan's choices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..cluster import AbstractMeasured, Cluster, subcluster
from ..core import AliquotWarning
from ..cost import PlannedStage, PlannedStep, Problem, decode_interior, make_problem
from ..graph import Graph, graph_fingerprint, split_scans, with_recomputation
from ..plans import Plan, require_match
from ..sharding import (
    Choice,
    LayeredStep,
    NodeId,
    StagedStep,
    layer_step,
    stage_step,
    without_own_loop,
)
from ._base import Task
from ._follow import follow
from ._write import array_interfaces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutStep:
    """A step cut as a plan says, without the plan's choices.

    Attributes:
        graph: the step on its whole batch, without its own loop where the plan's micro-batches take
            its place.
        problems: one for each stage. Stages that are alike have the same.
        combine: how the outputs of micro-batches combine; see `MicroBatchPlan`.
        layered, staged: how it was cut into stages; None for one program.
    """

    graph: Graph
    problems: tuple[Problem, ...]
    combine: Mapping[str, str]
    layered: LayeredStep | None = None
    staged: StagedStep | None = None


def apply_plan(
    plan: Plan,
    graph: Graph,
    on_missing_rule: str = "infer",
    measured: AbstractMeasured | None = None,
) -> PlannedStep:
    """A step cut as its plan says.

    If the plan is one program and the step now traces into other operators than when it was
    planned, what lies between its inputs and outputs is planned anew, with a warning.

    Args:
        graph: the step on its whole batch.
        measured: measurements that correct its costs; None for the cost model alone.

    Raises:
        PlanMismatchError: the plan was made for another step; lists every difference.
        CaptureError: the step does not decompose into the plan's micro-batches.
    """
    inputs, outputs = array_interfaces(graph)
    require_match(
        plan,
        inputs=inputs,
        outputs=outputs,
        asked=f"the plan was made for another step than {graph.name}",
    )
    cut = cut_as_planned(plan, graph, on_missing_rule, measured)
    if cut.layered is None:
        (problem,) = cut.problems
        return PlannedStep.of_program(plan, cut.graph, problem, _choices(plan, cut.graph, problem))
    stages: list[PlannedStage] = []
    for stage, problem in zip(plan.stages, cut.problems, strict=True):
        if stage.like is not None:
            # Choices of an equal stage are stored once; see `StagePlan.like`.
            stages.append(stages[stage.like])
            continue
        choices = decode_interior(stage, problem.nodes)
        repeat = frozenset(NodeId(k) for k, entry in enumerate(stage.interior) if entry.recompute)
        stages.append(PlannedStage(problem=problem, choices=choices, repeat=repeat))
    return PlannedStep(
        plan=plan,
        graph=cut.layered.graph,
        stages=tuple(stages),
        layered=cut.layered,
        staged=cut.staged,
    )


def cut_as_planned(
    plan: Plan,
    graph: Graph,
    on_missing_rule: str = "infer",
    measured: AbstractMeasured | None = None,
) -> CutStep:
    """A step in the micro-batches and stages of a plan, which need not be for this step.

    Raises:
        CaptureError, InputError: it cannot be cut so.
    """
    cluster = replace(Cluster.from_dict(plan.cluster), measured=measured)
    if graph.calling.recompute is None:
        graph = with_recomputation(graph, plan.recompute)
    cut = _pipeline if plan.is_pipeline else _program
    return cut(plan, _as_planned(plan, graph, on_missing_rule), cluster, on_missing_rule)


def _as_planned(plan: Plan, graph: Graph, on_missing_rule: str) -> Graph:
    """The step, without its own loop over micro-batches if the plan's take its place."""
    is_exact = plan.micro_batch_semantics == "exact"
    own = without_own_loop(graph, on_missing_rule) if is_exact else None
    if own is None or graph_fingerprint(graph) == plan.graph_fingerprint:
        return graph
    # Another release of a library may have changed the operators.
    takes_place = plan.num_micro_batches % own.turns == 0
    is_same = graph_fingerprint(own.graph) == plan.graph_fingerprint
    return own.graph if is_same or takes_place else graph


def _program(plan: Plan, graph: Graph, cluster: Cluster, on_missing_rule: str) -> CutStep:
    task = Task(
        graph=graph,
        cluster=cluster,
        semantics=plan.micro_batch_semantics,
        on_missing_rule=on_missing_rule,
        memory_limit_bytes=plan.prediction.memory_limit_bytes,
    )
    count = plan.num_micro_batches
    return CutStep(graph=graph, problems=(task.problem(count),), combine=task.combine(count))


def _choices(plan: Plan, graph: Graph, problem: Problem) -> Sequence[Choice]:
    if graph_fingerprint(graph) == plan.graph_fingerprint:
        return decode_interior(plan.stages[0], problem.nodes)
    warnings.warn(
        f"{graph.name} is traced into other operators than the plan was made for (another release"
        " of a library, perhaps). Its inputs and outputs are the same: they are split as planned,"
        " and what lies between is planned anew.",
        AliquotWarning,
        stacklevel=5,
    )
    return follow(problem, plan.stages[0])


def _pipeline(plan: Plan, graph: Graph, cluster: Cluster, on_missing_rule: str) -> CutStep:
    layers: str | int | None = plan.layers or None if plan.num_layers is None else plan.num_layers
    whole = split_scans(graph, plan.scan_bounds).graph if plan.scan_bounds else graph
    layered = layer_step(
        whole,
        plan.num_micro_batches,
        layers=layers,
        semantics=plan.micro_batch_semantics,
        on_missing_rule=on_missing_rule,
    )
    # Where a scan over layers is cut, the layers of the cut step are the ranges of the scan, one
    # for each stage.
    first = [k if plan.scan_bounds else stage.first_layer for k, stage in enumerate(plan.stages)]
    staged = stage_step(layered, first)
    problems: list[Problem] = []
    for stage, extract in zip(plan.stages, staged.extracts, strict=True):
        if stage.like is not None:
            problems.append(problems[stage.like])
            continue
        problem = make_problem(
            extract.graph,
            cluster,
            num_micro_batches=plan.num_micro_batches,
            on_missing_rule=on_missing_rule,
            repeats=stage.folded,
            semantics=plan.micro_batch_semantics,
            of_stage=True,
        )
        size = math.prod(stage.mesh_shape)
        shape = max(1, size // cluster.devices_per_host), min(size, cluster.devices_per_host)
        problems.append(replace(problem, cluster=subcluster(cluster, shape)))
    return CutStep(
        graph=graph,
        problems=tuple(problems),
        combine=layered.combine,
        layered=layered,
        staged=staged,
    )
