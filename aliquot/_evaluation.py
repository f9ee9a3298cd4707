"""The loss on other data, computed where the state of a training step lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ._api import parallelize, plan
from .cluster import Cluster
from .planners import ManualParallel

if TYPE_CHECKING:
    from .runtime import Step


def evaluator(
    step: Step, evaluate: Callable[[Any, Any], Mapping[str, Any]], state: Any, batch: Any
) -> Callable[[Any, Any], Mapping[str, Any]]:
    """A function `(state, batch) -> metrics` that computes `evaluate` under a training step's plan.
    The state stays where it is, and usable.

    Under a plan of one program this is a program of its own, forward only, in as many micro-batches
    as the step. In a pipeline it is a training step whose new state is dropped, so its devices need
    memory for a second state.

    Args:
        step: as `parallelize` returned it, with a plan.
        evaluate: such as `Workload.evaluate`. Its metrics are a part of those of the step.
        state, batch: as the step takes them; shapes are enough.
    """
    if step.plan.is_pipeline:
        return lambda state, batch: step.dry_run(state, batch)[1]
    (stage,) = step.plan.stages

    def part(state: Any) -> Any:
        # Optimizer states are large, and not read.
        return {name: state[name] for name in state if name in ("params", "batch_stats", "amax")}

    specs = {}
    for path, dims in stage.shardings.items():
        if path.startswith(("state.params", "state.batch_stats", "state.amax", "batch")):
            specs[path] = tuple(axes or None for axes in dims)
    made = plan(
        evaluate,
        part(state),
        batch,
        cluster=Cluster.from_dict(step.plan.cluster),
        method=ManualParallel(
            specs=specs, mesh_shape=stage.mesh_shape, axis_names=stage.axis_names
        ),
        num_micro_batches=step.plan.num_micro_batches,
    )
    forward = parallelize(evaluate, made)
    return lambda state, batch: forward(part(state), batch)
