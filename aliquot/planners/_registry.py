"""Methods by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable

from ..core import InputError, nearest
from ._base import AbstractMethod
from ._methods import Auto, DataParallel, ShardParallel, Zero2Parallel, Zero3Parallel

METHODS: dict[str, Callable[[tuple[int, ...] | None], AbstractMethod]] = {
    "dp": lambda mesh: DataParallel(),
    "zero2": lambda mesh: Zero2Parallel(),
    "zero3": lambda mesh: Zero3Parallel(),
    "shard": lambda mesh: ShardParallel(mesh_shape=mesh),
    "auto": lambda mesh: Auto(mesh_shape=mesh),
}


def method_by_name(name: str, mesh_shape: tuple[int, ...] | None = None) -> AbstractMethod:
    """The method of a name, on a given mesh if there is one. Raises `InputError` for an unknown name."""
    if name not in METHODS:
        raise InputError(f"Unknown method {name!r}: {nearest(name, list(METHODS))}")
    if mesh_shape is not None and name in ("dp", "zero2", "zero3"):
        raise InputError(f"Method {name} uses all devices as one axis; --mesh goes with shard and auto.")
    return METHODS[name](mesh_shape)
