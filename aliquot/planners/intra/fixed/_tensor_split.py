"""Tensor parallelism: which factor of each node a mesh axis splits if products are split as in
Megatron-LM.

The forward pass is followed in program order. A product with a weight is split by its output
features (by columns) where what it reads is whole, and by its contraction (by rows) where what it
reads is split; a lookup is split by its table's rows. Products without weights, such as those of
attention, keep the split of their operands: by heads. The residual stream stays whole. The splits
of the backward pass and the update follow, because they share these index spaces.

Reference: M. Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using
model parallelism", 2019, section 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ....graph import Phase, wildcard
from ....sharding import Adjacency, Edge, NodeGraph
from ._restrict import Kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFine:
    """A dim of a weight that a degree does not divide."""

    label: str
    size: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """For each node, the factors one of which a tensor axis splits; nodes that are not listed stay
    whole.

    Attributes:
        factors: by node.
        streams: groups that hold residual streams, with their norms; they are not listed.
        too_fine: the dims of weights that the degree does not divide.
        kept_whole: the dims of weights that stay whole because they are smaller than the degree.
    """

    factors: dict[int, frozenset[int]]
    streams: frozenset[int]
    too_fine: tuple[TooFine, ...]
    kept_whole: tuple[TooFine, ...]


def tensor_split(nodes: NodeGraph, kinds: Kinds, degree: int) -> TensorSplit:
    """The split of all nodes of a step by a tensor axis of the given degree."""
    walk = Forward(nodes=nodes, kinds=kinds, degree=degree)
    for product in walk.products:
        # In program order, so that what a product reads is decided before the product.
        walk.decide(product)
    return TensorSplit(
        factors=walk.spread(),
        streams=walk.streams,
        too_fine=tuple(walk.too_fine),
        kept_whole=tuple(walk.kept_whole),
    )


def expert_split(nodes: NodeGraph, kinds: Kinds) -> dict[int, int]:
    """The factor that counts the experts, for each node that has one.

    Expert weights are those with a dim that is also in both the activation and the result of their
    product. Arrays that only such products read and make are split by experts too; where tokens
    enter and leave, they change between a split by batch and one by experts.
    """
    walk = Forward(nodes=nodes, kinds=kinds, degree=1)
    factors: dict[int, int] = {}
    for product in walk.products:
        for edge in walk.incoming[product]:
            if edge.source in walk.weights:
                for factor in walk.parts(product).experts:
                    factors[product] = factor
                    factors[edge.source] = edge.source_projection.index(
                        edge.target_projection[factor]
                    )
    # Spread from the weights to what they meet without a product between: casts, gradients,
    # optimizer state, and the products there. Not through products, which may also read what all
    # experts share.
    pending = [n for n in factors if nodes.nodes[n].kind == "group"]
    while pending:
        node = pending.pop()
        for other, factor in walk.ways.continued(node, factors[node]):
            if other not in factors:
                factors[other] = factor
                if nodes.nodes[other].kind == "group":
                    pending.append(other)
    beside: dict[int, dict[int, int]] = defaultdict(dict)
    for product in [n for n in factors if nodes.nodes[n].kind == "product"]:
        for other, factor in walk.ways.continued(product, factors[product]):
            beside[other][product] = factor
    groups = {
        n: found_beside for n, found_beside in beside.items() if nodes.nodes[n].kind == "group"
    }
    for node, by_product in groups.items():
        products = {n for n in walk.ways.beside(node) if nodes.nodes[n].kind == "product"}
        # A group that other products read as well would have to change its split for them.
        if (
            node not in factors
            and products == set(by_product)
            and len(set(by_product.values())) == 1
        ):
            factors[node] = next(iter(by_product.values()))
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The factors of a product with a weight: those that it contracts, its output features, and
    those that weight, activation and result share, which count experts; and, of experts that are
    one operator, those that only the weights have: what is inside an expert.
    """

    contraction: tuple[int, ...] = ()
    features: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    is_lookup: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Forward:
    """A walk over the forward pass.

    `split` holds the factor that was decided for each node; `whole` holds groups that stay whole
    because a sum over the axis ends in them.
    """

    nodes: NodeGraph
    kinds: Kinds
    degree: int
    split: dict[int, int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    too_fine: list[TooFine] = field(default_factory=list)
    kept_whole: list[TooFine] = field(default_factory=list)
    incoming: dict[int, list[Edge]] = field(init=False)
    outgoing: dict[int, list[Edge]] = field(init=False)
    ways: Adjacency = field(init=False)
    weights: frozenset[int] = field(init=False)
    products: tuple[int, ...] = field(init=False)
    streams: frozenset[int] = field(init=False)
    heads: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.incoming, self.outgoing = defaultdict(list), defaultdict(list)
        self.ways = Adjacency(self.nodes.edges)
        for edge in self.nodes.edges:
            # What the backward pass and the update do follows from the forward pass; see `spread`.
            if edge.phase <= Phase.FORWARD and not edge.gradient:
                self.incoming[edge.target].append(edge)
                self.outgoing[edge.source].append(edge)
        self.products = tuple(
            node.index
            for node in self.nodes.nodes
            if node.phase is not None and node.phase <= Phase.FORWARD
        )
        self.weights = self._weights()
        self.streams = self._streams()
        self.heads = frozenset(p for p in self.products if self._is_head(p))

    def decide(self, product: int) -> None:
        """Choose the factor of a product, and the splits of the arrays it makes that follow from
        it.
        """
        parts = self.parts(product)
        carried = self._carried(product)
        chosen: int | None = None
        # A lookup split by rows of its table leaves partial sums, as the vocabulary-parallel
        # embedding does.
        if parts.is_lookup:
            chosen = parts.contraction[0] if self._is_largest_lookup(product) else None
        elif product in self.heads:
            chosen = self._column(product, parts.features)
        elif shared := [f for f in carried if f in parts.contraction] or carried:
            chosen = shared[0]
        # What feeds the residual stream must not be split by columns: the stream stays whole.
        elif parts.features and not any(e.target in self.streams for e in self.outgoing[product]):
            chosen = self._column(product, parts.features)
        elif parts.inner:
            chosen = parts.inner[0]
        if chosen is None:
            return
        self.split[product] = chosen
        finest = self._finest(product, chosen)
        # Only products with a weight are reported, as the others follow them.
        if finest % self.degree and any(e.source in self.weights for e in self.incoming[product]):
            self.too_fine.append(self._too_fine(product, chosen, finest))
        for edge in self.outgoing[product]:
            self._land(edge, chosen)

    def parts(self, product: int) -> Parts:
        """The factors of a product by kind; empty if it has no weight."""
        weight, activation, results = set[int](), set[int](), set[int]()
        order: list[int] = []
        for edge in self.incoming[product]:
            dims = {f: d for f, d in enumerate(edge.target_projection) if d >= 0}
            if edge.source in self.weights:
                weight |= set(dims)
                order += sorted(dims, key=dims.__getitem__)
            else:
                activation |= set(dims)
        for edge in self.outgoing[product]:
            results |= {f for f, d in enumerate(edge.source_projection) if d >= 0}
        # Products of two activations have no weight, and take their operands' split.
        if not weight or not activation or self.nodes.nodes[product].kind != "product":
            return Parts()
        ordered = list(dict.fromkeys(order))
        contraction = tuple(f for f in ordered if f not in results)
        experts = tuple(f for f in ordered if f in results and f in activation)
        only_weights = bool(contraction) and not activation & set(contraction)
        return Parts(
            contraction=contraction,
            features=tuple(f for f in ordered if f in results and f not in activation),
            experts=experts,
            inner=contraction if only_weights and experts else (),
            is_lookup=only_weights and not experts,
        )

    def spread(self) -> dict[int, frozenset[int]]:
        """Factors of all nodes: those of the products, propagated to the backward pass, weights and
        update.
        """
        decided = {*self.split, *self.whole, *self.streams, *self.products}
        factors = {node: {factor} for node, factor in self.split.items()}
        pending = list(self.split.items())
        while pending:
            node, factor = pending.pop()
            for other, same in self.ways.continued(node, factor):
                if other not in decided and same not in factors.setdefault(other, set()):
                    factors[other].add(same)
                    pending.append((other, same))
        return {node: frozenset(some) for node, some in factors.items() if some}

    def _weights(self) -> frozenset[int]:
        """Groups that hold parameters or values computed from these alone, such as casts."""
        weights = set(self.kinds.parameters)
        for node in self.nodes.nodes:
            sources = [e.source for e in self.incoming[node.index]]
            derived = bool(sources) and all(s in weights for s in sources)
            if node.kind == "group" and derived and node.index not in self.kinds.update:
                # What depends on the batch is no weight, even if only weights enter it.
                if not self.nodes.batch_factors[node.index]:
                    weights.add(node.index)
        return frozenset(weights)

    def _streams(self) -> frozenset[int]:
        """Groups that hold a residual stream: features to which the results of products that read
        them are added.
        """
        features = self._features()
        streams: set[int] = set()
        on_path: set[int] = set()
        seen: set[int] = set()
        fed = [
            n.index for n in self.nodes.nodes if n.kind == "group" and n.index not in self.weights
        ]
        # From the inputs of the batch, so that the stream is found at its beginning.
        for root in sorted(fed, key=lambda n: n not in self.kinds.batch_inputs):
            # An explicit stack, as deep models would exceed Python's recursion limit.
            stack = [(root, iter(self.outgoing[root]))] if root not in seen else []
            seen.add(root)
            on_path.add(root)
            while stack:
                node, edges = stack[-1]
                edge = next(edges, None)
                if edge is None:
                    stack.pop()
                    on_path.discard(node)
                elif edge.target not in seen:
                    seen.add(edge.target)
                    on_path.add(edge.target)
                    stack.append((edge.target, iter(self.outgoing[edge.target])))
                # An edge back to a group on the path closes a loop: what the group holds is added
                # to it again.
                elif edge.target in on_path and self._adds_features(edge, features[edge.target]):
                    streams.add(edge.target)
            on_path.discard(root)
        return frozenset(streams)

    def _features(self) -> dict[int, set[int]]:
        """For each node, its factors that carry output features of products with weights."""
        features: dict[int, set[int]] = defaultdict(set)
        pending = []
        for p in self.products:
            for f in self.parts(p).features:
                pending.append((p, f))
        while pending:
            node, factor = pending.pop()
            if factor in features[node]:
                continue
            features[node].add(factor)
            for edge in self.outgoing[node]:
                if (same := edge.follow(factor)) >= 0:
                    pending.append((edge.target, same))
        return features

    def _adds_features(self, edge: Edge, features: set[int]) -> bool:
        dims = {d for d in edge.source_projection if d >= 0}
        return any(edge.target_projection[f] in dims for f in features)

    def _carried(self, product: int) -> list[int]:
        """Factors of a product along which its operands are already split."""
        carried: dict[int, None] = {}
        for edge in self.incoming[product]:
            if edge.source in self.split and edge.source not in self.weights:
                if (same := edge.follow(self.split[edge.source])) >= 0:
                    carried[same] = None
        return list(carried)

    def _column(self, product: int, features: tuple[int, ...]) -> int | None:
        """The factor of output features to split; None if all stay whole.

        Features stay whole if they are fewer than the devices, as those of a head that makes one
        value of a token are; if they count experts, as the scores of a router do; or if an output
        head contracts them, which is split by columns itself.
        """
        sizes = {f: self.nodes.nodes[product].factors[f].size for f in features}
        candidates = []
        for f in features:
            if sizes[f] >= self.degree and not self._leads_to(product, f, self._wants_whole):
                candidates.append(f)
        if features and max(sizes.values()) < self.degree:
            largest = max(features, key=sizes.__getitem__)
            self.kept_whole.append(self._too_fine(product, largest, sizes[largest]))
        divided = [f for f in candidates if self._finest(product, f) % self.degree == 0]
        # If the degree divides none, the first is taken, so that the refusal can name it.
        return next(iter(divided or candidates), None)

    def _wants_whole(self, product: int, factor: int) -> bool:
        parts = self.parts(product)
        return factor in parts.experts or (product in self.heads and factor in parts.contraction)

    def _is_head(self, product: int) -> bool:
        """True if a product has more output than input features and no weight reads them, as with a
        vocabulary.
        """
        parts, factors = self.parts(product), self.nodes.nodes[product].factors
        if not parts.features or parts.is_lookup:
            return False
        num_made, num_read = (
            math.prod(factors[f].size for f in some) for some in (parts.features, parts.contraction)
        )
        # Fewer outputs than inputs is no head, and what feeds the stream is inside the model.
        if num_made <= num_read or any(e.target in self.streams for e in self.outgoing[product]):
            return False
        return not any(self._leads_to(product, f, self._has_weight) for f in parts.features)

    def _has_weight(self, product: int, factor: int) -> bool:
        return self.parts(product) != Parts()

    def _leads_to(self, product: int, factor: int, is_target: Callable[[int, int], bool]) -> bool:
        """True if a factor of a product reaches, outside residual streams, a node and factor that
        satisfy `is_target`.
        """
        seen: set[tuple[int, int]] = set()
        pending = [(product, factor)]
        while pending:
            node, mine = pending.pop()
            for edge in self.outgoing[node]:
                reached = edge.target, edge.follow(mine)
                if reached[1] < 0 or edge.target in self.streams:
                    continue
                if is_target(*reached):
                    return True
                if reached not in seen:
                    seen.add(reached)
                    pending.append(reached)
        return False

    def _finest(self, product: int, factor: int) -> int:
        """Number of parts that must not be cut, such as heads, of a product's factor: in the
        product and in the arrays it makes.
        """
        sizes = [self.nodes.nodes[product].factors[factor].size]
        for edge in self.outgoing[product]:
            if (same := edge.follow(factor)) >= 0:
                sizes.append(self.nodes.nodes[edge.target].factors[same].size)
        return math.gcd(*sizes)

    def _is_largest_lookup(self, product: int) -> bool:
        """True if no larger table is looked up for the same array; small ones, such as those of
        positions, stay whole.
        """
        targets = {e.target for e in self.outgoing[product]}
        rivals = []
        for p in self.products:
            if self.parts(p).is_lookup and targets & {e.target for e in self.outgoing[p]}:
                rivals.append(p)
        # The embedding of tokens is the largest; all lookups for one array must agree.
        return max(rivals, key=self._table_bytes) == product

    def _table_bytes(self, product: int) -> int:
        return max(e.num_bytes for e in self.incoming[product] if e.source in self.weights)

    def _land(self, edge: Edge, factor: int) -> None:
        """Split the group that an edge leads to as the edge's source is split, and so on through
        the groups that read it.
        """
        pending = [(edge, factor)]
        while pending:
            edge, factor = pending.pop()
            node, same = edge.target, edge.follow(factor)
            if self.nodes.nodes[node].kind == "product" or node in self.split:
                continue
            if same < 0 or node in self.streams or node in self.whole:
                # A sum over the axis ends here: the array is whole behind it.
                self.whole.add(node)
                continue
            self.split[node] = same
            pending += [(e, self.split[node]) for e in self.outgoing[node]]

    def _too_fine(self, product: int, factor: int, parts: int) -> TooFine:
        label = wildcard(next(e.label for e in self.incoming[product] if e.source in self.weights))
        size = self.nodes.nodes[product].factors[factor].size
        return TooFine(label=label, size=size, parts=parts)
