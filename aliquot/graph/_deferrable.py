"""The part of each stage's backward pass that no other stage waits for: chiefly gradients of
weights.

Zero-bubble schedules put it off and fill idle time with it (P. Qi, X. Wan, G. Huang, M. Lin, "Zero
bubble pipeline parallelism", 2023). The runtime cuts backward programs here, and planners price the
same two halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._dataflow import Item
from ._first_half import FirstHalf, first_half
from ._rule import traits_of
from ._stages import SHARED
from ._traits import Moves
from ._types import Call, Graph, Op, Phase, StageId, ValueId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deferrable:
    """What stages can put off, by positions of items.

    Attributes:
        items: those of which nothing is needed before the update.
        halves: loops and remat regions of which a part is needed, with that part.
    """

    items: frozenset[int]
    halves: Mapping[int, FirstHalf]

    def puts_off(self, position: int, op: Op) -> bool:
        """True if an operator of an item, or a link of it, is put off."""
        half = self.halves.get(position)
        if half is None:
            return position in self.items
        return half.values.isdisjoint(op.outputs) if op.is_link else op.index not in half.ops


def deferrable_items(graph: Graph, items: Sequence[Item], stages: Sequence[StageId]) -> Deferrable:
    """The backward items, and parts of loops and remat regions, whose results no other stage needs
    before the update, not even indirectly.

    Sums of the gradients of a parameter that several stages use need nothing, as they are made in
    the update.

    Args:
        graph: whose operators the items are.
        items: of a step, in program order.
        stages: the stage of each item; `SHARED` for those that every stage works out where it needs
            them.
    """
    maker = {o: k for k, item in enumerate(items) for o in item.outputs}
    # For each value the stages whose forward or backward pass reads it, directly or through shared
    # items.
    readers: dict[ValueId, set[StageId]] = defaultdict(set)
    late = sums_for_the_update(graph, items)
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is Phase.UPDATE or k in late:
            continue
        by = (
            {stages[k]}
            if stages[k] != SHARED
            else {s for o in item.outputs for s in readers.get(o, ())}
        )
        for i in item.inputs:
            readers[i] |= by
    # What is shared has no home: every stage works it out for itself, and waits for nobody.
    homes = {v: stages[k] for v, k in maker.items() if stages[k] != SHARED}
    needed = {v for v, by in readers.items() if v in homes and by - {homes[v]}}
    deferrable: set[int] = set()
    halves: dict[int, FirstHalf] = {}
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is not Phase.BACKWARD or stages[k] == SHARED:
            continue
        if needed.isdisjoint(item.outputs):
            # Items come in reverse, so all readers of its results have been seen.
            deferrable.add(k)
            continue
        half = (
            first_half(graph, item.what, needed.intersection(item.outputs))
            if isinstance(item.what, Call)
            else None
        )
        reads: Sequence[ValueId] = item.inputs
        if half is not None:
            halves[k] = half
            reads = [i for i in item.inputs if i in half.values]
        _add_reads(reads, items, stages, maker, needed)
    return Deferrable(items=frozenset(deferrable), halves=halves)


def hands_on_gradients(op: Op) -> bool:
    """True if it adds gradients up or only rearranges one, as on the way of a parameter's gradients
    into one sum.
    """
    traits = traits_of(op.name)
    moves = traits.moves is not None and (traits.moves.keeps_all or traits.moves is Moves.NEGATE)
    return (traits.adds or moves) and all(isinstance(i, int) for i in op.inputs)


def sums_for_the_update(graph: Graph, items: Sequence[Item]) -> frozenset[int]:
    """Positions of the backward items that add gradients up, or hand them on, for the update
    alone.
    """
    sums: set[int] = set()
    wanted: set[ValueId] = set()
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if item.phase is Phase.UPDATE:
            continue
        op = graph.ops[item.what] if isinstance(item.what, int) else None
        if (
            op is not None
            and item.phase is Phase.BACKWARD
            and hands_on_gradients(op)
            and wanted.isdisjoint(item.outputs)
        ):
            sums.add(k)
        else:
            wanted.update(item.inputs)
    return frozenset(sums)


def _add_reads(
    reads: Sequence[ValueId],
    items: Sequence[Item],
    stages: Sequence[StageId],
    maker: dict[ValueId, int],
    needed: set[ValueId],
) -> None:
    """Add what an item reads, itself or through the shared items that are worked out for it."""
    waiting = list(reads)
    while waiting:
        i = waiting.pop()
        k = maker.get(i) if i not in needed else None
        needed.add(i)
        if k is not None and stages[k] == SHARED:
            waiting += items[k].inputs
