"""Stand-ins for arrays of which a process holds no part, and conversion of random keys to words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ...graph import key_generator


def struct(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """Shape, dtype and sharding of an array."""
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


def from_host(array: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """A host array, the same in all processes, on devices of any processes.

    It is moved on purpose, which `jax.transfer_guard("disallow")` would not know.
    """
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def stub(shape: Sequence[int], sharding: Sharding, dtype: Any) -> jax.Array:
    """An array that lies on other processes only, and so has no data in this one."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def is_key(array: Any) -> bool:
    """True if an array, or its description, is of random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def words_of(described: Any) -> Any:
    """Shape, dtype and sharding of an array; for random keys those of their words, as keys cannot
    cross between processes.
    """
    if not is_key(described):
        return described
    words = jax.eval_shape(
        jax.random.key_data, jax.ShapeDtypeStruct(described.shape, described.dtype)
    )
    sharding = described.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, sharding.spec)
    return struct(words.shape, words.dtype, sharding)


def words(array: Any) -> Any:
    """The array itself, or the words of random keys."""
    if not is_key(array):
        return array
    if isinstance(array, jax.core.Tracer) or array.sharding.addressable_devices:
        return jax.random.key_data(array)
    plain = words_of(array)
    return stub(plain.shape, plain.sharding, plain.dtype)


def keys_from(words: Any, wanted: Any) -> Any:
    """An array that was received, as random keys if `wanted` describes keys, whose words it then
    holds.
    """
    if not is_key(wanted):
        return words
    return jax.random.wrap_key_data(words, impl=key_generator(wanted.dtype))
