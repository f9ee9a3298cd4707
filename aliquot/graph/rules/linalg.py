"""Linear algebra and Fourier transforms: leading dims are a batch, the matrices or transformed dims
stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, DimRuleFn, HasShape, register_dim_rule
from .._traits import Traits
from ._factors import Factors


def _batched(inner: int) -> DimRuleFn:
    """Routines that solve one problem for each element of a batch; the last `inner` dims of the
    first operand belong to the problem, the others are the batch.
    """

    def declare(
        operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
    ) -> DimRule:
        f = Factors()
        count = len(operands[0].shape) - inner
        batch = f.splits(operands[0].shape[:count])

        def dims(shape: Sequence[int]) -> tuple[str, ...]:
            return (*batch, *f.wholes(shape[count:]))

        return f.rule(tuple(dims(o.shape) for o in operands), tuple(map(dims, results)))

    return declare


_ON_MATRICES = (
    "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur"
    " svd symmetric_product tridiagonal"
).split()
register_dim_rule(*_ON_MATRICES)(_batched(2))
register_dim_rule("lu_pivots_to_permutation", "tridiagonal_solve")(_batched(1))


@register_dim_rule("triangular_solve", traits=Traits(runs_on_pieces=True))
def _triangular_solve(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """One system with many right-hand sides, which are independent and may be split."""
    f = Factors()
    shape = operands[1].shape
    batch = f.splits(shape[:-2])
    size, sides = f.whole(operands[0].shape[-1]), f.split(shape[-1 if params["left_side"] else -2])
    solved = (*batch, size, sides) if params["left_side"] else (*batch, sides, size)
    return f.rule(
        ((*batch, size, f.whole(operands[0].shape[-1])), solved),
        (solved,),
        linear=(0, 1),
        contracts=True,
        flops_per_point=1.0,
    )


@register_dim_rule("fft", traits=Traits(runs_on_pieces=True))
def _fft(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """The last dims are transformed, with `5 n log2 n` operations for each transform; a real one
    changes the size of a dim.
    """
    f = Factors()
    shape, lengths = operands[0].shape, params["fft_lengths"]
    count = len(shape) - len(lengths)
    batch = f.splits(shape[:count])
    before, after = (*batch, *f.wholes(shape[count:])), (*batch, *f.wholes(results[0][count:]))
    size = math.prod(lengths)
    flops = 5.0 * math.prod(shape[:count]) * size * math.log2(max(size, 1))
    return f.rule(
        (before,),
        (after,),
        linear=(1,),
        contracts=True,
        flops_per_point=flops / max(math.prod(f.sizes.values()), 1),
    )
