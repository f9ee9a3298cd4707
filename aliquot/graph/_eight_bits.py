"""Scales with which arrays are cast to 8-bit floats.

Each array is scaled so that its largest magnitude is the largest number of the type. What is larger
than expected is clipped. Inputs and weights are cast to e4m3, gradients of results to e5m2.

Reference: Micikevicius et al., "FP8 formats for deep learning", 2022, sections 3 and 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

NARROW, WIDE = jnp.float8_e4m3fn, jnp.float8_e5m2
# Of Micikevicius et al., table 1.
_LARGEST = {NARROW: 448.0, WIDE: 57344.0}


def magnitude(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude of an array."""
    return jnp.max(jnp.abs(x), axis=axis).astype(jnp.float32)


def scale(amax: jax.Array, dtype: Any) -> jax.Array:
    """By what arrays of such magnitudes are multiplied; 1 if nothing is known of them."""
    return jnp.where(amax > 0, _LARGEST[dtype] / amax, 1.0)


def to_eight_bits(x: jax.Array, amax: jax.Array, dtype: Any) -> jax.Array:
    """An array, scaled and clipped."""
    top = _LARGEST[dtype]
    return jnp.clip(x * scale(amax, dtype).astype(x.dtype), -top, top).astype(dtype)


def unscaling(left: tuple[jax.Array, Any], right: tuple[jax.Array, Any]) -> jax.Array:
    """What takes the scales of two factors off their product: `(magnitude, dtype)` of each."""
    return 1 / (scale(*left) * scale(*right))
