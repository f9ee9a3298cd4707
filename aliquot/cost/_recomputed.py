"""Costs and savings of recomputation: of all operators of a stage, or of some of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
    most_at_once,
    recomputed_runs,
)
from ..sharding import NodeId, operators_of
from ._evaluate import conversions
from ._priced import Ints, Priced
from .memory import MemoryModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Costs and savings of recomputation, on each device for each micro-batch: additional seconds
    of the backward pass, bytes that are not kept for it, and the most recomputed bytes alive at
    once.
    """

    seconds: float = 0.0
    freed_bytes: float = 0.0
    peak_bytes: float = 0.0


NOTHING_AGAIN = Recomputation()


def recomputation(
    priced: Priced, picks: Ints, graph: Graph, model: MemoryModel, repeat: frozenset[NodeId]
) -> Recomputation:
    """Costs and savings of products that the backward pass may recompute.

    Seconds are those of the repeated products, of the arrays that only these products fill, and of
    the conversions before and after them.

    Args:
        model: memory under the choices.
        repeat: nodes of the products.
    """
    again, freed, runs = repeated_operators(graph, operators_of(priced.graph, repeat))
    share = _repeated_share(priced, again, repeat)
    seconds = _seconds(priced, picks, share | _filled_by(priced, share))
    by_op = _freed_bytes(graph, model, picks, freed)
    return Recomputation(
        seconds=seconds,
        freed_bytes=sum(by_op.values()),
        peak_bytes=_most_at_once(graph, runs, by_op),
    )


def whole_recomputation(
    priced: Priced, picks: Ints, graph: Graph, forward_s: float
) -> Recomputation:
    """Costs of a stage that may recompute all operators of its forward pass.

    Products whose results the backward pass does not need, such as the last one of a stage, are not
    repeated. Its memory is not computed here: only what enters the stage is kept.

    Args:
        forward_s: of the stage's forward pass.
    """
    again, _, _ = repeated_operators(graph, None)
    products = frozenset(
        node.index
        for node in priced.graph.nodes
        if node.kind == "product" and node.phase is Phase.FORWARD
    )
    share = _repeated_share(priced, again, products)
    skipped = {node: 1.0 - part for node, part in share.items() if part < 1}
    return Recomputation(seconds=max(0.0, forward_s - _seconds(priced, picks, skipped)))


def _repeated_share(
    priced: Priced, again: frozenset[OpId], products: frozenset[NodeId]
) -> dict[NodeId, float]:
    """The share of the operators of each product's node that is repeated."""
    return {
        node: len(again & ops) / len(ops)
        for node in products
        if (ops := operators_of(priced.graph, {node}))
    }


def _seconds(priced: Priced, picks: Ints, share: Mapping[NodeId, float]) -> float:
    """Seconds of a part of the forward pass for one micro-batch: of a share of some nodes, and of
    the conversions before and after them.
    """
    seconds = 0.0
    for node, part in share.items():
        table, pick = priced.nodes[node], picks[node]
        exposed = table.compute + table.communication - table.hideable
        seconds += part * float(exposed[Phase.FORWARD, pick])
    for (index, source, target), paid in conversions(priced, picks).items():
        edge = priced.graph.edges[index]
        part = max(share.get(edge.source, 0.0), share.get(edge.target, 0.0))
        if edge.phase is Phase.FORWARD and not edge.gradient:
            seconds += part * (paid - float(priced.edges[index].hideable_s[source, target]))
    return seconds / priced.repeats


# Cached, because the same layers are priced on many meshes.
@functools.lru_cache(maxsize=64)
def repeated_operators(
    graph: Graph, repeat: frozenset[OpId] | None
) -> tuple[frozenset[OpId], frozenset[OpId], tuple[RecomputedRun, ...]]:
    """The operators that a stage's backward program recomputes, the operators whose results are not
    kept for it, and the runs of recomputed operators.

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
    again = frozenset(op for item in repeated.items for op in item.ops)
    runs = recomputed_runs(repeated.items, _backward(graph))
    freed: set[OpId] = set()
    dropped: set[ValueId] = set()
    # Arrays that leave the stage, or these layers of it, are kept for their readers outside.
    kept = repeated.kept | {o.value for o in graph.outputs if isinstance(o.value, int)}
    for item in forward:
        name = graph.ops[item.ops[0]].name if item.ops else ""
        may_repeat = repeat is None or (bool(item.ops) and repeat.issuperset(item.ops))
        if not may_repeat and (is_costly(item, name) or not dropped.intersection(item.inputs)):
            continue
        if not kept & set(item.outputs):
            freed.update(item.ops)
            dropped.update(item.outputs)
    return again, frozenset(freed), runs


@functools.lru_cache(maxsize=16)
def _items(graph: Graph) -> tuple[Item, ...]:
    """`items_of` a layer or stage, cached: many sets of products are tried on the same graph."""
    return items_of(graph)


@functools.lru_cache(maxsize=16)
def _backward(graph: Graph) -> tuple[Item, ...]:
    return tuple(item for item in _items(graph) if item.phase is Phase.BACKWARD and not item.shared)


def _most_at_once(graph: Graph, runs: Sequence[RecomputedRun], freed: dict[OpId, float]) -> float:
    """The most recomputed bytes that are alive at once."""
    num_bytes: dict[ValueId, float] = {}
    for run in runs:
        for item in run.items:
            total = sum(freed.get(op, 0.0) for op in item.ops)
            # An item with several results counts them with the first.
            num_bytes |= dict.fromkeys(item.outputs[:1], total)
    return most_at_once(runs, _backward(graph), num_bytes)


def _filled_by(priced: Priced, share: dict[NodeId, float]) -> dict[NodeId, float]:
    """For groups of arrays that results of products fill, such as scores with their softmax, the
    share of them that is recomputed: the least share of these products.
    """
    fillers: dict[NodeId, list[float]] = {}
    for site in priced.graph.sites:
        if not site.results or len(site.results[0]) < 2:
            continue
        product, landed = site.results[0][0].node, site.results[0][1].node
        if landed >= 0 and priced.graph.nodes[product].phase is Phase.FORWARD:
            fillers.setdefault(landed, []).append(share.get(product, 0.0))
    return {node: min(parts) for node, parts in fillers.items() if min(parts) > 0}


def _freed_bytes(
    graph: Graph, model: MemoryModel, picks: Ints, freed: frozenset[OpId]
) -> dict[OpId, float]:
    """Bytes on a device of arrays that are recomputed instead of kept between the two passes, by
    the operators that make them.
    """
    moment = next((op.index for op in graph.ops if op.phase is Phase.BACKWARD), None)
    if moment is None or not freed:
        return {}
    operators = np.array(sorted(freed))
    by_op: dict[OpId, float] = {}
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        if r.category in ("activations", "temporaries"):
            alive = (r.births < moment) & (r.deaths >= moment) & np.isin(r.births, operators)
            num_bytes = float(local[picks[r.node]] if r.node >= 0 else local[0])
            for op in r.births[alive].tolist():
                by_op[OpId(op)] = by_op.get(OpId(op), 0.0) + num_bytes
    return by_op
