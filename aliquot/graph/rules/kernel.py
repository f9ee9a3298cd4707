"""Pallas kernels: a kernel runs once for each block and may be split along the dims of its grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._kernels import KERNEL, Walked, kernel_of
from .._rule import DimRule, Dims, HasShape, register_dim_rule
from .._traits import Traits
from ._factors import Factors


@register_dim_rule(KERNEL, traits=Traits(costly=True, runs_on_pieces=True), replaceable=True)
def _kernel(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """A dim of the grid that numbers blocks along one dim of every result is a factor; blocks stay
    whole.

    A kernel is not split along dims in which it asks for its position in the grid, or may keep
    values from one block to the next.
    """
    num_tables = params["grid_mapping"].num_index_operands
    kernel = kernel_of(params, [getattr(o, "value", None) for o in operands[:num_tables]])
    f = Factors()
    letters = {}
    for g, size in enumerate(kernel.grid):
        if any(walk.grid_dim == g for walk in itertools.chain(*kernel.results)):
            letters[g] = f.split(size)

    def dims(shape: Sequence[int], walks: Sequence[Walked]) -> Dims:
        if not walks:
            return f.wholes(shape)
        return tuple(
            (
                f.whole(size)
                if walk.grid_dim < 0
                else letters[walk.grid_dim] + f.whole(walk.block).replace("1", "")
            )
            for size, walk in zip(shape, walks, strict=True)
        )

    taken = [
        dims(operand.shape, walks) for operand, walks in zip(operands, kernel.operands, strict=True)
    ]
    result_dims = [dims(shape, walks) for shape, walks in zip(results, kernel.results, strict=True)]
    return f.rule(
        taken,
        result_dims,
        contracts=True,
        flops_per_point=kernel.flops / max(math.prod(f.sizes.values()), 1),
        accessed_bytes=kernel.accessed_bytes,
        scores=kernel.scores,
    )
