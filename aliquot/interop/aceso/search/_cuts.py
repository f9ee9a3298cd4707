"""The cuts into stages that minimise `(micro-batches - 1) * slowest + sum` of the stages' times,
which are given by tables; found by a dynamic program over suffixes of the chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ._space import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One stage: its operators `[first, last)`, number of devices, number of stages after it
    (`behind`), and index of its links among those of its number of devices.
    """

    first: int
    last: int
    num_devices: int
    behind: int
    links: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Stages in order, with the largest and the sum of their times in the table."""

    stages: tuple[Cut, ...]
    slowest_us: float
    total_us: float


class CutSearch:
    """The dynamic program over one set of tables, which may change between calls.

    Args:
        tables: for each number of devices, times of stages, indexed by number of stages after it,
            links, first operator, and length less one.
        links: for each number of devices and index of links, whether a stage is entered and left
            between nodes.
    """

    def __init__(
        self,
        tables: Mapping[int, Floats],
        links: Mapping[int, tuple[tuple[int, int], ...]],
        *,
        num_operators: int,
        num_devices: int,
        gpus_per_node: int,
        max_stages: int,
    ) -> None:
        self._tables, self._num, self._devices = tables, num_operators, num_devices
        self._steps: list[tuple[int, int, int, int]] = []
        for stages in range(1, max_stages + 1):
            for used in range(stages, num_devices + 1):
                for n in sorted(tables):
                    start, remaining = num_devices - used, used - n
                    if remaining < stages - 1 or (remaining == 0) != (stages == 1):
                        continue
                    if start // gpus_per_node != (start + n - 1) // gpus_per_node:
                        continue
                    enters = int(start > 0 and start % gpus_per_node == 0)
                    leaves = int((start + n) % gpus_per_node == 0)
                    pair = (
                        (enters, leaves) if (enters, leaves) in links[n] else (enters, 1 - leaves)
                    )
                    if pair not in links[n]:
                        pair = next(link for link in links[n] if link[1] == leaves)
                    self._steps.append((stages, used, n, links[n].index(pair)))

    def solve(
        self, micro_batches: int, *, tolerance: float = 1e-4, max_splits: int = 6
    ) -> tuple[Cuts | None, float]:
        """The best stages, and a lower bound on all in microseconds.

        Stages with slowest stage `s` and sum `t` take `(micro_batches - 1) * s + t`. One dynamic
        program gives the least sum if no stage may take longer than a bar. Intervals of bars are
        halved until the best stages are within `tolerance` of the bound.
        """
        least, _ = self._solve(np.inf, total=False)
        floor = min(
            (float(v[0]) for (_, used), v in least.items() if used == self._devices), default=np.inf
        )
        if not np.isfinite(floor):
            return None, np.inf
        weight = micro_batches - 1

        def value(cuts: Cuts) -> float:
            return weight * cuts.slowest_us + cuts.total_us

        best = self._stages(floor * (1 + 1e-12))
        free = self._stages(np.inf)
        assert best is not None and free is not None
        best = min(best, free, key=value)
        # With a slowest stage above this, no stages can be better.
        top = max((value(best) - free.total_us) / weight, floor) if weight else np.inf
        capped = self._stages(top)
        total = capped.total_us if capped is not None else np.inf
        best = min(best, capped, key=value) if capped is not None else best
        # A heap of intervals of bars: lower bound, both ends, least sum for the upper end.
        intervals = [(weight * floor + total, floor, top, total)]
        for _ in range(max_splits if weight else 0):
            bound, low, high, total = intervals[0]
            if bound >= value(best) * (1 - tolerance):
                break
            middle = (low + high) / 2
            halved = self._stages(middle)
            best = min(best, halved, key=value) if halved is not None else best
            below = halved.total_us if halved is not None else np.inf
            heapq.heapreplace(intervals, (weight * low + below, low, middle, below))
            heapq.heappush(intervals, (weight * middle + total, middle, high, total))
        return best, min(intervals[0][0], value(best))

    def _stages(self, bar: float) -> Cuts | None:
        """The stages with the least sum, none of which takes longer than `bar`; None if there are
        none.
        """
        least, chosen = self._solve(bar, total=True)
        ends = [
            (float(v[0]), key)
            for key, v in least.items()
            if key[1] == self._devices and np.isfinite(v[0])
        ]
        if not ends:
            return None
        total, (stages, used) = min(ends)
        cuts, slowest, at = [], 0.0, 0
        while stages:
            n, links, offset = chosen[stages, used][at]
            value = float(self._tables[n][stages - 1, links, at, offset])
            slowest = max(slowest, value)
            cuts.append(
                Cut(
                    first=at,
                    last=at + 1 + int(offset),
                    num_devices=int(n),
                    behind=stages - 1,
                    links=int(links),
                )
            )
            at += 1 + int(offset)
            stages, used = stages - 1, used - int(n)
        return Cuts(stages=tuple(cuts), slowest_us=slowest, total_us=total)

    def _solve(
        self, bar: float, *, total: bool
    ) -> tuple[dict[tuple[int, int], Floats], dict[tuple[int, int], Floats]]:
        """The dynamic program: by number of stages and devices, for each suffix of the chain, the
        least sum of times (the least maximum unless `total`), and the first stage that gives it.
        """
        num = self._num
        end = np.full(num + 1, np.inf)
        end[num] = 0.0
        least: dict[tuple[int, int], Floats] = {(0, 0): end}
        chosen: dict[tuple[int, int], Floats] = {}
        windows: dict[tuple[int, int, int], Floats] = {}
        for stages, used, n, links in self._steps:
            behind = least.get((stages - 1, used - n))
            if behind is None or not np.isfinite(behind).any():
                continue
            table = self._tables[n][stages - 1, links]
            width = table.shape[1]
            key = stages - 1, used - n, width
            if key not in windows:
                windows[key] = sliding_window_view(
                    np.append(behind[1:], np.full(width - 1, np.inf)), width
                )
            if total:
                values = table + windows[key]
                values[table > bar] = np.inf
            else:
                values = np.maximum(table, windows[key])
            offset = values.argmin(axis=1)
            value = values[np.arange(num), offset]
            state = (stages, used)
            if state not in least:
                least[state] = np.full(num + 1, np.inf)
                chosen[state] = np.zeros((num, 3), np.int64)
            better = value < least[state][:num]
            least[state][:num][better] = value[better]
            chosen[state][better] = np.stack(
                [np.full(num, n), np.full(num, links), offset], axis=1
            )[better]
        return least, chosen
