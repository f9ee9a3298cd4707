"""Removal of dominated partial stages: those for which there is another that is no worse in time,
memory and everything else that counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ._space import Floats

# Differences of up to so many microseconds or MiB are rounding errors.
TOLERANCE = 1e-9

_BLOCK = 256


def undominated(labels: Floats, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the labels that no other label of their group dominates.

    Args:
        labels: a row for each, sorted by time; the columns are time, memory, and further
            quantities.
    """
    survivors: list[NDArray[np.int64]] = []
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        quantities = labels[members, 1:]
        varies = quantities[:, 1:].max(axis=0) - quantities[:, 1:].min(axis=0) > TOLERANCE
        if not varies.any():
            memory = quantities[:, 0]
            before = np.minimum.accumulate(memory)
            survivors.append(members[np.append(True, memory[1:] < before[:-1] - TOLERANCE)])
            continue
        columns = [quantities[:, 0], *quantities[:, 1:].T[varies]]
        # Positions of points that no earlier point dominates; in blocks, so that few are compared
        # at a time.
        points = np.stack(columns)
        kept: NDArray[np.int64] = np.zeros(0, np.int64)
        for start in range(0, points.shape[1], _BLOCK):
            candidates = np.arange(start, min(start + _BLOCK, points.shape[1]))
            if len(kept):
                beaten = _none_greater(points[:, kept], points[:, candidates]).any(axis=0)
                candidates = candidates[~beaten]
            among = _none_greater(points[:, candidates], points[:, candidates])
            candidates = candidates[~np.triu(among, 1).any(axis=0)]
            kept = np.concatenate([kept, candidates])
        survivors.append(members[kept])
    return np.sort(np.concatenate(survivors))


def _none_greater(these: Floats, those: Floats) -> NDArray[np.bool_]:
    """For every pair, whether no coordinate of the first exceeds that of the second.

    It compares one coordinate after another: a reduction over so short an axis would take several
    times as long.
    """
    result = np.ones((these.shape[1], those.shape[1]), bool)
    for left, right in zip(these, those + TOLERANCE, strict=True):
        result &= left[:, None] <= right
    return result
