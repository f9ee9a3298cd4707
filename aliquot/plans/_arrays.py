"""Arrays of a step as a plan sees them: their sizes, their pieces on each device, and groups of
equal arrays of repeated layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ._plan import ArrayInterface, StagePlan

Dims = tuple[tuple[str, ...], ...]

_INDEX = re.compile(r"\[\d+\]|(?<=\.)\d+(?=\.|\[|$)")
_ROWS = re.compile(r"\[(\d+):(\d+)\]$")
_BITS = re.compile(r"^[a-z]+?(\d{1,3})")
_ODD_SIZES_BYTES = {"bool": 1.0}
_KEY_BYTES = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayGroup:
    """Arrays that differ only in the index of their layer and are split alike.

    Attributes:
        pattern: their path with `*` for the indices that vary; the path itself for a single array.
        count: how many there are.
        shape, dtype, role: of each.
        dims: the mesh axes that split each dim.
        total_bytes: of all of them, unsplit.
        local_bytes: of all of them on each device.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    role: str
    dims: Dims
    total_bytes: float
    local_bytes: float


def item_bytes(dtype: str) -> float:
    """Bytes of one element; random keys count as two 32-bit words.

    >>> item_bytes("bfloat16"), item_bytes("float8_e4m3fn"), item_bytes("int4"), item_bytes("bool")
    (2.0, 1.0, 0.5, 1.0)
    """
    if dtype in _ODD_SIZES_BYTES:
        return _ODD_SIZES_BYTES[dtype]
    match = _BITS.match(dtype)
    return int(match[1]) / 8 if match else _KEY_BYTES


def num_pieces(dims: Dims, axis_sizes: Mapping[str, int]) -> int:
    """Number of different pieces into which an array is cut. Axes that the mesh does not have count
    as 1.
    """
    return math.prod(axis_sizes.get(axis, 1) for axes in dims for axis in axes)


def format_dims(dims: Sequence[Sequence[str]]) -> str:
    """A split as text: the axes of each dim, `-` for none.

    >>> format_dims((("x",), (), ("y", "z"))), format_dims(((), ())), format_dims(())
    ('[x, -, y+z]', 'replicated', 'replicated')
    """
    if not any(dims):
        return "replicated"
    return f"[{', '.join('+'.join(axes) or '-' for axes in dims)}]"


def grouped_arrays(
    arrays: Sequence[ArrayInterface], stage: StagePlan, shardings: Mapping[str, Dims]
) -> list[ArrayGroup]:
    """The arrays of one stage, with equal arrays of repeated layers in one group; the largest on
    each device first.
    """
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=False))
    members: dict[tuple[str, tuple[int, ...], str, str, Dims], list[ArrayInterface]] = {}
    for array in placed_arrays(arrays, shardings):
        key = (
            _INDEX.sub("*", array.path),
            array.shape,
            array.dtype,
            array.role,
            shardings[array.path],
        )
        members.setdefault(key, []).append(array)
    groups = []
    for (_, shape, dtype, role, dims), paths in members.items():
        # By the dtype's name, because plans are read without JAX, whose dtypes NumPy lacks.
        total_bytes = len(paths) * math.prod(shape) * item_bytes(dtype)
        groups.append(
            ArrayGroup(
                pattern=_pattern([array.path for array in paths]),
                count=len(paths),
                shape=shape,
                dtype=dtype,
                role=role,
                dims=dims,
                total_bytes=total_bytes,
                local_bytes=total_bytes / num_pieces(dims, sizes),
            )
        )
    return sorted(groups, key=lambda group: (-group.local_bytes, -group.total_bytes, group.pattern))


def placed_arrays(
    arrays: Sequence[ArrayInterface], shardings: Mapping[str, Dims]
) -> list[ArrayInterface]:
    """The arrays that have an entry in `shardings`, in the order of `arrays`. If a stage holds only
    some rows of an array of stacked layers, these count as an array.
    """
    rows: dict[str, list[str]] = {}
    for path in shardings:
        if _ROWS.search(path):
            rows.setdefault(unranged(path), []).append(path)
    placed = []
    for array in arrays:
        if array.path in shardings:
            placed.append(array)
        for path in rows.get(array.path, ()):
            match = _ROWS.search(path)
            assert match is not None
            num_rows = int(match[2]) - int(match[1])
            shape = (num_rows, *array.shape[1:])
            placed.append(msgspec.structs.replace(array, path=path, shape=shape))
    return placed


def without_moments(groups: Sequence[ArrayGroup]) -> list[ArrayGroup]:
    """Groups without the optimizer state of the shape and the split of its parameter."""
    splits: dict[tuple[str, tuple[int, ...], int], set[Dims]] = {}
    names = set()
    for group in groups:
        if group.role == "parameter":
            for name in endings_of_path(group.pattern):
                names.add(name)
                splits.setdefault((name, group.shape, group.count), set()).add(group.dims)
    kept = []
    for group in groups:
        # A moment belongs to the parameter with which it has the longest ending of the path in
        # common; of several, to any of them.
        name = next((name for name in endings_of_path(group.pattern) if name in names), "")
        of_parameters = splits.get((name, group.shape, group.count))
        if group.role != "optimizer_state" or of_parameters != {group.dims}:
            kept.append(group)
    return kept


def endings_of_path(pattern: str) -> list[str]:
    """The path without its first part, without its first two, and so on.

    >>> endings_of_path("state.params.w")
    ['params.w', 'w']
    """
    parts = pattern.split(".")
    return [".".join(parts[k:]) for k in range(1, len(parts))]


def _pattern(paths: Sequence[str]) -> str:
    """The common pattern of several paths, with `*` for each index in which they differ."""
    indices = zip(*([match[0] for match in _INDEX.finditer(path)] for path in paths))
    shown = iter(
        [
            one[0] if len(set(one)) == 1 else "[*]" if one[0].startswith("[") else "*"
            for one in indices
        ]
    )
    return _INDEX.sub(lambda _: next(shown), paths[0])


def unindexed(path: str) -> str:
    """The path of an array, or the pattern of several, with `*` for every index.

    >>> unindexed("params.layers[3].w"), unindexed("params.layers[*].w"), unindexed("p.layers.*.w")
    ('params.layers*.w', 'params.layers*.w', 'p.layers.*.w')
    """
    return _INDEX.sub("*", path.replace("*", "0"))


def unranged(path: str) -> str:
    """The path of an array, given that of some of its rows.

    >>> unranged("params.layers.w[0:4]")
    'params.layers.w'
    """
    return _ROWS.sub("", path)
