"""Transfer of arrays between stages of unequal size, or with processes in common, where one has
devices of several processes.

Between processes, JAX moves an array only to equally many devices of other processes, with the same
split. So the sending stage cuts it into as many pieces as the larger stage has devices, each piece
goes from one device to one device, and the receiving stage assembles them in its own split. No byte
crosses twice, and every device of either end takes its share.

Reference: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", 2021, section 4.1 (scatter and gather around transfers between stages).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ._arrays import keys_from, stub, words, words_of

# A smaller array crosses whole; the devices of the receiving stage pass it on.
WORTH_CUTTING_BYTES = 65536


class _Cut(msgspec.Struct, frozen=True):
    """Cut of one array along `dim` into `count` pieces of `length`, the last one padded; one piece
    is the whole.
    """

    shape: tuple[int, ...]
    dtype: Any
    dim: int
    count: int
    length: int

    @classmethod
    def of(cls, struct: Any, count: int) -> _Cut:
        """The cut of an array into `count` pieces, or none where it is small."""
        shape = tuple(struct.shape)
        num_bytes = math.prod(shape) * np.dtype(struct.dtype).itemsize
        if not shape or num_bytes < WORTH_CUTTING_BYTES:
            return cls(shape, struct.dtype, 0, 1, 0)
        # A dim that divides evenly needs no padding; otherwise the longest is padded least.
        even = [d for d, size in enumerate(shape) if size % count == 0]
        dim = even[0] if even else max(range(len(shape)), key=shape.__getitem__)
        return cls(shape, struct.dtype, dim, count, -(-shape[dim] // count))

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of a piece as one row: a dim of size 1, then the cut dim, then the others."""
        if self.count == 1:
            return (1, *self.shape)
        rest = [size for d, size in enumerate(self.shape) if d != self.dim]
        return (1, self.length, *rest)

    def on_each(self, devices: int) -> int:
        """Largest number of pieces on a device; the first devices are filled first."""
        return -(-self.count // devices)

    def apart(self, x: Any, devices: int) -> list[Any]:
        """The pieces, in arrays with one row for each device: row k of each belongs to device k."""
        # A whole array goes to each device, so that any leg can start from the first row.
        if self.count == 1:
            return [jnp.broadcast_to(x[None], (devices, *self.shape))]
        each = self.on_each(devices)
        x = jnp.moveaxis(x, self.dim, 0)
        # Padded, as all pieces of an array must have one shape.
        x = jnp.pad(x, [(0, devices * each * self.length - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        x = x.reshape(devices, each, self.length, *x.shape[1:])
        return [x[:, k] for k in range(each)]

    def together(self, rows: Sequence[Any]) -> Any:
        """The array from the rows that `apart` makes."""
        if self.count == 1:
            return rows[0][0]
        x = jnp.stack(list(rows), axis=1)
        x = x.reshape(-1, *x.shape[3:])[: self.shape[self.dim]]
        return jnp.moveaxis(x, 0, self.dim)


class _Leg(msgspec.Struct, frozen=True):
    """Pieces that go from one device to another, each as (array, number of the piece)."""

    source: Any
    target: Any
    pieces: tuple[tuple[int, int], ...]


def plan_route(
    structs: Sequence[jax.ShapeDtypeStruct], targets: Sequence[NamedSharding]
) -> Callable[..., Sequence[Any]]:
    """This process's part in moving arrays between two meshes, each of any devices of any
    processes.

    Args:
        structs: shape, dtype and sharding of each array at the sender; the same mesh for all.
        targets: the sharding of each at the receiver; the same mesh for all.

    Returns:
        A function that takes the arrays at the sender and none elsewhere, and returns them at the
        receiver and none elsewhere.
    """
    source: Any = structs[0].sharding
    # Shardings of arrays with one row for each device.
    ends = []
    for mesh in (source.mesh, targets[0].mesh):
        devices = mesh.devices.reshape(-1)
        ends.append(NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device")))
    senders, receivers = ([*end.mesh.devices.flat] for end in ends)
    process = jax.process_index()
    cuts = [_Cut.of(words_of(struct), max(len(senders), len(receivers))) for struct in structs]
    legs = _legs(cuts, senders, receivers)
    take = _taker(cuts, ends[0], senders, process)
    give = _giver(structs, cuts, ends[1], receivers, targets, process)

    def move(*arrays: Any) -> Sequence[Any]:
        held = take(arrays)
        arrived: dict[tuple[int, int], Any] = {}
        for leg in legs:
            sender, receiver = leg.source.process_index, leg.target.process_index
            if sender == process:
                pieces = [held[piece] for piece in leg.pieces]
            # Between devices of one other process this process has nothing to issue.
            elif sender == receiver:
                continue
            else:
                lead = SingleDeviceSharding(leg.source)
                pieces = [
                    stub(cuts[array].piece, lead, cuts[array].dtype) for array, _ in leg.pieces
                ]
            # One call for each pair of devices: in a call for several, the two ends may pull
            # different arrays first, and wait for ever.
            moved = jax.device_put(pieces, SingleDeviceSharding(leg.target))
            if receiver == process:
                arrived.update(zip(leg.pieces, moved, strict=True))
        return give(arrived)

    return move


def _legs(cuts: Sequence[_Cut], senders: Sequence[Any], receivers: Sequence[Any]) -> list[_Leg]:
    """All pairs of devices that exchange pieces, in an order that is the same in every process."""
    between: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for array, cut in enumerate(cuts):
        each = cut.on_each(len(senders)), cut.on_each(len(receivers))
        for piece in range(cut.count):
            between.setdefault((piece // each[0], piece // each[1]), []).append((array, piece))
    # Sorted, so that all processes issue the transfers in the same order.
    legs = []
    for (a, b), pieces in sorted(between.items()):
        legs.append(_Leg(senders[a], receivers[b], tuple(pieces)))
    return legs


def _taker(
    cuts: Sequence[_Cut], end: NamedSharding, senders: Sequence[Any], process: int
) -> Callable[[Sequence[Any]], dict[tuple[int, int], Any]]:
    """A function from arrays at the sender to the pieces that this process holds."""
    here = {device: k for k, device in enumerate(senders) if device.process_index == process}
    if not here:
        return lambda arrays: {}

    def rows_of(arrays: Sequence[Any]) -> list[list[Any]]:
        return [cut.apart(words(x), len(senders)) for cut, x in zip(cuts, arrays, strict=True)]

    ends = [[end] * cut.on_each(len(senders)) for cut in cuts]
    apart = jax.jit(rows_of, out_shardings=ends)

    def take(arrays: Sequence[Any]) -> dict[tuple[int, int], Any]:
        held = {}
        for array, (cut, rows) in enumerate(zip(cuts, apart(list(arrays)), strict=True)):
            for k, row in enumerate(rows):
                for shard in row.addressable_shards:
                    piece = here[shard.device] * len(rows) + k
                    # Behind the last piece lies padding.
                    if piece < cut.count:
                        held[array, piece] = shard.data
        return held

    return take


def _giver(
    structs: Sequence[Any],
    cuts: Sequence[_Cut],
    end: NamedSharding,
    receivers: Sequence[Any],
    targets: Sequence[NamedSharding],
    process: int,
) -> Callable[[dict[tuple[int, int], Any]], Sequence[Any]]:
    """A function from the pieces that came to this process to arrays at the receiver."""
    here = [(k, device) for k, device in enumerate(receivers) if device.process_index == process]
    if not here:
        return lambda arrived: []

    def join(rows: Sequence[Sequence[Any]]) -> list[Any]:
        joined = []
        for cut, pieces, described in zip(cuts, rows, structs, strict=True):
            joined.append(keys_from(cut.together(pieces), described))
        return joined

    together = jax.jit(join, out_shardings=list(targets))
    # Padding in the place of pieces that do not exist: the last devices may get fewer than the
    # others.
    blanks: dict[tuple[int, int], Any] = {}
    for array, cut in enumerate(cuts):
        each = cut.on_each(len(receivers))
        for place, device in here:
            for piece in range(max(place * each, cut.count), (place + 1) * each):
                blanks[array, piece] = jax.device_put(np.zeros(cut.piece, cut.dtype), device)

    def give(arrived: dict[tuple[int, int], Any]) -> Sequence[Any]:
        held = blanks | arrived
        rows = []
        for array, cut in enumerate(cuts):
            each = cut.on_each(len(receivers))
            shape = (len(receivers), *cut.piece[1:])
            row = []
            for k in range(each):
                shards = [held[array, place * each + k] for place, _ in here]
                row.append(jax.make_array_from_single_device_arrays(shape, end, shards))
            rows.append(row)
        joined: list[Any] = together(rows)
        return joined

    return give
