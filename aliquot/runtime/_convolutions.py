"""Convolutions in the forms that XLA's SPMD partitioner splits well, which are not all those that JAX writes.

Where each group of devices has images and kernels of its own, as in the gradient of a kernel, JAX's batching makes the
groups groups of features. The partitioner gathers such images from all devices, so here each group convolves by itself.
And of a convolution with one input channel in each group of features that is split over the groups it gets wrong what it
computes where the features of image and result are not at the same position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, PartitionSpec

Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Runs an equation on operands."""


def in_each_group(eqn: Any, arrays: Sequence[Any], bind: Bind, mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """A convolution of which a `vmap` over groups along these mesh axes, all of them, gives each group its own operands."""

    @custom_vmap
    def run(*operands: Any) -> Any:
        return with_features_in_place(eqn, operands, bind)[0]

    @run.def_vmap
    def _run_in_groups(size: int, batched: Sequence[bool], *operands: Any) -> tuple[Any, bool]:
        def own(*mine: Any) -> Any:
            return run(*(a[0] if b else a for a, b in zip(mine, batched, strict=True)))[None]

        groups = PartitionSpec(tuple(axes))
        local = jax.shard_map(
            own,
            mesh=mesh,
            in_specs=tuple(groups if b else PartitionSpec() for b in batched),
            out_specs=groups,
            axis_names=set(axes),
            check_vma=False,
        )
        return local(*operands), True

    return [run(*arrays)]


def with_features_in_place(eqn: Any, arrays: Sequence[Any], bind: Bind) -> list[Any]:
    """A convolution, where need be with the features of its result at the position that they have in the image."""
    numbers = eqn.params["dimension_numbers"]
    _, channels, *_ = numbers.lhs_spec
    out_spec = list(numbers.out_spec)
    one_channel = arrays[1].shape[numbers.rhs_spec[1]] == 1
    if eqn.params["feature_group_count"] == 1 or not one_channel or out_spec[1] == channels:
        return list(bind(eqn, arrays))
    position = out_spec[1]
    moved = [channels if d == position else position if d == channels else d for d in out_spec]
    params = {**eqn.params, "dimension_numbers": numbers._replace(out_spec=tuple(moved))}
    (result,) = bind(eqn.replace(params=params), arrays)
    return [jnp.swapaxes(result, position, channels)]
