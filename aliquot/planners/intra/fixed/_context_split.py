"""Context parallelism: which factors of each node a mesh axis may split if every token lies on one
of its devices.

The sequence is the dim of a batch's array behind the batch dim. It is followed through everything
that is computed from it. Where an array has two such dims, as the scores of attention do, that of
the queries is split: then keys and values are gathered, or travel. The other way through attention
is to exchange the split of the sequence for one of heads, and back: two all-to-alls.

References: H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for
near-infinite context", 2023; S. A. Jacobs et al., "DeepSpeed Ulysses: system optimizations for
enabling training of extreme long sequence transformer models", 2023.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....core import divisors
from ....graph import Graph, Phase, Role
from ....sharding import RING, Adjacency, Edge, Node, NodeGraph
from ._restrict import Kinds

Ints = NDArray[np.int64]
GATHER, ULYSSES = "gather", "ulysses"
ATTENTION_WAYS = (GATHER, RING, ULYSSES)
"""Ways to compute attention to a split sequence: with gathered keys and values, with keys and
values that travel from device to device, and with the split exchanged for one of heads.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSplit:
    """For each node, the factors one of which a context axis splits; nodes that are not listed
    stay whole.

    Attributes:
        tokens: the sequence, by node.
        heads: factors of attention that may be split instead, by node: what its operators share
            besides batch and sequence. Empty for attention that has none.
    """

    tokens: dict[int, frozenset[int]]
    heads: dict[int, frozenset[int]]

    def factors(self, node: int, attention: str | None) -> frozenset[int]:
        """The factors of a node that may be split if attention is computed in a given way."""
        tokens, heads = (of.get(node, frozenset()) for of in (self.tokens, self.heads))
        return heads if attention == ULYSSES and heads else tokens if attention else tokens | heads

    def on_axis(
        self, axis: int, nodes: NodeGraph, kinds: Kinds, choices: Sequence[Ints]
    ) -> list[Ints]:
        """Of the choices of each node those with which a mesh axis splits nothing but the sequence,
        and that wherever it can; state may be split as it likes. None are left of an array of the
        batch whose sequence it does not divide.
        """
        state, chosen = kinds.parameters | kinds.update, []
        for node, mine in zip(nodes.nodes, choices, strict=True):
            if node.index in state:
                chosen.append(mine)
                continue
            must = node.index in kinds.batch_inputs and node.index in self.tokens
            chosen.append(split_by(mine, axis, self.factors(node.index, None), must=must))
        return chosen


def context_split(graph: Graph, nodes: NodeGraph, kinds: Kinds) -> ContextSplit:
    """The split of all nodes of a step by a context axis."""
    walk = _Walk(nodes=nodes, without=kinds.parameters | kinds.update)
    roots = list(_roots(graph, nodes))
    reached = walk.ways.reached(roots)
    scores = {node for node, factors in reached.items() if len(factors) > 1}
    scores -= {node for node, _ in roots}
    queries = walk.queries(reached, scores)
    tokens = {
        node: frozenset(queries.get(node, factors)) for node, factors in sorted(reached.items())
    }
    return ContextSplit(tokens=tokens, heads=walk.heads(reached, scores))


def context_faults(
    split: ContextSplit,
    nodes: NodeGraph,
    degree: int,
    attention: str | None,
    heads_over: Mapping[int, int],
) -> tuple[list[str], list[str]]:
    """What keeps a context axis from splitting a step, and what to use instead.

    Args:
        degree: devices along the context axis.
        heads_over: by node, the devices over which another axis splits its heads already.
    """
    faults, advice, ways = [], [], set(ATTENTION_WAYS)
    lengths: dict[int, str] = {}
    for index, factors in split.tokens.items():
        node = nodes.nodes[index]
        for factor in (node.factors[f] for f in factors):
            # A causal kernel has a factor of half the length, as each device takes two chunks.
            kernel = f"pairs of chunks in {node.label.split(':')[0]}"
            lengths.setdefault(factor.size, factor.label if node.kind == "group" else kernel)
    for size, label in lengths.items():
        if size % degree:
            faults.append(f"a sequence of {size} ({label}) cannot be split over cp {degree}")
    if faults:
        common = math.gcd(*lengths)
        fitting = [str(n) for n in divisors(common, most=2 * degree)[1:]]
        advice.append(
            f"a context degree that divides the sequence, such as {' or '.join(fitting[-3:])}"
            if fitting
            else f"sequences of a multiple of {degree}"
        )
    for index, heads in split.heads.items():
        node = nodes.nodes[index]
        if node.kind != "product":
            continue
        name = node.label.split(":")[0]
        way = attention_way(node, bool(split.tokens.get(index)))
        sizes = [node.factors[f].size for f in heads]
        over = degree * heads_over.get(index, 1)
        divides = any(size % over == 0 for size in sizes)
        ways &= {*([way] if way else []), *([ULYSSES] if divides else [])}
        if attention == ULYSSES or (attention is None and way is None):
            if not divides:
                whole = "" if way else " needs the sequence whole, and"
                faults.append(
                    f"{name}{whole or ':'} {max(sizes, default=0)} heads cannot be split over"
                    f" {over} devices (cp {degree} x tp {over // degree})"
                )
                fit = divisors(max(sizes, default=0))[1:]
                if fit:
                    advice.append(f"cp x tp that divides the heads: {' or '.join(map(str, fit))}")
        elif attention not in (None, way):
            does = {None: "needs the sequence whole", RING: "is computed by a ring"}
            faults.append(f"{name} {does.get(way, 'gathers keys and values')}")
    if faults and attention is not None:
        others = sorted(ways - {attention})
        advice += [f"{way} in place of {attention}" for way in others]
    return list(dict.fromkeys(faults)), list(dict.fromkeys(advice))


def attention_way(node: Node, over_tokens: bool) -> str | None:
    """How a product of attention is computed if the sequence stays split; None if that cannot
    be.
    """
    if not over_tokens:
        return None
    return RING if any(c.kind == RING for c in node.collectives) else GATHER


def split_by(choices: Ints, axis: int, factors: Iterable[int], *, must: bool = False) -> Ints:
    """Choices that let an axis split one of some factors, or nothing where they cannot, unless it
    must.
    """
    column = choices[:, axis]
    wanted = np.isin(column, list(factors))
    return np.asarray(choices[wanted if must or wanted.any() else column == -1], np.int64)


def _roots(graph: Graph, nodes: NodeGraph) -> Iterator[tuple[int, int]]:
    """Nodes and factors of the sequence in arrays of the batch: of tokens, or of vectors. A float
    for each row and each dim behind is taken for a row of features.

    What a step cuts off an array, such as the tokens but the last, lies in the same node, with a
    factor of its own at the same dim.
    """
    reading: dict[int, list[Edge]] = defaultdict(list)
    for edge in nodes.edges:
        reading[edge.source].append(edge)
    for item, port in zip(graph.inputs, nodes.input_ports, strict=True):
        if item.role is not Role.BATCH or port.node < 0:
            continue
        batch = nodes.batch_factors[port.node]
        rows = {port.projection[f] for f in batch} - {-1}
        dim = max(rows, default=0) + 1
        for edge in reading[port.node]:
            dims = edge.source_projection
            lies_alike = {dims[f] for f in batch} - {-1} == rows
            if edge.rank >= (3 if "float" in edge.dtype else 2) and lies_alike and dim in dims:
                yield port.node, dims.index(dim)


@dataclass(slots=True, kw_only=True, eq=False)
class _Walk:
    """Walks over the nodes of a step, but those of parameters and of the update."""

    nodes: NodeGraph
    without: Collection[int]
    ways: Adjacency = field(init=False)

    def __post_init__(self) -> None:
        without = set(self.without)
        self.ways = Adjacency(
            e
            for e in self.nodes.edges
            if e.phase is not Phase.UPDATE and not e.gradient and not {e.source, e.target} & without
        )

    def queries(self, reached: dict[int, set[int]], scores: set[int]) -> dict[int, set[int]]:
        """Of nodes with the sequences of queries and of keys, that of the queries: the softmax sums
        over the keys, and so does the product that makes the result of attention.
        """
        results: dict[int, set[int]] = defaultdict(set)
        for e in self.nodes.edges:
            results[e.source] |= {f for f, dim in enumerate(e.source_projection) if dim >= 0}
        roots = []
        for index in sorted(scores):
            node = self.nodes.nodes[index]
            if node.kind == "group":
                sums = [c.factors for c in node.collectives if c.kind == "all-reduce"]
                kept = reached[index].difference(*sums) if sums else set()
            elif node.phase is not None and node.phase <= Phase.FORWARD:
                kept = reached[index] & results[index]
            else:
                continue
            if len(kept) == 1:
                roots.append((index, kept.pop()))
        return self.ways.reached(roots, scores)

    def heads(self, reached: dict[int, set[int]], scores: set[int]) -> dict[int, frozenset[int]]:
        """What the operators of attention share besides batch and sequence, by node.

        Products that the sequence does not run through, although they read arrays that it does,
        need it whole: so do some kernels of attention, and what they can be split by are their
        heads. So are those of kernels that compute by a ring.
        """
        batch = self.nodes.batch_factors
        roots = [
            (node, factor)
            for node in sorted(scores)
            if self.nodes.nodes[node].kind == "group"
            for factor in range(len(self.nodes.nodes[node].factors))
            if factor not in reached[node] and factor not in batch[node]
        ]
        found = self.ways.reached(roots, scores)
        for node in self.nodes.nodes:
            tokens = reached.get(node.index, set())
            goes_round = any(c.kind == RING for c in node.collectives)
            if node.kind != "product" or node.index in self.without or (tokens and not goes_round):
                continue
            if self.ways.beside(node.index) & reached.keys():
                found[node.index] = set(range(len(node.factors))) - batch[node.index] - tokens
        return {node: frozenset(factors) for node, factors in sorted(found.items())}
