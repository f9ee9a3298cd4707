"""Programs of single operators: products, elementwise traffic, collectives, and transfers between
submeshes.

All devices of a mesh run the operator at the same time, each what it would run in a step, because
virtual devices share cores and collectives share links. An operator is described by a line of text,
such as `product bfloat16 1x512x2048x512`, which is also its key in the database.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..cluster import AXIS_NAMES
from ..core import format_bytes
from ..runtime import make_mesh, plan_move
from ._database import ProgramKey
from ._programs import CompiledPart, compile_program, device_key, idle_part, takes_part

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_FLOAT32_BYTES = 4
# Kinds of operators.
_PRODUCT, _TRAFFIC, _LAUNCH = "product", "traffic", "launch"
TRANSFER = "transfer"


class Operator(NamedTuple):
    """One operator as each device runs it.

    Attributes:
        kind: `"product"`, `"traffic"`, `"transfer"` from the first half of the devices to the
            other, `"launch"`, or one of `COLLECTIVES`.
        dtype: of its arrays.
        sizes: of a product, the number of products, rows, columns and the length of the contracted
            dim; of traffic, the bytes that it reads and writes; of a collective, the bytes of its
            operand on each device; of a transfer, the bytes of the whole array.
        axes: positions of the mesh axes that a collective runs along.
    """

    kind: str
    dtype: str = "float32"
    sizes: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    def __str__(self) -> str:
        along = "along " + ",".join(map(str, self.axes)) if self.axes else ""
        return " ".join(
            part for part in (self.kind, self.dtype, "x".join(map(str, self.sizes)), along) if part
        )

    def described(self, mesh: str = "") -> str:
        """A name for readers: sizes with units, and axes by name.

        Args:
            mesh: the mesh that a collective runs on, such as `"4x2"`.

        >>> Operator("product", "bfloat16", (16, 32, 64, 8)).described()
        'product bfloat16: 16 of 32x8 by 8x64'
        >>> Operator("all-reduce", "float32", (1 << 20,), (0, 1)).described("4x2")
        'all-reduce float32: 1.0 MiB along x,y of 4x2'
        """
        if self.kind == _LAUNCH:
            return "launch of a program"
        name = f"{self.kind} {self.dtype}:"
        if self.kind == _PRODUCT:
            count, rows, columns, depth = self.sizes
            some = f"{count} of " if count > 1 else ""
            return f"{name} {some}{rows}x{depth} by {depth}x{columns}"
        size = f"{name} {format_bytes(self.sizes[0])}"
        if not self.axes:
            return size
        along = ",".join(AXIS_NAMES[axis] for axis in self.axes)
        return f"{size} along {along}" + (f" of {mesh}" if mesh else "")

    @staticmethod
    def parse(text: str) -> Operator | None:
        """The operator that `str` turned into this text; None for other texts, such as the hash of
        a segment.
        """
        head, _, along = text.partition(" along ")
        kind, *rest = head.split(" ")
        if kind == _LAUNCH:
            return LAUNCH
        if kind not in (_PRODUCT, _TRAFFIC, TRANSFER, *COLLECTIVES) or len(rest) != 2:
            return None
        try:
            sizes = tuple(map(int, rest[1].split("x")))
            if len(sizes) != (4 if kind == _PRODUCT else 1) or min(sizes) < 1:
                return None
            axes = tuple(map(int, along.split(","))) if along else ()
            return Operator(kind, rest[0], sizes, axes)
        except ValueError:
            return None


LAUNCH = Operator(_LAUNCH)
"""A program that does next to nothing. Its time is part of every measured program, but not of an
operator inside a step.
"""


def operator_key(operator: Operator, mesh_shape: tuple[int, ...]) -> ProgramKey:
    """The key of an operator on this process's devices. Only collectives depend on the mesh."""
    shape = mesh_shape if operator.axes else (math.prod(mesh_shape),)
    return device_key(str(operator), shape)


def compile_operator(operator: Operator, mesh_shape: tuple[int, ...]) -> CompiledPart:
    """Compile an operator for the first of all devices. May be called in several threads."""
    if operator.kind == TRANSFER:
        return _transfer(operator, math.prod(mesh_shape))
    names = AXIS_NAMES[: len(mesh_shape)]
    mesh = make_mesh(mesh_shape, names, None)
    function, shapes, dtype = _local_program(operator, tuple(names[axis] for axis in operator.axes))
    split, lead = PartitionSpec(names), math.prod(mesh_shape)
    sharding = NamedSharding(mesh, split)
    arguments = [jax.ShapeDtypeStruct((lead, *s), dtype, sharding=sharding) for s in shapes]

    def on_each(*blocks: Any) -> Any:
        return function(*(block[0] for block in blocks))[None]

    jitted = jax.jit(
        jax.shard_map(
            on_each, mesh=mesh, in_specs=(split,) * len(shapes), out_specs=split, check_vma=False
        )
    )
    label = operator.described("x".join(map(str, mesh_shape)))
    return compile_program(jitted, arguments, mesh_shape, names, label=label)


def _transfer(operator: Operator, num_devices: int) -> CompiledPart:
    """The transfer of an array that is split over one half of the devices to the other half.

    Between processes, as those of several hosts, one run moves it there and back: a sender does not
    see when an array arrives.
    """
    half, (num_bytes,), label = num_devices // 2, operator.sizes, operator.described()
    ends = (jax.devices()[:half], jax.devices()[half:num_devices])
    meshes = [make_mesh((half,), ("x",), devices) for devices in ends]
    here, there = (NamedSharding(mesh, PartitionSpec("x")) for mesh in meshes)
    shape = (num_bytes // _FLOAT32_BYTES,)
    on_this = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=here)
    on_that = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there)
    if len({device.process_index for device in itertools.chain(*ends)}) == 1:
        if not takes_part(ends[0]):
            return idle_part(label)

        def move(x: Any) -> Any:
            return jax.device_put(x, there)

        # JAX moves arrays without a program.
        return CompiledPart(
            arguments=(on_this,), successors={}, compiled=move, memory_bytes=0.0, label=label
        )
    go, come = plan_move([on_this], [there]), plan_move([on_that], [here])

    def go_and_come(*arrays: Any) -> Any:
        arrived = go(*arrays) if go is not None else ()
        return [*arrived, *(come(*arrived) if come is not None else ())]

    return CompiledPart(
        arguments=(on_this,) if takes_part(ends[0]) else (),
        successors={},
        compiled=go_and_come,
        memory_bytes=0.0,
        label=label,
        times=2,
    )


def _local_program(
    operator: Operator, axes: tuple[str, ...]
) -> tuple[Callable[..., Any], list[tuple[int, ...]], Any]:
    """The program of each device: a function, the shapes of its arguments, and their dtype."""
    dtype = jnp.dtype(operator.dtype)
    if operator.kind == _LAUNCH:
        return lambda x: x + 1, [()], dtype
    if operator.kind == _PRODUCT:
        batch, rows, columns, depth = operator.sizes
        lead = (batch,) if batch > 1 else ()
        return jnp.matmul, [(*lead, rows, depth), (*lead, depth, columns)], dtype
    (num_bytes,) = operator.sizes
    if operator.kind == _TRAFFIC:
        # Read once and written once.
        return lambda x: x * 1.5 + 0.5, [(max(num_bytes // 2 // dtype.itemsize, 1),)], dtype
    size = max(num_bytes // dtype.itemsize, 1)
    return functools.partial(_collective, kind=operator.kind, axes=axes), [(size,)], dtype


def _collective(x: Any, kind: str, axes: tuple[str, ...]) -> Any:
    match kind:
        case "all-reduce":
            return jax.lax.psum(x, axes)
        case "all-gather":
            return jax.lax.all_gather(x, axes, tiled=True)
        case "reduce-scatter":
            return jax.lax.psum_scatter(x, axes, tiled=True)
        case "all-to-all":
            return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        case "collective-permute":
            # To the next device of a ring.
            size = jax.lax.axis_size(axes)
            return jax.lax.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])
    raise AssertionError(f"unknown collective {kind}")


def collective_operator(
    kind: str, mesh_shape: tuple[int, ...], axes: tuple[int, ...], num_bytes: float
) -> Operator:
    """A collective on about so many bytes, rounded so that its devices divide them evenly."""
    size = math.prod(mesh_shape[axis] for axis in axes)
    unit = _FLOAT32_BYTES * size
    return Operator(kind, "float32", (max(round(num_bytes / unit), 1) * unit,), axes)


def transfer_operator(num_bytes: int, num_devices: int) -> Operator:
    """A transfer of about so many bytes, rounded so that half of the devices divide them evenly."""
    unit = _FLOAT32_BYTES * max(num_devices // 2, 1)
    return Operator(TRANSFER, "float32", (max(round(num_bytes / unit), 1) * unit,))
