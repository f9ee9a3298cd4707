"""Cut of a step into micro-batches and stages at once: programs of stages, without devices. Phases
say where: forward and backward pass are the body, and the update follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from ...graph import (
    NO_VALUE,
    SHARED,
    Call,
    Graph,
    Phase,
    StageId,
    Staging,
    ValueId,
    items_of,
    made_by,
    ops_inside,
    read_by,
)
from ..micro_batches import MicroBatchPlan, TimeKind, plan_micro_batches
from ._casts import cast_once
from ._crossing import written_in_place
from ._layout import Layout
from ._micro_batch_graphs import MicroBatchGraphs, cut_exactly, subgraph
from ._split_stages import Recompute, split_stages
from ._stage_programs import StagePrograms


def cut_graph(plan: MicroBatchPlan, layout: Layout) -> MicroBatchGraphs:
    """The three graphs of a plan, exact or independent."""
    phased = plan.phased
    if phased is None:
        return cut_exactly(plan, layout)
    # Micro-batches that are steps of their own: the body as it is traced at their size, the update
    # as it stands in the step.
    given = plan.whole.input_values
    late = plan.part if phased.late_of_part else plan.whole
    body = [plan.part.body.items[k] for k in phased.body]
    return MicroBatchGraphs(
        early=subgraph(plan.whole, given, [], []),
        body=subgraph(plan.part, given, body, phased.crossing),
        late=subgraph(
            late,
            [*given, *phased.crossing],
            [late.body.items[k] for k in phased.late],
            plan.whole.output_values,
        ),
        early_values=(),
        inside=(),
        sliced=tuple(
            (i.value, plan.specs[i.value].dim)
            for i in plan.whole.inputs
            if plan.specs[i.value].kind is TimeKind.CONCATENATE
        ),
        crossing=phased.crossing,
        group=NO_VALUE,
        micro_batch=NO_VALUE,
        handed_on=phased.handed_on,
    )


def phase_parts(graph: Graph) -> MicroBatchGraphs:
    """Graphs of a step that runs on its whole batch at once; nothing runs early, and nothing is
    sliced.
    """
    items = items_of(graph)
    given = graph.input_values
    body = [item for item in items if item.phase is not Phase.UPDATE]
    late = [item for item in items if item.phase is Phase.UPDATE]
    crossing = sorted(made_by(body) & (read_by(late).keys() | graph.returned))
    return MicroBatchGraphs(
        early=subgraph(graph, given, [], []),
        body=subgraph(graph, given, [item.op_or_call for item in body], crossing),
        late=subgraph(
            graph,
            [*given, *crossing],
            [item.op_or_call for item in late],
            graph.output_values,
        ),
        early_values=(),
        inside=(),
        sliced=(),
        crossing=tuple(crossing),
        group=NO_VALUE,
        micro_batch=NO_VALUE,
    )


class TimeCut(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step cut over time for a number of data-parallel groups.

    Attributes:
        parts: its graphs.
        plan: how it was cut; None for a whole batch at once.
        layout: groups and micro-batches.
    """

    parts: MicroBatchGraphs
    plan: MicroBatchPlan | None
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineCut:
    """A step cut into micro-batches and stages.

    Attributes:
        stages: for each stage the cut over time with its own number of groups.
        programs: of all stages, without those that make nothing.
    """

    stages: tuple[TimeCut, ...] = field(repr=False)
    programs: StagePrograms = field(repr=False)


def cut_pipeline(
    graph: Graph,
    staging: Staging,
    groups: Sequence[int],
    *,
    num_micro_batches: int,
    split_backward: bool = False,
    recompute: Recompute = MappingProxyType({}),
    casts_once: frozenset[StageId] = frozenset(),
    semantics: str = "exact",
    on_missing_rule: str = "infer",
) -> PipelineCut:
    """A step cut into micro-batches and stages.

    Args:
        graph: the step on its whole batch.
        staging: which stage everything runs on.
        groups: for each stage the number of its data-parallel groups.
        split_backward, recompute: see `split_stages`.
        casts_once: stages that cast their parameters once a step (`StagePlan.casts_once`).
        semantics, on_missing_rule: see `plan_micro_batches`.

    Raises:
        CaptureError: the step does not decompose into so many micro-batches.
        InputError: the batch does not divide.
    """
    if semantics == "independent" and num_micro_batches > 1:
        # All devices of a stage share each micro-batch.
        groups = [1] * len(groups)
    # Whatever the number of groups, the batch is cut into the same shards, so that a micro-batch
    # holds the same examples in all stages.
    shards = math.lcm(*groups)
    # A number of groups that several stages share is cut once.
    cuts: dict[int, TimeCut] = {}
    programs: dict[int, StagePrograms] = {}
    for number in sorted(set(groups)):
        plan, layout = None, Layout()
        if num_micro_batches > 1:
            plan = plan_micro_batches(
                graph,
                num_micro_batches,
                num_groups=number,
                semantics=semantics,
                on_missing_rule=on_missing_rule,
            )
            layout = Layout(groups=number, shards=shards // number, micro_batches=num_micro_batches)
        if plan is None:
            parts = written_in_place(phase_parts(graph), graph, staging)
        else:
            parts = cut_graph(plan, layout)
            if casts_once and plan.phased is None:
                # What several stages read is cast once if all of them keep their casts.
                shared = {SHARED} if len(casts_once) == staging.num_stages else set[StageId]()
                # The stage of each value that an operator makes, also inside of structured
                # operators.
                stages: dict[ValueId, StageId] = {}
                for item, stage in zip(staging.items, staging.stage, strict=True):
                    inside = item.op_or_call
                    ops = ops_inside(inside) if isinstance(inside, Call) else (inside,)
                    for op in ops:
                        for out in graph.ops[op].outputs:
                            stages[out] = stage
                parts = cast_once(parts, stages, casts_once | shared)
        cuts[number] = TimeCut(parts=parts, plan=plan, layout=layout)
        programs[number] = split_stages(
            parts, plan, staging, split_backward=split_backward, recompute=recompute
        )
    return PipelineCut(
        stages=tuple(cuts[number] for number in groups),
        programs=_mixed([programs[number] for number in groups]),
    )


def _mixed(by_stage: Sequence[StagePrograms]) -> StagePrograms:
    """Each stage's programs from the cut for its own number of groups, without those that make
    nothing.
    """
    first = by_stage[0]
    by_key = {}
    for k, cut in enumerate(by_stage):
        for p in cut.programs:
            if p.stage == k:
                by_key[(p.stage, p.part, p.round)] = p
    programs = [by_key[p.stage, p.part, p.round] for p in first.programs]
    useful = tuple(p for p in programs if p.exports or p.totals or p.stacked or p.handed_on)
    return StagePrograms(
        programs=useful, made_by=first.made_by, outputs=first.outputs, home=first.home
    )
