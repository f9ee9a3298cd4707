"""Placement of arrays on devices, and their way back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ...core import PlanMismatchError
from ._arrays import from_host, stub, words
from ._own_block import own_block
from ._transfer import lies_elsewhere, share_with_all


def place(
    leaf: Any,
    sharding: NamedSharding,
    shape: Sequence[int],
    *,
    keep: bool = False,
    path: str = "an array",
) -> jax.Array:
    """An array with the given sharding; the array itself if it has that already.

    With several processes, a host array of the global shape is taken to be the same in all of them,
    and one of another shape to be the process's own part.

    Args:
        leaf: a NumPy or JAX array.
        sharding: over devices of this and perhaps other processes.
        shape: the global shape.
        keep: the result will be donated, but `leaf` must stay usable: never share its buffers.
        path: how messages call it.

    Returns:
        The array; without data where this process has no device of `sharding`.

    Raises:
        PlanMismatchError: a process's part has a shape that fits nowhere.
    """
    if not sharding.addressable_devices:
        same = isinstance(leaf, jax.Array) and leaf.sharding == sharding
        return leaf if same else stub(shape, sharding, leaf.dtype)
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        if jax.process_count() > 1 and not leaf.committed:
            # Only committed arrays can be sent to another process.
            leaf = jax.device_put(leaf, sharding)
        there: jax.Array = leaf.copy() if keep else leaf
        return there
    if sharding.is_fully_addressable:
        if tuple(leaf.shape) != tuple(shape):
            raise _is_no_part(leaf, shape, path, "its devices hold all of it")
        moved: jax.Array = jax.device_put(leaf, sharding)
        # One of the new shards may still be the old buffer, even where aliasing is forbidden.
        return moved.copy() if keep else moved
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # Between processes only a program moves data.
        resharded: jax.Array = jax.jit(lambda x: x, out_shardings=sharding)(leaf)
        return resharded
    return _from_host(leaf, sharding, tuple(shape), path)


def _from_host(leaf: Any, sharding: NamedSharding, shape: tuple[int, ...], path: str) -> jax.Array:
    """An array over several processes from a host array: the whole, or this process's part; see
    `place`.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(leaf))
        # Keys are sent as words to every device, and split by the program that wraps them.
        whole = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        data = from_host(words, whole)
        impl = jax.random.key_impl(leaf)
        keys: jax.Array = jax.jit(
            lambda x: jax.random.wrap_key_data(x, impl=impl), out_shardings=sharding
        )(data)
        return keys
    host = np.asarray(leaf)
    if host.shape == shape:
        return from_host(host, sharding)
    try:
        with jax.transfer_guard_host_to_device("allow"):
            array: jax.Array = jax.make_array_from_process_local_data(sharding, host, shape)
    except ValueError as error:
        raise _is_no_part(host, shape, path, str(error)) from None
    return array


def _is_no_part(leaf: Any, shape: Sequence[int], path: str, why: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"{path} has the shape {tuple(leaf.shape)} in process {jax.process_index()}, which is"
        f" neither all of {tuple(shape)} nor the part of it that this process holds: {why}",
        asked="a process passes another array than the step takes",
        advice="`step.local_part(array)` cuts its part out of the whole.",
    )


def gather(array: Any) -> Any:
    """All of an array as a NumPy array, in every process. Random keys come back as their words.

    Waits for the array; with several processes all must call it, in the same order. An array whose
    mesh has only some of the processes, such as a leaf of a pipeline's state, is assumed to be
    passed by all processes; one without a mesh is this process's own.
    """
    if isinstance(array, jax.Array):
        array = share_with_all(words(array)) if lies_elsewhere(array) else words(array)
    if (
        isinstance(array, jax.Array)
        and not array.is_fully_addressable
        and not array.is_fully_replicated
    ):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def local_part(array: Any, *homes: NamedSharding) -> Any:
    """The smallest block of a host array that holds all that this process's devices need, in all
    the places where the array is needed.
    """
    host = np.asarray(array)
    return host[own_block(homes, host.shape)]
