"""Interleaved stages: several rounds over equal submeshes, so that only units and options are left to decide."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....cost import Chain, StageChoice, Stretches, chain_in_flight, measure_form, schedule_form
from ._boxes import Found
from ._limits import memory_ends, reach_within, simple_lows
from ._tables import Floats, Ints, RunMinima

_SCHEDULE = "interleaved-1f1b"


class RoundsProgram:
    """The least sum of the interleaved closed form for a number of submeshes and of chunks on each."""

    def __init__(self, chain: Chain, tables: Stretches, *, num_submeshes: int, chunks: int, limit_bytes: float) -> None:
        self.chain, self.tables = chain, tables
        self.num_submeshes, self._chunks, self._limit_bytes = num_submeshes, chunks, limit_bytes
        self.form = schedule_form(_SCHEDULE, tables, chain.num_micro_batches, chunks)
        self._size = chain.num_devices // num_submeshes
        self._options = np.flatnonzero(chain.device_counts() == self._size)
        # Of stages that keep so many micro-batches, and which of them each stage is.
        self._ends: Ints | None = None
        self._row_of = np.zeros(0, np.int64)
        self._edges_s = np.stack([self._edge_s(k) for k in range(num_submeshes)] + [np.zeros(chain.num_units)])

    @property
    def weights(self) -> list[float]:
        """Of the form's maxima."""
        return [term.weight for term in self.form.maxima]

    def lows(self) -> tuple[float, list[float]]:
        """Bounds of the sum and the maxima that need no search."""
        return simple_lows(self.chain, self.tables, self.form, self.chain.num_devices * self._chunks)

    def solve(self, limits_s: tuple[float, ...]) -> Found | None:
        """The least sum whose maxima keep within limits; None if there are no such stages."""
        units, options = self.chain.num_units, self._options
        reach = reach_within(self.chain, self.tables, self.form, limits_s, self._edges_s)
        sums = self.form.sums[options]
        count = self.num_submeshes * self._chunks
        least = np.full((count + 1, units + 1), np.inf)
        least[count, units] = 0
        steps = np.arange(units + 1)
        ends_of: list[Ints] = []
        extra_of: list[Floats] = []
        for k in range(count - 1, -1, -1):
            row = k % self.num_submeshes if k else self.num_submeshes
            ends = reach.ends[row if len(reach.ends) > 1 else 0, options]
            ends_of.append(np.minimum(ends, self._memory_ends(k)))
            extra_of.append(self.form.transfers * self._edges_s[row] + reach.blocked[row] - sums[:, :-1])
            found = RunMinima(sums.shape, steps[1:], ends_of[-1]).of(sums + least[k + 1])
            least[k, :units] = (found + extra_of[-1]).min(axis=0)
        if not np.isfinite(least[0, 0]):
            return None
        stages, unit = [], 0
        for k in range(count):
            ends, extra = ends_of[count - 1 - k][:, unit, None], extra_of[count - 1 - k][:, unit, None]
            values = np.where((steps > unit) & (steps <= ends), sums + least[k + 1] + extra, np.inf)
            o, last = (int(n) for n in np.unravel_index(values.argmin(), values.shape))
            where = k % self.num_submeshes * self._size
            stages.append(StageChoice(first_unit=unit, last_unit=last, option=int(options[o]), first_device=where))
            unit = last
        sum_s, maxima_s = measure_form(self.chain, self.form, stages)
        return Found(stages=tuple(stages), sum_s=sum_s, maxima_s=maxima_s)

    def _edge_s(self, submesh: int) -> Floats:
        """[U], one way over the edge in front of a submesh, which for the first is that from the last one."""
        chain, first = self.chain, submesh * self._size
        same_host = submesh > 0 and (first - 1) // chain.devices_per_host == first // chain.devices_per_host
        crosses = chain.num_hosts > 1 and not same_host
        edge = np.zeros(chain.num_units)
        edge[1:] = chain.transfer_s(chain.boundary_bytes[:-1], self._size, self._size, crosses)
        return edge

    def _memory_ends(self, stage: int) -> Ints:
        # Most programs are ruled out before they are searched; a list of tasks would be too much for them.
        if self._ends is None:
            count = self.num_submeshes * self._chunks
            kept = chain_in_flight(_SCHEDULE, self.chain.num_micro_batches, count, self.num_submeshes)
            distinct, self._row_of = np.unique(kept, return_inverse=True)
            self._ends = memory_ends(
                self.chain, self.tables, self._options, distinct.tolist(), self._limit_bytes, self._chunks
            )
        found: Ints = self._ends[self._row_of[stage]]
        return found


def round_counts(chain: Chain, num_stages: int | None, most_chunks: int) -> Iterator[tuple[int, int]]:
    """(number of submeshes, chunks on each), at least two of both, for which the chain has units and options."""
    sizes = set(chain.device_counts().tolist())
    for submeshes in range(2, chain.num_devices + 1):
        size, rest = divmod(chain.num_devices, submeshes)
        if rest or size not in sizes or not all(chain.fits_at(k * size, size) for k in range(submeshes)):
            continue
        for chunks in range(2, min(most_chunks, chain.num_units // submeshes) + 1):
            if num_stages in (None, submeshes * chunks):
                yield submeshes, chunks
