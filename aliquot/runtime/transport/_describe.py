"""Descriptions of arrays, by which processes compare what they pass."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ._arrays import is_key, words
from ._given import Given
from ._own_block import own_block
from ._pieces import PiecedArray

# Of larger arrays some elements at even distances are read. 64 MiB take 60 ms.
_MOST_BYTES = 64 * 2**20
_SAMPLES = 4096
# The same in most calls, which must not wait for it.
_MOST_BYTES_OF_EACH_CALL = 2**18
_SHOWN = 3


def describe(
    leaf: Any,
    shape: Sequence[int],
    dtype: Any,
    homes: Sequence[Sharding],
    *,
    is_state: bool,
    in_full: bool,
) -> Given | None:
    """The description of an array; None where nothing can be compared.

    Args:
        leaf: the array that was passed.
        shape, dtype: of the whole, as the step takes it.
        homes: where the step needs it; a tuple.
        is_state: it belongs to the state: what lies on the devices that need it comes from the call
            before.
        in_full: read all of it, also from devices; otherwise what takes no noticeable time: host
            arrays, and of large ones a sample.
    """
    if isinstance(leaf, PiecedArray):
        return None
    is_committed = isinstance(leaf, jax.Array) and leaf.committed
    if is_state and is_committed and not in_full:
        # What the last call returned.
        return None
    most_bytes = _MOST_BYTES if in_full else _MOST_BYTES_OF_EACH_CALL
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            return _on_devices(leaf, most_bytes) if in_full else None
        if is_committed and any(leaf.sharding.is_equivalent_to(h, leaf.ndim) for h in homes):
            # It lies on devices of this process alone, where the step needs it.
            return None
        devices: Any = leaf.sharding.device_set
        array: Any = leaf
        at_hand = array.is_ready() and all(device.platform == "cpu" for device in devices)
        if not in_full and not at_hand:
            return Given(kind=_kind(leaf), is_restored=is_state and not is_committed)
    host = np.asarray(words(leaf) if is_key(leaf) else leaf)
    if not is_key(leaf):
        # JAX converts 64 bits to 32: what counts is what the step gets.
        host = host.astype(dtype, copy=False)
    place, rows, own = _whole(shape), "", _own_part(homes, tuple(shape))
    if 0 in leaf.shape and 0 not in shape:
        # It needs nothing of the array, and passes none of it.
        return None
    if own != place:
        rows = "all" if tuple(leaf.shape) == tuple(shape) else "own"
        place = place if rows == "all" else own
    elif tuple(leaf.shape) != tuple(shape):
        place = "a part"
    return Given(
        kind=_kind(leaf),
        rows=rows,
        digests={place: digest(host, most_bytes)},
        begins=_beginning(host),
        is_restored=is_state and not is_committed,
    )


def describe_whole(leaf: Any) -> Given | None:
    """The description of an array that all processes must hold alike; None where it has no numbers
    that several processes hold.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _on_devices(leaf, _MOST_BYTES)
    host = np.asarray(words(leaf) if is_key(leaf) else leaf)
    numbers = {_whole(leaf.shape): digest(host)}
    return Given(kind=_kind(leaf), digests=numbers, begins=_beginning(host))


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _on_devices(leaf: jax.Array, most_bytes: int) -> Given | None:
    """Description of those pieces of an array on several processes that others hold too."""
    holders: dict[str, set[int]] = {}
    indices: Mapping[Any, Any] = leaf.sharding.devices_indices_map(leaf.shape)
    for device, index in indices.items():
        holders.setdefault(_place(index, leaf.shape), set()).add(device.process_index)
    digests: dict[str, str] = {}
    begins = ""
    plain = words(leaf)
    for shard in leaf.addressable_shards if plain is leaf else ():
        place = _place(shard.index, leaf.shape)
        if place in digests or len(holders[place]) < 2:
            continue
        data = shard.data
        while data.nbytes > most_bytes:
            data = data[0]
        host = np.asarray(data)
        digests[place] = digest(host, most_bytes)
        begins = begins or _beginning(host)
    if plain is not leaf and plain.is_fully_replicated and plain.addressable_shards:
        host = np.asarray(plain.addressable_data(0))
        digests[_whole(leaf.shape)] = digest(host, most_bytes)
        begins = _beginning(host)
    return Given(kind=_kind(leaf), digests=digests, begins=begins) if digests else None


def digest(host: np.ndarray[Any, Any], most_bytes: int = _MOST_BYTES) -> str:
    """Digest of an array's elements, whatever their order in memory; of some elements at even
    distances if the array has more than `most_bytes`.
    """
    if host.nbytes > most_bytes:
        places = np.linspace(0, host.size - 1, _SAMPLES, dtype=np.int64)
        host = host[np.unravel_index(places, host.shape)]
    if host.dtype == object:
        return hashlib.sha256(repr(host.tolist()).encode()).hexdigest()[:16]
    plain = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    return hashlib.sha256(plain.data).hexdigest()[:16]


def _beginning(host: np.ndarray[Any, Any]) -> str:
    first = [str(element) for element in itertools.islice(host.flat, _SHOWN)]
    return f"{', '.join(first)}{', ...' * (host.size > _SHOWN)}"


@functools.lru_cache(maxsize=4096)
def _own_part(homes: Sequence[Sharding], shape: tuple[int, ...]) -> str:
    """The place of the block that this process needs; all of the array if it needs nothing."""
    block = own_block(homes, shape)
    return _whole(shape) if any(b.start == b.stop for b in block) else _place(block, shape)


def _whole(shape: Sequence[int]) -> str:
    return _place([slice(None)] * len(shape), shape)


def _place(index: Any, shape: Sequence[int]) -> str:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop in bounds)
