"""Transfer of arrays from one mesh to another through the memory of the hosts, for devices that
cannot send to other processes.

XLA's CPU devices have transfers between processes, but with two or more devices in each these lose
data and hang. Here each process sends another one those parts of its devices' shards that the other
needs, and the other assembles its own shards from them. Any split can be converted to any other,
and no byte goes twice to the same process.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from ._arrays import keys_from, words, words_of
from ._channels import Channels
from ._own_block import Block, devices_by_block, slices_in


class _Piece(msgspec.Struct, frozen=True):
    """A block of array number `array` that process `source` holds on `device` and process `target`
    wants.

    `within` is the block that the device holds, `goal` the block that the target's devices need.
    """

    array: int
    block: Block
    within: Block
    goal: Block
    device: Any
    source: int
    target: int


def plan_host_move(
    structs: Sequence[Any], targets: Sequence[Mapping[int, Sharding]], channels: Channels
) -> Callable[..., list[Any]] | None:
    """This process's part in moving arrays.

    Args:
        structs: shape, dtype and sharding of each array at the sender.
        targets: for each array the wanted sharding, by receiving process.

    Returns:
        A function that takes the arrays in processes that hold parts of them, and returns them in
        processes that are to have parts. None if this process has nothing to do.
    """
    this_process = jax.process_index()
    plain = list(map(words_of, structs))
    sends: dict[int, list[_Piece]] = {}
    arriving: dict[int, list[_Piece]] = {}
    for k, (described, by_process) in enumerate(zip(plain, targets, strict=True)):
        for process, target in sorted(by_process.items()):
            for piece in _pieces(k, described, process, target):
                if piece.source == this_process:
                    sends.setdefault(piece.target, []).append(piece)
                elif piece.target == this_process:
                    arriving.setdefault(piece.source, []).append(piece)
    needed = sorted({piece.array for piece in itertools.chain(*sends.values())})
    receives = any(this_process in by_process for by_process in targets)
    # What stays in this process does not go through a channel.
    local = sends.pop(this_process, [])
    if not sends and not receives:
        return None
    together = (
        _joiner(structs, plain, [by_process.get(this_process) for by_process in targets])
        if receives
        else None
    )

    def move(*arrays: Any) -> list[Any]:
        # These references keep the shards until the messages are made, even if the caller drops the
        # arrays.
        shards = {}
        for k in needed:
            for shard in words(arrays[k]).addressable_shards:
                shards[k, shard.device] = shard.data
        for process, group in sends.items():
            mine = [(shards[p.array, p.device], slices_in(p.block, p.within)) for p in group]
            channels.send(process, functools.partial(_cut, mine))
        if together is None:
            return []
        received: dict[tuple[int, Block, Block], np.ndarray[Any, Any]] = {}
        for p in local:
            # Copied, because the new shard must not share the old buffer, which may be donated.
            held = np.asarray(shards[p.array, p.device])[slices_in(p.block, p.within)]
            received[p.array, p.goal, p.block] = np.array(held)
        del shards
        for process, group in arriving.items():
            shapes = [tuple(b - a for a, b in p.block) for p in group]
            dtypes = [np.dtype(plain[p.array].dtype) for p in group]
            sizes = [math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
            data, start = channels.receive(process, sum(sizes)), 0
            for p, shape, dtype, size in zip(group, shapes, dtypes, sizes, strict=True):
                part = data[start : start + size].view(dtype).reshape(shape)
                received[p.array, p.goal, p.block] = part
                start += size
        return together(received)

    return move


def _pieces(array: int, described: Any, process: int, target: Sharding) -> list[_Piece]:
    """The pieces of an array that a process needs, and their senders."""
    held: dict[Block, dict[int, Any]] = {}
    for block, devices in devices_by_block(described.sharding, tuple(described.shape)):
        for device in devices:
            held.setdefault(block, {}).setdefault(device.process_index, device)
    goals = []
    for block, devices in devices_by_block(target, tuple(described.shape)):
        if any(device.process_index == process for device in devices):
            goals.append(block)
    pieces = []
    for goal in sorted(goals):
        for within in sorted(held):
            block = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(goal, within, strict=True)
            )
            if all(start < stop for start, stop in block):
                holders = held[within]
                # Where several processes hold the block, different receivers get it from different
                # ones.
                source = process if process in holders else sorted(holders)[process % len(holders)]
                pieces.append(_Piece(array, block, within, goal, holders[source], source, process))
    return pieces


def _joiner(
    structs: Sequence[Any], plain: Sequence[Any], targets: Sequence[Any]
) -> Callable[[Mapping[tuple[int, Block, Block], Any]], list[Any]]:
    """A function that assembles arrays on this process's devices from blocks. Blocks are keyed by
    array, the block that they belong to, and the block that they are.
    """
    process = jax.process_index()
    places: list[list[Block]] = []
    here = []
    for target, described in zip(targets, plain, strict=True):
        blocks = []
        for block, devices in devices_by_block(target, tuple(described.shape)):
            mine = [device for device in devices if device.process_index == process]
            blocks += [block] * len(mine)
            here += mine
        places.append(blocks)

    def together(received: Mapping[tuple[int, Block, Block], Any]) -> list[Any]:
        parts: dict[tuple[int, Block], dict[Block, Any]] = {}
        for (k, goal, block), data in received.items():
            parts.setdefault((k, goal), {})[block] = data
        whole = {key: _filled(key[1], blocks, plain[key[0]].dtype) for key, blocks in parts.items()}
        hosts = []
        for k, blocks in enumerate(places):
            for block in blocks:
                if (k, block) not in whole:
                    whole[k, block] = _filled(block, {}, plain[k].dtype)
                hosts.append(whole[k, block])
        shards = iter(jax.device_put(hosts, here))
        found: list[Any] = []
        for struct, described, target, place in zip(structs, plain, targets, places, strict=True):
            found.append(
                keys_from(
                    jax.make_array_from_single_device_arrays(
                        described.shape, target, [next(shards) for _ in place]
                    ),
                    struct,
                )
            )
        return found

    return together


def _filled(goal: Block, parts: Mapping[Block, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """A block on the host, assembled from smaller ones."""
    if goal in parts:
        filled: np.ndarray[Any, Any] = parts[goal]
        return filled
    filled = np.empty([b - a for a, b in goal], dtype)
    for block, data in parts.items():
        filled[slices_in(block, goal)] = data
    return filled


def _cut(held: Sequence[tuple[Any, tuple[slice, ...]]]) -> list[np.ndarray[Any, Any]]:
    """Blocks of shards, on the host. Waits until the shards are computed."""
    return [np.asarray(data)[where] for data, where in held]
