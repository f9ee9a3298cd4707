"""ParallelBlocks: products of a step through which one split passes without communication.

A block is decided by its *entry*, its first product of the forward pass: how the entry is split
says how every other product of the block is. The products of a block are found from the node graph
alone, whose factors follow from the dimension rules:

1. Every product of the forward pass with a parameter is an entry. All products with the same
   parameter, and those that make its gradient, belong to it: recomputed ones and both products of
   the backward pass.
2. Entries that read one activation and sum over one of its dims are one block (query, key and
   value; gate and up).
3. A product with a parameter joins the block that makes its other operand if both share a batch
   factor (the second product of experts).
4. A product of two activations (scores, context, dispatch and combine, and their gradients) joins
   the first block that alone makes one of its arrays.

Reference: W. Hu et al., "CFP: Efficient Optimization of Intra-Operator Parallelism Plans for Large
Model Training", arXiv 2504.00598, which finds the groups of step 1 and lists those of steps 2 to 4
by hand for each model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core import InputError, nearest
from ..graph import Graph, Phase, Role
from ._disjoint_sets import DisjointSets
from ._nodes import Choice, Edge, Node, NodeGraph

NodeFactor: TypeAlias = tuple[int, int]
"""A node and one of its factors."""

BLOCK_FACTORS = ("cfp", "all")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelBlock:
    """Products that are split together.

    Attributes:
        entry: the product that decides, a node.
        products: all of them, in program order.
        parameters: nodes of the parameters that they multiply by.
        factors: of the entry, which an option may split.
        may_repeat: whether an option may leave a mesh axis without a split, so that its devices do
            the same.
        linked: for each product and each factor of the entry the product's factor that a split of
            the entry's reaches; -1 where it is summed up before, or would reach two (queries and
            keys, both split along the sequence), so that the product is free.
        handed_over: for products of two activations that share an array with the experts of another
            block their factors over which those are split (of dispatch and combine the experts);
            any mesh axis may split these, whatever the option, as the tokens change devices on one
            side of the product or on the other.
    """

    entry: int
    products: tuple[int, ...]
    parameters: tuple[int, ...]
    factors: tuple[int, ...]
    may_repeat: bool
    linked: Mapping[int, tuple[int, ...]]
    handed_over: Mapping[int, frozenset[int]]

    def allows(self, product: int, choices: NDArray[np.int64], option: Choice) -> NDArray[np.bool_]:
        """The choices of one of the products that go with an option of the entry.

        Args:
            choices: one row for each choice, one column for each mesh axis.
            option: for each mesh axis the factor of the entry that it splits, or -1.
        """
        mask = np.ones(len(choices), bool)
        for axis, factor in enumerate(option):
            if product == self.entry:
                mask &= choices[:, axis] == factor
            elif factor == -1 or self.linked[product][factor] >= 0:
                reached = -1 if factor == -1 else self.linked[product][factor]
                mask &= np.isin(choices[:, axis], [reached, *self.handed_over.get(product, ())])
        return mask

    def options(self, axis_sizes: Sequence[int], sizes: Sequence[int]) -> list[Choice]:
        """The ways to split the entry: on each mesh axis one of `factors`, as far as they divide,
        or none (see `may_repeat`).

        An axis that divides none of them splits nothing.

        Args:
            sizes: of the entry's factors.
        """
        columns = []
        for n in axis_sizes:
            dividing = [f for f in self.factors if sizes[f] % n == 0]
            columns.append([*dividing, -1] if self.may_repeat or not dividing else dividing)
        options = []
        for option in itertools.product(*columns):
            pieces = dict.fromkeys(option, 1)
            for factor, n in zip(option, axis_sizes, strict=True):
                pieces[factor] *= n
            if all(f == -1 or sizes[f] % n == 0 for f, n in pieces.items()):
                options.append(option)
        return options


def find_blocks(
    graph: Graph, nodes: NodeGraph, *, factors: str = "cfp"
) -> tuple[ParallelBlock, ...]:
    """The blocks of a step in program order.

    Lookups, and products of the update, belong to none.

    Args:
        factors: `"all"` lets options split every factor of an entry, or none; `"cfp"` as in the
            paper, which leaves out the dims of the activation that are not the batch, such as the
            sequence, and always splits.

    Raises:
        InputError: for other `factors`.
    """
    if factors not in BLOCK_FACTORS:
        raise InputError(f"factors={factors!r}: {nearest(factors, BLOCK_FACTORS)}")
    finder = _Finder(graph, nodes)
    return tuple(
        finder.block(entries, products, factors) for entries, products in finder.partition()
    )


class _Finder:
    """Finds the blocks of a step from the edges of its node graph.

    Attributes:
        products: the nodes that are products, by index.
        operands, results: edges into and out of each product.
        readers, makers: of each group of arrays the edges to products that read it, and the
            products that make it.
        parameters: groups made of one parameter alone, and the group of that parameter.
        parameter_of_gradient: groups that hold a gradient, and the group of its parameter.
        by_parameter, block_of: after `partition`, products with a parameter, and the block of each.
    """

    def __init__(self, graph: Graph, nodes: NodeGraph) -> None:
        self.nodes = nodes
        self.products = {n.index: n for n in nodes.nodes if _is_product(n)}
        roles = zip(graph.inputs, nodes.input_ports, strict=True)
        # Parameters that nothing reads have no node.
        given = {
            port.node for item, port in roles if item.role is Role.PARAMETER and port.node >= 0
        }
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
        self.parameters = self._made_of_parameters(given)
        self.parameter_of_gradient = self._gradients(given)
        self.by_parameter: dict[int, bool] = {}
        self.block_of: dict[int, int] = {}

    def _made_of_parameters(self, given: set[int]) -> dict[int, int]:
        """Groups that hold a parameter, or what is made of one alone (its cast, kept by a loop);
        and that parameter's group.
        """
        entering: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.nodes.edges:
            if edge.target not in self.products:
                entering[edge.target].append(edge)
        parameter_of = {node: node for node in given}
        for node in range(len(self.nodes.nodes)):
            sources = {
                parameter_of.get(e.source, -1) if e.kind == "parameter" else -1
                for e in entering[node]
            }
            if (
                node not in parameter_of
                and len(sources) == 1
                and not self.nodes.batch_factors[node]
            ):
                (root,) = sources
                parameter_of.update({node: root} if root >= 0 else {})
        return parameter_of

    def _gradients(self, given: set[int]) -> dict[int, int]:
        """The parameter for which the arrays of a group are the gradient, or its successor."""
        onward: dict[int, set[int]] = defaultdict(set)
        for edge in self.nodes.edges:
            if edge.kind in ("gradient", "alias"):
                onward[edge.target].add(edge.source)
        parameter_of: dict[int, int] = {}
        for parameter in sorted(given):
            reached, waiting = {parameter}, [parameter]
            while waiting:
                fresh = onward[waiting.pop()] - reached
                reached |= fresh
                waiting += fresh
            for group in reached - {parameter}:
                parameter_of.setdefault(group, parameter)
        return parameter_of

    def partition(self) -> list[tuple[list[int], list[int]]]:
        """For each block its entries and all of its products; the steps are those of this module's
        docstring.
        """
        owner = self._parameter_of_product()
        self.by_parameter = dict.fromkeys(owner, True)
        entries = [
            p for p, node in self.products.items() if p in owner and node.phase is Phase.FORWARD
        ]
        blocks: DisjointSets[int] = DisjointSets()
        self._join_by_shared_sums(entries, owner, blocks)
        self._join_by_batch(entries, owner, blocks)
        members: dict[int, list[int]] = defaultdict(list)
        for product in self.products:
            if product in owner:
                members[blocks.root(owner[product])].append(product)
        # A parameter that only the backward pass multiplies by has no entry, and forms no block.
        starts = {
            root: min((p for p in ps if p in entries), default=-1) for root, ps in members.items()
        }
        self._add_products_of_activations(owner, blocks, members, starts)
        self.block_of = {product: root for root, some in members.items() for product in some}
        return [
            ([p for p in sorted(members[root]) if p in entries], sorted(members[root]))
            for start, root in sorted((s, r) for r, s in starts.items() if s >= 0)
        ]

    def _parameter_of_product(self) -> dict[int, int]:
        """Step 1: the one parameter that a product multiplies by or makes the gradient of. Products
        without one, or with several, are left out.
        """
        owner: dict[int, int] = {}
        for product in self.products:
            touched = {
                self.parameters[e.source]
                for e in self.operands[product]
                if e.source in self.parameters
            }
            gradients = [
                e for e in self.results[product] if e.gradient or e.target in self.parameters
            ]
            touched |= {self.parameter_of_gradient.get(e.target, -1) for e in gradients} - {-1}
            if len(touched) == 1:
                owner[product] = touched.pop()
        return owner

    def _join_by_shared_sums(
        self, entries: Sequence[int], owner: Mapping[int, int], blocks: DisjointSets[int]
    ) -> None:
        """Step 2: entries that sum over one dim of the same activation, such as query, key and
        value.
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
        """Step 3: an entry and the block that makes its other operand, where both have the same
        batch factor. An operand that several blocks make joins none.
        """
        for product in entries:
            for edge in self.operands[product]:
                before = [
                    p
                    for p in entries
                    if p < product and (p == edge.source or p in self.makers[edge.source])
                ]
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
        """Step 4: products of two activations go to the first block that alone makes one of their
        arrays.
        """
        # A product may only join once the one that makes its operand has, so that passes repeat
        # until none joins.
        is_waiting = True
        while is_waiting:
            is_waiting = False
            for product in self.products:
                if product in owner:
                    continue
                near = [e.source for e in self.operands[product]] + [
                    e.target for e in self.results[product]
                ]
                roots = {self._only_owner(n, owner, blocks) for n in near}
                known = sorted((starts[r], r) for r in roots if r is not None and starts[r] >= 0)
                if known:
                    owner[product] = known[0][1]
                    members[known[0][1]].append(product)
                    is_waiting = True

    def _only_owner(
        self, node: int, owner: Mapping[int, int], blocks: DisjointSets[int]
    ) -> int | None:
        """The set whose products alone make a node's arrays, as far as these are known; None if
        there are several.
        """
        makers = {node} if node in self.products else self.makers[node]
        roots = {blocks.root(owner[m]) for m in makers if m in owner}
        return roots.pop() if len(roots) == 1 and node not in self.parameters else None

    def _summed(self, product: int, edge: Edge) -> Iterator[int]:
        """Factors of an operand's node over which a product sums."""
        if edge.source in self.parameters:
            return
        for here, there in _pairs(edge.target_projection, edge.source_projection):
            if all(e.source_projection[here] < 0 for e in self.results[product]):
                yield there

    def _share_batch_factor(self, product: int, edge: Edge, maker: int) -> bool:
        """True if a factor of all arrays of a product is also one of all arrays of the maker of an
        operand.
        """
        mine = {
            there
            for here, there in _pairs(edge.target_projection, edge.source_projection)
            if self._in_all(product, here)
        }
        theirs: set[int] = set()
        for result in self.results[maker]:
            if result.target == edge.source:
                pairs = _pairs(result.source_projection, result.target_projection)
                theirs |= {there for here, there in pairs if self._in_all(maker, here)}
            elif maker == edge.source:
                theirs |= {
                    here
                    for here in range(len(result.source_projection))
                    if self._in_all(maker, here)
                }
        return bool(mine & theirs)

    def _in_all(self, product: int, factor: int) -> bool:
        operands = [e.target_projection[factor] for e in self.operands[product]]
        return min(operands + [e.source_projection[factor] for e in self.results[product]]) >= 0

    def block(self, entries: Sequence[int], products: Sequence[int], factors: str) -> ParallelBlock:
        """A block of these products."""
        entry = entries[0]
        # Factors of nodes that one split passes through.
        classes: DisjointSets[NodeFactor] = DisjointSets()
        for product in products:
            for edge in self.operands[product]:
                links = _pairs(edge.source_projection, edge.target_projection)
                classes.join_all(((edge.source, a), (product, b)) for a, b in links)
            weights = self._weights_of(product)
            for edge in [
                e for e in self.nodes.edges if e.target in weights and e.kind == "parameter"
            ]:
                links = _pairs(edge.source_projection, edge.target_projection)
                classes.join_all(((edge.source, a), (edge.target, b)) for a, b in links)
            # A gradient may be split otherwise than the product that makes it, as ZeRO does.
            for edge in self.results[product]:
                if not edge.gradient:
                    links = _pairs(edge.source_projection, edge.target_projection)
                    classes.join_all(((product, a), (edge.target, b)) for a, b in links)
        # What is recomputed in the backward pass is split as it was in the forward pass, although
        # no array passes from one to the other.
        for product, again in self._repeated(products):
            classes.join_all(
                ((product, f), (again, f)) for f in range(len(self.products[product].factors))
            )
        of_entry = [classes.root((entry, f)) for f in range(len(self.products[entry].factors))]
        linked = {}
        for product in products:
            roots = [classes.root((product, f)) for f in range(len(self.products[product].factors))]
            # A factor that two factors of a product follow cannot split both.
            linked[product] = tuple(
                [roots.index(r) if roots.count(r) == 1 else -1 for r in of_entry]
            )
        return ParallelBlock(
            entry=entry,
            products=tuple(products),
            parameters=tuple(
                sorted({self.parameters[w] for p in products for w in self._weights_of(p)})
            ),
            factors=tuple(self._open_factors(entry, factors)),
            may_repeat=factors == "all",
            linked=linked,
            handed_over={p: handed for p in products if (handed := self._handed_over(p))},
        )

    def _handed_over(self, product: int) -> frozenset[int]:
        """See `ParallelBlock.handed_over`."""
        if self.by_parameter.get(product):
            return frozenset()
        return frozenset(
            factor
            for other, factor, its_factor in self._next_to(product)
            if self.by_parameter.get(other)
            and self.block_of.get(other) != self.block_of[product]
            and self._in_all(other, its_factor)
        )

    def _next_to(self, product: int) -> Iterator[tuple[int, int, int]]:
        """Products that make an operand of a product or read a result, with each of its factors
        that is one of theirs.
        """
        for edge in self.operands[product]:
            mine = _pairs(edge.source_projection, edge.target_projection)
            if edge.source in self.products:
                yield from ((edge.source, here, there) for there, here in mine)
                continue
            by_group = dict(mine)
            for maker in self.makers[edge.source]:
                for result in [e for e in self.results[maker] if e.target == edge.source]:
                    pairs = _pairs(result.source_projection, result.target_projection)
                    yield from (
                        (maker, by_group[group], there)
                        for there, group in pairs
                        if group in by_group
                    )
        for edge in self.results[product]:
            mine = _pairs(edge.target_projection, edge.source_projection)
            if edge.target in self.products:
                yield from ((edge.target, here, there) for there, here in mine)
                continue
            by_group = dict(mine)
            for read in self.readers[edge.target]:
                pairs = _pairs(read.target_projection, read.source_projection)
                yield from (
                    (read.target, by_group[group], there)
                    for there, group in pairs
                    if group in by_group
                )

    def _repeated(self, products: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of a product and the same one, recomputed in the backward pass."""
        known: dict[object, int] = {}
        for product in products:
            weights = [
                (self.parameters[e.source], e.target_projection)
                for e in self.operands[product]
                if e.source in self.parameters
            ]
            results = tuple(sorted({e.source_projection for e in self.results[product]}))
            first = known.setdefault(
                (self.products[product].factors, tuple(weights), results), product
            )
            if weights and first != product:
                yield first, product

    def _weights_of(self, product: int) -> set[int]:
        return {e.source for e in self.operands[product] if e.source in self.parameters}

    def _open_factors(self, entry: int, factors: str) -> list[int]:
        every = range(len(self.products[entry].factors))
        if factors == "all":
            return list(every)
        batch = self.nodes.batch_factors[entry]
        of_parameter = {
            f
            for e in self.operands[entry]
            if e.source in self.parameters
            for f in every
            if e.target_projection[f] >= 0
        }
        return [f for f in every if f in batch or f in of_parameter]


def _is_product(node: Node) -> bool:
    return node.kind == "product" and node.multiplies and node.phase is not Phase.UPDATE


def _pairs(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Factors of two nodes that stand for the same dim of an array between them."""
    by_dim = {dim: factor for factor, dim in enumerate(other) if dim >= 0}
    for factor, dim in enumerate(one):
        if dim >= 0 and dim in by_dim:
            yield factor, by_dim[dim]
