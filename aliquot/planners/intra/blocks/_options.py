"""The options of ParallelBlocks as masks over the choices that are priced on one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....cost import Priced, Problem
from ....sharding import Choice, ParallelBlock, find_blocks
from .._base import Ints, Space


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOptions:
    """The options of a block on one mesh.

    Attributes:
        block: the products that are split together.
        choices: for each option, the choice of the entry.
        masks: for each option and each product of the block, a mask over the product's table of
            choices: those that follow the option.
    """

    block: ParallelBlock
    choices: tuple[Choice, ...]
    masks: tuple[Mapping[int, NDArray[np.bool_]], ...]

    def __len__(self) -> int:
        return len(self.choices)

    def followed(self, picks: Ints) -> list[int]:
        """The options that at least one product follows, the most followed first; the entry counts
        as much as all products together.
        """
        votes = []
        for masks in self.masks:
            follows = [bool(mask[picks[product]]) for product, mask in masks.items()]
            votes.append(
                sum(follows) + len(follows) * bool(masks[self.block.entry][picks[self.block.entry]])
            )
        return sorted((o for o, vote in enumerate(votes) if vote), key=lambda o: -votes[o])

    def option_of(self, picks: Ints) -> int | None:
        """The option that all products follow under these picks; None if they follow no common
        option.
        """
        for option, masks in enumerate(self.masks):
            if all(mask[picks[product]] for product, mask in masks.items()):
                return option
        return None


def block_options(problem: Problem, space: Space, *, factors: str) -> tuple[BlockOptions, ...]:
    """The blocks of a step, each with the options that a space allows; blocks without any are left
    out.

    Raises:
        InputError: as `find_blocks` does.
    """
    with_options = []
    priced = space.priced
    for block in find_blocks(problem.graph, problem.nodes, factors=factors):
        sizes = [factor.size for factor in problem.nodes.nodes[block.entry].factors]
        choices, masks = [], []
        for option in block.options(priced.axis_sizes, sizes):
            of_option = {
                p: space.allowed[p] & _follows(block, p, space, option) for p in block.products
            }
            if all(mask.any() for mask in of_option.values()):
                choices.append(option)
                masks.append(of_option)
        if choices:
            with_options.append(
                BlockOptions(block=block, choices=tuple(choices), masks=tuple(masks))
            )
    return tuple(with_options)


def blocks_split_apart(problem: Problem, priced: Priced, picks: Ints) -> list[ParallelBlock]:
    """The blocks of a step whose products follow no common option under these picks."""
    space = Space.whole("all", priced)
    blocks = block_options(problem, space, factors="all")
    return [options.block for options in blocks if options.option_of(picks) is None]


def as_one_block(blocks: Sequence[BlockOptions]) -> BlockOptions:
    """Blocks with equal options as one, whose products all follow the same option."""
    first, *others = blocks
    if not others:
        return first
    alone = [b.block for b in blocks]
    return BlockOptions(
        block=replace(
            first.block,
            products=tuple(sorted(p for b in alone for p in b.products)),
            parameters=tuple(sorted({p for b in alone for p in b.parameters})),
            linked={p: factors for b in alone for p, factors in b.linked.items()},
            handed_over={p: factors for b in alone for p, factors in b.handed_over.items()},
            exchanging=frozenset().union(*[b.exchanging for b in alone]),
            gradients=frozenset().union(*[b.gradients for b in alone]),
        ),
        choices=first.choices,
        masks=tuple(
            {p: mask for of_block in masks for p, mask in of_block.items()}
            for masks in zip(*[b.masks for b in blocks], strict=True)
        ),
    )


def _follows(block: ParallelBlock, product: int, space: Space, option: Choice) -> NDArray[np.bool_]:
    """A mask of a product's choices that agree with an option of its block's entry."""
    choices = space.priced.nodes[product].choices
    mask = np.zeros(len(choices), bool)
    for way in block.followed_by(product, option, space.priced.axis_sizes):
        mask |= block.allows(product, choices, way)
    return mask


def restrict_blocks(
    space: Space, blocks: Sequence[BlockOptions], left: Mapping[int, Sequence[int]]
) -> Space:
    """A space in which every product of a block follows some option of the block: one of those that
    `left` lists for the block's position, or any if it lists none.
    """
    allowed: list[NDArray[np.bool_]] = list(space.allowed)
    for k, options in enumerate(blocks):
        for product in options.block.products:
            masks = [options.masks[o][product] for o in left.get(k, range(len(options)))]
            allowed[product] = allowed[product] & np.logical_or.reduce(masks)
    return replace(space, allowed=allowed)
