"""Choice of the forward results to keep for the backward program; the others are recomputed.

A separate backward program cannot fuse with the forward pass: every value that it reads is an array
in memory that is handed over and kept, for each micro-batch in flight. Cheap values are therefore
recomputed from the smallest set of arrays that suffices, a minimum cut between results of products
and the values that the backward program reads.

Reference: the min-cut rematerialisation of functorch's AOTAutograd (Horace He, "Min-cut
recomputation", 2022); here only for memory, as products are never repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from ._dataflow import Item, made_at, made_by
from ._rule import traits_of
from ._types import Call, Graph, Value, ValueId

# Handing over one array costs about as much as moving this many bytes.
_BYTES_PER_ARRAY = 4096
_LARGEST = 2**30


class Repeated(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Recomputation in a backward program: the values of the forward program that are kept for it,
    and the items by which it recomputes the others.
    """

    kept: frozenset[ValueId]
    items: tuple[Item, ...]


def find_repeated(
    graph: Graph,
    forward: Sequence[Item],
    reads: Collection[ValueId],
    *,
    free: Collection[ValueId],
    repeat: frozenset[int] | None = frozenset(),
) -> Repeated:
    """Recomputation in a backward program; used both for the programs that run and for prices.

    Args:
        graph: the graph that the items belong to.
        forward: items of the forward program, in order.
        reads: values that the backward program reads.
        free, repeat: see `values_to_keep`.
    """
    names = [graph.ops[item.ops[0]].name if item.ops else "" for item in forward]
    made_forward = made_by(forward)
    wanted = [value for value in reads if value in made_forward]
    kept = values_to_keep(
        forward,
        names,
        wanted,
        graph.values,
        free=free,
        # Values that the backward program reads anyway have no additional cost.
        read_anyway={value for value in reads if value not in made_forward},
        repeat=repeat,
    )
    return Repeated(kept=kept, items=tuple(items_between(forward, wanted, kept)))


def values_to_keep(
    items: Sequence[Item],
    names: Sequence[str],
    wanted: Collection[ValueId],
    values: Sequence[Value],
    *,
    free: Collection[ValueId],
    read_anyway: Collection[ValueId],
    repeat: frozenset[int] | None = frozenset(),
) -> frozenset[ValueId]:
    """The values to keep: the set with the fewest bytes from which all wanted values can be
    recomputed.

    Args:
        items: of the forward program, in order.
        names: of their primitives.
        wanted: values made by `items` that the backward program reads.
        values: of the graph, by index.
        free: values that both programs have: the step's inputs, and results of shared items.
        read_anyway: values from elsewhere that the backward program reads in any case.
        repeat: operators that may be recomputed although they are costly; None: all. If any are
            given, then among equally small sets the one that leaves the least to recompute is
            taken. It holds the outputs of layers, not the terms of their sums, so that layers are
            recomputed one by one.
    """
    costly = []
    for item, name in zip(items, names, strict=True):
        is_repeated = repeat is None or (item.ops and repeat.issuperset(item.ops))
        costly.append(not is_repeated and is_costly(item, name))
    maker = made_at(items)
    needed: dict[ValueId, None] = dict.fromkeys(wanted)
    waiting = list(needed)
    while waiting:
        k = maker.get(waiting.pop())
        if k is None or costly[k]:
            continue
        new = [i for i in items[k].inputs if i not in needed and i not in free]
        needed |= dict.fromkeys(new)
        waiting += new
    number = {v: n for n, v in enumerate(needed)}
    # Nodes of the flow network: two for each value, joined by an edge with the cost of keeping it,
    # then source and sink.
    source, sink = 2 * len(number), 2 * len(number) + 1
    total = sum(values[v].num_bytes + _BYTES_PER_ARRAY for v in number)
    # The solver has 32-bit capacities: the finite ones must add up to less than `_LARGEST`, which
    # stands for infinity.
    unit = max(1, -(-total // (_LARGEST // 2)))
    edges: list[tuple[int, int, int]] = []
    for v, n in number.items():
        # At least 1, however coarse the unit: one more array is never free.
        cost = 0 if v in read_anyway else (values[v].num_bytes + _BYTES_PER_ARRAY) // unit + 1
        edges.append((2 * n, 2 * n + 1, cost))
        k = maker.get(v)
        if k is None or costly[k]:
            # This value cannot be recomputed: the cut must keep it, or values between it and all
            # wanted ones that depend on it.
            edges.append((source, 2 * n, _LARGEST))
        else:
            edges += [(2 * number[i] + 1, 2 * n, _LARGEST) for i in items[k].inputs if i in number]
    edges += [(2 * number[v] + 1, sink, _LARGEST) for v in set(wanted)]
    if not number:
        return frozenset()
    if repeat:
        behind = _reached([(b, a, cost) for a, b, cost in edges], sink, source)
        found = set()
        for v, n in number.items():
            if 2 * n + 1 in behind and 2 * n not in behind:
                found.add(v)
        return frozenset(found)
    reached = _reached(edges, source, sink)
    return frozenset(v for v, n in number.items() if 2 * n in reached and 2 * n + 1 not in reached)


def items_between(
    items: Sequence[Item], wanted: Collection[ValueId], kept: frozenset[ValueId]
) -> list[Item]:
    """The items that make the wanted values from the kept ones, in order."""
    need = {v for v in wanted if v not in kept}
    needed = []
    for item in reversed(items):
        if any(o in need for o in item.outputs):
            needed.append(item)
            need.update(i for i in item.inputs if i not in kept)
    return needed[::-1]


def is_costly(item: Item, name: str) -> bool:
    """True if an item is recomputed only where a plan says so."""
    return isinstance(item.op_or_call, Call) or traits_of(name).costly


def _reached(edges: Sequence[tuple[int, int, int]], source: int, sink: int) -> frozenset[ValueId]:
    """The nodes on the source's side of the minimum cut that is nearest to the source. For the cut
    nearest to the sink, reverse all edges and exchange source and sink.
    """
    # Imported here because the import is slow and only pipelines need it.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    rows, columns, capacity = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    size = max(source, sink) + 1
    graph = csr_array((capacity, (rows, columns)), shape=(size, size))
    flow = maximum_flow(graph, source, sink).flow
    left = (graph - flow).tocsr()
    left.data = np.where(left.data > 0, left.data, 0)
    left.eliminate_zeros()
    return frozenset(breadth_first_order(left, source, return_predecessors=False).tolist())
