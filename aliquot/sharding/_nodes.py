"""Decisions of a planner: nodes with factors, and edges along which arrays change their split.

A *product* node is an operator that chooses its own split (`DimRule.contracts`). A *group* node is
a set of arrays joined by operators that pass splits through; it has one factor for each class of
dims that must be split together. A choice of a node assigns to each mesh axis one factor, or none.
Everything else follows from choices by projection: the split of an array is, axis by axis, the dim
that stands for the chosen factor.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..graph import OpId, Phase, ValueId
from ._ids import NodeId
from ._spec import REPLICATED, Spec

# Of an operator, as in `dot_general:12`, or of a value, as in `value 7`.
_NUMBER = re.compile(r"[: ]\d+$")

Projection: TypeAlias = tuple[int, ...]
"""For each factor of a node the dim of an array that stands for it, `REPLICATED`, or `PARTIAL` and
below.
"""

Choice: TypeAlias = tuple[int, ...]
"""For each mesh axis the factor that it splits, or -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """An index space that a mesh axis may split.

    Attributes:
        size: what the split must divide, the gcd over all dims in it.
        label: of the first of them.
        shortest: the operator that makes the shortest of them; None for that of an input.
    """

    size: int
    label: str
    shortest: OpId | None = field(default=None, compare=False)


SplitBy: TypeAlias = tuple[bool, ...]
"""For each factor of a node: whether splitting it divides a quantity."""


class NodeCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a node pays when an axis splits any of `factors`: the sum of a reduction,
    or a gather of what must be whole. All axes that split one take part in the same collective.

    `num_bytes` is the whole array's; splitting a factor of `split_by` divides it. It happens
    `count` times a step. For `deferrable` see `Op`, for `over_tokens` and `total_dtype` `Edge`.
    """

    kind: str
    factors: tuple[int, ...]
    split_by: SplitBy
    num_bytes: float
    dtype: str
    count: float
    phase: Phase
    gradient: bool
    label: str
    deferrable: bool = False
    over_tokens: bool = False
    total_dtype: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One decision. `copies` is how many equal operators or arrays of the step it stands for.

    Of a product, `phase` is that in which it runs, and `multiplies` tells whether it does
    arithmetic; lookups only move.
    """

    index: NodeId
    label: str
    kind: str
    factors: tuple[Factor, ...]
    copies: int
    phase: Phase | None = None
    multiplies: bool = False
    collectives: tuple[NodeCollective, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edge:
    """An array that one node makes in one split and another reads in its own, so that it may have
    to be converted.

    Attributes:
        source, target: nodes.
        source_projection, target_projection: for each of their factors the dim of the array that
            stands for it.
        num_bytes: bytes of the whole array.
        rank: number of its dims.
        length: of its first dim; 1 if it has none.
        count: how often a step converts it, all copies together.
        share: edges with the same share number and the same conversion share the result of one
            conversion.
        share_once: the number to use instead for casts that are gathered once in a step, which both
            passes read, even where the passes are programs of their own.
        gradient: whether it ends in the update phase, so that with micro-batches it may wait for
            the last one.
        starts, ends: for each copy, the operators between which a converted array lives.
        masked: whether it leaves a gather in fill mode. Rows outside the table are filled between
            its partial sums and any slice of it, so XLA all-reduces them.
        on_pieces: whether its partial sums are those of a product that each device can run on its
            own pieces, so that the runtime reduce-scatters them where a compiler does not.
        deferrable: whether the operators that read it are; see `Op`.
        parameter: whether it is a parameter, or made of parameters alone, such as a cast.
        cast: whether it is a parameter's cast to a narrower type; see `parameter_casts`.
        over_tokens: whether it is a gradient that may also wait where an axis splits the sequence;
            see `sums_that_wait`.
        total_dtype: of a gradient, the dtype in which the step hands it to the update. Its running
            total over micro-batches is rounded to that before devices add up theirs.
    """

    index: int
    source: NodeId
    source_projection: Projection
    target: NodeId
    target_projection: Projection
    num_bytes: int
    rank: int
    length: int
    dtype: str
    count: float
    share: int
    share_once: int
    phase: Phase
    gradient: bool
    label: str
    kind: str
    starts: NDArray[np.int64] = field(repr=False)
    ends: NDArray[np.int64] = field(repr=False)
    masked: bool = False
    on_pieces: bool = False
    deferrable: bool = False
    parameter: bool = False
    cast: bool = False
    over_tokens: bool = False
    total_dtype: str = ""

    @property
    def beside_compute(self) -> bool:
        """Whether its conversions can run beside compute: sums of gradients behind the products
        that make them, and gathers of parameters ahead of those that read them.
        """
        return self.gradient or (self.parameter and self.phase is not Phase.UPDATE)

    @property
    def without_place(self) -> tuple[Hashable, ...]:
        """All that its conversions cost by, but the splits at its ends: equal for edges that
        differ only in their nodes and in what shares their results.
        """
        return (
            *(self.num_bytes, self.rank, self.length, self.dtype, self.count, self.phase),
            *(self.gradient, self.kind, self.masked, self.on_pieces, self.parameter),
            *(self.cast, self.over_tokens, self.total_dtype),
        )

    def follow(self, factor: int) -> int:
        """The target's factor for the dim that a factor of the source stands for; -1 if there is
        none.
        """
        dim = self.source_projection[factor]
        return (
            self.target_projection.index(dim) if dim >= 0 and dim in self.target_projection else -1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """How an array lies in a node: the node that decides its split (`NO_NODE` for scalars and
    constants, which have none), and the dims that stand for the node's factors.
    """

    node: NodeId
    projection: Projection


class Site(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Place at which the runtime pins a split: an operator class, with the ports of its operands
    and results.

    `sources` are the ports at which the operands arise.

    A result may have two ports: that of the operator's own split, then that of its users' split.
    Where `readers` are given for a result, it is pinned only if one of them has another split.
    `on_pieces`: see `Edge`.
    """

    op_class: int
    operands: tuple[Port | None, ...]
    sources: tuple[Port | None, ...]
    results: tuple[tuple[Port, ...], ...]
    readers: tuple[tuple[Port, ...], ...] = ()
    on_pieces: bool = False


class Adjacency:
    """Some edges of a node graph in both directions, to follow factors from node to node."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        self._ways: dict[int, list[tuple[int, Projection, Projection]]] = defaultdict(list)
        for e in edges:
            self._ways[e.source].append((e.target, e.source_projection, e.target_projection))
            self._ways[e.target].append((e.source, e.target_projection, e.source_projection))

    def beside(self, node: int) -> set[int]:
        """All neighbours of a node: those that share an array with it."""
        return {other for other, _, _ in self._ways[node]}

    def continued(self, node: int, factor: int) -> Iterator[tuple[int, int]]:
        """Neighbours in which a factor of a node continues, each with its own factor for the same
        dim of the array between them.
        """
        for other, mine, theirs in self._ways[node]:
            if mine[factor] >= 0 and mine[factor] in theirs:
                yield other, theirs.index(mine[factor])

    def reached(
        self, roots: Iterable[tuple[int, int]], among: Container[int] | None = None
    ) -> dict[int, set[int]]:
        """For each node the factors to which some factors of nodes lead.

        Args:
            among: the nodes to which a way may lead; by default all.
        """
        found: dict[int, set[int]] = {}
        pending = list(roots)
        while pending:
            node, factor = pending.pop()
            if factor in found.setdefault(node, set()):
                continue
            found[node].add(factor)
            pending += [
                way for way in self.continued(node, factor) if among is None or way[0] in among
            ]
        return found


class TokenSum(msgspec.Struct, frozen=True, kw_only=True):
    """A class of sums that may wait where an axis splits the sequence; see `sums_that_wait`.

    Attributes:
        operands: their ports; None for one without.
        summed: for each operand the dims over which the operator sums.
    """

    op_class: int
    operands: tuple[Port | None, ...]
    summed: tuple[frozenset[int], ...]

    def is_split(self, choices: Sequence[Choice], axis: int) -> bool:
        """True if a mesh axis splits what it sums over, under a choice for every node."""
        for port, dims in zip(self.operands, self.summed, strict=True):
            if port is None or port.node < 0:
                continue
            if project(choices[port.node], port.projection)[axis] in dims:
                return True
        return False


class WholeOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that every device runs on whole arrays, as no dim of it may be split.

    Attributes:
        label: as that of the collectives that gather its operands.
        index: of the first such operator in the step.
        num_bytes: what it reads and writes each time.
        count: how often it runs in a step of one micro-batch.
        declared: whether the rule that says so is declared; else none could be inferred.
    """

    label: str
    index: int
    num_bytes: float
    count: float
    phase: Phase
    declared: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeGraph:
    """All decisions of a step, independent of the mesh.

    Attributes:
        nodes, edges: see `Node` and `Edge`.
        sites: where splits are pinned when the step runs.
        input_ports, output_ports: how each input and output of the step is split.
        num_ops: number of operators.
        batch_factors: for each node the factors that the batch dim of the inputs runs through.
        batch_sums: number of places between products of the backward pass at which layers sum over
            the batch.
        op_class: class of each operator.
        loop_ports: how the values that loops carry and remat regions take are split, by value
            index.
        folded: whether any node stands for more than one copy.
        on_missing_rule: see `dim_rule`.
        whole: operators that run whole on every device.
        small: operators that regroup the batch into fewer rows, in small arrays that every device
            computes whole, with the number of rows.
        token_sums: gradients that may wait where an axis splits the sequence.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    sites: tuple[Site, ...]
    input_ports: tuple[Port, ...]
    output_ports: tuple[Port, ...]
    num_ops: int
    batch_factors: tuple[frozenset[int], ...]
    batch_sums: int
    op_class: tuple[int, ...]
    loop_ports: dict[ValueId, Port]
    folded: bool
    on_missing_rule: str = "infer"
    whole: tuple[WholeOperator, ...] = ()
    small: tuple[tuple[OpId, int], ...] = ()
    token_sums: tuple[TokenSum, ...] = ()


def project(choice: Choice, projection: Projection) -> Spec:
    """The split of an array under a choice.

    >>> project((1, -1), (0, 2))
    (2, -1)
    """
    return tuple(projection[factor] if factor >= 0 else REPLICATED for factor in choice)


def shards_of(choice: Choice, split_by: SplitBy, axis_sizes: Sequence[int]) -> int:
    """Number of pieces into which a choice cuts an array that the factors in `split_by` divide."""
    # Only dims that an axis of this choice splits are divided; partial sums and copies are not.
    return math.prod(
        size for size, f in zip(axis_sizes, choice, strict=True) if f >= 0 and split_by[f]
    )


def operators_of(nodes: NodeGraph, products: Collection[NodeId]) -> frozenset[OpId]:
    """The operators that some products' nodes stand for."""
    classes = set()
    for site in nodes.sites:
        if site.results and site.results[0] and site.results[0][0].node in products:
            classes.add(site.op_class)
    numbers = (number for number, op_class in enumerate(nodes.op_class) if op_class in classes)
    return frozenset(cast("Iterator[OpId]", numbers))


def decide_alike(one: NodeGraph, other: NodeGraph) -> bool:
    """Whether two steps have the same decisions: nodes, edges and sites that differ at most in the
    numbers of operators, so that what is chosen for one holds for the other at the same price.
    """
    return _forms(one) == _forms(other)


def _forms(nodes: NodeGraph) -> list[Hashable]:
    forms: list[Hashable] = [nodes.on_missing_rule]
    for node in nodes.nodes:
        what = _NUMBER.sub("", node.label), node.kind, node.copies, node.phase, node.multiplies
        sizes = tuple(factor.size for factor in node.factors)
        forms.append(
            (what, sizes, tuple(msgspec.structs.replace(c, label="") for c in node.collectives))
        )
    for edge in nodes.edges:
        ends = (edge.source, edge.source_projection, edge.target, edge.target_projection)
        forms.append((ends, edge.without_place))
    for site in nodes.sites:
        forms.append(
            (
                *map(_decided, (site.operands, site.sources)),
                site.results,
                site.readers,
                site.on_pieces,
            )
        )
    return forms


def _decided(ports: tuple[Port | None, ...]) -> tuple[Port | None, ...]:
    """Ports of operands, None for those that have no node."""
    return tuple(port if port is not None and port.node >= 0 else None for port in ports)
