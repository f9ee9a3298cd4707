"""Range minima over many rows at once, and ends of stages that grow until they exceed a limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Sums are differences of prefix sums: a value put in as a limit must pass it again.
_ROUNDING = 1e-12


class RangeMinimum:
    """The least of any run of entries along the last axis, in constant time after O(n log n)."""

    def __init__(self, values: Floats) -> None:
        rows, count = values.size // values.shape[-1], values.shape[-1]
        levels = max(count.bit_length(), 1)
        tables = np.empty((levels, rows, count))
        tables[0] = values.reshape(rows, count)
        for k in range(1, levels):
            step = 1 << (k - 1)
            tables[k] = tables[k - 1]
            np.minimum(tables[k - 1, :, :-step], tables[k - 1, :, step:], out=tables[k, :, :-step])
        self._flat = tables.reshape(-1)
        self._level_stride = rows * count
        self._starts = (np.arange(rows) * count).reshape(*values.shape[:-1], 1)
        self._log = _LOGARITHMS if count < len(_LOGARITHMS) else np.frexp(np.arange(count + 1))[1] - 1

    def of(self, first: Ints, last: Ints) -> Floats:
        """The least of entries first to last, both included; infinite where first > last.

        Shapes broadcast to [..., the shape of the rows, queries].
        """
        length = last - first + 1
        level = self._log[np.maximum(length, 1)]
        base = self._starts + level * self._level_stride
        low = self._flat.take(base + np.minimum(first, last), mode="clip")
        high = self._flat.take(base + last - (1 << level) + 1, mode="clip")
        return np.where(length > 0, np.minimum(low, high), np.inf)


_LOGARITHMS = (np.frexp(np.arange(4096))[1] - 1).astype(np.int64)


def last_within(sums: Floats, limit: Floats) -> Ints:
    """For each option and beginning i the largest j with `sums[o, j] - sums[o, i] <= limit[..., o, i]`; i if none is.

    Args:
        sums: prefix sums, [O, U + 1].
        limit: [..., O, U].
    """
    start = sums[:, :-1]
    reach = start + limit + _ROUNDING * (np.abs(limit) + start)
    found = np.stack([np.searchsorted(row, reach[..., o, :], side="right") - 1 for o, row in enumerate(sums)], axis=-2)
    return np.maximum(found, np.arange(start.shape[1]))


def last_true(shape: tuple[int, ...], count: int, holds: Callable[[Ints], NDArray[np.bool_]]) -> Ints:
    """By bisection, the largest j in [i, count] for which `holds`, which is true up to it; i where it never is.

    Args:
        shape: of the answer; its last axis is the beginning i, 0 to count - 1.
        holds: takes ends j > i of that shape.
    """
    starts = np.broadcast_to(np.arange(shape[-1]), shape)
    low, high = starts.copy(), np.full(shape, count)
    while (low < high).any():
        middle = (low + high + 1) // 2
        good = holds(np.maximum(middle, starts + 1)) | (low == high)
        low, high = np.where(good, middle, low), np.where(good, high, middle - 1)
    return low
