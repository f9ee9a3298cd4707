"""Arrays from one stage's mesh to another's, in one process or between processes.

Within a process `jax.device_put` moves anything anywhere. Between processes it is a pull by the receiver, for which both
ends must be split alike over equally many devices. Pulls are matched by their order alone, in every process: each must issue
all of them, also those between two others, with an empty array of the sender's sharding in place of what it does not hold.
What was sent must not be donated: nothing tells the sender when it was pulled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core import PlanMismatchError

Move = Callable[..., Sequence[Any]]

# Below this an array that every receiving device needs whole goes to one of them, which hands it on.
_WORTH_CUTTING_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Wire:
    """How one array crosses between processes: laid out as `source` at the sender, arriving as `target`."""

    source: NamedSharding
    target: NamedSharding


def stub(shape: Sequence[int], sharding: Sharding, dtype: Any) -> jax.Array:
    """This process's view of an array that lies on other processes only."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def processes_of(sharding: Sharding) -> frozenset[int]:
    """The processes that hold a part."""
    devices: Any = sharding.device_set
    return frozenset(device.process_index for device in devices)


def crosses(source: Sharding, target: Sharding) -> bool:
    """Whether arrays go from one process to another."""
    return processes_of(source) != processes_of(target)


def plan_move(structs: Sequence[jax.ShapeDtypeStruct], targets: Sequence[NamedSharding]) -> Move | None:
    """What this process does to move arrays in one transfer.

    Args:
        structs: of each array, with its sharding at the sender; the same mesh for all.
        targets: where each shall lie; the same mesh for all.

    Returns:
        A function from the arrays, at the sender, to those at the receiver. Elsewhere it takes or gives none. None where
        there is nothing to do.

    Raises:
        PlanMismatchError: the meshes lie on processes in a way that no transfer can follow.
    """
    source: Any = structs[0].sharding
    target = targets[0]
    senders, receivers, own = processes_of(source), processes_of(target), jax.process_index()
    if senders == receivers:
        goals = list(targets)
        return (lambda *arrays: jax.device_put(list(arrays), goals)) if own in senders else None
    _check(source.mesh, target.mesh)
    plain = [_without_key(struct) for struct in structs]
    spans = len(senders) > 1 or len(receivers) > 1
    wires = [_wire(s, t, spans) for s, t in zip(plain, targets, strict=True)]
    goals = [wire.target for wire in wires]
    stubs = [] if own in senders else [stub(s.shape, w.source, s.dtype) for s, w in zip(plain, wires, strict=True)]
    if own in senders:
        return _sender(structs, plain, wires)
    if own not in receivers:
        return lambda *_: jax.device_put(stubs, goals)[:0]
    return _receiver(structs, stubs, wires, targets)


def _sender(structs: Sequence[Any], plain: Sequence[Any], wires: Sequence[Wire]) -> Move:
    goals = [wire.target for wire in wires]
    changed = [
        k
        for k, (s, w) in enumerate(zip(plain, wires, strict=True))
        if not s.sharding.is_equivalent_to(w.source, len(s.shape)) or s is not structs[k]
    ]
    if not changed:
        return lambda *arrays: jax.device_put(list(arrays), goals)[:0]
    layouts = [wires[k].source for k in changed]
    lay_out: Callable[..., list[Any]] = lambda arrays: jax.device_put(arrays, layouts)  # noqa: E731
    if not layouts[0].is_fully_addressable:
        lay_out = jax.jit(lambda arrays: arrays, out_shardings=layouts)

    def send(*arrays: Any) -> Sequence[Any]:
        found = list(arrays)
        for k, array in zip(changed, lay_out([words(found[k]) for k in changed]), strict=True):
            found[k] = array
        moved: list[Any] = jax.device_put(found, goals)
        return moved[:0]

    return send


def _receiver(structs: Sequence[Any], stubs: Sequence[Any], wires: Sequence[Wire], targets: Sequence[Any]) -> Move:
    goals = [wire.target for wire in wires]
    changed = [k for k, (w, t) in enumerate(zip(wires, targets, strict=True)) if w.target != t]
    keys = [k for k, s in enumerate(structs) if _is_key(s)]
    last = [targets[k] for k in changed]

    def receive(*_: Any) -> Sequence[Any]:
        found: list[Any] = jax.device_put(stubs, goals)
        if changed:
            for k, array in zip(changed, jax.device_put([found[k] for k in changed], last), strict=True):
                found[k] = array
        for k in keys:
            found[k] = jax.random.wrap_key_data(found[k], impl=jax.random.key_impl(structs[k]))
        return found

    return receive


def _check(source: Any, target: Any) -> None:
    groups = [{device.process_index for device in mesh.devices.flat} for mesh in (source, target)]
    shared = groups[0] & groups[1]
    sizes = [mesh.devices.size for mesh in (source, target)]
    several = max(len(group) for group in groups) > 1
    advice = "Let every stage have devices of one process only, or all stages equally many whole processes."
    if shared:
        raise PlanMismatchError(
            f"two stages exchange arrays, one on processes {sorted(groups[0])} and the other on {sorted(groups[1])}",
            asked="stages share some of their processes but not all",
            advice=advice,
        )
    if several and sizes[0] != sizes[1]:
        raise PlanMismatchError(
            f"two stages exchange arrays, one with {sizes[0]} devices on processes {sorted(groups[0])}, the other with "
            f"{sizes[1]} on {sorted(groups[1])}",
            asked="stages of unequal size that span processes cannot exchange arrays",
            advice=advice,
        )


def _wire(struct: Any, target: NamedSharding, spans: bool) -> Wire:
    """The cheapest form that both ends can make: no byte crosses twice, and all devices of the smaller end take part."""
    source: NamedSharding = struct.sharding
    n, m = source.mesh.devices.size, target.mesh.devices.size
    if spans or (m <= n and _num_parts(struct.shape, target) == m):
        return Wire(_like(target, source.mesh), target)
    if n <= m and _num_parts(struct.shape, source) == n:
        return Wire(source, _like(source, target.mesh))
    parts = min(n, m)
    dims = [d for d, size in enumerate(struct.shape) if size % parts == 0 and size >= parts]
    if dims and math.prod(struct.shape) * struct.dtype.itemsize >= _WORTH_CUTTING_BYTES:
        spec = PartitionSpec(*[None] * dims[0], "parts")
    else:
        parts, spec = 1, PartitionSpec()
    ends = [
        NamedSharding(Mesh(mesh.devices.reshape(-1)[:parts], ("parts",)), spec) for mesh in (source.mesh, target.mesh)
    ]
    return Wire(*ends)


def _num_parts(shape: Sequence[int], sharding: NamedSharding) -> int:
    """How many different parts of an array the devices hold."""
    if 0 in shape:
        return 1
    return math.prod(size // part for size, part in zip(shape, sharding.shard_shape(tuple(shape)), strict=True))


def _like(form: NamedSharding, mesh: Any) -> NamedSharding:
    """The same split on other devices: the first of a mesh."""
    own: Any = form.mesh
    if own == mesh:
        return form
    devices = mesh.devices.reshape(-1)[: own.devices.size].reshape(own.devices.shape)
    return NamedSharding(Mesh(devices, own.axis_names, axis_types=own.axis_types), form.spec)


def _is_key(struct: Any) -> bool:
    return bool(jnp.issubdtype(struct.dtype, jax.dtypes.prng_key))


def _without_key(struct: Any) -> Any:
    if not _is_key(struct):
        return struct
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(struct.shape, struct.dtype))
    return _struct(words.shape, words.dtype, NamedSharding(struct.sharding.mesh, struct.sharding.spec))


def words(array: Any) -> Any:
    """An array, or the words of random keys: keys cannot cross."""
    if not _is_key(array):
        return array
    if array.sharding.addressable_devices:
        return jax.random.key_data(array)
    plain = _without_key(array)
    return stub(plain.shape, plain.sharding, plain.dtype)


def _struct(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(tuple(shape), dtype, sharding=sharding)


# ---- to every process ------------------------------------------------------------------------------------------------


def plan_broadcast(structs: Sequence[jax.ShapeDtypeStruct]) -> Move:
    """What this process does to have arrays that lie whole on each device of some processes on all processes.

    Args:
        structs: of each array; the same mesh for all.

    Returns:
        A function from the arrays (nothing in processes without them) to arrays that this process can read.
    """
    own, devices = jax.process_index(), list(structs[0].sharding.mesh.devices.flat)
    holders = {device.process_index for device in devices}
    first = {device.process_index: device for device in reversed(jax.devices())}
    lead, sends = SingleDeviceSharding(devices[0]), devices[0].process_index == own
    others = sorted(first.keys() - holders)
    stubs = [] if sends else [stub(s.shape, lead, s.dtype) for s in structs]
    goals = [[SingleDeviceSharding(first[other])] * len(structs) for other in others]

    def share(*arrays: Any) -> Sequence[Any]:
        found: list[Any] = [array.addressable_data(0) for array in arrays]
        sources = found if sends else stubs
        for other, goal in zip(others, goals, strict=True):
            moved: list[Any] = jax.device_put(sources, goal)
            found = moved if other == own else found
        return found

    return share


def lies_elsewhere(array: jax.Array) -> bool:
    """Whether an array lies on a mesh of some processes and not of others."""
    if jax.process_count() == 1 or not isinstance(array.sharding, NamedSharding):
        return False
    return len(processes_of(array.sharding)) < int(jax.process_count())


def share_with_all(array: jax.Array) -> jax.Array:
    """An array of which `lies_elsewhere` is true, whole and readable on every process.

    All processes must call it, at the same point of their order of transfers.
    """
    sharding: Any = array.sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    found = []
    if array.is_fully_addressable:
        found = [jax.device_put(array, sharding.mesh.devices.flat[0])]
    elif sharding.addressable_devices:
        found = [jax.jit(lambda x: x, out_shardings=whole)(array)]
    readable: jax.Array
    (readable,) = plan_broadcast([_struct(array.shape, array.dtype, whole)])(*found)
    return readable
