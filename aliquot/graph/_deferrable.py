"""The part of each stage's backward pass for which no other stage waits: mainly gradients of
weights.

Zero-bubble schedules defer it into idle time. The runtime splits backward programs as determined
here, and planners price the same two halves.

Reference: P. Qi, X. Wan, G. Huang, M. Lin, "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from ._dataflow import Item, made_at
from ._first_half import FirstHalf, first_half
from ._rule import traits_of
from ._stages import SHARED
from ._traits import Moves
from ._types import Call, Graph, Op, Phase, StageId, ValueId


class Deferrable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Backward items that stages can defer to the update, by position.

    Attributes:
        items: items whose results nothing needs before the update.
        halves: loops and remat regions of which a part can be deferred, each with the part that
            cannot.
    """

    items: frozenset[int]
    halves: Mapping[int, FirstHalf]

    def defers(self, position: int, op: Op) -> bool:
        """True if an operator inside an item is deferred."""
        half = self.halves.get(position)
        if half is None:
            return position in self.items
        # `half.ops` has no links, because these run nothing; whether their results are needed
        # decides.
        return half.values.isdisjoint(op.outputs) if op.is_link else op.index not in half.ops


def deferrable_items(graph: Graph, items: Sequence[Item], stages: Sequence[StageId]) -> Deferrable:
    """The backward items, and parts of loops and remat regions, whose results no other stage needs
    before the update, not even indirectly.

    If several stages use a parameter, the sum of its gradients does not count as such a need,
    because it is computed in the update.

    Args:
        graph: the graph that the items belong to.
        items: of a step, in program order.
        stages: the stage of each item; `SHARED` for those that each stage computes for itself.
    """
    maker = made_at(items)
    needed = _needed_elsewhere(graph, items, stages)
    deferrable: set[int] = set()
    halves: dict[int, FirstHalf] = {}
    # In reverse, so that all readers of an item's results come before it.
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is not Phase.BACKWARD or stages[k] == SHARED:
            continue
        results = needed.intersection(item.outputs)
        if not results:
            deferrable.add(k)
            continue
        half = None
        if isinstance(item.op_or_call, Call):
            half = first_half(graph, item.op_or_call, results)
        reads: Sequence[ValueId] = item.inputs
        if half is not None:
            halves[k] = half
            reads = [i for i in item.inputs if i in half.values]
        # What it reads is needed, and what shared items read that make some of it.
        pending = list(reads)
        while pending:
            i = pending.pop()
            made_by = maker.get(i) if i not in needed else None
            needed.add(i)
            if made_by is not None and stages[made_by] == SHARED:
                pending += items[made_by].inputs
    return Deferrable(items=frozenset(deferrable), halves=halves)


def _needed_elsewhere(
    graph: Graph, items: Sequence[Item], stages: Sequence[StageId]
) -> set[ValueId]:
    """Values that the forward or backward pass of another stage than their own reads, directly or
    through shared items.
    """
    # Sums that are computed in the update do not count as readers.
    sums = sums_for_the_update(graph, items)
    reading_stages: dict[ValueId, set[StageId]] = defaultdict(set)
    # In reverse, so that the stages that read a shared item's results are known.
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is Phase.UPDATE or k in sums:
            continue
        if stages[k] != SHARED:
            item_stages = {stages[k]}
        else:
            item_stages = set().union(*(reading_stages.get(o, ()) for o in item.outputs))
        for i in item.inputs:
            reading_stages[i] |= item_stages
    # Each stage computes shared items for itself, so no stage waits for them.
    needed: set[ValueId] = set()
    for item, stage in zip(items, stages, strict=True):
        if stage != SHARED:
            needed.update(o for o in item.outputs if reading_stages.get(o, set()) - {stage})
    return needed


def passes_gradients_on(op: Op) -> bool:
    """True if an operator adds up gradients or only rearranges one, like the operators between the
    gradients of a parameter and their sum.
    """
    traits = traits_of(op.name)
    moves = traits.moves is not None and (traits.moves.keeps_all or traits.moves is Moves.NEGATE)
    return (traits.adds or moves) and all(isinstance(i, int) for i in op.inputs)


def sums_for_the_update(graph: Graph, items: Sequence[Item]) -> frozenset[int]:
    """Positions of the backward items that add up gradients, or pass them on, only for the
    update.
    """
    sums: set[int] = set()
    # Values that the forward or backward pass reads.
    needed: set[ValueId] = set()
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is Phase.UPDATE:
            continue
        op = graph.ops[item.op_or_call] if isinstance(item.op_or_call, int) else None
        if (
            op is not None
            and item.phase is Phase.BACKWARD
            and passes_gradients_on(op)
            and needed.isdisjoint(item.outputs)
        ):
            sums.add(k)
        else:
            needed.update(item.inputs)
    return frozenset(sums)
