"""Arrays that live longer because a compiler's scheduler defers products: those for gradients,
whose results only the update needs.

Operands of a deferred product stay in memory until it runs. So does a small result, which waits to
be reduce-scattered together with others. When a product runs depends on the scheduler:

* A scheduler that saves memory runs a product at once if its operands free at least as many bytes
  as its result takes, otherwise last.
* A scheduler that hides latency goes through the step from its end to its beginning and places
  these products beside collectives, of which one runs at a time:

  * All-reduces of gradients over the whole mesh run at the end, and all products run beside them,
    unless collectives inside backward layers take turns with the all-reduces (`takes_turns`).
  * Products whose results are reduce-scattered together, or are not summed over the whole mesh, run
    beside collectives inside backward layers. There are about two such collectives for each product
    (the gathers of a parameter for the recomputed layer and for its gradient), so a product runs
    about halfway between its operands and the end. With sums over the batch, as in normalisations,
    these products run at the end; products whose results are all-reduced then run beside these
    sums, except one for each all-reduce.
  * Products that tensor parallelism splits run beside the sums of activations inside layers: about
    halfway to the end as well, however long they take. They do so in each micro-batch too, in which
    other products run at once: their results are summed over devices after the last micro-batch.
  * Where products take long compared with gathers, they run fewer layers behind their operands
    (`compute_per_gather`). Small results then wait for each other, up to what is combined, and only
    a device's own piece of them waits for the update.
  * Where nothing runs beside all-reduces (`Target.overlaps_all_reduces`), products whose results
    are all-reduced run at once, and the others about halfway to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...graph import Phase
from ...sharding import PARTIAL, Edge, NodeId, Projection
from .._choices import shards
from ._pace import LAYERS_MOVED, compute_per_gather

if TYPE_CHECKING:
    from ...cluster import Target
    from .._picked import Picked
    from .._priced import Floats, Ints, Priced
    from ._residents import Resident

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeferredArray:
    """An array whose live range grows if the product of an edge is deferred.

    Attributes:
        local_bytes: on each device, for each conversion `(sources, targets)` of the edge.
        births, deaths: additional live range of each copy.
        category: the part of memory that it counts as.
    """

    edge: Edge
    local_bytes: Floats
    births: Ints
    deaths: Ints
    category: str


def deferred_arrays(priced: Priced, in_turn: bool) -> Iterator[DeferredArray]:
    """All arrays whose live ranges grow if products of a priced problem are deferred.

    Args:
        in_turn: see `takes_turns`.
    """
    sums = {
        e.source: _GradientSum(priced, e)
        for e in priced.graph.edges
        if e.kind == "result" and e.gradient
    }
    operands: dict[NodeId, list[Edge]] = {}
    for e in priced.graph.edges:
        if e.kind == "operand" and e.target in sums:
            operands.setdefault(e.target, []).append(e)
    paces = _paces(priced, sums)
    for resident in priced.residents:
        gradient_sum = sums.get(resident.consumer_node)
        if resident.late_deaths is not None and gradient_sum is not None:
            reads = operands.get(resident.consumer_node, [])
            yield from _deferred_operand(resident, gradient_sum, reads, in_turn, paces)
        gradient_sum = sums.get(resident.producer_node)
        if resident.unreduced_from is not None and gradient_sum is not None:
            reads = operands.get(resident.producer_node, [])
            yield from _deferred_result(
                resident, gradient_sum, reads, in_turn, paces, priced.target
            )


def _deferred_operand(
    resident: Resident,
    gradient_sum: _GradientSum,
    operands: list[Edge],
    in_turn: bool,
    paces: _Paces,
) -> Iterator[DeferredArray]:
    """An operand of a deferred product, from its last other use until the product runs."""
    assert resident.late_deaths is not None
    local = gradient_sum.local_bytes(resident.num_bytes, resident.read_projection)
    for where, pace in gradient_sum.deferrals(operands, in_turn, paces):
        yield DeferredArray(
            edge=gradient_sum.edge,
            local_bytes=where * local,
            births=resident.deaths + 1,
            deaths=pace.runs_at(resident.deaths) if pace else resident.late_deaths,
            category="activations",
        )


def _deferred_result(
    resident: Resident,
    gradient_sum: _GradientSum,
    operands: list[Edge],
    in_turn: bool,
    paces: _Paces,
    target: Target,
) -> Iterator[DeferredArray]:
    """The result of a product, from when it is computed until it is summed over devices; then a
    device's own piece of the sum, until the update.
    """
    assert resident.unreduced_from is not None
    # A product that runs last is summed at once.
    runs_last = np.zeros_like(gradient_sum.scattered)
    for where, pace in gradient_sum.deferrals(operands, in_turn, paces):
        runs_last = runs_last | where if pace is None else runs_last
    local = (gradient_sum.combined & ~runs_last) * gradient_sum.local_bytes(
        resident.num_bytes, gradient_sum.edge.source_projection
    )
    if not (target.overlaps_all_reduces or gradient_sum.total):
        local = np.where(
            gradient_sum.scattered, local, resident.num_bytes / gradient_sum.shards_left
        )
    made_at = resident.unreduced_from
    if target.hides_latency and target.overlaps_all_reduces:
        made_at = paces.scattered.runs_at(made_at)
    births, until = np.minimum(made_at, resident.births), resident.births - 1
    summed = np.minimum(made_at + paces.combined_after, until)
    yield DeferredArray(
        edge=gradient_sum.edge,
        local_bytes=local,
        births=births,
        deaths=np.maximum(summed, births - 1),
        category="unreduced gradients",
    )
    if (summed < until).any():
        yield DeferredArray(
            edge=gradient_sum.edge,
            local_bytes=local * gradient_sum.pieces_before / gradient_sum.shards_left,
            births=summed + 1,
            deaths=until,
            category="unreduced gradients",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Rule for where deferred products run, between the operators that make their operands and
    operator `end`.

    Products whose operands are made within the last `at_end` operators run at the end. A product
    whose operands are made `n` operators earlier than that runs `share * n` operators before the
    end, but no more than `most` operators after its operands.
    """

    end: int
    share: float
    at_end: float = 0.0
    most: float = math.inf

    def runs_at(self, times: Ints) -> Ints:
        """Positions at which products run whose operands are made at `times`."""
        distance = np.maximum(self.end - times - self.at_end, 0.0)
        latest = np.minimum(self.end - distance * self.share, times + self.most)
        positions: Ints = np.maximum(latest.astype(np.int64), times)
        return positions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """Paces of products, by the collective that sums their results over devices.

    Attributes:
        scattered: of products whose results are reduce-scattered.
        split: of products that tensor parallelism splits, whose results are not summed over the
            whole mesh.
        reduced: of products whose results are all-reduced; None if all run last.
        combined_after: number of operators after which results that are reduce-scattered are so
            many that they are combined no further.
    """

    scattered: _Pace
    split: _Pace
    reduced: _Pace | None
    combined_after: int


def _paces(priced: Priced, sums: dict[NodeId, _GradientSum]) -> _Paces:
    """Paces of deferred products under a scheduler that hides latency; see the module."""
    waits = [r for r in priced.residents if r.late_deaths is not None]
    until = [_waits_until(r) for r in waits]
    update = min((int(moments.min()) for moments in until if len(moments)), default=0)
    if not _sums_inside(priced) or not waits:
        most, combined_after = _moved_at_most(priced, waits, update)
        return _Paces(
            scattered=_Pace(end=update, share=0.5, most=most),
            split=_Pace(end=update, share=0.5),
            reduced=None,
            combined_after=combined_after,
        )
    inside = priced.graph.batch_sums
    edges = [gradient_sum.edge for gradient_sum in sums.values()]
    products = sum(e.count for e in edges)
    # Small all-reduces are combined with each other, and count by their share of the limit.
    all_reduces = sum(
        e.count * min(e.num_bytes / max(priced.target.combined_bytes, 1), 1.0) for e in edges
    )
    end = max(int(r.deaths.max()) for r in waits)
    begin = min(int(r.deaths.min()) for r in waits)
    beside_sums = _Pace(end=end, share=0.0)
    return _Paces(
        scattered=beside_sums,
        split=beside_sums,
        reduced=_Pace(
            end=end, share=products / inside, at_end=all_reduces / products * (end - begin)
        ),
        combined_after=update,
    )


def _waits_until(resident: Resident) -> Ints:
    """Ends of the live ranges of those copies that wait for a deferred product."""
    assert resident.late_deaths is not None
    return resident.late_deaths[resident.late_deaths > resident.deaths]


def _moved_at_most(priced: Priced, waits: list[Resident], update: int) -> tuple[float, int]:
    """Operators by which products move at most, and after which their small results are summed."""
    target = priced.target
    edges = [e for e in priced.graph.edges if e.gradient and e.kind == "result"]
    if not (target.hides_latency and target.overlaps_all_reduces and edges and waits):
        return math.inf, update
    layers = max(e.count for e in edges)
    begin = min(int(r.deaths.min()) for r in waits)
    # Stages of a pipeline may have no update of their own.
    span = max(update - begin, 0)
    layer = span / layers
    ratio = compute_per_gather(priced)
    # Lookups are gradients without products.
    most = LAYERS_MOVED * layer / ratio if ratio else math.inf
    devices = math.prod(priced.axis_sizes)
    small = sum(
        e.num_bytes * e.count / devices
        for e in edges
        if 2 * e.num_bytes / devices <= target.combined_bytes
    )
    # Until as much as is combined has come together.
    share = min(target.combined_bytes / small, 1.0) if small else 1.0
    return most, int(share * span)


class _GradientSum:
    """The sum over devices of the partial results of a product that computes a gradient.

    Masks and figures have a row for each source spec of the edge and a column for each target spec,
    or one row or column for all.

    Attributes:
        edge: from the product to its gradient.
        total: whether gradients are summed over micro-batches first.
        scattered, reduced: whether partial sums are reduce-scattered, or all-reduced.
        over_whole_mesh: whether every device of the mesh holds a summand.
        pieces_before, shards_left: number of pieces into which the summands and the sum are split.
        combined: whether the sum is reduce-scattered together with others, because two of its
            pieces are within the limit `Target.combined_bytes`.
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
        # Totals over micro-batches are reduced after the loop.
        is_sum: Flags = np.logical_and(partial.any(axis=1, keepdims=True), not self.total)
        self.scattered: Flags = is_sum & (~partial[:, None, :] | (targets >= 0)[None, :, :]).all(
            axis=2
        )
        self.reduced: Flags = is_sum & ~self.scattered
        self.over_whole_mesh: Flags = (partial | (sizes == 1)).all(axis=1)[:, None]
        self._result_bytes = self.local_bytes(edge.num_bytes, edge.source_projection)
        pieces = [np.where(specs >= 0, sizes, 1).prod(axis=1) for specs in (sources, targets)]
        self.shards_left: Floats = pieces[1][None, :].astype(np.float64)
        self.pieces_before: Floats = pieces[0][:, None].astype(np.float64)
        left = self._result_bytes * pieces[0][:, None] / pieces[1][None, :]
        self.combined: Flags = self.scattered & (2 * left <= priced.target.combined_bytes)

    def local_bytes(self, num_bytes: int, projection: Projection) -> Floats:
        """Bytes on a device of an array split as the product is: one column, with a row for each
        source.
        """
        split_by = tuple(d >= 0 for d in projection)
        return np.asarray(
            num_bytes / shards(self._choices, split_by, self._priced.axis_sizes), np.float64
        )[:, None]

    def deferrals(
        self, operands: list[Edge], in_turn: bool, paces: _Paces
    ) -> list[tuple[Flags, _Pace | None]]:
        """Masks of the conversions for which the product is deferred, each with its pace; None for
        products that run last, right before the update.
        """
        if self.total:
            beside_sums = ~self.over_whole_mesh & self._priced.target.hides_latency
            return [(np.broadcast_to(beside_sums, self.scattered.shape), paces.split)]
        if not self._priced.target.hides_latency:
            freed = sum(self.local_bytes(e.num_bytes, e.target_projection) for e in operands)
            return [(np.broadcast_to(self._result_bytes > freed, self.scattered.shape), None)]
        if not self._priced.target.overlaps_all_reduces:
            return [(self.scattered, paces.scattered)]
        beside_all_reduces: Flags = np.logical_and(self.over_whole_mesh, not in_turn)
        return [
            (beside_all_reduces & self.reduced, paces.reduced),
            (self.over_whole_mesh & beside_all_reduces & self.combined, paces.scattered),
            (np.broadcast_to(~self.over_whole_mesh, self.scattered.shape), paces.split),
        ]


def _sums_inside(priced: Priced) -> bool:
    """True if sums over the batch inside layers are more than half as many as products that compute
    gradients.
    """
    products = sum(e.count for e in priced.graph.edges if e.kind == "result" and e.gradient)
    return bool(products) and 2 * priced.graph.batch_sums > products


def may_take_turns(priced: Priced) -> bool:
    """True if some choices may make collectives inside backward layers take turns with
    all-reduces.
    """
    target = priced.target
    beside = target.hides_latency and target.overlaps_all_reduces and not _sums_inside(priced)
    return beside and priced.repeats == 1 and any(e.count > 1 for e in priced.graph.edges)


def takes_turns(picked: Picked) -> bool:
    """True if collectives inside backward layers take turns with all-reduces of these layers'
    gradients, under choices.
    """
    priced = picked.priced
    if not may_take_turns(priced):
        return False
    inside = reduced = False
    for edge in priced.graph.edges:
        # Gradients of biases and norms, of one dim, are combined with others.
        if edge.count <= 1 or (edge.gradient and (edge.kind != "result" or edge.rank < 2)):
            continue
        p = priced.edges[edge.index]
        at = picked.ends[edge.index]
        if edge.gradient:
            gradient_sum = _GradientSum(priced, edge)
            reduced |= bool((gradient_sum.over_whole_mesh & gradient_sum.reduced)[at])
        elif edge.phase is Phase.BACKWARD:
            inside |= bool(p.moves[at])
    return inside and reduced
