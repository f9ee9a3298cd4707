"""Costs and savings of recomputation: of all operators of a stage, or of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import Graph, OpId, Phase, RecomputedRun, ValueId, most_at_once
from ..sharding import NodeId, operators_of
from ._picked import Picked
from ._priced import Priced
from ._repeated import backward_items, repeated_operators
from .memory import MemoryUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Costs and savings of recomputation, on each device for each micro-batch: additional seconds
    of the backward pass, bytes that it keeps less than if it repeated nothing that takes long, and
    the most recomputed bytes alive at once.
    """

    seconds: float = 0.0
    freed_bytes: float = 0.0
    peak_bytes: float = 0.0


NOTHING_AGAIN = Recomputation()


def recomputation(picked: Picked, graph: Graph, repeat: frozenset[NodeId]) -> Recomputation:
    """Costs and savings of products that the backward pass may recompute.

    Seconds are those of the repeated products, of the arrays that only these products fill, and of
    the conversions before and after them.

    Args:
        repeat: nodes of the products.
    """
    priced = picked.priced
    assert priced.kept is not None, "the problem was not made with `of_stage`"
    repeated = repeated_operators(graph, operators_of(priced.graph, repeat))
    share = _repeated_share(priced, repeated.again, repeat)
    seconds = _seconds(picked, share | _filled_by(priced, share))
    kept_bytes = picked.bytes_on_device([priced.made[v] for v in repeated.kept])
    by_op = _recomputed_bytes(graph, picked.memory, repeated.dropped)
    return Recomputation(
        seconds=seconds,
        freed_bytes=max(0.0, picked.bytes_on_device(priced.kept) - kept_bytes),
        peak_bytes=_most_at_once(graph, repeated.runs, by_op),
    )


def whole_recomputation(picked: Picked, graph: Graph, forward_s: float) -> Recomputation:
    """Costs of a stage that may recompute all operators of its forward pass.

    Products whose results the backward pass does not need, such as the last one of a stage, are not
    repeated. Its memory is not computed here: only what enters the stage is kept.

    Args:
        forward_s: of the stage's forward pass.
    """
    again = repeated_operators(graph, None).again
    products = frozenset(
        node.index
        for node in picked.priced.graph.nodes
        if node.kind == "product" and node.phase is Phase.FORWARD
    )
    share = _repeated_share(picked.priced, again, products)
    skipped = {node: 1.0 - part for node, part in share.items() if part < 1}
    return Recomputation(seconds=max(0.0, forward_s - _seconds(picked, skipped)))


def _repeated_share(
    priced: Priced, again: frozenset[OpId], products: frozenset[NodeId]
) -> dict[NodeId, float]:
    """The share of the operators of each product's node that is repeated."""
    return {
        node: len(again & ops) / len(ops)
        for node in products
        if (ops := operators_of(priced.graph, {node}))
    }


def _seconds(picked: Picked, share: Mapping[NodeId, float]) -> float:
    """Seconds of a part of the forward pass for one micro-batch: of a share of some nodes, and of
    the conversions before and after them.
    """
    seconds, priced = 0.0, picked.priced
    for node, part in share.items():
        table, pick = priced.nodes[node], picked.picks[node]
        exposed = table.compute + table.communication - table.hideable
        seconds += part * float(exposed[Phase.FORWARD, pick])
    for (index, source, target), paid in picked.conversions.items():
        edge = priced.graph.edges[index]
        part = max(share.get(edge.source, 0.0), share.get(edge.target, 0.0))
        if edge.phase is Phase.FORWARD and not edge.gradient:
            seconds += part * (paid - float(priced.edges[index].hideable_s[source, target]))
    return seconds / priced.repeats


def _most_at_once(graph: Graph, runs: Sequence[RecomputedRun], by_op: dict[OpId, float]) -> float:
    """The most recomputed bytes that are alive at once."""
    num_bytes: dict[ValueId, float] = {}
    for run in runs:
        for item in run.items:
            total = sum(by_op.get(op, 0.0) for op in item.ops)
            # An item with several results counts them with the first.
            num_bytes |= dict.fromkeys(item.outputs[:1], total)
    return most_at_once(runs, backward_items(graph), num_bytes)


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


def _recomputed_bytes(
    graph: Graph, memory: MemoryUse, dropped: frozenset[OpId]
) -> dict[OpId, float]:
    """Bytes on a device of arrays that are recomputed instead of kept between the two passes, by
    the operators that make them.
    """
    moment = next((op.index for op in graph.ops if op.phase is Phase.BACKWARD), None)
    if moment is None or not dropped:
        return {}
    operators = np.array(sorted(dropped))
    by_op: dict[OpId, float] = {}
    for r, num_bytes in memory.residents:
        if r.category in ("activations", "temporaries"):
            alive = (r.births < moment) & (r.deaths >= moment) & np.isin(r.births, operators)
            for op in r.births[alive].tolist():
                by_op[OpId(op)] = by_op.get(OpId(op), 0.0) + num_bytes
    return by_op
