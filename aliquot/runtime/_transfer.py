"""Arrays from one stage's mesh to another's, in one process or between processes.

Between processes `jax.device_put` is a pull by the receiver, matched by order: every process must issue every transfer, also
those between two others, with an empty array of the sender's sharding in place of what it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding


def move(
    arrays: Sequence[Any], shapes: Sequence[jax.ShapeDtypeStruct], targets: Sequence[NamedSharding]
) -> list[jax.Array]:
    """Move arrays in one transfer.

    Args:
        arrays: what this process holds of them; None for what it holds nothing of.
        shapes: of each array, with the sharding that it has at the sender.
        targets: where each shall lie.
    """
    sources = [_stub(shape) if array is None else array for array, shape in zip(arrays, shapes, strict=True)]
    moved: list[jax.Array] = jax.device_put(sources, list(targets))
    return moved


def _stub(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, [], dtype=shape.dtype)
