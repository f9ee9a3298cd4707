"""All choices of a node on a mesh, as arrays."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..sharding import REPLICATED, Choice, Node, Projection, Spec


def enumerate_choices(node: Node, axis_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Every way to give each mesh axis one factor of a node or none, shape `(choices, axes)`.

    A factor may take several axes if their product divides its size. The first choice splits nothing.
    """
    fitting = [
        [-1, *(f for f, factor in enumerate(node.factors) if factor.size % size == 0 and factor.size >= size)]
        for size in axis_sizes
    ]
    found = [c for c in itertools.product(*fitting) if _divides(node, c, axis_sizes)]
    return np.array(found, np.int64).reshape(len(found), len(axis_sizes))


def can_split(node: Node, choice: Choice, axis_sizes: Sequence[int]) -> bool:
    """Whether a choice is one of those that `enumerate_choices` lists."""
    return all(-1 <= f < len(node.factors) for f in choice) and _divides(node, choice, axis_sizes)


def _divides(node: Node, choice: Choice, axis_sizes: Sequence[int]) -> bool:
    return all(
        node.factors[f].size % math.prod(size for g, size in zip(choice, axis_sizes, strict=True) if g == f) == 0
        for f in set(choice)
        if f >= 0
    )


def shards(choices: NDArray[np.int64], split_by: Sequence[bool], axis_sizes: Sequence[int]) -> NDArray[np.float64]:
    """For each choice, into how many pieces it cuts something that the factors in `split_by` divide."""
    divides = np.array([*split_by, False])
    sizes = np.array(axis_sizes, np.float64)
    return np.asarray(np.prod(np.where(divides[choices], sizes, 1.0), axis=1), np.float64)


def distinct_specs(choices: NDArray[np.int64], projection: Projection) -> tuple[tuple[Spec, ...], NDArray[np.int64]]:
    """The different splits that choices give an array, and which one each choice gives (not to be written to)."""
    return _distinct_specs(choices.tobytes(), choices.shape[1], projection)


# Meshes of other sizes often leave the same choices.
@functools.lru_cache(maxsize=1 << 14)
def _distinct_specs(
    choices_of_int64: bytes, num_axes: int, projection: Projection
) -> tuple[tuple[Spec, ...], NDArray[np.int64]]:
    choices = np.frombuffer(choices_of_int64, np.int64).reshape(-1, num_axes)
    table = np.array([*projection, REPLICATED], np.int64)
    rows = table[choices]
    # One number for each row, in the order of the rows: to sort these is ten times faster than to sort the rows.
    least, base = int(table.min()), int(np.ptp(table)) + 1
    numbers = (rows - least) @ base ** np.arange(rows.shape[1] - 1, -1, -1)
    _, first, index = np.unique(numbers, return_index=True, return_inverse=True)
    return tuple(tuple(row) for row in rows[first].tolist()), np.asarray(index, np.int64)
