"""Transfer of arrays from one stage's mesh to another's, in one process or between processes.

Within a process `jax.device_put` moves anything anywhere. Between processes arrays of CPU devices
go through the memory of the hosts, see `_host_moves`. For other devices `jax.device_put` is a pull
by the receiver, for which both ends must be split alike over equally many devices; `_route` takes
arrays apart where an end has devices of several processes. Pulls are matched by their order alone,
in every process: each must issue all of them, also those between two others, with an empty array of
the sender's sharding in place of arrays of which it holds no part. What was sent must not be
donated: nothing tells the sender when it was pulled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._arrays import is_key, keys_from, struct, stub, words, words_of
from ._channels import Channels
from ._host_moves import plan_host_move
from ._route import WORTH_CUTTING_BYTES, plan_route
from ._watchdog import watched

Move = Callable[..., Sequence[Any]]


class Wire(msgspec.Struct, frozen=True):
    """Shardings with which one array crosses between processes: `source` at the sender, `target` at
    the receiver.
    """

    source: NamedSharding
    target: NamedSharding


def processes_of(sharding: Sharding) -> frozenset[int]:
    """The processes that have devices of a sharding."""
    devices: Any = sharding.device_set
    return frozenset(device.process_index for device in devices)


def channels_of_hosts() -> Channels | None:
    """The channels that carry arrays between processes if devices cannot, or None. The first call
    must come at the same point in all processes.
    """
    peers = watched()
    if (
        peers is None
        or peers.transfers == "device"
        or (peers.transfers is None and jax.default_backend() != "cpu")
    ):
        return None
    return peers.channels


def plan_move(
    structs: Sequence[jax.ShapeDtypeStruct], targets: Sequence[NamedSharding]
) -> Move | None:
    """This process's part in one transfer of arrays.

    Args:
        structs: shape, dtype and sharding of each array at the sender; the same mesh for all.
        targets: the sharding of each at the receiver; the same mesh for all.

    Returns:
        A function that takes the arrays at the sender and none elsewhere, and returns them at the
        receiver and none elsewhere. None if this process has nothing to do.
    """
    source: Any = structs[0].sharding
    target = targets[0]
    senders, receivers, process = processes_of(source), processes_of(target), jax.process_index()
    # In one process, or on the same devices, JAX moves arrays itself.
    if senders == receivers and (len(senders) == 1 or source.device_set == target.device_set):
        goals = list(targets)
        return (lambda *arrays: jax.device_put(list(arrays), goals)) if process in senders else None
    channels = channels_of_hosts()
    if channels is not None:
        return plan_host_move(
            structs, [dict.fromkeys(receivers, target) for target in targets], channels
        )
    spans = len(senders) > 1 or len(receivers) > 1
    if spans and (senders & receivers or source.mesh.devices.size != target.mesh.devices.size):
        return plan_route(structs, targets)
    plain = list(map(words_of, structs))
    wires = [_wire(s, t, spans) for s, t in zip(plain, targets, strict=True)]
    if process in senders:
        return _sender(structs, plain, wires)
    goals = [wire.target for wire in wires]
    stubs = [stub(s.shape, w.source, s.dtype) for s, w in zip(plain, wires, strict=True)]
    if process not in receivers:
        return lambda *_: jax.device_put(stubs, goals)[:0]
    return _receiver(structs, stubs, wires, targets)


def _sender(structs: Sequence[Any], plain: Sequence[Any], wires: Sequence[Wire]) -> Move:
    """The sender's part of a transfer: give the arrays the shardings of their wires, then offer
    them.
    """
    goals, changed = [], []
    for k, (s, w) in enumerate(zip(plain, wires, strict=True)):
        goals.append(w.target)
        if not s.sharding.is_equivalent_to(w.source, len(s.shape)) or s is not structs[k]:
            changed.append(k)
    if not changed:
        # `[:0]`: nothing of what arrives elsewhere is kept here.
        return lambda *arrays: jax.device_put(list(arrays), goals)[:0]
    layouts = [wires[k].source for k in changed]
    lay_out: Callable[..., list[Any]] = lambda arrays: jax.device_put(arrays, layouts)  # noqa: E731
    # Arrays of several processes are laid out by a program; `device_put` moves only what one
    # process holds.
    if not layouts[0].is_fully_addressable:
        lay_out = jax.jit(lambda arrays: arrays, out_shardings=layouts)

    def send(*arrays: Any) -> Sequence[Any]:
        sent = list(arrays)
        for k, array in zip(changed, lay_out([words(sent[k]) for k in changed]), strict=True):
            sent[k] = array
        moved: list[Any] = jax.device_put(sent, goals)
        return moved[:0]

    return send


def _receiver(
    structs: Sequence[Any], stubs: Sequence[Any], wires: Sequence[Wire], targets: Sequence[Any]
) -> Move:
    """The receiver's part of a transfer: pull the arrays, then give them their final shardings."""
    goals = [wire.target for wire in wires]
    changed = [k for k, (w, t) in enumerate(zip(wires, targets, strict=True)) if w.target != t]
    keys = [k for k, s in enumerate(structs) if is_key(s)]
    last = [targets[k] for k in changed]

    def receive(*_: Any) -> Sequence[Any]:
        received: list[Any] = jax.device_put(stubs, goals)
        if changed:
            moved = jax.device_put([received[k] for k in changed], last)
            for k, array in zip(changed, moved, strict=True):
                received[k] = array
        for k in keys:
            received[k] = keys_from(received[k], structs[k])
        return received

    return receive


def _wire(described: Any, target: NamedSharding, spans: bool) -> Wire:
    """The cheapest shardings that both ends can make: no byte is sent twice, and all devices of the
    smaller end take part.
    """
    source: NamedSharding = described.sharding
    n, m = source.mesh.devices.size, target.mesh.devices.size
    if spans or (m <= n and _num_parts(described.shape, target) == m):
        return Wire(_like(target, source.mesh), target)
    if n <= m and _num_parts(described.shape, source) == n:
        return Wire(source, _like(source, target.mesh))
    parts = min(n, m)
    dims = [d for d, size in enumerate(described.shape) if size % parts == 0 and size >= parts]
    # Small arrays go whole between two devices: the latency of several pieces would cost more.
    if dims and math.prod(described.shape) * described.dtype.itemsize >= WORTH_CUTTING_BYTES:
        spec = PartitionSpec(*[None] * dims[0], "parts")
    else:
        parts, spec = 1, PartitionSpec()
    ends = []
    for mesh in (source.mesh, target.mesh):
        cut = Mesh(mesh.devices.reshape(-1)[:parts], ("parts",))
        ends.append(NamedSharding(cut, spec))
    return Wire(*ends)


def _num_parts(shape: Sequence[int], sharding: NamedSharding) -> int:
    """Number of different parts of an array on the devices."""
    if 0 in shape:
        return 1
    return math.prod(shape) // math.prod(sharding.shard_shape(tuple(shape)))


def _like(form: NamedSharding, mesh: Any) -> NamedSharding:
    """The same split on the first devices of another mesh."""
    own_mesh: Any = form.mesh
    if own_mesh == mesh:
        return form
    devices = mesh.devices.reshape(-1)[: own_mesh.devices.size].reshape(own_mesh.devices.shape)
    return NamedSharding(
        Mesh(devices, own_mesh.axis_names, axis_types=own_mesh.axis_types), form.spec
    )


def plan_broadcast(structs: Sequence[jax.ShapeDtypeStruct]) -> Move:
    """This process's part in sending arrays that lie whole on each device of some processes to all
    processes.

    Args:
        structs: shape, dtype and sharding of each array; the same mesh for all.

    Returns:
        A function from the arrays (nothing in processes without them) to arrays that this process
            can read.
    """
    process, devices = jax.process_index(), list(structs[0].sharding.mesh.devices.flat)
    holders = {device.process_index for device in devices}
    first = {device.process_index: device for device in reversed(jax.devices())}
    others = sorted(first.keys() - holders)
    channels = channels_of_hosts()
    if channels is not None:
        away = {other: SingleDeviceSharding(first[other]) for other in others}
        move = plan_host_move(structs, [away] * len(structs), channels)

        def share_by_host(*arrays: Any) -> Sequence[Any]:
            moved = move(*arrays) if move is not None else ()
            return [array.addressable_data(0) for array in arrays] if process in holders else moved

        return share_by_host
    lead, sends = SingleDeviceSharding(devices[0]), devices[0].process_index == process
    stubs = [] if sends else [stub(s.shape, lead, s.dtype) for s in structs]
    goals = [[SingleDeviceSharding(first[other])] * len(structs) for other in others]

    def share(*arrays: Any) -> Sequence[Any]:
        shared: list[Any] = [array.addressable_data(0) for array in arrays]
        sources = shared if sends else stubs
        for other, goal in zip(others, goals, strict=True):
            moved: list[Any] = jax.device_put(sources, goal)
            shared = moved if other == process else shared
        return shared

    return share


def lies_elsewhere(array: jax.Array) -> bool:
    """True if an array lies on a mesh that has no devices of some processes."""
    if jax.process_count() == 1 or not isinstance(array.sharding, NamedSharding):
        return False
    return len(processes_of(array.sharding)) < int(jax.process_count())


def share_with_all(array: jax.Array) -> jax.Array:
    """An array of which `lies_elsewhere` is true, whole and readable on every process.

    All processes must call it, at the same point of their order of transfers.
    """
    sharding: Any = array.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    shared = []
    if array.is_fully_addressable:
        shared = [jax.device_put(array, sharding.mesh.devices.flat[0])]
    elif sharding.addressable_devices:
        shared = [jax.jit(lambda x: x, out_shardings=whole)(array)]
    readable: jax.Array
    (readable,) = plan_broadcast([struct(array.shape, array.dtype, whole)])(*shared)
    return readable
