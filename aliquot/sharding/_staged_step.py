"""Steps cut into the stages of a pipeline, at the size of one micro-batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core import CaptureError, InputError, divisors
from ..graph import (
    Graph,
    Layers,
    StageExtracts,
    StageId,
    Staging,
    ValueId,
    cut_alike,
    cut_layers,
    range_layers,
    stage_layers,
)
from ._spec import differing_dims
from .micro_batches import TimeKind, in_stages, plan_micro_batches, trace_part
from .programs import Crossing, find_crossing, find_early_updates, require_one_stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayeredStep:
    """A step and its layers.

    Attributes:
        graph: the step on its whole batch.
        part: the same operators on one micro-batch.
        layers: of `part`.
        batch_dims: for each value that is cut with the batch, the dim along which it is.
        num_micro_batches: how many make up a batch.
        combine: how the outputs of micro-batches combine; see `MicroBatchPlan`.
        semantics: see `plan_micro_batches`.
        handed_on: state that micro-batches hand on; see `Phased`.
    """

    graph: Graph
    part: Graph
    layers: Layers
    batch_dims: Mapping[ValueId, int] = field(repr=False)
    num_micro_batches: int
    combine: Mapping[str, str]
    semantics: str = "exact"
    handed_on: tuple[tuple[ValueId, ValueId], ...] = ()

    @property
    def micro_batch_size(self) -> int:
        """Examples in a micro-batch; 1 for a step without a batch."""
        return next(iter(self.part.batch_sizes), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedStep:
    """A step and its stages. What follows from them is made when it is asked for.

    Attributes:
        graph: the step on its whole batch.
        part: the same operators on one micro-batch.
        staging: which stage everything runs on.
        extracts: each stage as a step of its own, at the size of a micro-batch.
    """

    graph: Graph
    part: Graph
    staging: Staging
    extracts: StageExtracts

    @functools.cached_property
    def crossing(self) -> Crossing:
        """What stages exchange for each micro-batch."""
        return find_crossing(self.part, self.staging)

    @functools.cached_property
    def early_updates(self) -> frozenset[StageId]:
        """The stages whose update reads nothing of other stages."""
        return find_early_updates(self.part, self.staging)


def layer_step(
    graph: Graph,
    num_micro_batches: int,
    *,
    layers: str | int | Layers | None = None,
    semantics: str = "exact",
    on_missing_rule: str = "infer",
) -> LayeredStep:
    """A step cut into micro-batches and layers.

    Args:
        layers: see `cut_layers`; or the layers of the same step at another size. If the step's
            scans are cut, its layers are the ranges into which they are.
        num_micro_batches, semantics, on_missing_rule: see `plan_micro_batches`.

    Raises:
        CaptureError, InputError: as `plan_micro_batches` and `cut_layers` say.
    """
    part, combine = graph, dict[str, str]()
    dims = batch_dims(graph)
    handed_on: tuple[tuple[ValueId, ValueId], ...] = ()
    if num_micro_batches > 1:
        plan = plan_micro_batches(
            graph, num_micro_batches, semantics=semantics, on_missing_rule=on_missing_rule
        )
        part, combine = in_stages(plan.part), plan.combine
        handed_on = plan.phased.handed_on if plan.phased else ()
        dims = {}
        for v, spec in enumerate(plan.specs):
            if spec.kind is TimeKind.CONCATENATE:
                dims[ValueId(v)] = spec.dim
    return LayeredStep(
        graph=graph,
        part=part,
        layers=_layers(part, layers),
        batch_dims=dims,
        num_micro_batches=num_micro_batches,
        combine=combine,
        semantics=semantics if num_micro_batches > 1 else "exact",
        handed_on=handed_on,
    )


def sketch_step(
    graph: Graph,
    num_micro_batches: int,
    *,
    layers: str | int | Layers | None = None,
    semantics: str = "exact",
    on_missing_rule: str = "infer",
) -> LayeredStep:
    """`layer_step` for pricing alone: it is not checked whether the step decomposes into
    micro-batches. Raises as `trace_part` does.
    """
    if num_micro_batches == 1:
        return layer_step(graph, 1, layers=layers, on_missing_rule=on_missing_rule)
    part = trace_part(graph, num_micro_batches)
    if len(part.values) != len(graph.values):
        # The step is another program on a micro-batch: `layer_step` reports that.
        return layer_step(
            graph,
            num_micro_batches,
            layers=layers,
            semantics=semantics,
            on_missing_rule=on_missing_rule,
        )
    return LayeredStep(
        graph=graph,
        part=part,
        layers=_layers(part, layers),
        batch_dims=_cut_dims(graph, part),
        # Nothing is combined, as the step does not run.
        num_micro_batches=num_micro_batches,
        combine={},
        semantics=semantics,
    )


def _layers(part: Graph, layers: str | int | Layers | None) -> Layers:
    if part.split is not None:
        return range_layers(part)
    return (
        cut_alike(layers, part) if isinstance(layers, Layers) else cut_layers(part, layers=layers)
    )


def stage_step(step: LayeredStep, first_layers: Sequence[int]) -> StagedStep:
    """A step cut into stages; `first_layers` are the first layers of the stages. Raises as
    `require_one_stage` does.
    """
    staging = stage_layers(step.part, step.layers, first_layers)
    require_one_stage(step.graph, staging, step.handed_on)
    return StagedStep(
        graph=step.graph,
        part=step.part,
        staging=staging,
        extracts=StageExtracts(step.part, staging, step.batch_dims),
    )


def batch_dims(graph: Graph) -> dict[ValueId, int]:
    """The batch dim of each value, without micro-batches: the one that is shorter on a part of the
    batch. Of a step that is another program there, or cannot be traced, it is dim 0 of all arrays
    whose first dim is as long as the batch.
    """
    sizes = set(graph.batch_sizes)
    if len(sizes) == 1 and min(sizes) > 1:
        with contextlib.suppress(CaptureError, InputError):
            part = trace_part(graph, divisors(min(sizes))[1])
            if len(part.values) == len(graph.values):
                return _cut_dims(graph, part)
    return {v.index: 0 for v in graph.values if v.shape and v.shape[0] in sizes}


def _cut_dims(graph: Graph, part: Graph) -> dict[ValueId, int]:
    """For each value that is shorter on a part of the batch, the dim along which it is: the first
    that differs.
    """
    dims = {}
    for v, w in zip(part.values, graph.values, strict=True):
        if v.shape != w.shape and len(v.shape) == len(w.shape):
            dims[v.index] = differing_dims(v.shape, w.shape)[0]
    return dims
