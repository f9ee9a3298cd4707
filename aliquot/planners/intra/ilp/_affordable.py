"""Pruning by an incumbent: removes choices and conversions that no solution as cheap as the
incumbent can contain.

Every solution costs at least the sum of the cheapest choices of all nodes. The excess of a choice
over the cheapest of its node, with the conversions that it cannot avoid, must not exceed the excess
of the incumbent over that sum. The same holds for a conversion with the best choices on its two
sides. Solutions for different meshes differ by per cents, conversions by factors of a thousand: the
solution for one mesh leaves between a third and two thirds of the conversions of another, and the
solver takes a fraction of the time.

Reference: M. Cooper et al., "Soft arc consistency revisited", Artificial Intelligence, 2010,
section 3 (node and arc consistency under an upper bound).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....cost import Priced, PricedEdge
from ....sharding import NodeId

Floats = NDArray[np.float64]
Masks = Sequence[NDArray[np.bool_]]
# For sums of thousands of prices in another order than that of `cost.evaluate`.
_ROUNDING = 1e-9


def affordable(priced: Priced, allowed: Masks, ceiling_s: float) -> tuple[Priced, Masks]:
    """The problem with infinite prices for conversions that no solution of at most `ceiling_s` can
    contain, and masks of the remaining choices.
    """
    if not np.isfinite(ceiling_s):
        return priced, allowed
    # What can run beside compute may cost nothing.
    costs = []
    for node, mask in zip(priced.nodes, allowed, strict=True):
        costs.append(np.where(mask, node.exposed_s, np.inf))
    least = [float(seconds.min(initial=np.inf)) for seconds in costs]
    # A margin for rounding is added, so that the incumbent itself is never pruned.
    room = (ceiling_s - sum(least)) + _ROUNDING * ceiling_s
    # A node without an allowed choice stays as it is, and makes the program infeasible.
    above = []
    for seconds, low in zip(costs, least, strict=True):
        above.append(seconds - low if np.isfinite(low) else seconds)
    prices = [table.seconds - table.hideable_s for table in priced.edges]
    affordable_choices = [
        seconds <= room for seconds in _with_conversions(priced, prices, above, room)
    ]
    above = [
        np.where(mask, seconds, np.inf)
        for mask, seconds in zip(affordable_choices, above, strict=True)
    ]
    edges = []
    for edge, table, price in zip(priced.graph.edges, priced.edges, prices, strict=True):
        sources, targets = _by_split(table, above[edge.source], above[edge.target])
        is_affordable = price + (sources[:, None] + targets) <= room
        edges.append(replace(table, seconds=np.where(is_affordable, table.seconds, np.inf)))
    return replace(priced, edges=tuple(edges)), affordable_choices


def _with_conversions(
    priced: Priced, prices: Sequence[Floats], above: Sequence[Floats], room: float
) -> list[Floats]:
    """`above` plus the cheapest conversion over each edge of a node; of edges that share
    conversions, only the dearest.
    """
    shares = Counter(edge.share for edge in priced.graph.edges)
    total = [seconds.copy() for seconds in above]
    shared: dict[tuple[NodeId, int], Floats] = {}
    for edge, table, price in zip(priced.graph.edges, priced.edges, prices, strict=True):
        sources, targets = _by_split(table, above[edge.source], above[edge.target])
        # Conversions to or from choices that cost too much by themselves are not considered.
        out = price[:, targets <= room].min(axis=1, initial=np.inf)[table.source_index]
        into = price[sources <= room].min(axis=0, initial=np.inf)[table.target_index]
        for node, seconds in ((edge.source, out), (edge.target, into)):
            # Edges that share conversions may pay for a single one together, so only the dearest
            # counts.
            if shares[edge.share] == 1:
                total[node] += seconds
            else:
                key = node, edge.share
                shared[key] = np.maximum(shared[key], seconds) if key in shared else seconds
    for (node, _), seconds in shared.items():
        total[node] += seconds
    return total


def _by_split(table: PricedEdge, source: Floats, target: Floats) -> tuple[Floats, Floats]:
    """The least cost of the choices that give each split, for both sides of an edge."""
    sources, targets = np.full(len(table.sources), np.inf), np.full(len(table.targets), np.inf)
    np.minimum.at(sources, table.source_index, source)
    np.minimum.at(targets, table.target_index, target)
    return sources, targets
