"""Construction of a pipeline from a step that is cut into stages, on any meshes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from ...graph import Graph
from ...plans import Schedule
from ...sharding import PipelineCut
from ._pipeline import Pipeline, assemble_pipeline
from ._stage_functions import StageContext
from ._stage_functions import StageSetup as StageSetup


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
    contexts = []
    for k, (setup, time) in enumerate(zip(setups, cut.stages, strict=True)):
        of_stage = [p for p in cut.programs.programs if p.stage == k]
        contexts.append(
            StageContext(
                **{
                    **structs.asdict(setup),
                    # Without several groups there is no dim to split over data axes.
                    "data_axes": setup.data_axes if time.layout.groups > 1 else (),
                },
                bodies=[(p.graph, p.totals) for p in of_stage if p.totals],
                parts=time.parts,
                plan=time.plan,
                layout=time.layout,
            )
        )
    return assemble_pipeline(graph, cut.programs, contexts, schedule, processes=processes)
