"""The blocks of an array that devices hold, and what a process needs of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import Sharding

#: A block of an array: start and stop along each dim.
Block = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=4096)
def devices_by_block(
    sharding: Sharding, shape: tuple[int, ...], *, local: bool = False
) -> tuple[tuple[Block, list[Any]], ...]:
    """The devices that hold each block of an array; with `local` those of this process alone."""
    indices = (
        sharding.addressable_devices_indices_map(shape)
        if local
        else sharding.devices_indices_map(shape)
    )
    found: dict[Block, list[Any]] = {}
    for device, index in indices.items():
        ends = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True)]
        found.setdefault(tuple(ends), []).append(device)
    return tuple(found.items())


def slices_in(block: Block, within: Block) -> tuple[slice, ...]:
    """Where a block lies in one that holds it."""
    return tuple(
        slice(first - start, last - start)
        for (first, last), (start, _) in zip(block, within, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def own_block(homes: Sequence[Sharding], shape: Sequence[int]) -> tuple[slice, ...]:
    """The smallest block of an array that holds all that this process's devices need; empty if they
    need nothing.

    Args:
        homes: where the array is needed, such as on several stages. If this process needs other
            blocks in one place than in another, it needs all of the array.
        shape: of the whole; both must be tuples.
    """
    blocks = set()
    for home in homes:
        pieces = home.addressable_devices_indices_map(tuple(shape)).values()
        # `None` where all of a dim is meant.
        places = [piece for piece in pieces if piece is not None]
        if not places:
            continue
        ranges = []
        for dim, size in enumerate(shape):
            starts, stops = zip(*(place[dim].indices(size)[:2] for place in places))
            ranges.append((min(starts), max(stops)))
        blocks.add(tuple(ranges))
    if not blocks:
        return tuple(slice(0, size if dim else 0) for dim, size in enumerate(shape))
    if len(blocks) > 1:
        return tuple(slice(0, size) for size in shape)
    return tuple(slice(first, last) for first, last in blocks.pop())
