"""Interleaved stages: several rounds over equal submeshes, so that only units and options are
chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....cost import Chain, PrefixSums, StageChoice, chain_in_flight, evaluate_form
from ....plans import schedule_kind
from ._boxes import StageSolution
from ._limits import Floats, Ints, RunMinima, memory_ends, reach_within, simple_lows


class RoundsProgram:
    """The dynamic program that minimises the sum of an interleaved schedule's closed form, for a
    given number of submeshes and of chunks on each.
    """

    proves = True

    def __init__(
        self,
        chain: Chain,
        tables: PrefixSums,
        schedule: str,
        *,
        num_submeshes: int,
        chunks: int,
        limit_bytes: float,
    ) -> None:
        self.chain, self.tables, self.schedule = chain, tables, schedule
        self.num_submeshes, self._chunks, self._limit_bytes = num_submeshes, chunks, limit_bytes
        kind = schedule_kind(schedule)
        self.form = kind.closed_form(tables, chain.num_micro_batches, chunks)
        self._placement = kind.placement(num_submeshes * chunks, num_submeshes)
        self._size = chain.num_devices // num_submeshes
        self._options = np.flatnonzero(chain.device_counts() == self._size)
        # Furthest ends, a row for each distinct number of micro-batches in flight, and the row of
        # each stage.
        self._ends: Ints | None = None
        self._row_of = np.zeros(0, np.int64)
        # Stages with the same submesh and the same submesh before them share a row.
        rows = {(-1, 0): np.zeros(chain.num_units)}
        pairs = [(-1, 0), *zip(self._placement, self._placement[1:])]
        for pair in pairs[1:]:
            if pair not in rows:
                rows[pair] = self._edge_s(*pair)
        self._edge_row = [list(rows).index(pair) for pair in pairs]
        self._edges_s = np.stack(list(rows.values()))
        # Number of table entries computed so far.
        self.work = 0

    @property
    def weights(self) -> list[float]:
        """The weights of the form's maxima."""
        return [term.weight for term in self.form.maxima]

    def lows(self) -> tuple[float, list[float]]:
        """Lower bounds on the form's sum and on its maxima that need no search."""
        return simple_lows(
            self.chain, self.tables, self.form, self.chain.num_devices * self._chunks
        )

    def solve(self, limits_s: tuple[float, ...]) -> StageSolution | None:
        """The stages of least sum whose maxima keep within limits; None if there are none."""
        units, options = self.chain.num_units, self._options
        reach = reach_within(self.chain, self.tables, self.form, limits_s, self._edges_s, options)
        sums = self.form.sums[options]
        count = self.num_submeshes * self._chunks
        least = np.full((count + 1, units + 1), np.inf)
        least[count, units] = 0
        steps = np.arange(units + 1)
        ends_of: list[Ints] = []
        extra_of: list[Floats] = []
        for k in range(count - 1, -1, -1):
            row = self._edge_row[k]
            ends = reach.ends[row if len(reach.ends) > 1 else 0, options]
            ends_of.append(np.minimum(ends, self._memory_ends(k)))
            extra_of.append(
                self.form.transfers * self._edges_s[row] + reach.blocked[row] - sums[:, :-1]
            )
            minima = RunMinima(sums.shape, steps[1:], ends_of[-1]).of(sums + least[k + 1])
            self.work += sums.size
            least[k, :units] = (minima + extra_of[-1]).min(axis=0)
        if not np.isfinite(least[0, 0]):
            return None
        stages, unit = [], 0
        for k in range(count):
            ends, extra = (
                ends_of[count - 1 - k][:, unit, None],
                extra_of[count - 1 - k][:, unit, None],
            )
            values = np.where((steps > unit) & (steps <= ends), sums + least[k + 1] + extra, np.inf)
            o, last = (int(n) for n in np.unravel_index(values.argmin(), values.shape))
            first_device = self._placement[k] * self._size
            stages.append(
                StageChoice(
                    first_unit=unit,
                    last_unit=last,
                    option=int(options[o]),
                    first_device=first_device,
                )
            )
            unit = last
        sum_s, maxima_s = evaluate_form(self.chain, self.form, stages)
        return StageSolution(stages=tuple(stages), sum_s=sum_s, maxima_s=maxima_s)

    def _edge_s(self, sender: int, receiver: int) -> Floats:
        """[U], the transfer from one submesh to another, in one direction, with a cut before each
        unit.
        """
        chain, size = self.chain, self._size
        if sender == receiver:
            return np.zeros(chain.num_units)
        ends = set()
        for submesh in (sender, receiver):
            for k in (0, size - 1):
                ends.add((submesh * size + k) // chain.devices_per_host)
        crosses = len(ends) > 1
        edge = np.zeros(chain.num_units)
        edge[1:] = chain.transfer_s(chain.boundary_bytes[:-1], size, size, crosses)
        return edge

    def _memory_ends(self, stage: int) -> Ints:
        # Computed only when it is needed: most programs are pruned before they are searched.
        if self._ends is None:
            count = self.num_submeshes * self._chunks
            in_flight = chain_in_flight(
                self.schedule, self.chain.num_micro_batches, count, self.num_submeshes
            )
            distinct, self._row_of = np.unique(in_flight, return_inverse=True)
            self._ends = memory_ends(
                self.chain,
                self.tables,
                self._options,
                distinct.tolist(),
                self._limit_bytes,
                self._chunks,
            )
        ends: Ints = self._ends[self._row_of[stage]]
        return ends


def round_counts(
    chain: Chain, num_stages: int | None, most_chunks: int
) -> Iterator[tuple[int, int]]:
    """Pairs (number of submeshes, chunks on each), at least two of both, for which the chain has
    enough units, and options of that size.
    """
    sizes = set(chain.device_counts().tolist())
    for submeshes in range(2, chain.num_devices + 1):
        size, remainder = divmod(chain.num_devices, submeshes)
        if (
            remainder
            or size not in sizes
            or not all(chain.fits_at(k * size, size) for k in range(submeshes))
        ):
            continue
        for chunks in range(2, min(most_chunks, chain.num_units // submeshes) + 1):
            if num_stages in (None, submeshes * chunks):
                yield submeshes, chunks
