"""Split of one array over a mesh: one placement for each mesh axis.

A placement is a dim (the axis splits that dim), `REPLICATED` (all devices along the axis hold the
same), or `PARTIAL` (each device holds a summand of the array). Numbers below `PARTIAL` are partial
sums too: a product that sums over several dims gives each its own, as compilers that do not merge
reductions reduce them one by one. Where several axes split one dim, the axis that comes first in
the mesh is the major one: the order is canonical, so that two ways to write one split cannot
differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

REPLICATED = -1
PARTIAL = -2

Spec: TypeAlias = tuple[int, ...]
"""One placement per mesh axis: a dim, `REPLICATED`, or `PARTIAL` and below."""


def dims_of(
    spec: Spec, axis_names: Sequence[str], rank: int, minor: Collection[int] = ()
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each dim, as a `jax.sharding.PartitionSpec` lists them; the axes
    `minor` stand last.

    >>> dims_of((0, -1, 0), ("x", "y", "z"), 2)
    (('x', 'z'), ())
    >>> dims_of((0, -1, 0), ("x", "y", "z"), 2, minor=(0,))
    (('z', 'x'), ())
    """
    order = cutting_order(len(spec), minor)
    return tuple(tuple(axis_names[a] for a in order if spec[a] == dim) for dim in range(rank))


def cutting_order(num_axes: int, minor: Collection[int]) -> list[int]:
    """Mesh axes, major ones first: in the mesh's order, but with the axes `minor`, which subdivide
    tiles last, at the end.
    """
    return sorted(range(num_axes), key=lambda a: (a in minor, a))


def spec_from_dims(
    dims: Sequence[Sequence[str]], axis_names: Sequence[str], partial: Sequence[str] = ()
) -> Spec:
    """The reverse of `dims_of`, with the axes along which the array is a partial sum."""
    placements = []
    for name in axis_names:
        dim = next((d for d, axes in enumerate(dims) if name in axes), REPLICATED)
        placements.append(PARTIAL if name in partial else dim)
    return tuple(placements)


def num_shards(spec: Spec, axis_sizes: Sequence[int]) -> int:
    """Number of different pieces into which an array is cut; partial sums and copies do not
    count.
    """
    return math.prod(
        size for size, placement in zip(axis_sizes, spec, strict=True) if placement >= 0
    )


def differing_dims(shape: Sequence[int], other: Sequence[int]) -> list[int]:
    """The dims in which two shapes of one rank differ."""
    return [d for d, (a, b) in enumerate(zip(shape, other, strict=True)) if a != b]


def divides(shape: Sequence[int], spec: Spec, axis_sizes: Sequence[int]) -> bool:
    """True if every dim is a multiple of the axes that split it."""
    shards = [1] * len(shape)
    for size, placement in zip(axis_sizes, spec, strict=True):
        if placement >= 0:
            # Uneven shards are not planned: XLA pads them, and `jax.jit` refuses them for
            # arguments.
            shards[placement] *= size
    return all(dim % count == 0 for dim, count in zip(shape, shards, strict=True))


def without_partial(spec: Spec) -> Spec:
    """The same split with partial sums summed up."""
    return tuple(REPLICATED if placement <= PARTIAL else placement for placement in spec)


def without_axes(spec: Spec, axes: Collection[int]) -> Spec:
    """The same split with nothing split over some axes, given by position.

    >>> without_axes((0, 1), {1})
    (0, -1)
    """
    return tuple(REPLICATED if a in axes else placement for a, placement in enumerate(spec))


def format_spec(spec: Spec, axis_names: Sequence[str], rank: int) -> str:
    """A spec as a reader writes it: `[x, -, y+z]`, with `+y` behind it for a partial sum over y."""
    dims = ", ".join("+".join(axes) or "-" for axes in dims_of(spec, axis_names, rank))
    partial = "".join(n for n, p in zip(axis_names, spec, strict=True) if p <= PARTIAL)
    return f"[{dims}]" + (f"+{partial}" if partial else "")


def axes_of(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split a dim, from its entry in a `jax.sharding.PartitionSpec`."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())
