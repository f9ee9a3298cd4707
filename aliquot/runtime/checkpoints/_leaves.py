"""Arrays as a checkpoint holds them: each as one whole, whoever holds which part of it.

A leaf of a pipeline's state lies on the devices of one stage, and its other processes hold nothing
of it; a `PiecedArray` lies on several stages. In a checkpoint both are plain arrays of the user's
shape. Every process computes from the shardings alone where blocks end, so that all of them cut an
array into the same chunks, and no two write to one chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...graph import key_generator
from ..transport import Block, PiecedArray, Rows, devices_by_block, is_key, words

# A reader takes whole chunks. Those of a large array are small enough for readers that split a dim
# eight ways, but not so small that there is more to tell of a chunk than there is in it.
_PIECES = 8
_LEAST_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of the user's tree. Random keys are their words.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
        chunks: shape of the chunks in which it is stored.
        blocks: what this process writes of it: where, and an array of one device or of the host.
        writers: the processes that write.
        generator: the generator of random keys; empty for other arrays.
    """

    shape: tuple[int, ...]
    dtype: Any
    chunks: tuple[int, ...]
    blocks: tuple[tuple[Block, Any], ...]
    writers: frozenset[int]
    generator: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How an array of a checkpoint is restored.

    Attributes:
        described: its shape and dtype.
        places: the sharding of each of its pieces; none for an array of NumPy.
    """

    described: Any
    places: tuple[Rows, ...] = ()


def leaf_of(array: Any, turn: int = 0) -> Leaf:
    """An array, as it is stored. An array of the host is the same in all processes, and process 0
    writes it.

    Args:
        turn: of the devices that hold the same block, which one's process writes it; counted round.
            Numbers that rise from array to array share the work among processes.
    """
    pieces = array.pieces if isinstance(array, PiecedArray) else (array,)
    starts = array.bounds if isinstance(array, PiecedArray) else (0,)
    shape = tuple(np.shape(array))
    ends: list[set[int]] = []
    blocks: list[tuple[Block, Any]] = []
    writers: set[int] = set()
    for start, piece in zip(starts, pieces, strict=False):
        stored = words(piece)
        shape = (*shape[:1], *stored.shape[1:]) if shape else stored.shape
        ends = ends or [{size} for size in shape]
        for block, process, data in _blocks(stored, turn):
            block = shifted(block, start)
            for dim, both in enumerate(block):
                ends[dim].update(both)
            writers.add(process)
            if data is not None:
                blocks.append((block, data))
    return Leaf(
        shape=shape,
        dtype=np.dtype(stored.dtype),
        chunks=chunk_shape(shape, ends, np.dtype(stored.dtype).itemsize),
        blocks=tuple(blocks),
        writers=frozenset(writers),
        generator=str(key_generator(array.dtype)) if is_key(array) else "",
    )


def shifted(block: Block, rows: int) -> Block:
    """A block, some rows further on."""
    if not block:
        return block
    (first, last), *others = block
    return ((first + rows, last + rows), *others)


def _blocks(array: Any, turn: int) -> Iterator[tuple[Block, int, Any]]:
    """All blocks of an array: where each is, the process that writes it, and its data if that is
    this process.
    """
    if not isinstance(array, jax.Array) or not array.committed:
        whole = tuple((0, size) for size in array.shape)
        yield whole, 0, array if jax.process_index() == 0 else None
        return
    data = {shard.device: shard.data for shard in array.addressable_shards}
    for block, devices in devices_by_block(array.sharding, array.shape, local=False):
        device = devices[turn % len(devices)]
        yield block, device.process_index, data.get(device)


def chunk_shape(
    shape: Sequence[int], ends: Sequence[Iterable[int]], itemsize: int
) -> tuple[int, ...]:
    """The shape of an array's chunks: each lies within one block, and a large array has several
    along each dim.

    Args:
        ends: for each dim, where blocks begin or end.

    >>> chunk_shape((12, 8), [{0, 4, 12}, {0, 8}], 4)
    (4, 8)
    >>> chunk_shape((4096, 4096), [{0, 4096}, {0, 4096}], 4)
    (512, 512)
    """
    return _cut(tuple(shape), tuple(max(math.gcd(*of), 1) for of in ends), itemsize)


# A state has many arrays of few shapes, in every save.
@functools.lru_cache(maxsize=4096)
def _cut(shape: tuple[int, ...], largest: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Chunks that are cut from the largest ones that lie within one block."""
    chunks = list(largest)
    closed: set[int] = set()
    while len(closed) < len(chunks):
        # The dim that is cut into the fewest chunks is the next to be cut.
        dim = min(
            (k for k in range(len(chunks)) if k not in closed), key=lambda k: shape[k] / chunks[k]
        )
        factor = _smallest_factor(chunks[dim])
        smaller = math.prod(chunks) * itemsize // factor
        if factor == 1 or shape[dim] // chunks[dim] >= _PIECES or smaller < _LEAST_BYTES:
            closed.add(dim)
        else:
            chunks[dim] //= factor
    return tuple(chunks)


def _smallest_factor(number: int) -> int:
    """The smallest prime factor; 1 if there is none."""
    for factor in range(2, math.isqrt(number) + 1):
        if number % factor == 0:
            return factor
    return max(number, 1)
