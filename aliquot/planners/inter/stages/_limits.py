"""The furthest ends of stages under limits on time and memory, and lower bounds that need no
search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....cost import Chain, PrefixSums
from ....plans import ClosedForm
from ._tables import Floats, Ints, last_true, last_within


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
