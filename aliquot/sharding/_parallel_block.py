"""A ParallelBlock as `find_blocks` returns it, the ways to split it, and its operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph import OpId, Phase
from ._nodes import Choice, Node, NodeGraph


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelBlock:
    """Products that are split together.

    Attributes:
        entry: node of the product that decides how the others are split.
        entries: this node, and those of the same product in layers that are separate nodes.
        products: nodes of all products, the entry included, in program order.
        parameters: nodes of the parameters that they multiply by; the first layer's for all layers
            whose products are equal.
        factors: those of the entry that an option may split.
        may_repeat: whether an option may leave a mesh axis unused, so that all devices along it
            compute the same.
        linked: for each product, one entry for each factor of the block's entry: the product's
            factor that is split with it. It is -1 where there is none, because the factor is summed
            on the way to the product or would split two of the product's factors (scores, whose
            queries and keys both run along the sequence); the product may then be split in any way.
        handed_over: for each product of two activations next to experts of another block (such as
            dispatch and combine), its factors over which those experts are split. Any mesh axis may
            split these whatever the option, because tokens move between devices either before or
            after the product.
        exchanging: products that may follow an option with mesh axes of equal size exchanged, such
            as `(0, 2)` instead of `(2, 0)`. Activations then move between devices, which may take
            less time than a sum over the slower axis. They may also leave an axis unused
            that the option uses, and split anything along one that it leaves unused.
        gradients: products that make gradients of parameters and may be split in any way: their
            results go to the update, which is split as the state is stored.
    """

    entry: int
    entries: tuple[int, ...]
    products: tuple[int, ...]
    parameters: tuple[int, ...]
    factors: tuple[int, ...]
    may_repeat: bool
    linked: Mapping[int, tuple[int, ...]]
    handed_over: Mapping[int, frozenset[int]]
    exchanging: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()

    def followed_by(
        self, product: int, option: Choice, axis_sizes: Sequence[int]
    ) -> tuple[Choice, ...]:
        """The options of the entry with which a product may agree where the entry is split by
        `option`: this one, and for `exchanging` products those with equal axes exchanged.
        """
        if product not in self.exchanging:
            return (option,)
        axes = range(len(option))
        ways: dict[Choice, None] = {}
        for order in itertools.permutations(axes):
            if all(axis_sizes[axis] == axis_sizes[other] for axis, other in enumerate(order)):
                ways[tuple([option[other] for other in order])] = None
        return tuple(ways)

    def allows(self, product: int, choices: NDArray[np.int64], option: Choice) -> NDArray[np.bool_]:
        """True for each choice of a product that agrees with an option of the entry.

        Args:
            choices: of the product; one row for each choice, one column for each mesh axis.
            option: for each mesh axis the factor of the entry that it splits, or -1.
        """
        mask = np.ones(len(choices), bool)
        if product in self.gradients:
            return mask
        handed = self.handed_over.get(product, ())
        for axis, factor in enumerate(option):
            reached = -1 if factor == -1 else self.linked[product][factor]
            if product == self.entry:
                mask &= choices[:, axis] == factor
            elif product in self.exchanging:
                if reached >= 0:
                    mask &= np.isin(choices[:, axis], [reached, -1, *handed])
            # A product that is not linked to the option's factor may be split in any way.
            elif factor == -1 or reached >= 0:
                mask &= np.isin(choices[:, axis], [reached, *handed])
        return mask

    def options(self, axis_sizes: Sequence[int], sizes: Sequence[int]) -> list[Choice]:
        """The ways to split the entry: each mesh axis splits one of `factors` that it divides.

        An axis splits none (-1) if it divides none of them, or also otherwise if `may_repeat`.

        Args:
            axis_sizes: of the mesh.
            sizes: of all factors of the entry.
        """
        columns = []
        for n in axis_sizes:
            # An axis that divides none of the factors must be allowed to stay unused, or the block
            # would have no option.
            dividing = [f for f in self.factors if sizes[f] % n == 0]
            columns.append([*dividing, -1] if self.may_repeat or not dividing else dividing)
        options = []
        for option in itertools.product(*columns):
            # Several axes may split one factor: their product must divide it.
            pieces = dict.fromkeys(option, 1)
            for factor, n in zip(option, axis_sizes, strict=True):
                pieces[factor] *= n
            if all(f == -1 or sizes[f] % n == 0 for f, n in pieces.items()):
                options.append(option)
        return options


def is_product(node: Node) -> bool:
    """True if a node is a product that a block may hold."""
    return node.kind == "product" and node.multiplies and node.phase is not Phase.UPDATE


def outside_blocks(nodes: NodeGraph, blocks: Iterable[ParallelBlock]) -> list[OpId]:
    """For each product of the forward and backward pass that is in none of these blocks, the first
    operator that it stands for.
    """
    inside = set[int]()
    for block in blocks:
        inside.update(block.products)
    outside: dict[int, int] = {}
    for n in nodes.nodes:
        if is_product(n) and n.index not in inside:
            outside[n.index] = n.index
    first = {node: op for op, node in reversed(block_by_operator(nodes, outside).items())}
    return list(map(OpId, sorted(first.values())))


def blocks_of_operators(nodes: NodeGraph, blocks: Sequence[ParallelBlock]) -> dict[int, int]:
    """For each operator that is a product of a block, the position of this block."""
    block_of: dict[int, int] = {}
    for k, block in enumerate(blocks):
        block_of.update(dict.fromkeys(block.products, k))
    return block_by_operator(nodes, block_of)


def block_by_operator(nodes: NodeGraph, block_of: Mapping[int, int]) -> dict[int, int]:
    """For each operator of the given products, the block of its product."""
    of_class = {}
    for site in nodes.sites:
        if site.results and site.results[0] and site.results[0][0].node in block_of:
            of_class[site.op_class] = block_of[site.results[0][0].node]
    found = {}
    for op, op_class in enumerate(nodes.op_class):
        if op_class in of_class:
            found[op] = of_class[op_class]
    return found
