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
    rows: list[list[int]] = _grid(tail).reshape(-1, _numbers(lead)[-1]).tolist()
    return rows


def _listed(text: str) -> list[list[int]]:
    return list(map(_numbers, re.findall(r"\{([\d, ]*)\}", text)))


def _numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))


def _grid(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Numbers in a grid, its dims reordered: `[4,2]T(1,0)` is one of 4 x 2, transposed."""
    dims, _, order = text.partition("T")
    numbers = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return numbers.transpose(_numbers(order)) if order else numbers


def _mesh_groups(mesh: str, order: str | None, axes: str) -> list[list[int]]:
    """Groups along some axes of a mesh: `'a'=2,'b'=2`, how its devices are ordered, and `'a'`."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    devices = _grid(order) if order else np.arange(math.prod(sizes.values()))
    # An axis may take part with a factor of its own only: `'x':(2)4` is the middle of 2 x 4 x rest.
    parts: list[tuple[int, bool]] = []
    moving = {name: factors for name, *factors in _GROUP_AXIS.findall(axes)}
    for name, size in sizes.items():
        if name not in moving:
            parts.append((size, False))
            continue
        before, extent = moving[name]
        lead_size, moved_size = int(before or 1), int(extent or size)
        rest = size // (lead_size * moved_size)
        parts += [(lead_size, False), (moved_size, True), (rest, False)]
    grid = devices.reshape([size for size, _ in parts])
    last = [axis for axis, (_, moves) in enumerate(parts) if moves]
    groups = np.moveaxis(grid, last, range(grid.ndim - len(last), grid.ndim))
    members: list[list[int]] = groups.reshape(
        -1, math.prod(parts[axis][0] for axis in last)
    ).tolist()
    return members
