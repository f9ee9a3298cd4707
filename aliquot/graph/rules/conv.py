"""Convolutions: batch, feature and group splits; dims that a window moves over stay whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._rule import DimRule, HasShape, register_dim_rule
from .._traits import Traits
from ._factors import Factors, merged


@register_dim_rule("conv_general_dilated", traits=Traits(multiplies=True, costly=True))
def _conv_general_dilated(
    operands: Sequence[HasShape], results: Sequence[tuple[int, ...]], params: Mapping[str, Any]
) -> DimRule:
    """`out[n, o, x] = sum_iw image[n, i, x + w] * kernel[o, i, w]`, with groups of features or of
    the batch.

    Groups are the major factor of the dims that they divide: `image[n, (gI)]`, `kernel[(gO), I]`,
    `out[n, (gO)]` for groups of features, `image[(gN), i]`, `kernel[(gO), i]`, `out[N, (gO)]` for
    groups of the batch. There are two floating-point operations for each output point, input
    channel and window point, except at zeros that dilation inserts into the image.
    """
    f = Factors()
    image, kernel = operands
    numbers = params["dimension_numbers"]
    (image_n, image_c, *image_x), (kernel_o, kernel_i, *kernel_x) = (
        numbers.lhs_spec,
        numbers.rhs_spec,
    )
    out_n, out_o, *out_x = numbers.out_spec
    by_feature, by_batch = params["feature_group_count"], params["batch_group_count"]
    groups = by_feature * by_batch
    group = f.split(groups)
    # A factor that is minor to a group factor has no contiguous pieces, so it cannot be split.
    n = f.whole(results[0][out_n]) if by_batch > 1 else f.split(results[0][out_n])
    i = f.whole(kernel.shape[kernel_i]) if by_feature > 1 else f.split(kernel.shape[kernel_i])
    o = f.whole(results[0][out_o] // groups) if groups > 1 else f.split(results[0][out_o])

    lhs, rhs, out = ["1"] * len(image.shape), ["1"] * len(kernel.shape), ["1"] * len(results[0])
    lhs[image_n] = merged(group, n) if by_batch > 1 else n
    lhs[image_c] = merged(group, i) if by_feature > 1 else i
    rhs[kernel_o] = out[out_o] = merged(group, o)
    rhs[kernel_i], out[out_n] = i, n
    moved_over = 1
    for k, (a, b, c) in enumerate(zip(image_x, kernel_x, out_x)):
        steps = params["window_strides"][k], params["lhs_dilation"][k], kernel.shape[b]
        if steps == (1, 1, 1) and tuple(params["padding"][k]) == (0, 0):
            lhs[a] = out[c] = f.split(image.shape[a])
            continue
        lhs[a], rhs[b], out[c] = (
            f.whole(image.shape[a]),
            f.whole(kernel.shape[b]),
            f.whole(results[0][c]),
        )
        moved_over *= image.shape[a] * params["lhs_dilation"][k]
    return f.rule(
        (tuple(lhs), tuple(rhs)),
        (tuple(out),),
        linear=(1, 2),
        contracts=True,
        # The work is proportional to all factors except the points of the image, which output and
        # window already count.
        flops_per_point=2.0 / max(moved_over, 1) if math.prod(image.shape) else 0.0,
    )
