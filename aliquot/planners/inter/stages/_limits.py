"""The furthest ends of stages under limits on time and memory, and lower bounds that need no
search; and range minima over many rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....cost import Chain, PrefixSums
from ....plans import ClosedForm

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Differences of prefix sums are rounded: a stage whose own time is used as the limit must still
# keep within it.
_ROUNDING = 1e-12


class RunMinima:
    """Minima over fixed runs along the last axis, for many arrays of one shape (range-minimum
    queries).

    Args:
        shape: the shape of the arrays.
        first, last: the runs, both ends included; they broadcast to [..., the shape of the rows,
            runs].
    """

    def __init__(self, shape: tuple[int, ...], first: Ints, last: Ints) -> None:
        count = shape[-1]
        self._rows = math.prod(shape[:-1])
        self._count = count
        self._levels = max(count.bit_length(), 1)
        length = last - first + 1
        logarithms = (
            _LOGARITHMS if count < len(_LOGARITHMS) else np.frexp(np.arange(count + 1))[1] - 1
        )
        level = logarithms[np.maximum(length, 1)]
        base = (np.arange(self._rows) * count).reshape(*shape[:-1], 1) + level * (
            self._rows * count
        )
        self._low = base + np.minimum(first, last)
        self._high = np.maximum(base + last - (1 << level) + 1, 0)
        self._empty = length <= 0

    def of(self, values: Floats) -> Floats:
        """The minimum of each run, in O(n log n) for all together; infinite for empty runs."""
        # tables[k] holds minima over 2**k neighbours; two of them, which may overlap, cover a run.
        tables = np.empty((self._levels, self._rows, self._count))
        tables[0] = values.reshape(self._rows, self._count)
        for k in range(1, self._levels):
            step = 1 << (k - 1)
            tables[k] = tables[k - 1]
            np.minimum(tables[k - 1, :, :-step], tables[k - 1, :, step:], out=tables[k, :, :-step])
        flat = tables.reshape(-1)
        minima: Floats = np.minimum(flat.take(self._low), flat.take(self._high))
        np.copyto(minima, np.inf, where=self._empty)
        return minima


_LOGARITHMS = (np.frexp(np.arange(4096))[1] - 1).astype(np.int64)


def last_within(sums: Floats, limit: Floats) -> Ints:
    """For each option o and first unit i, the largest j with `sums[o, j] - sums[o, i] <= limit[...,
    o, i]`; i if there is none.

    Args:
        sums: prefix sums, [O, U + 1].
        limit: [..., O, U].
    """
    start = sums[:, :-1]
    reach = start + limit + _ROUNDING * (np.abs(limit) + start)
    ends = np.stack(
        [np.searchsorted(row, reach[..., o, :], side="right") - 1 for o, row in enumerate(sums)],
        axis=-2,
    )
    return np.maximum(ends, np.arange(start.shape[1]))


def last_true(
    shape: tuple[int, ...], count: int, holds: Callable[[Ints], NDArray[np.bool_]]
) -> Ints:
    """The largest j in [i, count] for which `holds` is true, by bisection; i if it never is.
    `holds` must be monotone: true up to some j, false beyond.

    Args:
        shape: of the result; its last axis is the beginning i, 0 to count - 1.
        holds: takes ends j > i of that shape.
    """
    starts = np.broadcast_to(np.arange(shape[-1]), shape)
    low, high = starts.copy(), np.full(shape, count)
    while (low < high).any():
        middle = (low + high + 1) // 2
        good = holds(np.maximum(middle, starts + 1)) | (low == high)
        low, high = np.where(good, middle, low), np.where(good, high, middle - 1)
    return low


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reach:
    """The furthest ends of stages under limits on a closed form's maxima.

    Attributes:
        ends: [T, O, U], the largest end of a stage for each of T tables of the transfer into it; T
            is 1 if transfers do not count towards the time of a stage.
        blocked: [T', U], infinite where the transfer itself takes longer than a limit, else 0.
    """

    ends: Ints
    blocked: Floats


def reach_within(
    chain: Chain,
    tables: PrefixSums,
    form: ClosedForm,
    limits_s: Sequence[float],
    transfers_s: Floats,
    options: Ints,
) -> Reach:
    """The furthest ends of stages whose figures keep within limits, one limit for each maximum of
    the form.

    Args:
        transfers_s: [T, U], the transfer into a stage that begins at a unit, in one direction.
        options: the only options that stages may run with.
    """
    reached = tables.last_end[options][None]
    blocked = np.zeros(transfers_s.shape)
    for term, limit in zip(form.maxima, limits_s):
        if np.isinf(limit):
            continue
        remaining_s = np.full((1, 1, 1), limit)
        if chain.overlaps_transfers:
            blocked[term.link * transfers_s > limit * (1 + 1e-12)] = np.inf
        elif term.transfers:
            remaining_s = limit - term.transfers * transfers_s[:, None, :]
        shape = (remaining_s.shape[0], *reached.shape[1:])
        within = last_within(term.sums[options], np.broadcast_to(remaining_s, shape))
        reached = np.minimum(reached, within)
    ends = np.tile(np.arange(chain.num_units), (len(reached), len(tables.last_end), 1))
    ends[:, options] = reached
    return Reach(ends=ends, blocked=blocked)


def memory_ends(
    chain: Chain,
    tables: PrefixSums,
    options: Ints,
    in_flight: Sequence[float],
    limit_bytes: float,
    chunks: int = 1,
) -> Ints:
    """[len(in_flight), len(options), U], the furthest end of a stage that begins at a unit and fits
    in memory with so many micro-batches in flight.
    """
    num_kept = np.array(in_flight, np.float64)[:, None, None]
    rows = options[:, None]
    starts = np.arange(chain.num_units)

    def fits(ends: Ints) -> NDArray[np.bool_]:
        return tables.stage_bytes(rows, starts, ends, num_kept, chunks) <= limit_bytes

    return last_true((len(num_kept), len(options), chain.num_units), chain.num_units, fits)


def simple_lows(
    chain: Chain, tables: PrefixSums, form: ClosedForm, num_places: float
) -> tuple[float, list[float]]:
    """Lower bounds of a form's sum and of each maximum, over all stages.

    The device-seconds of a stage are at least those of its units' cheapest options, and in every
    plan some stage takes at least the average over all devices.

    Args:
        num_places: number of devices, each counted once for every stage that runs on it.
    """
    runs = tables.last_end > np.arange(chain.num_units)
    counts = chain.device_counts()[:, None]

    def least(sums: Floats, times: Ints | int) -> float:
        return float(np.where(runs, np.diff(sums, axis=1) * times, np.inf).min(axis=0).sum())

    return least(form.sums, 1), [least(term.sums, counts) / num_places for term in form.maxima]
