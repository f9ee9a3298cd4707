"""A node graph on a mesh, priced: for each node its choices with their seconds, for each edge a table of conversions.

Planners search these arrays; the judge adds up the same arrays. All seconds are those of one training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import LogicalMesh, Target, target_for
from ..graph import Phase
from ..sharding import PARTIAL, Edge, Node, NodeCollective, NodeGraph, Spec, Work, reshard
from ._choices import distinct_specs, enumerate_choices, shards
from ._collectives import collective_line, widening

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedNode:
    """Choices of one node, `(choices, axes)`, and what each costs."""

    choices: Ints
    compute_s: Floats
    backward_s: Floats
    communication_s: Floats
    gradient_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedEdge:
    """Conversions of one edge. `seconds[p, q]` is the price from `sources[p]` to `targets[q]`, infinite where impossible.

    `source_index[k]` is the split that choice `k` of the source node gives the array, likewise `target_index`.
    """

    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]
    source_index: Ints
    target_index: Ints
    seconds: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """A priced problem. `repeats` is the number of micro-batches: everything before the update happens that often."""

    graph: NodeGraph
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


def price(graph: NodeGraph, mesh: LogicalMesh, *, repeats: int = 1, data_axes: frozenset[int] = frozenset()) -> Priced:
    """Price every choice and conversion.

    Args:
        graph: nodes of the step at the size of one micro-batch.
        repeats: micro-batches in a step.
        data_axes: axes (by position) that split nothing but the batch, so that gradients wait for the last micro-batch.
    """
    target = target_for(mesh.cluster.device)
    pricer = _Pricer(mesh=mesh, target=target, repeats=repeats, data_axes=data_axes)
    nodes = tuple(pricer.node(node) for node in graph.nodes)
    edges = tuple(pricer.edge(edge, nodes) for edge in graph.edges)
    return Priced(
        graph=graph, mesh=mesh, target=target, repeats=repeats, data_axes=data_axes, nodes=nodes, edges=edges
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pricer:
    mesh: LogicalMesh
    target: Target
    repeats: int
    data_axes: frozenset[int]

    def node(self, node: Node) -> PricedNode:
        choices = enumerate_choices(node, self.mesh.shape)
        zeros = np.zeros(len(choices))
        compute, backward = zeros.copy(), zeros.copy()
        for work in node.work:
            seconds = work_seconds(work, choices, self.mesh, self.target) * self.times(work.phase)
            compute += seconds
            if work.phase is Phase.BACKWARD:
                backward += seconds
        plain, gradient = zeros.copy(), zeros.copy()
        for collective in node.collectives:
            seconds = self.collective(collective, choices)
            if collective.gradient:
                gradient += seconds
            else:
                plain += seconds
        return PricedNode(
            choices=choices, compute_s=compute, backward_s=backward, communication_s=plain, gradient_s=gradient
        )

    def collective(self, collective: NodeCollective, choices: Ints) -> Floats:
        """Seconds of a node's own collective under each choice."""
        joined = np.isin(choices, np.array(collective.factors))
        local = collective.num_bytes / shards(choices, collective.split_by, self.mesh.shape)
        local = local * widening(collective.dtype, self.target)
        seconds = np.zeros(len(choices))
        for pattern in np.unique(joined, axis=0):
            axes = tuple(int(a) for a in np.flatnonzero(pattern))
            if not axes:
                continue
            rows = (joined == pattern).all(axis=1)
            latency, per_byte = collective_line(collective.kind, axes, self.mesh, self.target)
            once = collective.gradient and set(axes) <= self.data_axes
            times = collective.count * (1 if once else self.times(collective.phase))
            seconds[rows] = times * (latency + per_byte * local[rows])
        return seconds

    def edge(self, edge: Edge, nodes: Sequence[PricedNode]) -> PricedEdge:
        sources, source_index = distinct_specs(nodes[edge.source].choices, edge.source_projection)
        targets, target_index = distinct_specs(nodes[edge.target].choices, edge.target_projection)
        seconds = np.array([[self.conversion(edge, p, q) for q in targets] for p in sources])
        return PricedEdge(
            sources=tuple(sources),
            targets=tuple(targets),
            source_index=source_index,
            target_index=target_index,
            seconds=seconds.reshape(len(sources), len(targets)),
        )

    def conversion(self, edge: Edge, source: Spec, target: Spec) -> float:
        """Seconds that a step spends on one conversion of an edge."""
        moves = reshard(source, target, self.mesh.shape, self.target.reduce_scatter)
        if moves is None:
            return np.inf
        num_bytes = edge.num_bytes * widening(edge.dtype, self.target)
        total = 0.0
        for move in moves:
            latency, per_byte = self.line(move.kind, move.axes)
            total += latency + per_byte * move.fraction * num_bytes
        return total * edge.count * self.conversions(edge, source)

    def line(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        return collective_line(kind, axes, self.mesh, self.target)

    def conversions(self, edge: Edge, source: Spec) -> int:
        """How often a step repeats an edge: gradients that are partial over data axes alone wait for the last micro-batch."""
        partial = {a for a, placement in enumerate(source) if placement == PARTIAL}
        if edge.gradient and partial and partial <= self.data_axes:
            return 1
        return self.times(edge.phase)

    def times(self, phase: Phase) -> int:
        """How often a step runs a phase."""
        return 1 if phase is Phase.UPDATE else self.repeats


def work_seconds(work: Work, choices: Ints, mesh: LogicalMesh, target: Target) -> Floats:
    """Roofline: the longer of arithmetic and memory traffic, and the launches that no split removes.

    Reference: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009.
    """
    device = mesh.cluster.device
    moved = np.zeros(len(choices))
    for num_bytes, split_by in work.arrays:
        moved += num_bytes / shards(choices, split_by, mesh.shape)
    seconds = moved / target.memory_bytes_per_s(device)
    if work.flops:
        speed = target.product_flops_per_s(device, work.dtype)
        seconds = np.maximum(seconds, work.flops / shards(choices, work.split_by, mesh.shape) / speed)
    return np.asarray(seconds + work.kernels * target.kernel_overhead_s, np.float64)
