"""Arrays as processes see them that hold none of their parts, and random keys as the words they are
made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding


def struct(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """The look of an array that lies somewhere."""
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


def stub(shape: Sequence[int], sharding: Sharding, dtype: Any) -> jax.Array:
    """This process's view of an array that lies on other processes only."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def is_key(array: Any) -> bool:
    """True if an array, or what looks like one, is of random keys."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def words_of(look: Any) -> Any:
    """The look of an array, or of the words of random keys: keys cannot cross between processes."""
    if not is_key(look):
        return look
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(look.shape, look.dtype))
    return struct(words.shape, words.dtype, NamedSharding(look.sharding.mesh, look.sharding.spec))


def words(array: Any) -> Any:
    """An array, or the words of random keys."""
    if not is_key(array):
        return array
    if isinstance(array, jax.core.Tracer) or array.sharding.addressable_devices:
        return jax.random.key_data(array)
    plain = words_of(array)
    return stub(plain.shape, plain.sharding, plain.dtype)


def keys_from(words: Any, look: Any) -> Any:
    """An array that arrived, as the random keys whose words it is if it shall look like keys."""
    if not is_key(look):
        return words
    names: list[Any] = []
    # Only arrays and tracers tell how keys are made.
    jax.eval_shape(
        lambda key: names.append(jax.random.key_impl(key)),
        jax.ShapeDtypeStruct(look.shape, look.dtype),
    )
    return jax.random.wrap_key_data(words, impl=names[0])
