"""Gradients of parameters that several stages use: each stage accumulates its own share, and the
shares are added up once, in the update.

If the backward pass added them up, they would cross between meshes for each micro-batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ...graph import (
    SHARED,
    Call,
    Op,
    Operand,
    OpId,
    StageId,
    Staging,
    ValueId,
    items_of,
    passes_gradients_on,
    value_ids,
)
from ..micro_batches import MicroBatchPlan, TimeKind
from ._micro_batch_graphs import MicroBatchGraphs, subgraph


def push_out(
    parts: MicroBatchGraphs, plan: MicroBatchPlan | None, staging: Staging
) -> MicroBatchGraphs:
    """The graphs with sums over shares of several stages moved from the body to the late graph."""
    ops, items = parts.body.ops, parts.body.body.items
    # Only operators whose inputs were not converted for micro-batches: the others are not the sums
    # of the late graph.
    as_before = []
    for k in items:
        if (
            isinstance(k, int)
            and k < len(parts.late.ops)
            and ops[k].inputs == parts.late.ops[k].inputs
        ):
            as_before.append(k)
    maker: dict[ValueId, OpId] = {}
    for k in as_before:
        if _adds(ops[k], plan):
            maker.update(dict.fromkeys(ops[k].outputs, k))
    sources = _sources(parts, maker, staging)
    readers = Counter(itertools.chain(*(item.inputs for item in items_of(parts.body))))
    crossing = set(parts.crossing)
    moved: list[OpId] = []
    # Last operators first: the readers of a sum have been moved before it, or stay.
    waiting = crossing & maker.keys()
    while waiting:
        value = max(waiting, key=lambda v: (maker[v], v))
        waiting.remove(value)
        # A sum of one stage's terms stays in its program: nothing would be saved by adding up
        # later.
        if len(sources[value]) < 2 or readers[value]:
            continue
        crossing.remove(value)
        moved.append(maker[value])
        for i in dict.fromkeys(ops[maker[value]].inputs):
            assert isinstance(i, int)
            # The terms now cross to the update instead of their sum.
            readers[i] -= 1
            crossing.add(i)
            if i in maker:
                waiting.add(i)
    if not moved:
        return parts
    gone = set(moved)
    kept = tuple(sorted(crossing))
    body_items = [item for item in items if isinstance(item, Call) or item not in gone]
    body = subgraph(parts.body, parts.body.input_values, body_items, kept)
    late_inputs = [v for v in parts.late.input_values if v not in parts.crossing]
    late_items = [*sorted(moved), *parts.late.body.items]
    late = subgraph(parts.late, [*late_inputs, *kept], late_items, parts.late.output_values)
    return replace(parts, body=body, late=late, crossing=kept)


def _adds(op: Op, plan: MicroBatchPlan | None) -> bool:
    """True for operators that add arrays up or pass one on, and that may as well run after the last
    micro-batch.
    """
    if plan is None or not passes_gradients_on(op):
        return passes_gradients_on(op)
    kinds = {plan.specs[v].kind for v in value_ids((*op.inputs, *op.outputs))}
    return kinds in ({TimeKind.SUM}, {TimeKind.MEAN})


def _sources(
    parts: MicroBatchGraphs, maker: Mapping[ValueId, OpId], staging: Staging
) -> dict[ValueId, frozenset[StageId]]:
    """For each value of `maker` the stages whose results it adds up."""
    stage_of = {}
    for item, s in zip(staging.items, staging.stage, strict=True):
        stage_of.update(dict.fromkeys(item.outputs, s))
    sources: dict[ValueId, frozenset[StageId]] = {}

    def of(value: Operand) -> frozenset[StageId]:
        assert isinstance(value, int)
        stage = stage_of.get(value, SHARED)
        return sources.get(value, frozenset([stage]) - {SHARED})

    for value, k in sorted(maker.items(), key=lambda pair: pair[1]):
        sources[value] = frozenset().union(*map(of, parts.body.ops[k].inputs))
    return sources
