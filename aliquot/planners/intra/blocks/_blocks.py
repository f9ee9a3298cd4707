"""`Blocks`: one decision for each ParallelBlock; another planner decides what these leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....core import InputError, nearest
from ....cost import Problem
from ....sharding import BLOCK_FACTORS
from .._base import AbstractIntra, AbstractRule, AbstractSearch, IntraSolution, Space
from ..ilp import ILP
from ._options import BlockOptions, block_options, restrict_blocks
from ._search import BlockSearch


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

    @property
    def name(self) -> str:
        return "blocks"

    @property
    def bound_holds_for(self) -> str:
        return "gap_within_blocks"

    def solve(
        self,
        problem: Problem,
        space: Space,
        *,
        memory_limit_bytes: float,
        ceiling_s: float = np.inf,
    ) -> IntraSolution | None:
        search = self.begin(
            problem, space, memory_limit_bytes=memory_limit_bytes, ceiling_s=ceiling_s
        )
        return search.improve(ceiling_s) if search.bound() is not None else None

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
        return BlockSearch(
            problem,
            space,
            blocks,
            self.rest,
            memory_limit_bytes=memory_limit_bytes,
            ceiling_s=ceiling_s,
            tolerance=self.tolerance,
            solve_limit=self.solve_limit,
            notes=notes,
        )

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
