"""How Orbax writes and reads one leaf of ours.

Orbax's own handler refuses arrays that lie on one process alone while there are several, and knows
no arrays in pieces. This one, added by Orbax's interface for types of one's own, writes each as a
plain array, so that what it wrote is read by Orbax's own handler as well. Asynchronous writing,
atomic ends, numbers and metadata are Orbax's.

Only this file and `_orbax.py` import Orbax.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from ..transport import (
    Block,
    PiecedArray,
    devices_by_block,
    keys_from,
    slices_in,
    stub,
    words_of,
)
from ._leaves import Leaf, Target, shifted
from ._record import reason

_AT_ONCE = 32
# How the bytes of a chunk are stored. Reading compares the checksum, which is zstd's own (XXH64).
_CODECS = (
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
)

_Found = TypeVar("_Found")


@dataclasses.dataclass
class Wanted(ocp.RestoreArgs):  # type: ignore[misc]
    """How one array is to be restored, as Orbax passes it on."""

    target: Target | None = None


class LeafHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
    """Writes each leaf from the processes that hold it, and reads for each process its own blocks.

    Args:
        only: the arrays that are read, by `plain_name`, where it is not all; they go to `found`,
            and nothing is returned.

    Attributes:
        read_bytes: what this process has read so far: whole chunks, as they are in memory.
        failure: why it could not write, if it could not.
    """

    def __init__(self, only: Mapping[str, Target] | None = None) -> None:
        self.read_bytes, self.failure = 0, ""
        self.found: dict[str, Any] = {}
        self._only = only

    def typestr(self) -> str:
        """The name of JAX's own arrays, so that Orbax reads them without this handler."""
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """As Orbax's own handler gives it."""
        plain = ocp.type_handlers.get_type_handler(jax.Array)
        found: Sequence[Any] = await plain.metadata(infos)
        return found

    async def serialize(
        self, values: Sequence[Leaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Copy what this process holds to the host, and write it in the background."""
        for leaf in values:
            for _, data in leaf.blocks:
                if not _is_in_host_memory(data):
                    data.copy_to_host_async()
        copied = []
        for leaf in values:
            held = []
            for block, data in leaf.blocks:
                # On CPUs `np.asarray` shares memory that the next step may overwrite.
                copy = np.array if _is_in_host_memory(data) else np.asarray
                held.append((block, copy(data)))
            copied.append(held)
        writing = self._write(values, infos, copied)
        return [ocp.future.CommitFutureAwaitingContractedSignals(writing, name="aliquot_leaves")]

    async def _write(
        self,
        values: Sequence[Leaf],
        infos: Sequence[Any],
        copied: Sequence[Sequence[tuple[Block, NDArray[Any]]]],
    ) -> None:
        # With one transaction all chunks come into one file.
        transaction = ts.Transaction(atomic=True)
        try:
            writing = []
            for leaf, info, blocks in zip(values, infos, copied, strict=True):
                if blocks:
                    writing.append(_write_one(leaf, info, blocks, transaction))
            await _all(writing)
            await transaction.commit_async()
            if jax.process_index() == 0:
                await _name_generators(values, infos)
        except Exception as error:
            self.failure = reason(error)
            raise

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """The arrays as `Wanted` says.

        Raises:
            ValueError: an array cannot be read, or is not what was written.
        """
        # Not all at once, as each is in the host's memory for a while.
        limit = asyncio.Semaphore(_AT_ONCE)
        has_failed = False

        async def read(info: Any, arg: Any) -> Any:
            nonlocal has_failed
            name = plain_name(info.name)
            if self._only is None:
                target = arg.target if isinstance(arg, Wanted) else None
            elif name in self._only:
                target = self._only[name]
            else:
                return None
            async with limit:
                if has_failed:
                    return None
                try:
                    array = await self._read(info, target)
                except (ValueError, OSError, KeyError) as error:
                    has_failed = True
                    raise ValueError(f"{name}: {reason(error)}") from error
            if self._only is not None:
                self.found[name] = array
            return array

        return await _all(read(info, arg) for info, arg in zip(infos, args or (), strict=True))

    async def _read(self, info: Any, target: Target | None) -> Any:
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
        stored = await ts.open(ts.Spec(spec), open=True, read=True, context=info.ts_context)
        if target is None or not target.places:
            whole = await self._take(stored, tuple((0, size) for size in stored.shape))
            return whole if target is None else _in_width_of(target.described, whole)
        pieces = []
        for rows in target.places:
            # The description of some rows of an array.
            shape = tuple(target.described.shape)
            if rows.stop is not None:
                shape = (rows.stop - rows.start, *shape[1:])
            make: Any = jax.ShapeDtypeStruct
            piece = make(shape, target.described.dtype, sharding=rows.sharding)
            plain = words_of(piece)
            blocks = devices_by_block(plain.sharding, plain.shape, local=True)
            if not blocks:
                pieces.append(stub(piece.shape, piece.sharding, piece.dtype))
                continue
            parts = await self._take_all(stored, [shifted(b, rows.start) for b, _ in blocks])
            parts = [_in_width_of(plain, part) for part in parts]
            holders = [devices for _, devices in blocks]
            array = _assembled(plain, zip(holders, parts, strict=True))
            pieces.append(keys_from(array, piece))
        return pieces[0] if target.places[0].stop is None else PiecedArray(pieces)

    async def _take_all(self, stored: Any, blocks: Sequence[Block]) -> Sequence[NDArray[Any]]:
        """Blocks of a stored array: each by itself or, where that reads no more, out of the
        smallest block that holds them all.
        """
        found = []
        for ends in zip(*blocks, strict=True):
            found.append((min(first for first, _ in ends), max(last for _, last in ends)))
        around = tuple(found)
        if _chunk_bytes(stored, around) > sum(_chunk_bytes(stored, block) for block in blocks):
            return await _all(self._take(stored, block) for block in blocks)
        host = await self._take(stored, around)
        return [host[slices_in(block, around)] for block in blocks]

    async def _take(self, stored: Any, block: Block) -> NDArray[Any]:
        host: NDArray[Any] = await stored[_index(block)].read()
        self.read_bytes += _chunk_bytes(stored, block)
        return host


def plain_name(path: str) -> str:
    """A place in a tree, spelled alike by us and by Orbax.

    >>> plain_name("params.layers[0].w"), plain_name("params.layers.0.w")
    ('params.layers.0.w', 'params.layers.0.w')
    """
    return re.sub(r"[\[\]'\".]+", ".", path).strip(".")


def _is_in_host_memory(data: Any) -> bool:
    """True for arrays of NumPy, and for those of CPU devices."""
    return not isinstance(data, jax.Array) or next(iter(data.devices())).platform == "cpu"


async def _write_one(
    leaf: Leaf, info: Any, blocks: Sequence[tuple[Block, Any]], transaction: Any
) -> None:
    await info.await_path_creation()
    spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=leaf.shape,
        local_shape=leaf.chunks,
        dtype=leaf.dtype,
        process_index=jax.process_index(),
    )
    spec["metadata"]["codecs"] = _CODECS
    stored: Any = await ts.open(
        ts.Spec(spec), create=True, open=True, context=info.ts_context, transaction=transaction
    )
    if leaf.nbytes == 0:
        # An array without elements has no chunk, and Orbax takes one for an array that is missing.
        name = "/".join(["c"] + ["0"] * len(leaf.shape))
        await stored.kvstore.write(name, b"")
        return
    await _all(
        stored[_index(block)].write(host, can_reference_source_data_indefinitely=True)
        for block, host in blocks
    )


async def _all(awaited: Iterable[Awaitable[_Found]]) -> list[_Found]:
    """What all of them give. Where some fail, the first error once all have ended: those of
    tensorstore that are still under way when the event loop is closed complain on standard error.
    """
    found = await asyncio.gather(*awaited, return_exceptions=True)
    given: list[_Found] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        given.append(one)
    return given


async def _name_generators(values: Sequence[Leaf], infos: Sequence[Any]) -> None:
    """Write the file in which Orbax's own handler looks for the generators of random keys."""
    named = []
    for leaf, info in zip(values, infos, strict=True):
        if leaf.generator:
            described = {
                "param_name": info.name,
                "write_shape": leaf.shape,
                "chunk_shape": leaf.chunks,
                "ext_metadata": {"random_key_impl": leaf.generator},
            }
            named.append({"array_metadata": described})
    if named:
        await infos[0].await_path_creation()
        path = infos[0].parent_dir / "array_metadatas" / "process_0"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"array_metadatas": named}))


def _chunk_bytes(stored: Any, block: Block) -> int:
    """Bytes of all chunks that a block touches."""
    chunks = stored.chunk_layout.read_chunk.shape or stored.shape
    num_bytes: int = stored.dtype.numpy_dtype.itemsize
    for (first, last), chunk, size in zip(block, chunks, stored.shape, strict=True):
        num_bytes *= min(-(-last // chunk) * chunk, size) - first // chunk * chunk
    return num_bytes


def _in_width_of(described: Any, host: NDArray[Any]) -> NDArray[Any]:
    """Floats as wide as those that are described; all else as it is."""
    is_float = jnp.issubdtype(described.dtype, jnp.floating)
    return host.astype(described.dtype, copy=False) if is_float else host


def _index(block: Block) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in block)


def _assembled(described: Any, parts: Iterable[tuple[Sequence[Any], NDArray[Any]]]) -> jax.Array:
    """An array from the blocks of this process."""
    kind = described.sharding.memory_kind
    shards = []
    for devices, host in parts:
        for device in devices:
            there = SingleDeviceSharding(device, memory_kind=kind)
            # The numbers of the host's memory are not shared: a step will be given this array.
            shards.append(jax.device_put(host, there, may_alias=False))
    array: jax.Array = jax.make_array_from_single_device_arrays(
        described.shape, described.sharding, shards, dtype=described.dtype
    )
    return array
