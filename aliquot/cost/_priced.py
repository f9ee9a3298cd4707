"""A node graph on a mesh, priced: for each node its choices with their seconds, for each edge a
table of conversions.

Planners search these arrays; the judge adds up the same arrays. All seconds are those of one
training step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cluster import Corrections, LogicalMesh, Products, Target, target_for
from ..graph import Phase
from ..plans import item_bytes
from ..sharding import (
    PARTIAL,
    Edge,
    Move,
    Node,
    NodeCollective,
    NodeGraph,
    Projection,
    Spec,
    reshard,
    waiting_apart,
)
from ._choices import distinct_specs, enumerate_choices, joined_axes, shards
from ._collectives import (
    collective_corrections,
    collective_line,
    move_line,
    pieces,
    rounded_bytes,
    size_points,
    through_copies,
    widening,
)
from ._problem import Problem
from ._work import Work
from .memory import Held, Resident

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_FEWEST_POSITIONS = 9.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedNode:
    """Choices of one node, `(choices, axes)`, and what each costs.

    `compute` and `communication` have a row for each phase, in the order of `Phase`; `compute_s`,
    `backward_s` (of it) and `communication_s` are sums of theirs, and `deferrable_s` is what
    deferrable operators take of both; see `Op`.
    """

    choices: Ints
    compute: Floats
    communication: Floats
    gradient_s: Floats
    deferrable_s: Floats
    compute_s: Floats = field(init=False)
    backward_s: Floats = field(init=False)
    communication_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute_s", self.compute.sum(axis=0))
        object.__setattr__(self, "backward_s", self.compute[Phase.BACKWARD])
        object.__setattr__(self, "communication_s", self.communication.sum(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedEdge:
    """Conversions of one edge.

    `seconds[p, q]` is the price from `sources[p]` to `targets[q]`, infinite where impossible;
    `once_s[p, q]` of it is paid for gradients behind the last micro-batch. `moves[p, q]` says
    whether it takes any collective. `source_index[k]` is the split that choice `k` of the source
    node gives the array, likewise `target_index`.
    """

    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]
    source_index: Ints
    target_index: Ints
    seconds: Floats
    once_s: Floats
    moves: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A priced problem. `repeats` is the number of micro-batches: everything before the update
    happens that often.
    """

    graph: NodeGraph
    work: tuple[tuple[Work, ...], ...]
    residents: tuple[Resident, ...]
    held: tuple[Held, ...]
    mesh: LogicalMesh
    target: Target
    repeats: int
    data_axes: frozenset[int]
    nodes: tuple[PricedNode, ...]
    edges: tuple[PricedEdge, ...]

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Devices along each mesh axis."""
        return self.mesh.shape


def price(
    problem: Problem,
    mesh: LogicalMesh,
    *,
    repeats: int = 1,
    data_axes: frozenset[int] = frozenset(),
    choices: Sequence[Ints] | None = None,
) -> Priced:
    """Price choices and conversions.

    Args:
        problem: of the step at the size of one micro-batch.
        repeats: micro-batches in a step.
        data_axes: axes (by position) that split nothing but the batch, so that gradients wait for
            the last micro-batch.
        choices: for each node the choices to price, `(choices, axes)`; by default all there are.
    """
    graph, target = problem.nodes, target_for(mesh.cluster.device)
    # One pricer for all nodes and edges, so that they share its cache.
    pricer = _Pricer(mesh=mesh, target=target, repeats=repeats, data_axes=data_axes)
    if choices is None:
        choices = [enumerate_choices(node, mesh.shape) for node in graph.nodes]
    nodes = tuple(
        pricer.node(node, work, some)
        for node, work, some in zip(graph.nodes, problem.work, choices, strict=True)
    )
    edges = tuple(pricer.edge(edge, nodes) for edge in graph.edges)
    return Priced(
        graph=graph,
        work=problem.work,
        residents=problem.residents,
        held=problem.held,
        mesh=mesh,
        target=target,
        repeats=repeats,
        data_axes=data_axes,
        nodes=nodes,
        edges=edges,
    )


_Specs: TypeAlias = tuple[Spec, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Cache:
    """Prices that many edges of one mesh have in common."""

    splits: dict[tuple[int, Projection], tuple[_Specs, Ints]] = field(default_factory=dict)
    lines: dict[tuple[Spec, Spec, bool, float | None], tuple[float, float]] = field(
        default_factory=dict
    )
    tables: dict[
        tuple[_Specs, _Specs, bool, float | None], tuple[Floats, Floats, NDArray[np.bool_]]
    ] = field(default_factory=dict)
    collectives: dict[tuple[str, tuple[int, ...], int, bool, float | None], tuple[float, float]] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pricer:
    mesh: LogicalMesh
    target: Target
    repeats: int
    data_axes: frozenset[int]
    cache: _Cache = field(default_factory=_Cache)

    def node(self, node: Node, node_work: Sequence[Work], choices: Ints) -> PricedNode:
        compute, communication = np.zeros((2, len(Phase), len(choices)))
        gradient, deferrable = np.zeros((2, len(choices)))
        sizes = [factor.size for factor in node.factors]
        for work in node_work:
            seconds = work_seconds(work, sizes, choices, self.mesh, self.target) * self.times(
                work.phase
            )
            compute[work.phase] += seconds
            if work.deferrable:
                deferrable += seconds
        for collective in node.collectives:
            seconds = self.collective(collective, choices)
            if collective.gradient:
                gradient += seconds
            else:
                communication[collective.phase] += seconds
                if collective.deferrable:
                    deferrable += seconds
        return PricedNode(
            choices=choices,
            compute=compute,
            communication=communication,
            gradient_s=gradient,
            deferrable_s=deferrable,
        )

    def collective(self, collective: NodeCollective, choices: Ints) -> Floats:
        """Seconds of a node's own collective under each choice."""
        local = collective.num_bytes / shards(choices, collective.split_by, self.mesh.shape)
        seconds = np.zeros(len(choices))
        for axes, rows in joined_axes(choices, collective.factors):
            for some, once in waiting_axes(collective, axes, self.data_axes):
                latency, per_byte = collective_line(collective.kind, some, self.mesh, self.target)
                times = collective.count * (1 if once else self.times(collective.phase))
                entering = local[rows] * widening(
                    collective.dtype, self.target, total=once and self.repeats > 1
                )
                each = latency + per_byte * entering
                if self.mesh.cluster.measured is not None and latency + per_byte:
                    each = (
                        each
                        * collective_corrections(
                            collective.kind, some, self.mesh, None, entering, each
                        ).ratios
                    )
                seconds[rows] += times * each
        return seconds

    def edge(self, edge: Edge, nodes: Sequence[PricedNode]) -> PricedEdge:
        sources, source_index = self.splits(edge.source, edge.source_projection, nodes)
        targets, target_index = self.splits(edge.target, edge.target_projection, nodes)
        whole = edge.num_bytes * widening(edge.dtype, self.target)
        near = rounded_bytes(whole, self.mesh)
        latency, per_byte, moves = self.lines(sources, targets, scatters(edge, self.target), near)
        if edge.kind == "alias":
            latency = latency * np.array(
                [[pieces(edge, p, q, self.target) for q in targets] for p in sources]
            )
        times = edge.count * self.times(edge.phase)
        seconds = (latency + per_byte * whole) * times
        # Without micro-batches all gradients are paid once anyway.
        once = (
            seconds if edge.gradient and self.repeats == 1 else np.broadcast_to(0.0, seconds.shape)
        )
        if edge.gradient and self.repeats > 1 and edge.phase is not Phase.UPDATE:
            seconds, once = self.waiting(edge, sources, targets, seconds)
        return PricedEdge(
            sources=sources,
            targets=targets,
            source_index=source_index,
            target_index=target_index,
            seconds=seconds,
            once_s=once,
            moves=moves,
        )

    def splits(
        self, node: int, projection: Projection, nodes: Sequence[PricedNode]
    ) -> tuple[_Specs, Ints]:
        """`distinct_specs`, once for all edges at one port."""
        known = self.cache.splits.get((node, projection))
        if known is None:
            known = self.cache.splits[node, projection] = distinct_specs(
                nodes[node].choices, projection
            )
        return known

    def lines(
        self, sources: _Specs, targets: _Specs, scatter: bool, near: float | None
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Latencies and seconds per byte of the whole array for all conversions between some
        splits, and which take any.

        Args:
            near: about the bytes of the whole array, where collectives were measured.
        """
        known = self.cache.tables.get((sources, targets, scatter, near))
        if known is None:
            both = np.array([[self.line(p, q, scatter, near) for q in targets] for p in sources])
            # What costs nothing moves nothing, even if the partitioner names a step.
            moves = np.isfinite(both[..., 0]) & (both.sum(axis=-1) > 0)
            known = self.cache.tables[sources, targets, scatter, near] = (
                both[..., 0],
                both[..., 1],
                moves,
            )
        return known

    def line(
        self, source: Spec, target: Spec, scatter: bool, near: float | None
    ) -> tuple[float, float]:
        """Latency and seconds per byte of the whole array, for one conversion."""
        known = self.cache.lines.get((source, target, scatter, near))
        if known is None:
            moves = reshard(source, target, self.mesh.shape, scatter)
            latency, per_byte = (0.0, 0.0) if moves is not None else (np.inf, 0.0)
            for move in moves or ():
                fixed, slope = self.move_line(
                    move, through_copies(move, source, target, self.target), near
                )
                latency += fixed
                per_byte += slope * move.fraction
            known = self.cache.lines[source, target, scatter, near] = latency, per_byte
        return known

    def move_line(self, move: Move, copies: bool, near: float | None) -> tuple[float, float]:
        """`move_line` of one collective, which many conversions have in common."""
        key = (
            move.kind,
            move.axes,
            move.group,
            copies,
            None if near is None else near * move.fraction,
        )
        known = self.cache.collectives.get(key)
        if known is None:
            known = self.cache.collectives[key] = move_line(
                move, copies, self.mesh, self.target, near
            )
        return known

    def waiting(
        self, edge: Edge, sources: _Specs, targets: _Specs, seconds: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds of a gradient's conversions, and what of them is paid once: sums over data axes
        wait for the last micro-batch.
        """
        apart, once = seconds.copy(), np.zeros(seconds.shape)
        whole = edge.num_bytes * widening(edge.dtype, self.target, total=True)
        each = edge.num_bytes * widening(edge.dtype, self.target)
        for p, source in enumerate(sources):
            if not any(source[a] <= PARTIAL for a in self.data_axes):
                continue
            for q, target in enumerate(targets):
                before, behind = waiting_apart(source, target, self.data_axes)
                lines = [
                    self.line(
                        *change,
                        scatters(edge, self.target, total=total),
                        rounded_bytes(size, self.mesh),
                    )
                    for change, total, size in ((before, False, each), (behind, True, whole))
                ]
                once[p, q] = (lines[1][0] + lines[1][1] * whole) * edge.count
                apart[p, q] = (lines[0][0] + lines[0][1] * each) * edge.count * self.times(
                    edge.phase
                ) + once[p, q]
        return apart, once

    def times(self, phase: Phase) -> int:
        """Number of runs of a phase in a step."""
        return 1 if phase is Phase.UPDATE else self.repeats


def scatters(edge: Edge, target: Target, *, total: bool = False) -> bool:
    """True if partial sums that become split are reduce-scattered: by the compiler, or by the
    runtime what products leave.

    Running totals of micro-batches (`total`) are no product's.
    """
    if target.reduce_scatter:
        return not edge.masked
    return edge.on_pieces and not total


def waiting_axes(
    collective: NodeCollective, axes: tuple[int, ...], data_axes: frozenset[int]
) -> list[tuple[tuple[int, ...], bool]]:
    """The axes of a collective for each micro-batch, and those of one behind the last, each with
    whether it is that.

    Sums of gradients wait over data axes.
    """
    # Only sums of gradients may wait; what is gathered is needed at once.
    if not collective.gradient or collective.kind != "all-reduce":
        return [(axes, False)]
    parts = [
        (tuple(a for a in axes if (a in data_axes) is waits), waits) for waits in (False, True)
    ]
    return [(some, waits) for some, waits in parts if some]


def work_seconds(
    work: Work, sizes: Sequence[int], choices: Ints, mesh: LogicalMesh, target: Target
) -> Floats:
    """Roofline: the longer of arithmetic and memory traffic, and the launches that no split
    removes; corrected where the cluster's devices were measured.

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
    """The cost model's seconds of `work_seconds`, and what measurements say of them, if there are
    any.
    """
    device, measured = mesh.cluster.device, mesh.cluster.measured
    moved = np.zeros(len(choices))
    for num_bytes, split_by in work.arrays:
        moved += num_bytes / shards(choices, split_by, mesh.shape)
    seconds = moved / target.memory_bytes_per_s(device)
    points = None
    if work.flops:
        flops = work.flops / shards(choices, work.split_by, mesh.shape)
        if len(work.arrays) == 3 and (target.products.tile > 1 or measured is not None):
            points = _product_points(work, flops, sizes, choices, mesh)
        # A product proper reads two arrays and writes one. Of others the shape is not known.
        slowdown = _product_slowdown(points, target.products)
        speed = target.product_flops_per_s(device, work.dtype)
        seconds = np.maximum(seconds / target.products.traffic, flops * slowdown / speed)
    seconds = np.asarray(seconds + work.kernels * target.kernel_overhead_s, np.float64)
    if measured is None:
        return seconds, None
    # A measurement is of one kernel.
    count = max(work.kernels, 1.0)
    # Products are tabled by shape, everything else by the bytes it moves.
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
    """Shapes of the products of a device under each choice, `(4, choices)`: products, rows,
    columns, and length of the sums.
    """
    left, right, result = (np.array(split_by) for _, split_by in work.arrays)
    # A factor of all three arrays repeats the product; one of the result comes from the left or
    # from the right.
    batch, rows, columns = (
        _local_size(sizes, factors, choices, mesh)
        for factors in (result & left & right, result & left & ~right, result & ~left)
    )
    rows = rows * _positions(work, sizes, result)
    # The length of the sums is what the operations leave: two for each element of the result and
    # each summand.
    return np.stack([batch, rows, columns, flops / (2 * work.kernels * batch * rows * columns)])


def _product_slowdown(points: Floats | None, products: Products) -> Floats | float:
    """Factor by which products of a device's share are slower than as many operations in a large
    product; see `Products`.
    """
    if points is None or products.tile == 1:
        return 1.0
    batch, rows, columns, depth = points
    tiles = batch * np.ceil(rows / products.tile) * np.ceil(columns / products.tile)
    # Fewer tiles than processors take as long as one for each.
    covered = np.maximum(tiles, products.processors) * products.tile**2
    return np.asarray(covered / (batch * rows * columns) * (1 + products.depth / depth), np.float64)


def _positions(work: Work, sizes: Sequence[int], result: NDArray[np.bool_]) -> float:
    """Elements of a product's result for each point of its factors: the positions of a convolution,
    which nothing splits.

    A result of another dtype than the product's operands differs by less than what any image has of
    them.
    """
    points = math.prod(size for size, counts in zip(sizes, result, strict=True) if counts)
    elements = work.arrays[-1][0] / item_bytes(work.dtype) / work.kernels
    return elements / points if elements >= _FEWEST_POSITIONS * points else 1.0


def _local_size(
    sizes: Sequence[int], factors: NDArray[np.bool_], choices: Ints, mesh: LogicalMesh
) -> Floats:
    """Elements that a device holds of the index space of some factors, under each choice."""
    whole = math.prod(size for size, counts in zip(sizes, factors, strict=True) if counts)
    return whole / shards(choices, factors.tolist(), mesh.shape)
