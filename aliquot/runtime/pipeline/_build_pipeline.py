"""A step with its stages -> the pipeline that runs it, on any meshes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jax.sharding import Mesh, PartitionSpec

from ...graph import Graph, Staging
from ...plans import Schedule
from ...sharding import MicroBatchPlan, Pins, plan_micro_batches
from ..spmd import Layout, MicroBatchGraphs, cut_graph
from ._phase_parts import phase_parts
from ._pipeline import Pipeline
from ._programs import StagePrograms
from ._split import Recompute, split_stages
from ._stage_functions import StageContext


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSetup:
    """The mesh of a stage and the splits on it.

    Attributes:
        mesh: its devices.
        pins: its splits, for the operators of the whole step.
        data_axes: mesh axes that split nothing but the batch.
        given_specs: how inputs of the step are split, by value.
        sent_specs: how values that it exchanges with other stages are split, by value.
    """

    mesh: Mesh
    pins: Pins
    data_axes: tuple[str, ...]
    given_specs: Mapping[int, PartitionSpec]
    sent_specs: Mapping[int, PartitionSpec]


def build_pipeline(
    graph: Graph,
    staging: Staging,
    setups: Sequence[StageSetup],
    schedule: Schedule,
    *,
    semantics: str = "exact",
    recompute: Recompute = MappingProxyType({}),
    processes: Sequence[frozenset[int]] | None = None,
) -> Pipeline:
    """The pipeline of a step.

    Args:
        graph: the step on its whole batch.
        staging: which stage everything runs on.
        setups: of each stage.
        schedule: order of tasks; its number of micro-batches is into how many parts the batch is
            cut.
        semantics: see `plan_micro_batches`.
        recompute: see `split_stages`.
        processes: that have devices of each stage; by default as the devices say.

    Raises:
        CaptureError: the step does not decompose into so many micro-batches.
        InputError: the batch does not divide.
    """
    count = schedule.num_micro_batches
    groups = [math.prod(s.mesh.shape[a] for a in s.data_axes) if count > 1 else 1 for s in setups]
    shards = math.lcm(*groups)
    split = any(task.kind == "backward-weight" for tasks in schedule.lists for task in tasks)
    cut: dict[int, tuple[MicroBatchGraphs, MicroBatchPlan | None, StagePrograms, Layout]] = {}
    for number in sorted(set(groups)):
        plan = None
        layout = Layout()
        if count > 1:
            plan = plan_micro_batches(
                graph, count, num_groups=number, semantics=semantics, on_missing_rule=setups[0].pins.on_missing_rule
            )
            layout = Layout(groups=number, shards=shards // number, micro_batches=count)
        parts = cut_graph(plan, layout) if plan else phase_parts(graph)
        cut[number] = (
            parts,
            plan,
            split_stages(parts, plan, staging, split_backward=split, recompute=recompute),
            layout,
        )
    contexts = [
        StageContext(
            mesh=s.mesh,
            pins=s.pins,
            data_axes=s.data_axes if number > 1 else (),
            parts=cut[number][0],
            plan=cut[number][1],
            layout=cut[number][3],
            given_specs=s.given_specs,
            sent_specs=s.sent_specs,
        )
        for s, number in zip(setups, groups, strict=True)
    ]
    return Pipeline(graph, _mixed([cut[n][2] for n in groups]), contexts, schedule, processes=processes)


def _mixed(by_stage: Sequence[StagePrograms]) -> StagePrograms:
    """Each stage's programs from the cut for its own number of groups, without those that make
    nothing.
    """
    first = by_stage[0]
    by_key = {(p.stage, p.part, p.round): p for k, cut in enumerate(by_stage) for p in cut.programs if p.stage == k}
    programs = [by_key[p.stage, p.part, p.round] for p in first.programs]
    useful = tuple(p for p in programs if p.exports or p.totals or p.stacked)
    return StagePrograms(programs=useful, made_by=first.made_by, outputs=first.outputs, home=first.home)
