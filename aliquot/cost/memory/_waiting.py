"""Deferral of products for gradients, which nothing but the update needs, in the order of a
compiler's scheduler.

One that saves memory runs such a product in turn if its operands free at least what its result
takes, and last otherwise.

One that hides latency goes from the end of a step to its beginning, runs one collective at a time,
and puts these products beside collectives. All-reduces of gradients over the whole mesh take all of
them, at the end, unless collectives inside backward layers take turns with them. What is
reduce-scattered together leaves them to the collectives inside backward layers, which have used
them up about halfway, and so does what is not summed over the whole mesh. Where nothing runs beside
all-reduces, products whose results are all-reduced run in turn, and the others are used up about
halfway.

Halfway, as there are about two collectives inside backward layers for each product: what gathers a
parameter for the recomputed layer and for its gradient. Normalisations over the batch add sums of
their own, and products then last for less of the way. Those whose results are all-reduced run
beside these sums, too, but for one for each all-reduce.

Operands wait for products that are put off. Results that are reduce-scattered together, as small
ones are, wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...graph import Phase
from ...sharding import PARTIAL, Edge, NodeId, Projection
from .._choices import shards

if TYPE_CHECKING:
    from .._priced import Floats, Ints, Priced

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """Arrays that wait where an edge's product is put off: local bytes for each conversion
    `(sources, targets)` of the edge.
    """

    edge: Edge
    local_bytes: Floats
    births: Ints
    deaths: Ints


def waiting(priced: Priced, in_turn: bool) -> Iterator[Waiting]:
    """Find the products that may be deferred in a priced problem. `in_turn`: see `takes_turns`."""
    landings = {
        e.source: _Landing(priced, e)
        for e in priced.graph.edges
        if e.kind == "result" and e.gradient
    }
    operands: dict[NodeId, list[Edge]] = {}
    for e in priced.graph.edges:
        if e.kind == "operand" and e.target in landings:
            operands.setdefault(e.target, []).append(e)
    paces = _paces(priced, landings)
    late_on = priced.target.hides_latency and priced.target.overlaps_all_reduces
    for r in priced.residents:
        landing = landings.get(r.consumer_node)
        if r.late_deaths is not None and landing is not None:
            local = landing.local_bytes(r.num_bytes, r.read_projection)
            for where, pace in landing.put_off(operands.get(r.consumer_node, []), in_turn, paces):
                until = pace.runs_at(r.deaths) if pace else r.late_deaths
                yield Waiting(
                    edge=landing.edge, local_bytes=where * local, births=r.deaths + 1, deaths=until
                )
        landing = landings.get(r.producer_node)
        if r.unreduced_from is not None and landing is not None:
            last = np.zeros_like(landing.scattered)
            for where, pace in landing.put_off(operands.get(r.producer_node, []), in_turn, paces):
                last = last | where if pace is None else last
            local = (landing.together & ~last) * landing.local_bytes(
                r.num_bytes, landing.edge.source_projection
            )
            if not (priced.target.overlaps_all_reduces or landing.total):
                local = np.where(landing.scattered, local, r.num_bytes / landing.shards_left)
            since = np.minimum(
                paces.scattered.runs_at(r.unreduced_from) if late_on else r.unreduced_from, r.births
            )
            yield Waiting(edge=landing.edge, local_bytes=local, births=since, deaths=r.births - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """The order in which deferred products run, from operator `end` backwards.

    Collectives at the end take those whose operands are there in the last `at_end` operators. For
    the rest of the way, the ones inside layers have taken all by `share` of it.
    """

    end: int
    share: float
    at_end: float = 0.0

    def runs_at(self, times: Ints) -> Ints:
        """Positions at which products run whose operands are there at `times`."""
        way = np.maximum(self.end - times - self.at_end, 0.0)
        positions: Ints = np.maximum((self.end - way * self.share).astype(np.int64), times)
        return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """Of products whose results are reduce-scattered, and of those whose results are all-reduced:
    None if all run last.
    """

    scattered: _Pace
    reduced: _Pace | None


def _paces(priced: Priced, landings: dict[NodeId, _Landing]) -> _Paces:
    waits = [r for r in priced.residents if r.late_deaths is not None]
    update = min((int(r.late_deaths.min()) for r in waits if r.late_deaths is not None), default=0)
    if not _sums_inside(priced) or not waits:
        return _Paces(scattered=_Pace(end=update, share=0.5), reduced=None)
    inside = priced.graph.batch_sums
    edges = [landing.edge for landing in landings.values()]
    products = sum(e.count for e in edges)
    # The others are combined with each other.
    all_reduces = sum(
        e.count * min(e.num_bytes / max(priced.target.combined_bytes, 1), 1.0) for e in edges
    )
    end = max(int(r.deaths.max()) for r in waits)
    begin = min(int(r.deaths.min()) for r in waits)
    return _Paces(
        scattered=_Pace(end=end, share=products / (2 * products + inside)),
        reduced=_Pace(
            end=end, share=products / inside, at_end=all_reduces / products * (end - begin)
        ),
    )


class _Landing:
    """Reduction of a gradient's product, for each conversion of its edge.

    Attributes:
        total: whether micro-batches are added up first.
        scattered, reduced: whether partial sums are reduce-scattered, or all-reduced.
        everywhere: whether every device of the mesh holds a part of the sums; one row for each way
            to leave.
        shards_left: among how many devices the sum is split.
        together: whether it is reduce-scattered with others: two of what is left of it are within
            the limit.
    """

    def __init__(self, priced: Priced, edge: Edge) -> None:
        self.edge = edge
        self._priced = priced
        p, sizes = priced.edges[edge.index], np.array(priced.axis_sizes)
        sources, targets = np.array(p.sources, np.int64), np.array(p.targets, np.int64)
        first = [int(np.flatnonzero(p.source_index == s)[0]) for s in range(len(p.sources))]
        self._choices = priced.nodes[edge.source].choices[first]
        partial = (sources <= PARTIAL) & (sizes > 1)
        self.total = priced.repeats > 1
        # Totals over micro-batches are reduced after the loop, where nothing is put off.
        some: Flags = np.logical_and(partial.any(axis=1, keepdims=True), not self.total)
        self.scattered: Flags = some & (~partial[:, None, :] | (targets >= 0)[None, :, :]).all(
            axis=2
        )
        self.reduced: Flags = some & ~self.scattered
        self.everywhere: Flags = (partial | (sizes == 1)).all(axis=1)[:, None]
        self._made = self.local_bytes(edge.num_bytes, edge.source_projection)
        pieces = [np.where(specs >= 0, sizes, 1).prod(axis=1) for specs in (sources, targets)]
        self.shards_left: Floats = pieces[1][None, :].astype(np.float64)
        left = self._made * pieces[0][:, None] / pieces[1][None, :]
        self.together: Flags = self.scattered & (2 * left <= priced.target.combined_bytes)

    def local_bytes(self, num_bytes: int, projection: Projection) -> Floats:
        """`num_bytes`, split as the product is, as a column: one row for each way in which the edge
        leaves.
        """
        split_by = tuple(d >= 0 for d in projection)
        return np.asarray(
            num_bytes / shards(self._choices, split_by, self._priced.axis_sizes), np.float64
        )[:, None]

    def put_off(
        self, operands: list[Edge], in_turn: bool, paces: _Paces
    ) -> list[tuple[Flags, _Pace | None]]:
        """Masks of the choices under which the product is deferred, each with its pace; None defers
        it to the update.
        """
        if self.total:
            return []
        if not self._priced.target.hides_latency:
            freed = sum(self.local_bytes(e.num_bytes, e.target_projection) for e in operands)
            return [(np.broadcast_to(self._made > freed, self.scattered.shape), None)]
        if not self._priced.target.overlaps_all_reduces:
            return [(self.scattered, paces.scattered)]
        apart: Flags = np.logical_and(self.everywhere, not in_turn)
        return [
            (apart & self.reduced, paces.reduced),
            (np.where(self.everywhere, apart & self.together, True), paces.scattered),
        ]


def _sums_inside(priced: Priced) -> bool:
    """True if layers have sums over the batch about as often as products for gradients."""
    products = sum(e.count for e in priced.graph.edges if e.kind == "result" and e.gradient)
    return bool(products) and 2 * priced.graph.batch_sums > products


def may_take_turns(priced: Priced) -> bool:
    """True if some choices may make collectives inside backward layers take turns with
    all-reduces.
    """
    target = priced.target
    beside = target.hides_latency and target.overlaps_all_reduces and not _sums_inside(priced)
    return beside and priced.repeats == 1 and any(e.count > 1 for e in priced.graph.edges)


def takes_turns(priced: Priced, picks: Ints) -> bool:
    """True if collectives inside backward layers take turns with all-reduces of these layers'
    gradients, under choices.
    """
    if not may_take_turns(priced):
        return False
    inside = reduced = False
    for edge in priced.graph.edges:
        # Gradients of biases and norms, of one dim, are combined with others.
        if edge.count <= 1 or (edge.gradient and (edge.kind != "result" or edge.rank < 2)):
            continue
        p = priced.edges[edge.index]
        at = p.source_index[picks[edge.source]], p.target_index[picks[edge.target]]
        if edge.gradient:
            landing = _Landing(priced, edge)
            reduced |= bool((landing.everywhere & landing.reduced)[at])
        elif edge.phase is Phase.BACKWARD:
            inside |= bool(p.moves[at])
    return inside and reduced
