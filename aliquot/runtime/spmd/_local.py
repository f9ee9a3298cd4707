"""Operators that XLA's SPMD partitioner splits badly, as programs on each device's pieces.

* Convolutions in which each group of devices has its own images and kernels, as in the gradient of
  a kernel: JAX's batching makes the groups groups of features, and the partitioner gathers such
  images from all devices. Here each group convolves by itself.
* Depthwise convolutions that are split over their groups of features: the partitioner miscomputes
  them, unless the features of image and result are at the same position.
* Fourier transforms and triangular systems: the partitioner gathers their operands. So it may with
  any primitive without a declared rule.
* Kernels in Pallas, which it cannot split: each device runs its part of the grid.
* cuDNN's attention, for which JAX has a partitioner of its own that must see the devices: each
  device runs it on its own examples and heads, and by a ring on its own part of the sequence.
* Experts without a capacity: each device computes its own experts; see `_experts.py`.
* Arrays whose order in memory is constrained: the partitioner gathers them.
* Joins along a split dim: the partitioner gathers what is joined, but exchanges rows where arrays
  are padded. Here they are padded to the length of the result, and added.
* Products whose partial sums are to be reduce-scattered, on backends that would all-reduce and
  slice them: each device multiplies its pieces, and the runtime reduce-scatters the sums. So it
  does on all backends for sums that are also all-reduced along other axes: of the terms of a sum,
  XLA merges all-reduces, and reduce-scatters, but not all-reduces behind all-reduces that it only
  slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from ...graph import ATTENTION, KERNEL, Dims, attention_on_piece, kernel_on_pieces
from ...sharding import DimRule, axes_of
from ._experts import experts_on_pieces
from ._mesh import axis_names
from ._ring import attention_by_ring

Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Runs an equation on operands."""


class Devices(NamedTuple):
    """The devices that an operator runs on. `groups`: mesh axes of a `vmap` around the program that
    gives each group its own operands; empty if there is none.
    """

    mesh: Mesh
    groups: Sequence[str] = ()


def convolution(eqn: Any, arrays: Sequence[Any], bind: Bind, devices: Devices) -> list[Any]:
    """A convolution on operands that each group of devices may have for itself.

    Args:
        bind: runs an equation on operands.
    """
    numbers = eqn.params["dimension_numbers"]
    channels, position = numbers.lhs_spec[1], numbers.out_spec[1]
    one_channel = arrays[1].shape[numbers.rhs_spec[1]] == 1
    in_place = eqn.params["feature_group_count"] == 1 or not one_channel or position == channels
    if not in_place:
        # A depthwise one is computed with the features of its result at the position that they
        # have in the image, and transposed.
        swapped = {channels: position, position: channels}
        out_spec = tuple(swapped.get(dim, dim) for dim in numbers.out_spec)
        numbers = numbers._replace(out_spec=out_spec)
        eqn = eqn.replace(params={**eqn.params, "dimension_numbers": numbers})

    def run(*operands: Any) -> list[Any]:
        (result,) = bind(eqn, operands)
        return [result if in_place else jnp.swapaxes(result, position, channels)]

    whole = [PartitionSpec()] * len(arrays)
    return list(_mapped_over_devices(run, arrays, devices, whole, [PartitionSpec()]))


def on_pieces(
    eqn: Any,
    arrays: Sequence[Any],
    bind: Bind,
    devices: Devices,
    rule: DimRule,
    given: Sequence[PartitionSpec | None],
) -> list[Any]:
    """An operator that each device runs on its pieces of the operands.

    Args:
        bind: runs an equation on operands.
        rule: the rule of the operator; factors that it reduces are not split.
        given: how the operands are split; None for one that follows the others.
    """
    cut: dict[str, tuple[str, ...]] = {}
    for dims, spec in zip(rule.operands, given, strict=True):
        for names, axes in zip(dims, spec or (), strict=False):
            if names[0].islower() and names[0] not in rule.reduced:
                cut.setdefault(names[0], axes_of(axes))

    def spec_of(dims: Dims) -> PartitionSpec:
        return PartitionSpec(*(cut.get(names[0], ()) for names in dims))

    ins, outs = list(map(spec_of, rule.operands)), list(map(spec_of, rule.results))
    shapes = [_piece(a.shape, spec, devices.mesh) for a, spec in zip(arrays, ins, strict=True)]
    local = eqn if eqn.primitive.name != KERNEL else kernel_on_pieces(eqn, shapes)
    if local is None:
        # The kernel's author has declared a rule that its grid alone does not allow.
        return list(bind(eqn, arrays))

    attends = eqn.primitive.name in ATTENTION
    round_axes = cut.get(rule.ring.factor, ()) if rule.ring is not None else ()
    # A result is a partial sum along mesh axes that cut a factor which leads none of its dims.
    lacking = {}
    for k in rule.summed:
        leading = {names[0] for names in rule.results[k]}
        others = [axes for name, axes in cut.items() if name not in leading]
        lacking[k] = tuple(itertools.chain(*others))

    def run(*operands: Any) -> list[Any]:
        if attends and round_axes:
            return attention_by_ring(local, operands, round_axes)
        results = attention_on_piece(local, operands) if attends else bind(local, operands)
        return [jax.lax.psum(r, lacking[k]) if lacking.get(k) else r for k, r in enumerate(results)]

    return list(_mapped_over_devices(run, arrays, devices, ins, outs, all_axes=attends))


def split_experts(
    eqn: Any,
    arrays: Sequence[Any],
    devices: Devices,
    given: Sequence[PartitionSpec | None],
    wanted: Sequence[PartitionSpec],
    *,
    wide_sums: bool,
) -> list[Any]:
    """Experts without a capacity, of which each device computes its own; see `_experts.py`.

    Args:
        given, wanted: how the operands are split, and how the results should be.
        wide_sums: see `Pins`.
    """
    experts = experts_on_pieces(
        eqn,
        list(map(_axes_of_dims, given)),
        list(map(_axes_of_dims, wanted)),
        _scattered_dims,
        wide_sums=wide_sums,
    )
    return list(
        _mapped_over_devices(experts.run, arrays, devices, experts.operands, experts.results)
    )


def _axes_of_dims(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    return [axes_of(dim) for dim in spec or ()]


def _piece(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of each device's piece."""
    found = []
    for n, axes in zip(shape, spec, strict=True):
        found.append(n // math.prod(mesh.shape[a] for a in axes_of(axes)))
    return tuple(found)


def scattered_product(
    eqn: Any,
    arrays: Sequence[Any],
    bind: Bind,
    devices: Devices,
    operands: Sequence[PartitionSpec],
    wanted: Callable[[Sequence[int]], PartitionSpec],
    *,
    wide_sums: bool,
) -> list[Any] | None:
    """A product of two split arrays that each device computes on its pieces, with its partial sums
    reduce-scattered.

    Args:
        bind: runs an equation on operands.
        operands: how the operands are split.
        wanted: gives the wanted split for a shape of the result.
        wide_sums: see `Pins`.

    Returns:
        The result in a list; None if reduce-scatters do not lead to the wanted split.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = map(_axes_of_dims, operands)
    summed_axes = [left[d] for d in contracted[0]]
    for of_left, of_right in (contracted, batch):
        if [left[d] for d in of_left] != [right[d] for d in of_right]:
            return None
    # Dims of the result in terms of the left operand's, then of the right operand's.
    free = []
    for array, summed, shared in zip(arrays, contracted, batch, strict=True):
        free.append([d for d in range(array.ndim) if d not in (*summed, *shared)])
    left_dims, right_dims = [*batch[0], *free[0]], free[1]
    shape = [*(arrays[0].shape[d] for d in left_dims), *(arrays[1].shape[d] for d in right_dims)]
    result = wanted(shape)
    scattered = _scattered_dims(
        [*(left[d] for d in left_dims), *(right[d] for d in right_dims)],
        _axes_of_dims(result),
        set(itertools.chain(*summed_axes)),
    )
    if not scattered:
        return None
    scattered_axes = set(itertools.chain(*scattered.values()))
    reduced = []
    for axes in summed_axes:
        reduced.append(tuple(a for a in axes if a not in scattered_axes))

    def run(*pieces: Any) -> Any:
        (piece,) = bind(eqn, pieces)
        dtype = piece.dtype
        # As XLA's CPU backend reduces narrow types, and as they are priced; see `Pins`.
        if wide_sums and jnp.issubdtype(dtype, jnp.inexact):
            piece = piece.astype(jnp.promote_types(dtype, jnp.float32))
        # Scattered first, so that the all-reduces that follow are of smaller pieces.
        for dim, axes in scattered.items():
            piece = jax.lax.psum_scatter(piece, axes, scatter_dimension=dim, tiled=True)
        for axes in reduced:
            piece = jax.lax.psum(piece, axes) if axes else piece
        return piece.astype(dtype)

    return [_shard_map(run, devices, operands, result)(*arrays)]


def _scattered_dims(
    before: Sequence[tuple[str, ...]], wanted: Sequence[tuple[str, ...]], summed: Collection[str]
) -> dict[int, tuple[str, ...]]:
    """Axes along which to reduce-scatter each dim of a product; empty if that does not lead to the
    wanted split.

    Args:
        before, wanted: the axes that split each dim.
        summed: axes along which the product is a partial sum.
    """
    scattered: dict[int, tuple[str, ...]] = {}
    for dim, (axes, wanted_axes) in enumerate(zip(before, wanted, strict=True)):
        more = wanted_axes[len(axes) :]
        if wanted_axes[: len(axes)] != axes or not set(more) <= set(summed):
            return {}
        if more:
            scattered[dim] = more
    return scattered


def in_plain_order(array: Any, mesh: Mesh, split: PartitionSpec) -> Any:
    """An array with each device's piece in row-major order. XLA's partitioner would gather the
    array to constrain it as a whole.
    """
    order = Layout(tuple(range(array.ndim)))

    def run(piece: Any) -> Any:
        return with_layout_constraint(piece, order)

    return jax.shard_map(run, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False)(array)


def _shard_map(
    run: Callable[..., Any],
    devices: Devices,
    operands: Sequence[PartitionSpec],
    results: Any,
    axes: Collection[str] = frozenset(),
) -> Callable[..., Any]:
    """`jax.shard_map` inside a `vmap`, of which JAX lets no spec mention the axis, not even where
    nothing is mapped.

    Args:
        operands, results: how both are split; without the groups' axes.
        axes: those to map over; by default all.
    """
    mapped = jax.shard_map(
        run,
        mesh=devices.mesh,
        in_specs=tuple(operands),
        out_specs=results,
        axis_names=set(axes),
        check_vma=False,
    )

    @custom_vmap
    def alone(*arrays: Any) -> Any:
        return mapped(*arrays)

    @alone.def_vmap
    def _in_groups(size: int, batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        dims = tuple(0 if b else None for b in batched)
        groups = devices.groups
        names: Any = tuple(groups) if len(groups) > 1 else groups[0]
        made = jax.vmap(mapped, in_axes=dims, axis_size=size, spmd_axis_name=names)(*arrays)
        return made, jax.tree.map(lambda _: True, made)

    result: Callable[..., Any] = alone
    return result


def joined_by_sums(arrays: Sequence[Any], dim: int) -> Any:
    """Arrays joined along a dim, as the sum of padded ones."""
    length = sum(a.shape[dim] for a in arrays)
    total, start = None, 0
    for array in arrays:
        end = start + array.shape[dim]
        edges = [(0, 0, 0)] * array.ndim
        edges[dim] = (start, length - end, 0)
        start = end
        if jnp.issubdtype(array.dtype, jnp.inexact):
            # The sum with a negative zero is exact for all numbers, also for zeros of both signs.
            part = jax.lax.pad(array, jnp.array(-0.0, array.dtype), edges)
            total = part if total is None else total + part
        else:
            part = jax.lax.pad(array, jnp.zeros((), array.dtype), edges)
            total = part if total is None else total | part
    return total


def _mapped_over_devices(
    run: Callable[..., list[Any]],
    arrays: Sequence[Any],
    devices: Devices,
    operands: Sequence[PartitionSpec],
    results: Sequence[PartitionSpec],
    all_axes: bool = False,
) -> Sequence[Any]:
    """Results of `run` on each device's pieces of split arrays, by `jax.shard_map`; with groups, of
    one group's arrays.

    Args:
        operands, results: how the arrays and the results are split.
        all_axes: map over all mesh axes, and not only over those that split an array.
    """

    def mapped(
        function: Callable[..., list[Any]],
        ins: Sequence[PartitionSpec],
        outs: Sequence[PartitionSpec],
        *given: Any,
    ) -> Sequence[Any]:
        dims = itertools.chain(*ins, *outs)
        axes = set(map(str, itertools.chain.from_iterable(map(axes_of, dims))))
        axes |= set(axis_names(devices.mesh)) if all_axes else set()
        if not axes:
            # Along all other axes the partitioner still decides.
            return function(*given)
        alone = Devices(devices.mesh)
        results: Sequence[Any] = _shard_map(function, alone, ins, list(outs), axes)(*given)
        return results

    if not devices.groups:
        return mapped(run, operands, results, *arrays)

    # Under a `vmap` over groups their dim becomes one more split dim of the pieces.
    @custom_vmap
    def alone(*given: Any) -> Sequence[Any]:
        return mapped(run, operands, results, *given)

    @alone.def_vmap
    def _in_groups(size: int, batched: Sequence[bool], *given: Any) -> tuple[Any, list[bool]]:
        def run_one(*group: Any) -> list[Any]:
            # Each device has one group, whose dim is taken off and put back.
            found: list[Any] = []
            for r in run(*(a[0] if b else a for a, b in zip(group, batched, strict=True))):
                found.append(r[None])
            return found

        lead = tuple(devices.groups)
        ins = list(operands)
        for k, spec in enumerate(operands):
            if batched[k]:
                ins[k] = PartitionSpec(lead, *spec)
        return mapped(run_one, ins, [PartitionSpec(lead, *spec) for spec in results], *given), [
            True
        ] * len(results)

    outputs: Sequence[Any] = alone(*arrays)
    return outputs
