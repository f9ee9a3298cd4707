"""What the backward program of a stage recomputes, and what is kept for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..graph import (
    Graph,
    Item,
    OpId,
    Phase,
    RecomputedRun,
    ValueId,
    find_repeated,
    is_costly,
    is_from_another_stage,
    items_of,
    recomputed_runs,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RepeatedOperators:
    """Recomputation in a stage's backward program.

    Attributes:
        again: operators that it recomputes.
        dropped: operators whose results are not kept for it.
        kept: values that are: of those that the forward pass makes, and that enter the stage.
        runs: the recomputed operators in runs.
    """

    again: frozenset[OpId]
    dropped: frozenset[OpId]
    kept: frozenset[ValueId]
    runs: tuple[RecomputedRun, ...]


# Cached, because the same layers are priced on many meshes.
@functools.lru_cache(maxsize=64)
def repeated_operators(graph: Graph, repeat: frozenset[OpId] | None) -> RepeatedOperators:
    """Recomputation in a stage's backward program. Results of cheap operators, such as
    activation functions, are always recomputed from others where that keeps fewer bytes.

    Args:
        graph: the stage as a step of its own.
        repeat: costly operators that it may repeat; None: all.
    """
    items = _items(graph)
    forward = [
        item
        for item in items
        if item.phase not in (Phase.BACKWARD, Phase.UPDATE) and not item.shared
    ]
    reads = sorted({i for item in items if item.phase is Phase.BACKWARD for i in item.inputs})
    free = {i.value for i in graph.inputs if not is_from_another_stage(i)}
    free |= graph.constants.keys()
    free |= {o for item in items if item.shared for o in item.outputs}
    repeated = find_repeated(graph, forward, reads, free=free, repeat=repeat)
    # Arrays that leave the stage, or these layers of it, are kept for their readers outside.
    kept = repeated.kept | {o.value for o in graph.outputs if isinstance(o.value, int)}
    dropped: set[OpId] = set()
    for item in forward:
        name = graph.ops[item.ops[0]].name if item.ops else ""
        may_repeat = repeat is None or (bool(item.ops) and repeat.issuperset(item.ops))
        if (may_repeat or not is_costly(item, name)) and not kept & set(item.outputs):
            dropped.update(item.ops)
    return RepeatedOperators(
        again=frozenset(op for item in repeated.items for op in item.ops),
        dropped=frozenset(dropped),
        kept=repeated.kept,
        runs=recomputed_runs(repeated.items, backward_items(graph)),
    )


@functools.lru_cache(maxsize=16)
def backward_items(graph: Graph) -> tuple[Item, ...]:
    """Items of the backward pass, in program order."""
    return tuple(item for item in _items(graph) if item.phase is Phase.BACKWARD and not item.shared)


@functools.lru_cache(maxsize=16)
def _items(graph: Graph) -> tuple[Item, ...]:
    """`items_of` a layer or stage, cached: many sets of products are tried on the same graph."""
    return items_of(graph)
