"""ParallelBlocks: products of a step through which one split passes without communication.

A block's *entry* is its first product of the forward pass: how the entry is split decides how every
other product of the block is split. Blocks are found from the node graph alone, whose factors
follow from the dimension rules:

1. Every product of the forward pass with a parameter starts a block. All other products with this
   parameter and those that make its gradient belong to the block: recomputed ones and both
   products of the backward pass. Parameters by which equal products of several layers multiply
   count as one, even where they are separate nodes: the first layer's often are, because a batch
   of numbers needs no gradient.
2. Blocks whose entries read the same activation and sum over the same dim of it are merged (query,
   key and value; gate and up).
3. A product with a parameter joins the block that makes its other operand if both share a batch
   factor (the second product of experts).
4. A product of two activations (attention scores and context, dispatch to experts and combine, and
   their gradients) joins the first block that alone makes one of its operands or results.

Reference: W. Hu et al., "CFP: Efficient Optimization of Intra-Operator Parallelism Plans for Large
Model Training", arXiv 2504.00598, which finds the groups of step 1 and lists those of steps 2 to 4
by hand for each model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ..core import DisjointSets, InputError, nearest
from ..graph import Graph, Phase, Role
from ._nodes import Edge, Node, NodeGraph
from ._parallel_block import ParallelBlock, is_product

NodeFactor: TypeAlias = tuple[int, int]
"""A node and one of its factors."""

BLOCK_FACTORS = ("cfp", "all")


def find_blocks(
    graph: Graph, nodes: NodeGraph, *, factors: str = "cfp"
) -> tuple[ParallelBlock, ...]:
    """The blocks of a step in program order.

    Embedding lookups and products of the update phase belong to no block; `outside_blocks` lists
    which others do not.

    Args:
        factors: which factors of an entry an option may split. `"cfp"`, as in the paper: those of
            the batch and of the parameter, and no axis that divides one may be left unused.
            `"all"`: also other dims of the activation, such as the sequence; axes may be left
            unused; and products of the backward pass may exchange axes of equal size.

    Raises:
        InputError: for other `factors`.
    """
    if factors not in BLOCK_FACTORS:
        raise InputError(f"factors={factors!r}: {nearest(factors, BLOCK_FACTORS)}")
    finder = _Finder(graph, nodes)
    found = []
    for entries, products in finder.partition():
        found.append(finder.block(entries, products, factors))
    return tuple(found)


class _Finder:
    """The search for the blocks of a step among the edges of its node graph.

    A node stands for equal products or, as an *array node*, for arrays that are split alike.

    Attributes:
        products: the nodes that are products, by index.
        operands, results: for each product the edges into and out of it.
        readers: for each array node the edges to the products that read it.
        makers: for each array node the products that make it.
        parameters: for each array node that holds a parameter, or arrays derived from one parameter
            alone, the node of that parameter, or of the first of those that count as one.
        parameter_of_gradient: the same for each array node that holds a gradient or an updated
            parameter.
        with_parameter: products that multiply by a parameter or make its gradient; known after
            `partition`.
        block_of: a number for the block of each product; known after `partition`.
    """

    def __init__(self, graph: Graph, nodes: NodeGraph) -> None:
        self.nodes = nodes
        self.products: dict[int, Node] = {n.index: n for n in nodes.nodes if is_product(n)}
        inputs = zip(graph.inputs, nodes.input_ports, strict=True)
        # Parameters that nothing reads have no node.
        parameter_nodes: set[int] = set()
        for item, port in inputs:
            if item.role is Role.PARAMETER and port.node >= 0:
                parameter_nodes.add(port.node)
        self.operands: dict[int, list[Edge]] = defaultdict(list)
        self.results: dict[int, list[Edge]] = defaultdict(list)
        self.readers: dict[int, list[Edge]] = defaultdict(list)
        self.makers: dict[int, set[int]] = defaultdict(set)
        for edge in nodes.edges:
            if edge.target in self.products and edge.kind == "operand":
                self.operands[edge.target].append(edge)
                self.readers[edge.source].append(edge)
            if edge.source in self.products:
                self.results[edge.source].append(edge)
                self.makers[edge.target].add(edge.source)
        derived = self._derived_from_parameters(parameter_nodes)
        same = self._same_in_all_layers(derived)
        self.parameters = {node: same.root(p) for node, p in derived.items()}
        gradients = self._parameters_of_gradients(parameter_nodes)
        self.parameter_of_gradient = {node: same.root(p) for node, p in gradients.items()}
        self.with_parameter: frozenset[int] = frozenset()
        self.block_of: dict[int, int] = {}

    def _derived_from_parameters(self, parameter_nodes: set[int]) -> dict[int, int]:
        """Arrays are derived from a parameter alone when they are, for example,
        its cast to another type that a loop keeps.
        """
        entering: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.nodes.edges:
            if edge.target not in self.products:
                entering[edge.target].append(edge)
        parameter_of = {node: node for node in parameter_nodes}
        for node in range(len(self.nodes.nodes)):
            sources = set()
            for e in entering[node]:
                sources.add(parameter_of.get(e.source, -1) if e.kind == "parameter" else -1)
            # What the batch reaches is an activation, whatever it was computed from.
            if (
                node not in parameter_of
                and len(sources) == 1
                and not self.nodes.batch_factors[node]
            ):
                (root,) = sources
                parameter_of.update({node: root} if root >= 0 else {})
        return parameter_of

    def _same_in_all_layers(self, parameters: Mapping[int, int]) -> DisjointSets[int]:
        """Sets of the parameters that are the same operand of a product in different layers."""
        same: DisjointSets[int] = DisjointSets()
        for product in self.products:
            first: dict[tuple[int, ...], int] = {}
            for edge in self.operands[product]:
                if edge.source in parameters:
                    parameter = parameters[edge.source]
                    same.join(parameter, first.setdefault(edge.target_projection, parameter))
        return same

    def _parameters_of_gradients(self, parameter_nodes: set[int]) -> dict[int, int]:
        """Edges are followed back from each parameter to the arrays
        that update it.
        """
        onward: dict[int, set[int]] = defaultdict(set)
        for edge in self.nodes.edges:
            if edge.kind in ("gradient", "alias"):
                onward[edge.target].add(edge.source)
        # Lowest nodes first, so that a gradient shared by two parameters belongs to the same one on
        # each run.
        parameter_of: dict[int, int] = {}
        for parameter in sorted(parameter_nodes):
            reached, waiting = {parameter}, [parameter]
            while waiting:
                fresh = onward[waiting.pop()] - reached
                reached |= fresh
                waiting += fresh
            for group in reached - {parameter}:
                parameter_of.setdefault(group, parameter)
        return parameter_of

    def partition(self) -> list[tuple[list[int], list[int]]]:
        """For each block its entry, with the same product of other layers, and all its products.

        The steps are those of this module's docstring.
        """
        # Blocks under construction are sets of parameters; `owner` is each product's parameter.
        owner = self._parameter_of_product()
        self.with_parameter = frozenset(owner)
        entries = []
        for p, node in self.products.items():
            if p in owner and node.phase is Phase.FORWARD:
                entries.append(p)
        blocks: DisjointSets[int] = DisjointSets()
        self._join_by_shared_sums(entries, owner, blocks)
        self._join_by_batch(entries, owner, blocks)
        members: dict[int, list[int]] = defaultdict(list)
        for product in self.products:
            if product in owner:
                members[blocks.root(owner[product])].append(product)
        # A parameter that only the backward pass multiplies by has no entry, and forms no block.
        starts = {}
        for root, ps in members.items():
            starts[root] = min((p for p in ps if p in entries), default=-1)
        self._add_products_of_activations(owner, blocks, members, starts)
        self.block_of = {}
        for root, ps in members.items():
            self.block_of.update(dict.fromkeys(ps, root))
        found = []
        for start, root in sorted((s, r) for r, s in starts.items() if s >= 0):
            own = [p for p in members[root] if p in entries and owner[p] == owner[start]]
            found.append((own, sorted(members[root])))
        return found

    def _parameter_of_product(self) -> dict[int, int]:
        """Step 1: for each product the parameter that it multiplies by or makes the gradient of.

        Products without one, or with several, are left out.
        """
        owner: dict[int, int] = {}
        for product in self.products:
            touched = set()
            for e in self.operands[product]:
                if e.source in self.parameters:
                    touched.add(self.parameters[e.source])
            for e in self.results[product]:
                if e.gradient or e.target in self.parameters:
                    touched.add(self.parameter_of_gradient.get(e.target, -1))
            touched.discard(-1)
            if len(touched) == 1:
                owner[product] = touched.pop()
        return owner

    def _join_by_shared_sums(
        self, entries: Sequence[int], owner: Mapping[int, int], blocks: DisjointSets[int]
    ) -> None:
        """Step 2: merge blocks whose entries sum over the same dim of the same activation, such as
        query, key and value.
        """
        first_reader: dict[tuple[int, int, int], int] = {}
        for product in entries:
            for edge in self.operands[product]:
                for factor in self._summed(product, edge):
                    key = (edge.share, edge.source, factor)
                    blocks.join(owner[product], owner[first_reader.setdefault(key, product)])

    def _join_by_batch(
        self, entries: Sequence[int], owner: Mapping[int, int], blocks: DisjointSets[int]
    ) -> None:
        """Step 3: merge an entry's block with the one that makes its other operand, where both have
        the same batch factor. If several blocks make the operand, none are merged.
        """
        for product in entries:
            for edge in self.operands[product]:
                before = []
                for p in entries:
                    if p < product and (p == edge.source or p in self.makers[edge.source]):
                        before.append(p)
                owners = {blocks.root(owner[p]) for p in before}
                if len(owners) == 1 and any(
                    self._share_batch_factor(product, edge, p) for p in before
                ):
                    blocks.join(owner[product], owners.pop())

    def _add_products_of_activations(
        self,
        owner: dict[int, int],
        blocks: DisjointSets[int],
        members: Mapping[int, list[int]],
        starts: Mapping[int, int],
    ) -> None:
        """Step 4: add products of two activations to the first block that alone makes one of their
        operands or results.

        Args:
            owner: parameter of each product; new products are added.
            members: products of each block, by its root; new products are added.
            starts: first entry of each block, by its root; -1 if it has none.
        """
        # A product can join only after the one that makes its operand has, so repeat until none
        # joins.
        has_changed = True
        while has_changed:
            has_changed = False
            for product in self.products:
                if product in owner:
                    continue
                neighbours = {e.source for e in self.operands[product]}
                neighbours |= {e.target for e in self.results[product]}
                candidates = []
                for node in neighbours:
                    root = self._only_owner(node, owner, blocks)
                    if root is not None and starts[root] >= 0:
                        candidates.append((starts[root], root))
                if candidates:
                    _, first_root = min(candidates)
                    owner[product] = first_root
                    members[first_root].append(product)
                    has_changed = True

    def _only_owner(
        self, node: int, owner: Mapping[int, int], blocks: DisjointSets[int]
    ) -> int | None:
        """The root of the one block that makes a node's arrays; None if there is none or several.

        Makers that are in no block yet are ignored.
        """
        makers = {node} if node in self.products else self.makers[node]
        roots = {blocks.root(owner[m]) for m in makers if m in owner}
        return roots.pop() if len(roots) == 1 and node not in self.parameters else None

    def _summed(self, product: int, edge: Edge) -> Iterator[int]:
        """Factors of an activation's node that a product sums over; none for a parameter's."""
        # Reading one weight is no reason to merge blocks: tied embeddings stand at both ends of a
        # model.
        if edge.source in self.parameters:
            return
        for here, there in _pairs(edge.target_projection, edge.source_projection):
            if all(e.source_projection[here] < 0 for e in self.results[product]):
                yield there

    def _share_batch_factor(self, product: int, edge: Edge, maker: int) -> bool:
        """True if an operand has a dim that is a batch dim both of the product and of its maker: a
        factor of every operand and result of either.
        """
        mine = set()
        for here, there in _pairs(edge.target_projection, edge.source_projection):
            if self._in_all(product, here):
                mine.add(there)
        theirs: set[int] = set()
        for result in self.results[maker]:
            if result.target == edge.source:
                pairs = _pairs(result.source_projection, result.target_projection)
                theirs |= {there for here, there in pairs if self._in_all(maker, here)}
            elif maker == edge.source:
                for here in range(len(result.source_projection)):
                    if self._in_all(maker, here):
                        theirs.add(here)
        return bool(mine & theirs)

    def _in_all(self, product: int, factor: int) -> bool:
        """True if every operand and result of a product has a dim of the factor."""
        operands = [e.target_projection[factor] for e in self.operands[product]]
        return min(operands + [e.source_projection[factor] for e in self.results[product]]) >= 0

    def block(self, entries: Sequence[int], products: Sequence[int], factors: str) -> ParallelBlock:
        """The block of these products.

        Args:
            factors: see `find_blocks`.
        """
        entry = entries[0]
        # Factors of nodes that are split together: joined along every edge that a split follows.
        classes: DisjointSets[NodeFactor] = DisjointSets()

        def join(edge: Edge) -> None:
            for a, b in _pairs(edge.source_projection, edge.target_projection):
                classes.join((edge.source, a), (edge.target, b))

        def roots_of(product: int) -> list[NodeFactor]:
            return [classes.root((product, f)) for f in range(len(self.products[product].factors))]

        for product in products:
            for edge in self.operands[product]:
                join(edge)
            weights = self._weights_of(product)
            # Between a weight and the product stand its casts and transposes, which pass its split
            # on.
            for edge in self.nodes.edges:
                if edge.target in weights and edge.kind == "parameter":
                    join(edge)
            # A gradient may be split otherwise than the product that makes it, as ZeRO does.
            for edge in self.results[product]:
                if not edge.gradient:
                    join(edge)
        # A recomputed product is split as in the forward pass, although no array passes from one to
        # the other.
        for product, again in self._repeated(products):
            for f in range(len(self.products[product].factors)):
                classes.join((product, f), (again, f))
        of_entry = roots_of(entry)
        linked = {}
        for product in products:
            roots = roots_of(product)
            # Where a factor of the entry would split two factors of the product, it splits neither:
            # one mesh axis cannot split both.
            linked[product] = tuple(
                [roots.index(r) if roots.count(r) == 1 else -1 for r in of_entry]
            )
        behind, gradients, parameters, handed_over = [], [], set(), {}
        for p in products:
            parameters.update([self.parameters[w] for w in self._weights_of(p)])
            if handed := self._handed_over(p):
                handed_over[p] = handed
            if factors == "all" and self.products[p].phase is not Phase.FORWARD:
                behind.append(p)
                if any(e.gradient for e in self.results[p]):
                    gradients.append(p)
        return ParallelBlock(
            entry=entry,
            entries=tuple(entries),
            products=tuple(products),
            parameters=tuple(sorted(parameters)),
            factors=tuple(self._factors_to_split(entry, factors)),
            may_repeat=factors == "all",
            linked=linked,
            handed_over=handed_over,
            exchanging=frozenset(behind),
            gradients=frozenset(gradients),
        )

    def _handed_over(self, product: int) -> frozenset[int]:
        if product in self.with_parameter:
            return frozenset()
        return frozenset(
            # For the product with the expert weights, experts are a batch dim: every operand and
            # result has it.
            factor
            for other, factor, its_factor in self._next_to(product)
            if other in self.with_parameter
            and self.block_of.get(other) != self.block_of[product]
            and self._in_all(other, its_factor)
        )

    def _next_to(self, product: int) -> Iterator[tuple[int, int, int]]:
        """Products that make an operand of a product or read its result: for each, pairs of factors
        for the same dim of the array between them, as (other product, factor, its factor).
        """
        # An edge joins two products directly, or each of them to an array node.
        for edge in self.operands[product]:
            mine = _pairs(edge.source_projection, edge.target_projection)
            if edge.source in self.products:
                yield from ((edge.source, here, there) for there, here in mine)
                continue
            by_group = dict(mine)
            for maker in self.makers[edge.source]:
                for result in self.results[maker]:
                    if result.target == edge.source:
                        pairs = _pairs(result.source_projection, result.target_projection)
                        for there, group in pairs:
                            if group in by_group:
                                yield maker, by_group[group], there
        for edge in self.results[product]:
            mine = _pairs(edge.target_projection, edge.source_projection)
            if edge.target in self.products:
                yield from ((edge.target, here, there) for there, here in mine)
                continue
            by_group = dict(mine)
            for read in self.readers[edge.target]:
                pairs = _pairs(read.target_projection, read.source_projection)
                for there, group in pairs:
                    if group in by_group:
                        yield read.target, by_group[group], there

    def _repeated(self, products: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of a product and its recomputation in the backward pass.

        Two products are taken for the same if they have equal factors, parameters and results.
        """
        known: dict[object, int] = {}
        for product in products:
            weights = set()
            # Without a weight to tell them apart, equal factors could be those of two different
            # products.
            for e in self.operands[product]:
                if e.source in self.parameters:
                    weights.add((self.parameters[e.source], e.target_projection))
            results = tuple(sorted({e.source_projection for e in self.results[product]}))
            first = known.setdefault(
                (self.products[product].factors, tuple(sorted(weights)), results), product
            )
            if weights and first != product:
                yield first, product

    def _weights_of(self, product: int) -> set[int]:
        """Array nodes of the operands that are, or are derived from, a parameter."""
        return {e.source for e in self.operands[product] if e.source in self.parameters}

    def _factors_to_split(self, entry: int, factors: str) -> list[int]:
        """The factors of an entry that an option may split; see `find_blocks`."""
        all_factors = range(len(self.products[entry].factors))
        if factors == "all":
            return list(all_factors)
        batch = self.nodes.batch_factors[entry]
        of_parameter = set()
        for e in self.operands[entry]:
            if e.source in self.parameters:
                for f in all_factors:
                    if e.target_projection[f] >= 0:
                        of_parameter.add(f)
        return [f for f in all_factors if f in batch or f in of_parameter]


def _pairs(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a factor of each of two nodes for the same dim of the array between them.

    Args:
        one, other: projections: for each factor of a node the dim of the array, -1 if none.
    """
    by_dim = {dim: factor for factor, dim in enumerate(other) if dim >= 0}
    for factor, dim in enumerate(one):
        if dim >= 0 and dim in by_dim:
            yield factor, by_dim[dim]
