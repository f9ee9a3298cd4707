"""Bounds from the total work of operators, however it is divided among stages: the least work of
all devices, the places where stages can meet, and the most operators of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ._space import Floats, StageSpace


def least_work(spaces: Mapping[int, StageSpace]) -> tuple[Floats, Floats]:
    """Rates in microseconds per MiB, and for each rate and operator the least cost for one
    micro-batch: its time summed over its devices, plus its memory on all of them at that rate.

    Every stage is taken to hold one micro-batch, the fewest possible, and each operator has its own
    best choice.
    """
    kinds = next(iter(spaces.values())).kinds
    low, high = rate_range(spaces)
    rates = np.concatenate([[0.0], np.geomspace(low, high, 12)])
    by_rate = rates[:, None, None]
    least = np.full((len(rates), len(next(iter(spaces.values())).busy_us)), np.inf)
    for n, space in spaces.items():
        held = by_rate * (space.state_copies * space.weights_mb + space.kept_mb)
        again = space.again_us + by_rate * (space.state_copies * space.weights_mb)
        device_us = n * (space.busy_us + np.minimum(held, again))
        least = np.minimum(least, np.where(space.valid, device_us, np.inf).min(axis=-1))
    return rates, least[:, kinds]


def spread_evenly_us(
    spaces: Mapping[int, StageSpace], *, num_devices: int, memory_limit_mb: float
) -> float:
    """A lower bound on the device time of one micro-batch, summed over all devices, if only the sum
    of their memory is limited. The limit is relaxed by a Lagrange multiplier, as in `_tables.py`.
    """
    rates, least = least_work(spaces)
    return float((least.sum(axis=1) - rates * num_devices * memory_limit_mb).max())


def possible_cuts(
    spaces: Mapping[int, StageSpace], *, num_devices: int, memory_limit_mb: float, stage_us: float
) -> NDArray[np.bool_]:
    """For each number of devices before a cut and each place in the chain, whether stages that all
    take at most `stage_us` for one micro-batch can have such a cut.

    The devices on either side must have the time and the memory for the operators on that side.
    """
    rates, least = least_work(spaces)
    num = least.shape[1]
    before = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(least, axis=1)], axis=1)
    # If there is no limit on stages, take one that none exceeds.
    stage_us = min(stage_us, float(before[:, -1].max()) + 1)
    room = (
        np.arange(num_devices + 1)[:, None, None]
        * (stage_us + rates * memory_limit_mb)[:, None]
        * (1 + 1e-9)
    )
    places: NDArray[np.bool_] = (before <= room).all(axis=1) & (
        before[:, -1:] - before <= room[::-1]
    ).all(axis=1)
    places[0], places[-1] = np.arange(num + 1) == 0, np.arange(num + 1) == num
    places[1:-1, [0, num]] = False
    return places


def rate_range(spaces: Mapping[int, StageSpace]) -> tuple[float, float]:
    """The range of rates to try: microseconds of recomputation per MiB saved, from half that of the
    cheapest operators to twice that of the most expensive, without outliers.
    """
    ratios = []
    for space in spaces.values():
        is_recomputable = space.valid & (space.kept_mb > 0) & (space.again_us > 0)
        ratios.append(space.again_us[is_recomputable] / space.kept_mb[is_recomputable])
    all_ratios = np.concatenate(ratios)
    if not len(all_ratios):
        return 1.0, 100.0
    low, high = np.quantile(all_ratios, [0.05, 0.95])
    return float(low) / 2, float(high) * 2


def longest_stage(space: StageSpace, stage_ceiling_us: float) -> int:
    """The most operators of a stage that takes less than the ceiling."""
    num = len(space.kinds)
    if not np.isfinite(stage_ceiling_us):
        return num
    sums = np.concatenate([[0.0], np.cumsum(space.busy_us.min(axis=1)[space.kinds])])
    ends = np.searchsorted(sums, sums[:-1] + stage_ceiling_us, side="right") - 1
    lengths: NDArray[np.int64] = ends - np.arange(num)
    return max(int(lengths.max()), 1)
