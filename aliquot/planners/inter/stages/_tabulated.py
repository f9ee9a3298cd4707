"""Stages from tables of quotes, for chains whose costs are not sums over units.

The chain proposes and quotes every stretch of units once, as a stage by itself, for each option and
number of micro-batches kept; transfers between stages are left out here and counted when plans are
judged. That is quick for chains of up to about a hundred units; longer ones need a planner of their
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....cost import AbstractChain, StageChoice, StageMemory
from ....plans import ClosedForm, schedule_kind
from ._boxes import StageSolution
from ._limits import Floats

_TIMES = ("forward_s", "backward_s", "weight_gradient_s", "exposed_s", "once_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Table:
    """Quotes of all stretches of units: arrays [O, U, U + 1] by option, first unit and end, 0 where
    `runs` is false.
    """

    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    exposed_s: Floats
    once_s: Floats
    runs: np.ndarray
    choices: dict[tuple[int, int, int], StageChoice]


class Quotes:
    """Cache of a chain's tables, for stages within a memory limit."""

    def __init__(self, chain: AbstractChain, limit_bytes: float) -> None:
        self.chain, self.limit_bytes = chain, limit_bytes
        options, units = len(chain.options), chain.num_units
        shape = (options, units, units + 1)
        o, i, j = (
            np.arange(n).reshape(s) for n, s in zip(shape, ((-1, 1, 1), (1, -1, 1), (1, 1, -1)))
        )
        first, last = np.broadcast_arrays(i, np.maximum(j, i + 1))
        self._possible = np.isfinite(chain.least_s(o, first[0], last[0])) & (j > i)
        self._known: dict[tuple[float, int], _Table] = {}

    def table(self, in_flight: float, chunks: int) -> _Table:
        """The table for stages that keep so many micro-batches and share their devices with so many
        stages, themselves included.
        """
        key = in_flight, chunks
        if key not in self._known:
            self._known[key] = self._made(in_flight, chunks)
        return self._known[key]

    def _made(self, in_flight: float, chunks: int) -> _Table:
        figures = {name: np.zeros(self._possible.shape) for name in _TIMES}
        runs, choices = np.zeros(self._possible.shape, bool), {}
        memory = StageMemory(in_flight=in_flight, limit_bytes=self.limit_bytes, chunks=chunks)
        for o, i, j in zip(*(axis.tolist() for axis in np.nonzero(self._possible)), strict=True):
            choice = self.chain.propose(o, i, j, first_device=0, memory=memory)
            if choice is None:
                continue
            (quoted,) = self.chain.quote([choice], [in_flight], chunks)
            runs[o, i, j], choices[o, i, j] = True, choice
            for name, table in figures.items():
                table[o, i, j] = getattr(quoted, name)
        return _Table(**figures, runs=runs, choices=choices)


class TabulatedProgram:
    """The dynamic program that minimises the sum of a closed form, for a given number of stages and
    of submeshes, under limits on the form's maxima.
    """

    # No bound: a chain's fastest proposal need not be the best one for every closed form, and
    # transfers are left out.
    proves = False

    def __init__(
        self, quotes: Quotes, schedule: str, *, num_stages: int, num_submeshes: int
    ) -> None:
        self.chain, self.num_submeshes = quotes.chain, num_submeshes
        kind, count = schedule_kind(schedule), self.chain.num_micro_batches
        chunks = num_stages // num_submeshes
        self._placement = kind.placement(num_stages, num_submeshes) if chunks > 1 else None
        self._tables = [
            quotes.table(float(kept), chunks)
            for kept in kind.in_flight(num_stages, count, num_submeshes)
        ]
        # Number of table entries computed so far.
        self.work = 0
        self._forms: list[ClosedForm] = [
            kind.closed_form(table, count, chunks) for table in self._tables
        ]

    @property
    def weights(self) -> list[float]:
        """The weights of the form's maxima."""
        return [term.weight for term in self._forms[0].maxima]

    def lows(self) -> tuple[float, list[float]]:
        """Lower bounds on the form's sum and on its maxima that need no search: zero, as none are
        known.
        """
        return 0.0, [0.0] * len(self.weights)

    def solve(self, limits_s: tuple[float, ...]) -> StageSolution | None:
        """The stages of least sum whose maxima keep within limits; None if there are none."""
        units, last = self.chain.num_units, len(self._tables)
        end = np.where(np.arange(units + 1) == units, 0.0, np.inf)
        # By stage and first device: the least sum of this stage and all later ones, for each first
        # unit.
        least = {(last, device): end for device in self._ends()}
        for stage in reversed(range(last)):
            costs = self._costs(stage, limits_s)
            for device in range(self.chain.num_devices):
                rows = [
                    (costs[option] + behind).min(axis=1)
                    for option, after in self._options_at(stage, device)
                    if (behind := least.get((stage + 1, after))) is not None
                ]
                self.work += len(rows) * costs[0].size
                if rows:
                    least[stage, device] = np.append(np.min(rows, axis=0), np.inf)
        if not np.isfinite(least.get((0, 0), end)[0]):
            return None
        return self._measured(list(self._walk(least, limits_s)))

    def _costs(self, stage: int, limits_s: Sequence[float]) -> Floats:
        """[O, U, U + 1], a stage's part of the sum; infinite if it exceeds a limit."""
        form, possible = self._forms[stage], self._tables[stage].runs
        for term, limit in zip(form.maxima, limits_s, strict=True):
            possible = possible & (term.sums <= limit * (1 + 1e-12))
        return np.where(possible, form.sums, np.inf)

    def _ends(self) -> range:
        """Values that the device behind the last stage may have."""
        devices = self.chain.num_devices
        return range(devices) if self._placement else range(devices, devices + 1)

    def _options_at(self, stage: int, device: int) -> Iterator[tuple[int, int]]:
        """Options of a stage that begins at a device, each with the first device of the next
        stage.
        """
        chain = self.chain
        for option, size in enumerate(chain.device_counts().tolist()):
            if self._placement is None:
                if chain.fits_at(device, size):
                    yield option, device + size
            elif (
                size * self.num_submeshes == chain.num_devices
                and device == self._placement[stage] * size
            ):
                behind = self._placement[stage + 1] if stage + 1 < len(self._placement) else 0
                yield option, behind * size

    def _walk(
        self, least: dict[tuple[int, int], Floats], limits_s: Sequence[float]
    ) -> Iterator[StageChoice]:
        device = unit = 0
        for stage, table in enumerate(self._tables):
            costs = self._costs(stage, limits_s)
            values = {
                (option, after): costs[option, unit] + least[stage + 1, after]
                for option, after in self._options_at(stage, device)
                if (stage + 1, after) in least
            }
            option, after = min(values, key=lambda way: float(values[way].min()))
            end = int(values[option, after].argmin())
            yield replace(table.choices[option, unit, end], first_device=device)
            device, unit = after, end

    def _measured(self, stages: list[StageChoice]) -> StageSolution:
        rows = [(s.option, s.first_unit, s.last_unit) for s in stages]
        sum_s = math.fsum(
            float(form.sums[row]) for form, row in zip(self._forms, rows, strict=True)
        )
        maxima = []
        for k in range(len(self.weights)):
            maxima.append(
                max(
                    float(form.maxima[k].sums[row])
                    for form, row in zip(self._forms, rows, strict=True)
                )
            )
        return StageSolution(stages=tuple(stages), sum_s=sum_s, maxima_s=tuple(maxima))


def tabulated_programs(
    chain: AbstractChain,
    schedule: str,
    *,
    num_stages: int | None,
    most_chunks: int,
    limit_bytes: float,
) -> list[TabulatedProgram]:
    """One program for each number of stages, or of submeshes and chunks if the schedule interleaves
    stages.
    """
    quotes, devices = Quotes(chain, limit_bytes), chain.num_devices
    sizes = set(chain.device_counts().tolist())
    if not schedule_kind(schedule).interleaves:
        most = min(chain.num_units, devices // min(sizes))
        counts = [(n, n) for n in range(1, most + 1)]
    else:
        counts = [
            (submeshes * chunks, submeshes)
            for submeshes in range(2, devices + 1)
            if devices % submeshes == 0 and devices // submeshes in sizes
            for chunks in range(2, min(most_chunks, chain.num_units // submeshes) + 1)
        ]
    found = []
    for n, submeshes in counts:
        if num_stages in (None, n):
            found.append(TabulatedProgram(quotes, schedule, num_stages=n, num_submeshes=submeshes))
    return found
