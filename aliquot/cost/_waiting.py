"""What waits because of products for gradients, which nothing but the update needs, in the order of a compiler's scheduler.

One that saves memory runs such a product in turn if its operands free at least what its result takes, and last otherwise.

One that hides latency goes from the end of a step to its beginning, runs one collective at a time, and puts these products
beside collectives. All-reduces of gradients over the whole mesh take all of them, at the end, unless collectives inside
backward layers take turns with them. What is reduce-scattered together leaves them to the collectives inside backward
layers, which have used them up about halfway, and so does what is not summed over the whole mesh. Where nothing runs beside
all-reduces, products whose results are all-reduced run in turn, and the others are used up about halfway.

Operands wait for products that are put off. Results that are reduce-scattered together, as small ones are, wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph import Phase
from ..sharding import PARTIAL, Edge, Projection
from ._choices import shards
from ._priced import Floats, Ints, Priced

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting:
    """Arrays that wait where an edge's product is put off: local bytes for each conversion `(sources, targets)` of the edge."""

    edge: Edge
    local_bytes: Floats
    births: Ints
    deaths: Ints


def waiting(priced: Priced, in_turn: bool) -> Iterator[Waiting]:
    """What may wait in a priced problem. `in_turn`: see `takes_turns`."""
    landings = {e.source: _Landing(priced, e) for e in priced.graph.edges if e.kind == "result" and e.gradient}
    operands: dict[int, list[Edge]] = {}
    for e in priced.graph.edges:
        if e.kind == "operand" and e.target in landings:
            operands.setdefault(e.target, []).append(e)
    late = [int(r.late_deaths.min()) for r in priced.graph.residents if r.late_deaths is not None]
    end = min(late, default=0)
    hides = priced.target.hides_latency
    for r in priced.graph.residents:
        landing = landings.get(r.reader)
        if r.late_deaths is not None and landing is not None:
            local = landing.local_bytes(r.num_bytes, r.read_projection)
            last, halfway = landing.put_off(operands.get(r.reader, []), in_turn)
            yield Waiting(edge=landing.edge, local_bytes=last * local, births=r.deaths + 1, deaths=r.late_deaths)
            if halfway.any():
                until = np.maximum((r.deaths + end) // 2, r.deaths)
                yield Waiting(edge=landing.edge, local_bytes=halfway * local, births=r.deaths + 1, deaths=until)
        landing = landings.get(r.maker)
        if r.early_births is not None and landing is not None:
            last, _ = landing.put_off(operands.get(r.maker, []), in_turn)
            local = (landing.together & ~last) * landing.local_bytes(r.num_bytes, landing.edge.source_projection)
            if not (priced.target.all_reduces_apart or landing.total):
                local = np.where(landing.scattered, local, r.num_bytes / landing.shards_left)
            halfway_on = hides and priced.target.all_reduces_apart
            since = np.minimum((r.early_births + end) // 2 if halfway_on else r.early_births, r.births)
            yield Waiting(edge=landing.edge, local_bytes=local, births=since, deaths=r.births - 1)


class _Landing:
    """How the result of a product for a gradient becomes a sum, for each conversion of its edge.

    Attributes:
        total: whether micro-batches are added up first.
        scattered, reduced: whether partial sums are reduce-scattered, or all-reduced.
        everywhere: whether every device of the mesh holds a part of the sums; one row for each way to leave.
        shards_left: among how many devices the sum is split.
        together: whether it is reduce-scattered with others: two of what is left of it are within the limit.
    """

    def __init__(self, priced: Priced, edge: Edge) -> None:
        self.edge = edge
        self._priced = priced
        p, sizes = priced.edges[edge.index], np.array(priced.axis_sizes)
        sources, targets = np.array(p.sources, np.int64), np.array(p.targets, np.int64)
        first = [int(np.flatnonzero(p.source_index == s)[0]) for s in range(len(p.sources))]
        self._choices = priced.nodes[edge.source].choices[first]
        partial = sources <= PARTIAL
        self.total = priced.repeats > 1
        some: Flags = np.logical_and(partial.any(axis=1, keepdims=True), not self.total)
        self.scattered: Flags = some & (~partial[:, None, :] | (targets >= 0)[None, :, :]).all(axis=2)
        self.reduced: Flags = some & ~self.scattered
        self.everywhere: Flags = (partial | (sizes == 1)).all(axis=1)[:, None]
        self._made = self.local_bytes(edge.num_bytes, edge.source_projection)
        pieces = [np.where(specs >= 0, sizes, 1).prod(axis=1) for specs in (sources, targets)]
        self.shards_left: Floats = pieces[1][None, :].astype(np.float64)
        left = self._made * pieces[0][:, None] / pieces[1][None, :]
        self.together: Flags = self.scattered & (2 * left <= priced.target.combined_bytes)

    def local_bytes(self, num_bytes: int, projection: Projection) -> Floats:
        """`num_bytes`, split as the product is, as a column: one row for each way in which the edge leaves."""
        split_by = tuple(d >= 0 for d in projection)
        return np.asarray(num_bytes / shards(self._choices, split_by, self._priced.axis_sizes), np.float64)[:, None]

    def put_off(self, operands: list[Edge], in_turn: bool) -> tuple[Flags, Flags]:
        """Whether the product runs last, and whether halfway to the end."""
        if self.total:
            return np.zeros_like(self.scattered), np.zeros_like(self.scattered)
        if not self._priced.target.hides_latency:
            freed = sum(self.local_bytes(e.num_bytes, e.target_projection) for e in operands)
            return np.broadcast_to(self._made > freed, self.scattered.shape), np.zeros_like(self.scattered)
        if not self._priced.target.all_reduces_apart:
            return np.zeros_like(self.scattered), self.scattered
        apart: Flags = np.logical_and(self.everywhere, not in_turn)
        return apart & self.reduced, np.where(self.everywhere, apart & self.together, True)


def may_take_turns(priced: Priced) -> bool:
    """Whether some choices may make collectives inside backward layers take turns with all-reduces."""
    target = priced.target
    beside = target.hides_latency and target.all_reduces_apart
    return beside and priced.repeats == 1 and any(e.count > 1 for e in priced.graph.edges)


def takes_turns(priced: Priced, picks: Ints) -> bool:
    """Whether collectives inside backward layers take turns with all-reduces of these layers' gradients, under choices."""
    if not may_take_turns(priced):
        return False
    inside = reduced = False
    for edge in priced.graph.edges:
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
