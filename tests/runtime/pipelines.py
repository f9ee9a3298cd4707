"""Steps as pipelines made by hand, for tests of the runtime: stages cut anywhere, on meshes of any
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from aliquot.graph import Graph, Phase, Role, Staging, capture, cut_layers, items_of, stage_layers
from aliquot.graph._stages import assign_stages
from aliquot.plans import SCHEDULES, make_schedule
from aliquot.runtime import PipelineRunner, Step
from aliquot.runtime._check import StepCheck, compare
from aliquot.runtime.pipeline._pipeline import build_pipeline
from aliquot.runtime.pipeline._stage_functions import StageSetup
from aliquot.sharding import Pins, cut_pipeline


def pipeline(
    fn: Any,
    *args: Any,
    sizes: Sequence[int] = (1, 1),
    micro_batches: int = 2,
    schedule: str = "1f1b",
    chunks: int = 1,
    layers: str | int | None = None,
    anywhere: bool = False,
    backwards: bool = False,
    early: bool = False,
    semantics: str = "exact",
    **kwargs: Any,
) -> Step:
    """A step as a pipeline.

    Args:
        sizes: how many devices each submesh has; they share the batch.
        chunks: how many stages each submesh runs.
        layers: as for `cut_layers`.
        anywhere: cut the forward pass into equal numbers of operators, however bad the places are.
        backwards: the first stage is on the last devices.
        early: update every stage early that can be.
    """
    graph = capture(fn, *args, **kwargs)
    return build(
        graph,
        staging(graph, len(sizes) * chunks, layers=layers, anywhere=anywhere),
        sizes=sizes,
        micro_batches=micro_batches,
        schedule=schedule,
        backwards=backwards,
        early=early,
        semantics=semantics,
    )


def staging(
    graph: Graph, num_stages: int, *, layers: str | int | None = None, anywhere: bool = False
) -> Staging:
    """Stages of about as many layers each."""
    if anywhere:
        items = items_of(graph)
        forward = [
            k for k, item in enumerate(items) if item.phase is Phase.FORWARD and not item.shared
        ]
        stages = {k: place * num_stages // len(forward) for place, k in enumerate(forward)}
        return assign_stages(graph, items, stages, num_stages)
    cut = cut_layers(graph, layers=layers)
    return stage_layers(graph, cut, [round(k * len(cut) / num_stages) for k in range(num_stages)])


def build(
    graph: Graph,
    stages: Staging,
    *,
    sizes: Sequence[int],
    micro_batches: int,
    schedule: str,
    backwards: bool = False,
    early: bool = False,
    semantics: str = "exact",
) -> Step:
    """The pipeline of a captured step; stage k runs on submesh `k % len(sizes)`, submeshes follow
    one another.
    """
    bounds = np.cumsum([0, *sizes])
    devices = jax.devices()[:: -1 if backwards else 1]
    setups = [_setup(graph, devices[a:b]) for a, b in zip(bounds, bounds[1:])]
    chosen = [setups[k % len(sizes)] for k in range(stages.num_stages)]
    updates = frozenset(range(stages.num_stages)) if early else frozenset()
    lists = make_schedule(schedule, stages.num_stages, micro_batches, len(sizes), updates)
    groups = [s.mesh.size if s.data_axes and micro_batches > 1 else 1 for s in chosen]
    splits = SCHEDULES[schedule].splits_backward
    cut = cut_pipeline(
        graph,
        stages,
        groups,
        num_micro_batches=micro_batches,
        split_backward=splits,
        semantics=semantics,
    )
    made = build_pipeline(graph, cut, chosen, lists)
    return Step(graph.calling.fn, runner=PipelineRunner(graph, made))


def _setup(graph: Graph, devices: Sequence[Any]) -> StageSetup:
    mesh = Mesh(np.array(devices, dtype=object), ("x",), axis_types=(AxisType.Auto,))
    pins = Pins(
        by_class={},
        op_class=[-1] * len(graph.ops),
        inputs=((-1,),) * len(graph.inputs),
        outputs=((-1,),) * len(graph.outputs),
        values={},
    )
    batch = {
        i.value: PartitionSpec("x")
        for i in graph.inputs
        if i.role is Role.BATCH and graph.values[i.value].shape
    }
    return StageSetup(
        mesh=mesh,
        pins=pins,
        data_axes=("x",) if len(devices) > 1 else (),
        given_specs=batch,
        sent_specs={},
    )


def check(step: Step, *args: Any, **kwargs: Any) -> StepCheck:
    """One step of a pipeline against the plain one."""
    return step.check(*args, **kwargs)


def check_steps(fn: Any, step: Step, state: Any, batches: Sequence[Any]) -> StepCheck:
    """Several steps `(state, batch) -> (state, metrics)` of a pipeline against as many plain
    ones.
    """
    plain = jax.jit(fn)
    wanted = found = (state, None)
    for batch in batches:
        wanted, found = plain(wanted[0], batch), step(found[0], batch)
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(wanted)[0]
    ]
    return compare(paths, jax.tree.leaves(found), jax.tree.leaves(wanted))
