"""The order of a step in ranges of layers that passes through its layers several times: siamese
networks, a preferred and a rejected answer, a model beside its frozen reference.

Each stage of a pipeline runs its layers for all passes, so that the passes go side by side: the
first range of each, then the second of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from ._dataflow import Item, items_of, links_around, made_at
from ._split_reach import scans_over_layers
from ._types import Call, Graph, OpId, Phase


def scans_of_ranges(graph: Graph, items: Sequence[Item]) -> list[int]:
    """Positions of the items that are scans over a range of layers, in program order."""
    assert graph.split is not None, "the step's scans are not cut"
    lengths = {b - a for a, b in itertools.pairwise(graph.split.bounds)}
    scans = [scan for scan in scans_over_layers(graph) if scan.length in lengths]
    inside = set(itertools.chain.from_iterable(range(scan.start, scan.stop) for scan in scans))
    found = []
    for k, item in enumerate(items):
        if isinstance(item.op_or_call, Call) and item.ops and item.ops[0] in inside:
            found.append(k)
    return found


def side_by_side(graph: Graph) -> Graph:
    """A step in ranges of layers with its passes side by side; as it is if there is one pass, or if
    a pass begins where another ends.
    """
    assert graph.split is not None, "the step's scans are not cut"
    items = items_of(graph)
    scans, num_ranges = scans_of_ranges(graph, items), len(graph.split.bounds) - 1
    passes, others = divmod(len(scans), num_ranges)
    if passes < 2 or others:
        return graph
    # The ranges of a pass follow one another.
    range_of = {k: number % num_ranges for number, k in enumerate(scans)}
    maker = made_at(items)
    # The range beside which an item runs: -1 before all, `num_ranges` after all.
    beside: list[int] = []
    for k, item in enumerate(items):
        before = max((beside[maker[i]] for i in item.inputs if i in maker), default=-1)
        if item.phase is Phase.FORWARD or (item.shared and item.phase is not Phase.UPDATE):
            beside.append(max(before, range_of.get(k, -1)))
        else:
            beside.append(num_ranges)
        if range_of.get(k, beside[k]) != beside[k]:
            return graph
    # What depends on no range, such as the embedding or the labels, runs where it is read.
    readers: dict[int, int] = {}
    for k in range(len(items) - 1, -1, -1):
        item = items[k]
        if beside[k] == -1 and not item.shared:
            wanted = [readers[o] for o in item.outputs if o in readers]
            beside[k] = min(wanted, default=num_ranges - 1)
        if item.phase is Phase.FORWARD:
            for i in item.inputs:
                readers[i] = min(readers.get(i, beside[k]), beside[k])
    ordered = sorted(range(len(items)), key=lambda k: (beside[k], k))
    split = replace(graph.split, passes=passes)
    return replace(_in_order(graph, [items[k] for k in ordered]), split=split)


def _in_order(graph: Graph, items: Sequence[Item]) -> Graph:
    """A step with its items in another order, and its operators numbered in that order."""
    order: list[OpId] = []
    for item in items:
        ops = set(item.ops)
        if isinstance(item.op_or_call, Call):
            ops |= links_around(graph, item.op_or_call)
        order += sorted(ops)
    number = {old: OpId(new) for new, old in enumerate(order)}

    def renumbered(op_or_call: OpId | Call) -> OpId | Call:
        if not isinstance(op_or_call, Call):
            return number[op_or_call]
        blocks = []
        for block in op_or_call.blocks:
            blocks.append(replace(block, items=tuple(map(renumbered, block.items))))
        return replace(op_or_call, blocks=tuple(blocks))

    body = replace(graph.body, items=tuple([renumbered(item.op_or_call) for item in items]))
    ops_in_order = tuple([structs.replace(graph.ops[old], index=number[old]) for old in order])
    return replace(graph, ops=ops_in_order, body=body)
