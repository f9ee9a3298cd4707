"""Operators that XLA's SPMD partitioner does not split well in the form in which JAX writes them.

Where each group of devices has images and kernels of its own, as in the gradient of a kernel, JAX's
batching makes the groups groups of features. The partitioner gathers such images from all devices,
so here each group convolves by itself. It also miscomputes depthwise convolutions that are split
over their groups of features, unless the features of image and result are at the same position.

It gathers the operands of Fourier transforms and triangular systems, and may do anything with a
primitive without a declared rule. Here each device runs them on its own pieces.

It cannot split kernels in Pallas: here each device runs its part of the grid. Each device also runs
cuDNN's attention on its own examples and heads, for which JAX has a partitioner of its own that
must see the devices.

It gathers an array to constrain its order in memory. Here each device's piece is constrained
instead.

Some backends all-reduce the partial sums of a product, and slice them. Here each device multiplies
what it has, and the sums are reduce-scattered. So are sums that are all-reduced along other axes:
XLA merges all-reduces of the terms of a sum, and reduce-scatters, but not all-reduces behind
all-reduces that it only slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from ...graph import ATTENTION, KERNEL, Dims, attention_on_piece, kernel_on_pieces
from ...sharding import DimRule

Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Runs an equation on operands."""


def convolution(
    eqn: Any, arrays: Sequence[Any], bind: Bind, mesh: Mesh, groups: Sequence[str]
) -> list[Any]:
    """A convolution, of which a `vmap` along these mesh axes may give each group of devices its own
    operands.
    """

    def run(*operands: Any) -> list[Any]:
        return [_with_features_in_place(eqn, operands, bind)]

    whole = [PartitionSpec()] * len(arrays)
    return list(_on_pieces(run, arrays, mesh, groups, whole, [PartitionSpec()]))


def on_pieces(
    eqn: Any,
    arrays: Sequence[Any],
    bind: Bind,
    mesh: Mesh,
    groups: Sequence[str],
    rule: DimRule,
    given: Sequence[PartitionSpec | None],
) -> list[Any]:
    """An operator on the pieces that each device has of its operands, as its rule allows; `groups`
    as above.

    Args:
        rule: the rule of the operator; factors that it reduces are not split.
        given: how the operands are split, None for one that is as the others want it.
    """
    cut: dict[str, tuple[str, ...]] = {}
    for dims, spec in zip(rule.operands, given, strict=True):
        for names, axes in zip(dims, spec or (), strict=False):
            if names[0].islower() and names[0] not in rule.reduced:
                cut.setdefault(names[0], _axes(axes))

    def spec_of(dims: Dims) -> PartitionSpec:
        return PartitionSpec(*(cut.get(names[0], ()) for names in dims))

    ins, outs = [spec_of(dims) for dims in rule.operands], [spec_of(dims) for dims in rule.results]
    shapes = [_piece(a.shape, spec, mesh) for a, spec in zip(arrays, ins, strict=True)]
    local = eqn if eqn.primitive.name != KERNEL else kernel_on_pieces(eqn, shapes)
    if local is None:
        # A rule that its author has written for it says more than its grid does.
        return list(bind(eqn, arrays))

    attends = eqn.primitive.name in ATTENTION
    lacking = {k: _axes_lacking(rule.results[k], cut) for k in rule.summed}

    def run(*operands: Any) -> list[Any]:
        results = attention_on_piece(local, operands) if attends else bind(local, operands)
        return [jax.lax.psum(r, lacking[k]) if lacking.get(k) else r for k, r in enumerate(results)]

    return list(_on_pieces(run, arrays, mesh, groups, ins, outs, everywhere=attends))


def _axes_lacking(dims: Dims, cut: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Axes along which factors are cut that do not lead any of these dims."""
    leading = {names[0] for names in dims}
    return tuple(axis for name, axes in cut.items() if name not in leading for axis in axes)


def _piece(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of each device's piece."""
    return tuple(
        n // math.prod(mesh.shape[a] for a in _axes(axes))
        for n, axes in zip(shape, spec, strict=True)
    )


def product(
    eqn: Any,
    arrays: Sequence[Any],
    bind: Bind,
    mesh: Mesh,
    operands: Sequence[PartitionSpec],
    wanted: Callable[[Sequence[int]], PartitionSpec],
    *,
    wide_sums: bool,
) -> list[Any] | None:
    """A product of two arrays that are split so, its sums scattered: the result is split as
    `wanted` says of its shape.

    None if no scattering of sums gets there. `wide_sums`: see `Pins`.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = ([_axes(dim) for dim in spec] for spec in operands)
    free = [
        [d for d in range(a.ndim) if d not in (*summed, *shared)]
        for a, summed, shared in zip(arrays, contracted, batch, strict=True)
    ]
    shape = [
        *(arrays[0].shape[d] for d in (*batch[0], *free[0])),
        *(arrays[1].shape[d] for d in free[1]),
    ]
    result_dims = [*(left[d] for d in (*batch[0], *free[0])), *(right[d] for d in free[1])]
    sums = [left[d] for d in contracted[0]]
    if sums != [right[d] for d in contracted[1]] or [left[d] for d in batch[0]] != [
        right[d] for d in batch[1]
    ]:
        return None
    result = wanted(shape)
    summed = [axis for axes in sums for axis in axes]
    scattered: dict[int, tuple[str, ...]] = {}
    for dim, (before, behind) in enumerate(zip(result_dims, map(_axes, result), strict=True)):
        more = behind[len(before) :]
        if behind[: len(before)] != before or not set(more) <= set(summed):
            return None
        if more:
            scattered[dim] = more
    if not scattered:
        return None
    scattered_axes = set(itertools.chain(*scattered.values()))
    left_over = [tuple(a for a in axes if a not in scattered_axes) for axes in sums]

    def run(*pieces: Any) -> Any:
        (piece,) = bind(eqn, pieces)
        dtype = piece.dtype
        # As XLA's CPU backend reduces narrow types, and as they are priced; see `Pins`.
        if wide_sums and jnp.issubdtype(dtype, jnp.inexact):
            piece = piece.astype(jnp.promote_types(dtype, jnp.float32))
        # Scattered first, so that the sums that follow are of smaller pieces.
        for dim, axes in scattered.items():
            piece = jax.lax.psum_scatter(piece, axes, scatter_dimension=dim, tiled=True)
        for axes in left_over:
            piece = jax.lax.psum(piece, axes) if axes else piece
        return piece.astype(dtype)

    return [
        jax.shard_map(run, mesh=mesh, in_specs=tuple(operands), out_specs=result, check_vma=False)(
            *arrays
        )
    ]


def in_plain_order(array: Any, mesh: Mesh, split: PartitionSpec) -> Any:
    """An array whose last dim is contiguous on each device. JAX's partitioner would gather it to
    make it so.
    """
    order = Layout(tuple(range(array.ndim)))

    def run(piece: Any) -> Any:
        return with_layout_constraint(piece, order)

    return jax.shard_map(run, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False)(array)


def _axes(dim: Any) -> tuple[str, ...]:
    """The mesh axes that split a dim."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def _on_pieces(
    run: Callable[..., list[Any]],
    arrays: Sequence[Any],
    mesh: Mesh,
    groups: Sequence[str],
    operands: Sequence[PartitionSpec],
    results: Sequence[PartitionSpec],
    everywhere: bool = False,
) -> Sequence[Any]:
    """Results of `run` on the pieces of split arrays; under a `vmap` over groups, on those of each
    group's arrays.

    `everywhere`: whether it runs on each device by itself along all mesh axes, not only along those
        that split an array.
    """

    def mapped(
        function: Callable[..., list[Any]],
        ins: Sequence[PartitionSpec],
        outs: Sequence[PartitionSpec],
        *given: Any,
    ) -> Sequence[Any]:
        axes = {str(axis) for spec in (*ins, *outs) for dim in spec for axis in _axes(dim)}
        axes |= {str(axis) for axis in mesh.axis_names if everywhere}
        if not axes:
            # Along all other axes the partitioner still decides.
            return function(*given)
        local = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=tuple(ins),
            out_specs=list(outs),
            axis_names=axes,
            check_vma=False,
        )
        results: Sequence[Any] = local(*given)
        return results

    if not groups:
        return mapped(run, operands, results, *arrays)

    # Under a `vmap` over groups their dim becomes one more split dim of the pieces.
    @custom_vmap
    def alone(*given: Any) -> Sequence[Any]:
        return mapped(run, operands, results, *given)

    @alone.def_vmap
    def _in_groups(size: int, batched: Sequence[bool], *given: Any) -> tuple[Any, list[bool]]:
        def run_one(*group: Any) -> list[Any]:
            return [
                # Each device has one group, whose dim is taken off and put back.
                r[None]
                for r in run(*(a[0] if b else a for a, b in zip(group, batched, strict=True)))
            ]

        lead = tuple(groups)
        ins = [
            PartitionSpec(lead, *spec) if b else spec
            for spec, b in zip(operands, batched, strict=True)
        ]
        return mapped(run_one, ins, [PartitionSpec(lead, *spec) for spec in results], *given), [
            True
        ] * len(results)

    outputs: Sequence[Any] = alone(*arrays)
    return outputs


def _with_features_in_place(eqn: Any, arrays: Sequence[Any], bind: Bind) -> Any:
    """A convolution, where need be with the features of its result at the position that they have
    in the image.
    """
    numbers = eqn.params["dimension_numbers"]
    _, channels, *_ = numbers.lhs_spec
    out_spec = numbers.out_spec
    one_channel = arrays[1].shape[numbers.rhs_spec[1]] == 1
    if eqn.params["feature_group_count"] == 1 or not one_channel or out_spec[1] == channels:
        (result,) = bind(eqn, arrays)
        return result
    position = out_spec[1]
    moved = tuple(channels if d == position else position if d == channels else d for d in out_spec)
    params = {**eqn.params, "dimension_numbers": numbers._replace(out_spec=moved)}
    (result,) = bind(eqn.replace(params=params), arrays)
    return jnp.swapaxes(result, position, channels)
