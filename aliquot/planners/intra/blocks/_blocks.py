"""`Blocks`: one decision for each ParallelBlock; another planner decides what these leave open.

The planner of the rest solves with the options of every block open. Its solution mostly has one
option for each block, as anything else would have to communicate inside the block. Sometimes that
pays nevertheless: summing one product costs less than computing it on more devices, while other
products of its block need no sum. Such blocks are then rounded to the option that most of their
products follow, all at once if possible, otherwise one after another. A block for which the step
would take longer than the tolerance allows stays split apart.

Every product follows some option of its block in all of these, so the bound of the first solve
holds for whatever is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....core import InputError, nearest
from ....cost import Picked, Problem
from ....sharding import BLOCK_FACTORS, Choice, ParallelBlock, find_blocks
from .._base import AbstractIntra, AbstractRule, AbstractSearch, IntraSolution, Ints, Space
from ..ilp import ILP

_ROUNDING = 1e-9


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


def blocks_split_apart(problem: Problem, picked: Picked) -> list[ParallelBlock]:
    """The blocks of a step whose products follow no common option."""
    space = Space.whole("all", picked.priced)
    blocks = block_options(problem, space, factors="all")
    return [options.block for options in blocks if options.option_of(picked.picks) is None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks(AbstractRule):
    """Split all products of a ParallelBlock as its entry is split, unless that costs too much;
    another planner decides what is then left.

    Attributes:
        factors: which factors of an entry its options may split; see `find_blocks`.
        rest: the planner that decides everything that belongs to no block, such as the storage of
            parameters.
        tolerance: the largest share by which a step may take longer because products of a block
            are split together, as long as it takes less than the best plan so far. Otherwise each
            product of the block follows some option of it; plans list these blocks.
        solve_limit: the most blocks on one mesh for which this is tried one after another; products
            of further ones are split each its own way.
        only: for each block, the number of the option that it must follow; by default all options
            are open.

    Reference: W. Hu et al., "CFP: Efficient Optimization of Intra-Operator Parallelism Plans for
    Large Model Training", arXiv 2504.00598.
    """

    factors: str = "all"
    rest: AbstractIntra = field(default_factory=ILP)
    tolerance: float = 0.01
    solve_limit: int = 32
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.factors not in BLOCK_FACTORS:
            raise InputError(f"factors={self.factors!r}: {nearest(self.factors, BLOCK_FACTORS)}")
        if self.tolerance <= 0:
            raise InputError(f"tolerance={self.tolerance}: pass more than 0, such as 0.01.")
        if self.solve_limit < 1:
            raise InputError(f"solve_limit={self.solve_limit}: pass at least 1.")

    name = "blocks"

    bound_holds_for = "gap_within_blocks"

    def begin(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
        notes: dict[str, Any] | None = None,
    ) -> AbstractSearch:
        blocks = block_options(problem, space, factors=self.factors)
        if self.only is not None:
            space, blocks = self._narrowed(space, blocks), ()
        limits = {"memory_limit_bytes": memory_limit_bytes, "ceiling_s": ceiling_s}
        opened = restrict_blocks(space, blocks, {})
        begun = self.rest.begin(problem, opened, **limits, notes=notes)
        return BlockSearch(self, problem, space, blocks, begun, limits)

    def _narrowed(self, space: Space, blocks: Sequence[BlockOptions]) -> Space:
        assert self.only is not None
        counts = [len(block) for block in blocks]
        if len(counts) != len(self.only) or any(
            not 0 <= o < n for o, n in zip(self.only, counts, strict=True)
        ):
            raise InputError(
                f"only={self.only} on a mesh {space.priced.mesh}: the step has {len(counts)} blocks"
                f" with {', '.join(map(str, counts))} options."
            )
        return restrict_blocks(space, blocks, {k: (o,) for k, o in enumerate(self.only)})


class BlockSearch(AbstractSearch):
    """The search of one space; see the module's description.

    Args:
        begun: the search with the options of every block open.
        limits: those that it was begun with.
    """

    def __init__(
        self,
        planner: Blocks,
        problem: Problem,
        space: Space,
        blocks: Sequence[BlockOptions],
        begun: AbstractSearch,
        limits: dict[str, float],
    ) -> None:
        self._planner, self._problem, self._space, self._blocks = planner, problem, space, blocks
        self._limits, self._open = limits, begun
        self._best: IntraSolution | None = None
        self._is_guessed = False
        self.gave_up = False

    @property
    def lower_bound_s(self) -> float:  # type: ignore[override]
        return self._open.lower_bound_s

    def start(self) -> float | None:
        return self._open.start()

    def bound(self, cutoff_s: float = np.inf) -> float | None:
        return self._open.bound(cutoff_s)

    @property
    def picked(self) -> Picked | None:
        """Products of a block may follow different options."""
        return self._open.picked

    def incumbent(self) -> IntraSolution | None:
        """The incumbent with all options open, with each block rounded to the option that most of
        its products follow.
        """
        if not self._is_guessed:
            self._is_guessed = True
            guess = self._open.incumbent()
            if guess is not None:
                rounded = self._solve(self._nearest(guess.picked.picks), self._limits["ceiling_s"])
                self._best = rounded and self._proved(rounded)
        return self._best

    def improve(self, cutoff_s: float = np.inf) -> IntraSolution | None:
        best, end_s = self._best, min(cutoff_s, self._limits["ceiling_s"])
        limit_s = min(end_s, best.step_time_s if best else np.inf)
        found = self._open.improve(limit_s)
        self.gave_up = self._open.gave_up
        if found is not None and found.step_time_s < limit_s:
            picks = found.picked.picks
            nearest = self._nearest(picks)
            apart = [k for k, b in enumerate(self._blocks) if b.option_of(picks) is None]
            most_s = found.step_time_s * (1 + self._planner.tolerance)
            if not apart:
                best = found
            elif (rounded := self._solve(nearest, min(most_s, limit_s))) is not None:
                best = rounded
            elif best is None or best.step_time_s > most_s:
                best, options = found, {k: o for k, o in nearest.items() if k not in apart}
                # A single one was tried above.
                for k in apart[: self._planner.solve_limit] if len(apart) > 1 else ():
                    rounded = self._solve({**options, k: nearest[k]}, min(most_s, end_s))
                    if rounded is not None:
                        best, options = rounded, {**options, k: nearest[k]}
        if best is None or best.step_time_s >= end_s:
            return None
        self._best = best if best is found else self._proved(best)
        return self._best

    def least_memory(self) -> Picked:
        return self._open.least_memory()

    def _nearest(self, picks: Ints) -> dict[int, tuple[int, ...]]:
        """For each block the option that most of its products follow."""
        return {k: tuple(options.followed(picks)[:1]) for k, options in enumerate(self._blocks)}

    def _proved(self, rounded: IntraSolution) -> IntraSolution:
        """A solution with the bound, and the status that their gap proves."""
        bound_s = min(self.lower_bound_s, rounded.step_time_s)
        gap_s, status = rounded.step_time_s - bound_s, "rounded"
        if gap_s <= max(self._planner.rest.relative_gap, _ROUNDING) * bound_s:
            status = "optimal" if gap_s <= _ROUNDING * bound_s else "optimal within the gap"
        return replace(rounded, lower_bound_s=bound_s, status=status)

    def _solve(
        self, options: Mapping[int, tuple[int, ...]], ceiling_s: float
    ) -> IntraSolution | None:
        """The best solution below a ceiling with these options of blocks; see `restrict_blocks`."""
        space = restrict_blocks(self._space, self._blocks, options)
        if not space.has_choices:
            return None
        limits = {**self._limits, "ceiling_s": ceiling_s}
        solution = self._planner.rest.solve(self._problem, space, **limits)
        return solution if solution and solution.step_time_s < ceiling_s else None
