"""Construction of a pipeline from a step that is cut into stages, on any meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from jax.sharding import Mesh, PartitionSpec

from ...graph import Graph, ValueId
from ...plans import Schedule
from ...sharding import Pins, PipelineCut
from ._pipeline import Pipeline, assemble_pipeline
from ._stage_functions import StageContext


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The mesh of a stage and the splits on it.

    Attributes:
        mesh: its devices.
        pins: its splits, indexed by the operators of the whole step.
        data_axes: mesh axes that split nothing but the batch.
        context_axes: the axis that splits the sequence, if gradients wait over it, too.
        given_specs: how inputs of the step are split, by value.
        sent_specs: how values that it exchanges with other stages are split, by value.
    """

    mesh: Mesh
    pins: Pins
    data_axes: tuple[str, ...]
    given_specs: Mapping[ValueId, PartitionSpec]
    sent_specs: Mapping[ValueId, PartitionSpec]
    context_axes: tuple[str, ...] = ()


def build_pipeline(
    graph: Graph,
    cut: PipelineCut,
    setups: Sequence[StageSetup],
    schedule: Schedule,
    *,
    processes: Sequence[frozenset[int]] | None = None,
) -> Pipeline:
    """The pipeline of a step.

    Args:
        graph: the step on its whole batch.
        cut: the step cut into micro-batches and stages, with the data-parallel groups of `setups`.
        setups: mesh and splits of each stage.
        schedule: order of tasks.
        processes: for each stage those that have its devices; by default read from the devices.
    """
    contexts = [
        StageContext(
            mesh=s.mesh,
            pins=s.pins,
            # Without several groups there is no dim to split over data axes.
            data_axes=s.data_axes if time.layout.groups > 1 else (),
            context_axes=s.context_axes,
            bodies=[
                (p.graph, p.totals) for p in cut.programs.programs if p.stage == k and p.totals
            ],
            parts=time.parts,
            plan=time.plan,
            layout=time.layout,
            given_specs=s.given_specs,
            sent_specs=s.sent_specs,
        )
        for k, (s, time) in enumerate(zip(setups, cut.stages, strict=True))
    ]
    return assemble_pipeline(graph, cut.programs, contexts, schedule, processes=processes)
