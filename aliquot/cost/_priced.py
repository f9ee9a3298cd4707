"""Prices of a node graph on a mesh: for each node its choices with their seconds, for each edge a
table of conversions.

Planners search these arrays; the judge adds up the same arrays. All seconds are those of one
training step. A collective's price is a line: a latency, and seconds for each byte.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cluster import Corrections, LogicalMesh, Products, SumCollective, Target, target_for
from ..graph import Phase, ValueId
from ..plans import item_bytes
from ..sharding import (
    PARTIAL,
    REPLICATED,
    RING,
    Edge,
    Move,
    Node,
    NodeCollective,
    NodeGraph,
    Projection,
    Spec,
    reshard,
    split_deferred_sums,
    without_axes,
)
from ._attention import attention_seconds
from ._choices import distinct_specs, enumerate_choices, joined_axes, shards
from ._collectives import (
    collective_corrections,
    collective_line,
    combined_share,
    in_hops,
    move_line,
    pieces,
    rounded_bytes,
    size_points,
    split_deferred_axes,
    through_copies,
    widening,
)
from ._host_copies import HostCopy
from ._mesh_use import MeshUse
from ._problem import Problem
from ._work import Work
from .memory import Held, Resident

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Least quotient in `_positions` at which a product is taken for a convolution.
_FEWEST_POSITIONS = 9.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedNode:
    """Choices of one node and their seconds.

    Attributes:
        choices: `(choices, axes)`.
        compute, communication: a row for each phase, in the order of `Phase`.
        gradient_s: collectives that sum gradients; not part of `communication`.
        gradient_once_s: the part of them that is paid once in a step, after the last micro-batch.
        hideable: a row for each phase: the part of `communication`, and of sums of gradients in
            every micro-batch, that the compiler can run beside compute.
        once_hideable_s: the same part of `gradient_once_s`.
        deferrable_s: the part of `compute` and `communication` in deferrable operators; see `Op`.
        compute_s, communication_s: sums over phases.
        beside_s: `compute` before the update, beside which collectives can run.
        casts: a row for each phase: what casts of parameters take beyond `compute` if they are made
            for each micro-batch and not kept for the whole step.
        hideable_s: what can run beside compute, of all of the node's collectives.
    """

    choices: Ints
    compute: Floats
    communication: Floats
    gradient_s: Floats
    gradient_once_s: Floats
    hideable: Floats
    once_hideable_s: Floats
    deferrable_s: Floats
    casts: Floats
    compute_s: Floats = field(init=False)
    beside_s: Floats = field(init=False)
    communication_s: Floats = field(init=False)
    hideable_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute_s", self.compute.sum(axis=0))
        object.__setattr__(self, "beside_s", self.compute_s - self.compute[Phase.UPDATE])
        object.__setattr__(self, "communication_s", self.communication.sum(axis=0))
        hideable_s = self.hideable.sum(axis=0) + self.once_hideable_s
        object.__setattr__(self, "hideable_s", hideable_s)

    @property
    def exposed_s(self) -> Floats:
        """What nothing can hide."""
        return self.compute_s + self.communication_s + self.gradient_s - self.hideable_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedEdge:
    """Conversions of one edge.

    Attributes:
        sources, targets: distinct specs of the array at either end.
        source_index, target_index: for each choice of the source (target) node, the position of
            the spec that it gives the array.
        seconds: `(sources, targets)`; infinite where no conversion exists.
        once_s: the part of `seconds` that is paid once in a step: sums of gradients after the last
            micro-batch, and gathers of casts before the first; see `MeshUse`.
        hideable_s, once_hideable_s: the parts of `seconds` and of `once_s` that the compiler can
            run beside compute.
        moves: True where a conversion takes a collective.
    """

    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]
    source_index: Ints
    target_index: Ints
    seconds: Floats
    once_s: Floats
    hideable_s: Floats
    once_hideable_s: Floats
    moves: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A priced problem. All phases before the update run `repeats` times, for each micro-batch."""

    graph: NodeGraph
    work: tuple[tuple[Work, ...], ...]
    residents: tuple[Resident, ...]
    held: tuple[Held, ...]
    made: Mapping[ValueId, Held]
    kept: tuple[Held, ...] | None
    copies: tuple[HostCopy, ...]
    use: MeshUse
    target: Target
    repeats: int
    nodes: tuple[PricedNode, ...]
    edges: tuple[PricedEdge, ...]

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh."""
        return self.use.mesh

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each mesh axis."""
        return self.use.mesh.shape


def price(
    problem: Problem,
    use: MeshUse | LogicalMesh,
    *,
    repeats: int = 1,
    choices: Sequence[Ints] | None = None,
) -> Priced:
    """Price choices and conversions.

    Args:
        problem: of the step at the size of one micro-batch.
        use: the mesh, of which independent micro-batches have no axes over which gradients wait, as
            each sums its own. Casts are gathered once only where some are made once.
        repeats: micro-batches in a step.
        choices: for each node the choices to price, `(choices, axes)`; by default all choices.
    """
    use = MeshUse(mesh=use) if isinstance(use, LogicalMesh) else use
    use = use.under(problem.semantics)
    graph, target = problem.nodes, target_for(use.mesh.cluster.device)
    # Independent micro-batches are steps of their own.
    keeps_casts = repeats > 1 and problem.semantics != "independent"
    if use.gathers_once and not (keeps_casts and any(edge.cast for edge in graph.edges)):
        use = replace(use, gathers_once=False)
    # One pricer for all nodes and edges, so that they share its cache.
    pricer = _Pricer(
        use=use,
        target=target,
        repeats=repeats,
        keeps_casts=keeps_casts,
        between_hosts=use.mesh.axes_between_hosts,
    )
    if use.gathers_once:
        graph = replace(
            graph, edges=tuple(replace(e, share=e.share_once) if e.cast else e for e in graph.edges)
        )
    if choices is None:
        choices = [enumerate_choices(node, use.mesh.shape) for node in graph.nodes]
    nodes = tuple(
        pricer.node(node, work, node_choices)
        for node, work, node_choices in zip(graph.nodes, problem.work, choices, strict=True)
    )
    edges = tuple(pricer.edge(edge, nodes) for edge in graph.edges)
    return Priced(
        graph=graph,
        work=problem.work,
        residents=problem.residents,
        held=problem.held,
        made=problem.made,
        kept=problem.kept,
        copies=problem.copies,
        use=use,
        target=target,
        repeats=repeats,
        nodes=nodes,
        edges=edges,
    )


_Specs: TypeAlias = tuple[Spec, ...]
_EdgePrices: TypeAlias = tuple[Floats, Floats, Floats, Floats, NDArray[np.bool_]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Cache:
    """Prices that many edges of one mesh have in common."""

    splits: dict[tuple[int, Projection], tuple[_Specs, Ints]] = field(default_factory=dict)
    lines: dict[tuple[Spec, Spec, SumCollective, float | None], tuple[float, float]] = field(
        default_factory=dict
    )
    tables: dict[
        tuple[_Specs, _Specs, SumCollective, float | None], tuple[Floats, Floats, NDArray[np.bool_]]
    ] = field(default_factory=dict)
    edges: dict[Hashable, _EdgePrices] = field(default_factory=dict)
    collectives: dict[tuple[str, tuple[int, ...], int, bool, float | None], tuple[float, float]] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pricer:
    """Prices nodes and edges on one mesh; edges share cached results.

    Args:
        between_hosts: The axes of the mesh whose neighbours lie in different hosts.
    """

    use: MeshUse
    target: Target
    repeats: int
    keeps_casts: bool
    between_hosts: tuple[int, ...]
    cache: _Cache = field(default_factory=_Cache)

    def node(self, node: Node, node_work: Sequence[Work], choices: Ints) -> PricedNode:
        compute, communication, hideable, casts = np.zeros((4, len(Phase), len(choices)))
        gradient, gradient_once, once_hideable, deferrable = np.zeros((4, len(choices)))
        sizes = [factor.size for factor in node.factors]
        for work in node_work:
            each = work_seconds(work, sizes, choices, self.use.mesh, self.target)
            times = work.times(self.repeats) if self.keeps_casts else self.times(work.phase)
            compute[work.phase] += times * each
            casts[work.phase] += (self.times(work.phase) - times) * each
            if work.deferrable:
                deferrable += times * each
        for collective in node.collectives:
            seconds, once = self.collective(collective, choices)
            if collective.gradient:
                gradient += seconds
                gradient_once += once
                shares = self.overlap_of_sums(collective, choices)
                hideable[collective.phase] += shares * (seconds - once)
                once_hideable += shares * once
            else:
                communication[collective.phase] += seconds
                if collective.kind == RING:
                    # One piece is sent on while scores to it are computed.
                    beside = np.minimum(seconds, compute[collective.phase])
                    hideable[collective.phase] += self.target.overlap_fraction * beside
                elif collective.kind != "all-to-all" and collective.phase is not Phase.UPDATE:
                    hideable[collective.phase] += self.target.activation_overlap * seconds
                if collective.deferrable:
                    deferrable += seconds
        return PricedNode(
            choices=choices,
            compute=compute,
            communication=communication,
            gradient_s=gradient,
            gradient_once_s=gradient_once,
            hideable=hideable,
            once_hideable_s=once_hideable,
            deferrable_s=deferrable,
            casts=casts,
        )

    def collective(self, collective: NodeCollective, choices: Ints) -> tuple[Floats, Floats]:
        """Seconds of a node's own collective under each choice, and the part of them that is paid
        once in a step, for sums of gradients.
        """
        local = collective.num_bytes / shards(choices, collective.split_by, self.use.mesh.shape)
        seconds, paid_once = np.zeros((2, len(choices)))
        waiting = self.use.waits_over(collective)
        for axes, rows in joined_axes(choices, collective.factors):
            for summed, once in split_deferred_axes(collective, axes, waiting):
                kind, hops = in_hops(collective.kind, summed, self.use.mesh)
                latency, per_byte = collective_line(kind, summed, self.use.mesh, self.target)
                times = hops * collective.count * (1 if once else self.times(collective.phase))
                total_dtype = collective.total_dtype if once and self.repeats > 1 else ""
                entering = local[rows] * widening(collective.dtype, self.target, total_dtype)
                share = combined_share(entering, self.target) if collective.gradient else 1.0
                each = latency * share + per_byte * entering
                if self.use.mesh.cluster.measured is not None and latency + per_byte:
                    each = (
                        each
                        * collective_corrections(
                            kind, summed, self.use.mesh, None, entering, each
                        ).ratios
                    )
                seconds[rows] += times * each
                if collective.gradient and (once or self.repeats == 1):
                    paid_once[rows] += times * each
        return seconds, paid_once

    def overlap_of_sums(self, collective: NodeCollective, choices: Ints) -> Floats:
        """Share of a node's own sum of gradients that can hide under each choice."""
        shares = np.full(len(choices), self.target.gradient_overlap(False))
        for axes, rows in joined_axes(choices, collective.factors):
            if any(axis in self.between_hosts for axis in axes):
                shares[rows] = self.target.gradient_overlap(True)
        return shares

    def edge(self, edge: Edge, nodes: Sequence[PricedNode]) -> PricedEdge:
        sources, source_index = self.splits(edge.source, edge.source_projection, nodes)
        targets, target_index = self.splits(edge.target, edge.target_projection, nodes)
        # Layers are full of edges that differ in their places alone.
        key = (sources, targets, edge.without_place)
        known = self.cache.edges.get(key)
        if known is None:
            known = self.cache.edges[key] = self.conversions(edge, sources, targets)
        seconds, once, hideable, once_hideable, moves = known
        return PricedEdge(
            sources=sources,
            targets=targets,
            source_index=source_index,
            target_index=target_index,
            seconds=seconds,
            once_s=once,
            hideable_s=hideable,
            once_hideable_s=once_hideable,
            moves=moves,
        )

    def conversions(self, edge: Edge, sources: _Specs, targets: _Specs) -> _EdgePrices:
        """`seconds`, `once_s`, `hideable_s`, `once_hideable_s` and `moves` of `PricedEdge`."""
        whole = edge.num_bytes * widening(edge.dtype, self.target)
        sums, near_bytes = sum_collective(edge, self.target), rounded_bytes(whole, self.use.mesh)
        latency, per_byte, moves = self.conversion_lines(sources, targets, sums, near_bytes)
        if edge.kind == "alias":
            parts = np.array([[pieces(edge, p, q, self.target) for q in targets] for p in sources])
            latency = latency * np.where(parts > 1, parts, combined_share(whole, self.target))
        elif edge.beside_compute:
            latency = latency * combined_share(whole, self.target)
        times = edge.count * self.times(edge.phase)
        seconds = (latency + per_byte * whole) * times
        # Without micro-batches, every gradient is summed once in a step anyway.
        once = (
            seconds if edge.gradient and self.repeats == 1 else np.broadcast_to(0.0, seconds.shape)
        )
        if edge.gradient and self.repeats > 1 and edge.phase is not Phase.UPDATE:
            seconds, once = self.with_deferred_sums(edge, sources, targets, seconds)
        if self.use.gathers_once and edge.cast:
            seconds, once, moves = self.gathered_once(edge, sources, targets, moves)
        hideable, once_hideable = self.hideable(edge, sources, targets, seconds, once)
        return seconds, once, hideable, once_hideable, moves

    def hideable(
        self, edge: Edge, sources: _Specs, targets: _Specs, seconds: Floats, once: Floats
    ) -> tuple[Floats, Floats]:
        """The parts of an edge's `seconds` and `once_s` that the compiler can run beside compute:
        a share of sums of gradients and gathers of parameters, a smaller one of such sums over
        several hosts, and one of sums and gathers of activations, as of tensor and sequence
        parallelism.
        """
        finite = np.where(np.isfinite(seconds), seconds, 0.0)
        if self.use.gathers_once and edge.cast:
            # What is gathered before the first micro-batch has no compute to hide beside.
            finite, once = finite - np.where(np.isfinite(seconds), once, 0.0), np.zeros_like(once)
        if edge.beside_compute:
            share: Floats | float = self.target.overlap_fraction
            if edge.gradient and self.between_hosts:
                axes = list(self.between_hosts)
                partial = np.array(sources)[:, None, axes] <= PARTIAL
                crosses = (partial & (np.array(targets)[:, axes] > PARTIAL)).any(axis=-1)
                share = np.where(crosses, self.target.gradient_overlap(True), share)
            return share * finite, share * np.where(np.isfinite(once), once, 0.0)
        none = np.broadcast_to(0.0, seconds.shape)
        if edge.phase is Phase.UPDATE or not self.target.activation_overlap:
            return none, none
        hides = sums_or_gathers(np.array(sources), np.array(targets))
        return self.target.activation_overlap * np.where(hides, finite, 0.0), none

    def splits(
        self, node: int, projection: Projection, nodes: Sequence[PricedNode]
    ) -> tuple[_Specs, Ints]:
        """`distinct_specs` of a node's choices, computed once for all edges at one port."""
        known = self.cache.splits.get((node, projection))
        if known is None:
            known = self.cache.splits[node, projection] = distinct_specs(
                nodes[node].choices, projection
            )
        return known

    def conversion_lines(
        self, sources: _Specs, targets: _Specs, sums: SumCollective, near_bytes: float | None
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Tables of conversions between all pairs of splits: latency, seconds per byte of the whole
        array, and which take a collective.

        Args:
            near_bytes: `rounded_bytes` of the whole array; None without measurements.
        """
        known = self.cache.tables.get((sources, targets, sums, near_bytes))
        if known is None:
            both = np.array(
                [[self.conversion_line(p, q, sums, near_bytes) for q in targets] for p in sources]
            )
            # A conversion without cost runs no collective, even if `reshard` names a move for it.
            moves = np.isfinite(both[..., 0]) & (both.sum(axis=-1) > 0)
            known = self.cache.tables[sources, targets, sums, near_bytes] = (
                both[..., 0],
                both[..., 1],
                moves,
            )
        return known

    def conversion_line(
        self, source: Spec, target: Spec, sums: SumCollective, near_bytes: float | None
    ) -> tuple[float, float]:
        """Latency and seconds per byte of the whole array, for one conversion."""
        known = self.cache.lines.get((source, target, sums, near_bytes))
        if known is None:
            moves = reshard(source, target, self.use.mesh.shape, sums)
            latency, per_byte = (0.0, 0.0) if moves is not None else (np.inf, 0.0)
            for move in moves or ():
                fixed, slope = self.move_line(
                    move, through_copies(move, source, target, self.target), near_bytes
                )
                latency += fixed
                per_byte += slope * move.fraction
            known = self.cache.lines[source, target, sums, near_bytes] = latency, per_byte
        return known

    def move_line(self, move: Move, copies: bool, near_bytes: float | None) -> tuple[float, float]:
        """`move_line` of one collective, computed once for all conversions that contain it."""
        key = (
            move.kind,
            move.axes,
            move.group,
            copies,
            None if near_bytes is None else near_bytes * move.fraction,
        )
        known = self.cache.collectives.get(key)
        if known is None:
            known = self.cache.collectives[key] = move_line(
                move, copies, self.use.mesh, self.target, near_bytes
            )
        return known

    def with_deferred_sums(
        self, edge: Edge, sources: _Specs, targets: _Specs, seconds: Floats
    ) -> tuple[Floats, Floats]:
        """`seconds` and `once_s` of a gradient's conversions: its sums over axes where it waits run
        once, after the last micro-batch.
        """
        waiting = self.use.waits_over(edge)
        seconds, once = seconds.copy(), np.zeros(seconds.shape)
        each_bytes = edge.num_bytes * widening(edge.dtype, self.target)
        total_bytes = edge.num_bytes * widening(edge.dtype, self.target, edge.total_dtype)
        for p, source in enumerate(sources):
            if not any(source[a] <= PARTIAL for a in waiting):
                continue
            for q, target in enumerate(targets):
                each, total = split_deferred_sums(source, target, waiting)
                sums = sum_collective(edge, self.target)
                each_s = self.conversion_seconds(*each, sums, each_bytes) * edge.count
                sums = sum_collective(edge, self.target, total=True)
                once[p, q] = self.conversion_seconds(*total, sums, total_bytes) * edge.count
                seconds[p, q] = each_s * self.times(edge.phase) + once[p, q]
        return seconds, once

    def gathered_once(
        self, edge: Edge, sources: _Specs, targets: _Specs, moves: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """`seconds`, `once_s` and `moves` of conversions of a parameter's cast: it is gathered over
        the axes over which gradients wait before the first micro-batch, and converted further for
        each.
        """
        seconds, once = np.zeros((2, *moves.shape))
        moves = moves.copy()
        whole = edge.num_bytes * widening(edge.dtype, self.target)
        sums = sum_collective(edge, self.target)
        for p, source in enumerate(sources):
            gathered = without_axes(source, self.use.data_axes | self.use.context_axes)
            if edge.phase is not Phase.BACKWARD:
                once[p] = edge.count * self.conversion_seconds(source, gathered, sums, whole)
            for q, target in enumerate(targets):
                each_s = self.conversion_seconds(gathered, target, sums, whole)
                moves[p, q] = each_s > 0
                seconds[p, q] = once[p, q] + edge.count * self.times(edge.phase) * each_s
        return seconds, once, moves

    def conversion_seconds(
        self, source: Spec, target: Spec, sums: SumCollective, whole_bytes: float
    ) -> float:
        """Seconds of one conversion of a gradient of `whole_bytes`."""
        near_bytes = rounded_bytes(whole_bytes, self.use.mesh)
        latency, per_byte = self.conversion_line(source, target, sums, near_bytes)
        share = float(combined_share(whole_bytes, self.target))
        return latency * share + per_byte * whole_bytes

    def times(self, phase: Phase) -> int:
        """Number of runs of a phase in a step."""
        return 1 if phase is Phase.UPDATE else self.repeats


def sums_or_gathers(sources: Ints, targets: Ints) -> NDArray[np.bool_]:
    """Whether conversions add up partial sums, or else only gather: the two halves of what tensor
    parallelism sums, of which sequence parallelism does one before its norms and one after.

    Args:
        sources, targets: specs, `(specs, axes)`.

    Returns:
        For each pair of a source and a target, `(sources, targets)`.
    """
    stays = targets == sources[:, None]
    sums = sources.min(axis=-1)[:, None] <= PARTIAL
    either: NDArray[np.bool_] = sums | (stays | (targets == REPLICATED)).all(axis=-1)
    return either


def sum_collective(edge: Edge, target: Target, *, total: bool = False) -> SumCollective:
    """The collective that reduces an edge's partial sums if their result is split.

    Args:
        total: the sums are running totals over micro-batches, not a product's result. Where the
            compiler does not reduce-scatter, the runtime does, but only results of products.
    """
    scattered = not edge.masked if target.reduce_scatter else edge.on_pieces and not total
    return SumCollective.REDUCE_SCATTER if scattered else SumCollective.ALL_REDUCE


def work_seconds(
    work: Work, sizes: Sequence[int], choices: Ints, mesh: LogicalMesh, target: Target
) -> Floats:
    """Roofline time under each choice: the longer of arithmetic and memory traffic, plus kernel
    launches, which no split removes; corrected where the cluster's devices were measured.

    Args:
        sizes: of the node's factors.

    Reference: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
    model", 2009.
    """
    seconds, corrections = corrected_work(work, sizes, choices, mesh, target)
    return seconds if corrections is None else seconds * corrections.ratios


def corrected_work(
    work: Work, sizes: Sequence[int], choices: Ints, mesh: LogicalMesh, target: Target
) -> tuple[Floats, Corrections | None]:
    """Uncorrected seconds of `work_seconds`, and their corrections if the devices were measured."""
    device, measured = mesh.cluster.device, mesh.cluster.measured
    moved = np.zeros(len(choices))
    for num_bytes, split_by in work.arrays:
        moved += num_bytes / shards(choices, split_by, mesh.shape)
    seconds = moved / target.memory_bytes_per_s(device)
    points = None
    if work.flops:
        parts = shards(choices, work.split_by, mesh.shape)
        flops = work.flops / parts * (1.0 if target.groups_products else work.ungrouped)
        if work.scores is not None and target.attention is not None:
            peak = device.peak(work.dtype)
            arithmetic_s = attention_seconds(work.scores, flops, parts, target.attention, peak)
            launches_s = work.kernels * target.kernel_overhead_s
            # Measurements of products and of elementwise code tell nothing about it.
            return np.maximum(seconds, arithmetic_s) + launches_s, None
        is_product = len(work.arrays) == 3 and not work.is_kernel
        if is_product and (target.products.tile > 1 or measured is not None):
            points = _product_points(work, flops, sizes, choices, mesh)
        # Slowdowns by shape hold for operators that read two arrays and write one.
        slowdown = _product_slowdown(points, target.products)
        speed = target.product_flops_per_s(device, work.dtype)
        seconds = np.maximum(seconds / target.products.traffic, flops * slowdown / speed)
    seconds = np.asarray(seconds + work.kernels * target.kernel_overhead_s, np.float64)
    if measured is None:
        return seconds, None
    # Each measurement is of one kernel.
    count = max(work.kernels, 1.0)
    # Measurements of products are looked up by shape, all others by the bytes moved.
    if points is not None:
        return seconds, measured.correct(
            f"product {work.dtype}", np.log2(points.T), seconds / count
        )
    return seconds, measured.correct(
        "traffic", size_points(moved / count)[:, None], seconds / count
    )


def _product_points(
    work: Work, flops: Floats, sizes: Sequence[int], choices: Ints, mesh: LogicalMesh
) -> Floats:
    """Shapes of the matrix products left on one device under each choice, `(4, choices)`: batch,
    rows, columns, and contracted length.
    """
    left, right, result = (np.array(split_by) for _, split_by in work.arrays)
    # A factor of all three arrays is a batch dim; any other factor of the result comes from the
    # left operand (rows) or only from the right one (columns).
    batch, rows, columns = (
        _local_size(sizes, factors, choices, mesh)
        for factors in (result & left & right, result & left & ~right, result & ~left)
    )
    rows = rows * _positions(work, sizes, result)
    # There are two FLOPs for each element of the result and each summand.
    return np.stack([batch, rows, columns, flops / (2 * work.kernels * batch * rows * columns)])


def _product_slowdown(points: Floats | None, products: Products) -> Floats | float:
    """Factor by which the products left on one device are slower than the same FLOPs in a large
    product; see `Products`.
    """
    if points is None or products.tile == 1:
        return 1.0
    batch, rows, columns, depth = points
    tiles = batch * np.ceil(rows / products.tile) * np.ceil(columns / products.tile)
    # Fewer tiles than processors take as long as one tile for each processor.
    covered = np.maximum(tiles, products.processors) * products.tile**2
    slowdown = covered / (batch * rows * columns) * (1 + products.depth / depth)
    # Compilers make no tiles of products with a vector: they multiply and sum as elementwise code.
    return np.where((rows > 1) & (columns > 1), slowdown, 1.0)


def _positions(work: Work, sizes: Sequence[int], result: NDArray[np.bool_]) -> float:
    """Elements of a product's result for each point of its factors: for a convolution its spatial
    positions, which no factor splits; for other products 1.

    The threshold leaves room for a result of another dtype than the operands, which also changes
    the quotient.
    """
    points = math.prod(size for size, counts in zip(sizes, result, strict=True) if counts)
    elements = work.arrays[-1][0] / item_bytes(work.dtype) / work.kernels
    return elements / points if elements >= _FEWEST_POSITIONS * points else 1.0


def _local_size(
    sizes: Sequence[int], factors: NDArray[np.bool_], choices: Ints, mesh: LogicalMesh
) -> Floats:
    """Size of the index space of some factors on each device, under each choice."""
    whole = math.prod(size for size, counts in zip(sizes, factors, strict=True) if counts)
    return whole / shards(choices, factors.tolist(), mesh.shape)
