"""Parser of the groups of devices that communicate in a collective instruction.

XLA writes groups as lists, as a grid of numbers with its dims reordered, or as axes of a mesh of
its own.
"""

from __future__ import annotations

import math
import re

import numpy as np

_GROUPS = re.compile(
    r"replica_groups=(\{\{[\d,{} ]*\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[^\)]*\)?)\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def device_groups(line: str, num_devices: int) -> list[list[int]]:
    """Groups of devices that communicate in a collective instruction; pairs for a permutation.

    >>> device_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [[0, 2], [1, 3]]
    >>> device_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}", 4)
    [[0, 2], [1, 3]]
    """
    pairs = _PAIRS.search(line)
    if pairs:
        return _listed(pairs.group(1))
    on_mesh = _MESH_GROUPS.search(line)
    if on_mesh:
        return _mesh_groups(*on_mesh.groups())
    groups = _GROUPS.search(line)
    if groups is None or groups.group(1) == "{}":
        # No groups, or empty ones: all devices communicate.
        return [list(range(num_devices))]
    text = groups.group(1)
    if text.startswith("{"):
        return _listed(text[1:-1])
    # `[groups, members]<=[dims]T(order)`: numbers in a grid, its dims reordered, read row by row.
    lead, _, tail = text.partition("<=")
    count, members = (
        (int(n) for n in lead[1:-1].split(",")) if "," in lead else (1, int(lead[1:-1]))
    )
    dims_text, _, order_text = tail.partition("T")
    dims = [int(n) for n in dims_text[1:-1].split(",")]
    order = [int(n) for n in order_text[1:-1].split(",")] if order_text else list(range(len(dims)))
    numbers = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    rows: list[list[int]] = numbers.reshape(count, members).tolist()
    return rows


def _listed(text: str) -> list[list[int]]:
    found: list[list[int]] = []
    for part in re.findall(r"\{([\d, ]*)\}", text):
        found.append([int(n) for n in part.split(",") if n.strip()])
    return found


def _mesh_groups(mesh: str, order: str | None, axes: str) -> list[list[int]]:
    """Groups along some axes of a mesh: `'a'=2,'b'=2`, how its devices are ordered, and `'a'`."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    devices = _device_order(order, math.prod(sizes.values()))
    # An axis may take part with a factor of its own only: `'x':(2)4` is the middle of 2 x 4 x rest.
    parts: list[tuple[int, bool]] = []
    moving = {
        name: (int(before or 1), int(size or 0)) for name, before, size in _GROUP_AXIS.findall(axes)
    }
    for name, size in sizes.items():
        if name not in moving:
            parts.append((size, False))
            continue
        before, extent = moving[name]
        extent = extent or size
        parts += [(before, False), (extent, True), (size // (before * extent), False)]
    grid = devices.reshape([size for size, _ in parts])
    last = [axis for axis, (_, moves) in enumerate(parts) if moves]
    groups = np.moveaxis(grid, last, range(grid.ndim - len(last), grid.ndim))
    members: list[list[int]] = groups.reshape(
        -1, math.prod(parts[axis][0] for axis in last)
    ).tolist()
    return members


def _device_order(text: str | None, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Devices in the order of the compiler's mesh: `[4,2]T(1,0)` is a grid of 4 x 2 numbers,
    transposed.
    """
    numbers = np.arange(count)
    if not text:
        return numbers
    dims, _, order = text.partition("T")
    grid = numbers.reshape([int(n) for n in re.findall(r"\d+", dims)])
    axes = [int(n) for n in re.findall(r"\d+", order)]
    return (grid.transpose(axes) if axes else grid).reshape(-1)
