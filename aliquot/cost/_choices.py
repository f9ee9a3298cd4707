"""Choices of a node on a mesh, as arrays."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..sharding import REPLICATED, Choice, Node, Projection, Spec

# Entries up to which the results for an array of choices are cached.
_FEW = 1 << 10


def enumerate_choices(node: Node, axis_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Every way to give each mesh axis one factor of a node or none, shape `(choices, axes)`.

    A factor may take several axes if their product divides its size. The first choice splits
    nothing.
    """
    return _enumerate(tuple([factor.size for factor in node.factors]), tuple(axis_sizes))


# Many nodes have factors of the same sizes.
@functools.lru_cache(maxsize=1 << 12)
def _enumerate(sizes: tuple[int, ...], axis_sizes: tuple[int, ...]) -> NDArray[np.int64]:
    fitting = [
        # Every axis size divides a factor of size 0, which is too small to give each device a part.
        [-1, *(f for f, n in enumerate(sizes) if n % size == 0 and n >= size)]
        for size in axis_sizes
    ]
    fitting_choices = [c for c in itertools.product(*fitting) if _divides(sizes, c, axis_sizes)]
    choices = np.array(fitting_choices, np.int64).reshape(len(fitting_choices), len(axis_sizes))
    # The arrays are shared by many nodes through the cache.
    choices.flags.writeable = False
    return choices


def can_split(node: Node, choice: Choice, axis_sizes: Sequence[int]) -> bool:
    """True if a choice is one of those that `enumerate_choices` lists."""
    sizes = [factor.size for factor in node.factors]
    return all(-1 <= f < len(sizes) for f in choice) and _divides(sizes, choice, axis_sizes)


def _divides(sizes: Sequence[int], choice: Choice, axis_sizes: Sequence[int]) -> bool:
    return all(
        sizes[f] % math.prod(size for g, size in zip(choice, axis_sizes, strict=True) if g == f)
        == 0
        for f in set(choice)
        if f >= 0
    )


def shards(
    choices: NDArray[np.int64], split_by: Sequence[bool], axis_sizes: Sequence[int]
) -> NDArray[np.float64]:
    """For each choice, the number of shards of an array that the factors in `split_by` divide. The
    result may be cached: do not write to it.
    """
    # Hashing a large array would cost more than the computation.
    if choices.size > _FEW:
        return _shards(choices, split_by, axis_sizes)
    return _known_shards(choices.tobytes(), choices.shape, tuple(split_by), tuple(axis_sizes))


def _shards(
    choices: NDArray[np.int64], split_by: Sequence[bool], axis_sizes: Sequence[int]
) -> NDArray[np.float64]:
    # The last entry stands for -1, the choice that splits nothing.
    divides = np.array([*split_by, False])
    return np.asarray(np.prod(np.where(divides[choices], axis_sizes, 1.0), axis=1), np.float64)


# Many nodes have the same choices, and the same of their factors divide their arrays.
@functools.lru_cache(maxsize=1 << 14)
def _known_shards(
    choices_of_int64: bytes,
    shape: tuple[int, ...],
    split_by: tuple[bool, ...],
    axis_sizes: tuple[int, ...],
) -> NDArray[np.float64]:
    counts = _shards(np.frombuffer(choices_of_int64, np.int64).reshape(shape), split_by, axis_sizes)
    counts.flags.writeable = False
    return counts


def joined_axes(
    choices: NDArray[np.int64], factors: Sequence[int]
) -> Sequence[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """The sets of axes along which choices split any of `factors`, each with the positions of the
    choices that do so; without the empty set.
    """
    return _joined_axes(choices.tobytes(), choices.shape, tuple(factors))


@functools.lru_cache(maxsize=1 << 12)
def _joined_axes(
    choices_of_int64: bytes, shape: tuple[int, ...], factors: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], NDArray[np.int64]], ...]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(shape)
    joined = np.isin(choices, np.array(factors))
    joined_tuples = []
    for pattern in np.unique(joined, axis=0):
        axes = tuple(int(a) for a in np.flatnonzero(pattern))
        if axes:
            joined_tuples.append((axes, np.flatnonzero((joined == pattern).all(axis=1))))
    return tuple(joined_tuples)


def distinct_specs(
    choices: NDArray[np.int64], projection: Projection
) -> tuple[tuple[Spec, ...], NDArray[np.int64]]:
    """The distinct specs that choices give an array, and for each choice the position of its spec.
    Results are cached: do not write to them.
    """
    return _distinct_specs(choices.tobytes(), choices.shape[1], projection)


# Cached, because meshes of different sizes often allow the same choices.
@functools.lru_cache(maxsize=1 << 14)
def _distinct_specs(
    choices_of_int64: bytes, num_axes: int, projection: Projection
) -> tuple[tuple[Spec, ...], NDArray[np.int64]]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(-1, num_axes)
    table = np.array([*projection, REPLICATED], np.int64)
    rows = table[choices]
    # Encode each row as one number that keeps the order of the rows: sorting these numbers is ten
    # times faster than sorting the rows.
    least, base = int(table.min()), int(np.ptp(table)) + 1
    numbers = (rows - least) @ base ** np.arange(rows.shape[1] - 1, -1, -1)
    _, first, index = np.unique(numbers, return_index=True, return_inverse=True)
    return tuple(tuple(row) for row in rows[first].tolist()), np.asarray(index, np.int64)
