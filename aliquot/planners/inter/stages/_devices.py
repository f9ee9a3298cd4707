"""Stages on consecutive submeshes: the dynamic program over first units and first devices.

Alpa's recursion with two additions: the transfer into a stage depends on the number of devices of
the stage before it, and the micro-batches that it keeps depend on the number of stages. The second
is modelled only as far as it matters: first as if no stage kept more than one micro-batch, then
with more as long as the resulting stages do not fit.

Reference: Zheng et al., Alpa: automating inter- and intra-operator parallelism for distributed deep
learning, OSDI 2022, section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....cost import Chain, PrefixSums, StageChoice, chain_in_flight, evaluate_form
from ....plans import Keeps, schedule_kind
from ._boxes import StageSolution
from ._limits import Floats, Ints, Reach, RunMinima, memory_ends, reach_within, simple_lows

Stages = tuple[StageChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What the first device of a stage determines; stages at equal places have the same transfers.

    Attributes:
        crosses: whether the stage before it is on another host.
        sizes: indices of the possible sizes of the stage before it; the index after all sizes
            stands for the case that there is no stage before it.
        options: the options that fit here.
    """

    crosses: bool
    sizes: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """The possible first devices of stages under some options.

    Attributes:
        rows: the table row of each first device, and of the end, which is the number of devices.
        options_at: for each first device, the options that fit there.
        places: the facts of each first device.
    """

    rows: dict[int, int]
    options_at: dict[int, Ints]
    places: dict[int, _Place]


class DeviceProgram:
    """The dynamic program that minimises the sum of a closed form over all stages, submeshes and
    options, under limits on the form's maxima.

    Args:
        num_stages: the number of stages, or None for any.
        limit_bytes: the memory limit of each device.
    """

    proves = True
    num_submeshes: int | None = None

    def __init__(
        self,
        chain: Chain,
        tables: PrefixSums,
        schedule: str,
        *,
        num_stages: int | None,
        limit_bytes: float,
    ) -> None:
        self.chain, self.tables, self.schedule = chain, tables, schedule
        kind = schedule_kind(schedule)
        self.form = kind.closed_form(tables, chain.num_micro_batches)
        self.num_stages, self._limit_bytes = num_stages, limit_bytes
        self._counts = chain.device_counts()
        self._sizes, self._size_of = np.unique(self._counts, return_inverse=True)
        self._layouts: dict[bytes, _Layout] = {}
        self._layout = _Layout(rows={}, options_at={}, places={})
        most = min(chain.num_units, chain.num_devices // int(self._counts.min()))
        self._most = most
        self._deepest = num_stages or (
            1 if kind.keeps is Keeps.ALL else min(chain.num_micro_batches, most)
        )
        self._keeps = kind.keeps
        # Tables tell this many numbers of later stages apart; more if the resulting stages do not
        # fit.
        self._depth = num_stages or 1
        # If every stage keeps as many micro-batches as there are stages: the fewest stages that can
        # fit, as known so far.
        self._least_count = 1
        self._memory: dict[float, Ints] = {}
        self._transfers_s = self._transfer_tables()
        # Number of table entries computed so far.
        self.work = 0

    @property
    def weights(self) -> list[float]:
        """The weights of the form's maxima."""
        return [term.weight for term in self.form.maxima]

    def lows(self) -> tuple[float, list[float]]:
        """Lower bounds on the form's sum and on its maxima that need no search."""
        return simple_lows(self.chain, self.tables, self.form, self.chain.num_devices)

    def solve(self, limits_s: tuple[float, ...]) -> StageSolution | None:
        """The stages of least sum whose maxima keep within limits; None if there are none."""
        reach = reach_within(
            self.chain,
            self.tables,
            self.form,
            limits_s,
            self._transfers_s.reshape(-1, self.chain.num_units),
            np.arange(len(self._counts)),
        )
        self._layout = self._layout_of(self._useful(reach))
        if 0 not in self._layout.options_at:
            return None
        unlimited = all(np.isinf(limit) for limit in limits_s)
        if self.num_stages is None and self._keeps is Keeps.STAGES:
            stages = self._shared_search(reach, unlimited)
        elif self.num_stages is None and self._keeps is Keeps.PLACE:
            stages = self._search_of_each_count(reach)
        else:
            stages = self._deepening_search(reach)
        if stages is None:
            return None
        sum_s, maxima_s = evaluate_form(self.chain, self.form, stages)
        return StageSolution(stages=stages, sum_s=sum_s, maxima_s=maxima_s)

    def _useful(self, reach: Reach) -> NDArray[np.bool_]:
        """A mask of the options that can run some unit within the limits on time and memory."""
        ends = np.minimum(reach.ends.max(axis=0), self._memory_ends((1.0,))[:, 0])
        return np.asarray((ends > np.arange(self.chain.num_units)).any(axis=1))

    def _layout_of(self, useful: NDArray[np.bool_]) -> _Layout:
        """The layout under the useful options; cached, as many limits leave the same options."""
        key = useful.tobytes()
        if key not in self._layouts:
            options_at = _usable_options(self.chain, self._counts, np.flatnonzero(useful))
            ends = sorted({0, self.chain.num_devices, *options_at})
            before = dict[int, set[int]]()
            for d, options in options_at.items():
                for size in set(self._size_of[options].tolist()):
                    before.setdefault(d + int(self._sizes[size]), set()).add(size)
            self._layouts[key] = _Layout(
                rows={d: row for row, d in enumerate(ends)},
                options_at=options_at,
                places={
                    d: self._place(d, options, before.get(d, {len(self._sizes)}))
                    for d, options in options_at.items()
                },
            )
        return self._layouts[key]

    def _deepening_search(self, reach: Reach) -> Stages | None:
        """The search if a stage keeps all micro-batches, or as many as the number of stages after
        it determines, or if the number of stages is given. Tables first tell few numbers of later
        stages apart, then twice as many, until the stages found fit.
        """
        while True:
            run = self._run(reach, self._kept(self._depth, self.num_stages), self.num_stages)
            if run is None or self._depth >= self._deepest or self._fits(run[1]):
                return run[1] if run else None
            self._depth = min(2 * self._depth, self._deepest)

    def _shared_search(self, reach: Reach, unlimited: bool) -> Stages | None:
        """The search if every stage keeps as many micro-batches as there are stages: one number of
        stages after the other, as long as more stages could be better.

        The least sum if no stage kept more than k micro-batches is a lower bound on all pipelines
        of k or more stages. If the stages that reach it fit with all micro-batches that they really
        keep, none of these pipelines is better.
        """
        best: tuple[float, Stages] | None = None
        count = self._least_count
        while count <= self._deepest:
            in_flight = self._kept(count, count)
            bound = self._run(reach, in_flight[-1:], None)
            if bound is None or (best and bound[0] >= best[0]):
                break
            if self._fits(bound[1]):
                return bound[1]
            # With more stages than `_deepest`, stages keep no more micro-batches.
            fewest = min(self._fewest(reach, in_flight[-1:]), self._deepest)
            if fewest > count:
                count = fewest
                self._least_count = count if unlimited else self._least_count
                continue
            run = self._run(reach, in_flight, count)
            best = run if run and (best is None or run[0] < best[0]) else best
            count += 1
        return best[1] if best else None

    def _search_of_each_count(self, reach: Reach) -> Stages | None:
        """The search if the place of a stage and the number of all stages determine how many
        micro-batches it keeps: one run for each number of stages.
        """
        runs = [
            self._run(reach, self._kept(count, count), count) for count in range(1, self._most + 1)
        ]
        best = min((run for run in runs if run), key=lambda run: run[0], default=None)
        return best[1] if best else None

    def _fewest(self, reach: Reach, kept: tuple[float, ...]) -> int:
        """The fewest stages that fit if each keeps so many micro-batches; the caller knows that
        some number fits.

        More micro-batches need more stages, so the number for k is a lower bound for all pipelines
        of k or more stages.
        """
        nothing = np.zeros_like(self.form.sums)
        least, _ = self._fill(reach, kept, None, nothing, 0.0, 1.0)
        return int(least[0, -1, 1, 0])

    def _kept(self, depth: int, num_stages: int | None) -> tuple[float, ...]:
        """How many micro-batches a stage with 0, 1, ... stages after it keeps."""
        total = num_stages or depth
        in_flight = chain_in_flight(self.schedule, self.chain.num_micro_batches, total, total)
        return tuple(in_flight[::-1][:depth].tolist())

    def _fits(self, stages: Stages) -> bool:
        count = len(stages)
        in_flight = chain_in_flight(self.schedule, self.chain.num_micro_batches, count, count)
        option, first, last = (
            np.array([getattr(s, n) for s in stages]) for n in ("option", "first_unit", "last_unit")
        )
        needed = self.tables.stage_bytes(option, first, last, in_flight)
        return bool((needed <= self._limit_bytes).all())

    def _transfer_tables(self) -> Floats:
        """[2, sizes + 1, U]: seconds of the transfer before each unit in one direction, inside a
        host and between hosts, by the size of the smaller side.

        The last entry of the sizes stands for the first stage, which receives nothing.
        """
        chain = self.chain
        table = np.zeros((2, len(self._sizes) + 1, chain.num_units))
        for crosses in (0, 1):
            for k, size in enumerate(self._sizes):
                table[crosses, k, 1:] = chain.transfer_s(
                    chain.boundary_bytes[:-1], size, size, bool(crosses)
                )
        return table

    def _memory_ends(self, kept: tuple[float, ...]) -> Ints:
        """The furthest end of a stage under the memory limit, by option, number of later stages and
        first unit, [O, depth, U].
        """
        fresh = [count for count in dict.fromkeys(kept) if count not in self._memory]
        if fresh:
            every = np.arange(len(self._counts))
            self._memory |= zip(
                fresh, memory_ends(self.chain, self.tables, every, fresh, self._limit_bytes)
            )
        return np.stack([self._memory[count] for count in kept], axis=1)

    def _run(
        self, reach: Reach, kept: tuple[float, ...], num_stages: int | None
    ) -> tuple[float, Stages] | None:
        """The recursion from the last device to the first: the least sum, and its stages; None if
        there are none.

        Args:
            kept: micro-batches kept by the last stage, the one before it, and so on; if the number
                of stages is not given, the last entry is that of all earlier ones.
        """
        least, memory = self._fill(
            reach, kept, num_stages, self.form.sums, self.form.transfers, 0.0
        )
        first = least[0, -1, 1:, 0]
        count = num_stages or int(first.argmin()) + 1
        if not np.isfinite(first[count - 1]):
            return None
        return float(first[count - 1]), self._walk(least, reach, memory, count, num_stages)

    def _fill(
        self,
        reach: Reach,
        kept: tuple[float, ...],
        num_stages: int | None,
        sums: Floats,
        transfers: float,
        each: float,
    ) -> tuple[Floats, Ints]:
        """The recursion's table, for a sum over stages of `sums`, plus `transfers` times the
        transfer into each stage, plus `each`.

        least[d, p, k, i] is the least sum for units i and later on devices d and later, in k stages
        (for the last k: in k or more), behind a stage of size p. The second result holds the
        furthest ends under the memory limit, [options, depth, U].
        """
        units, layout = self.chain.num_units, self._layout
        memory = self._memory_ends(kept)
        least = np.full((len(layout.rows), len(self._sizes) + 1, len(kept) + 1, units + 1), np.inf)
        least[-1, :, 0, units] = 0
        edges_of: dict[_Place, tuple[RunMinima, Floats]] = {}
        for d in sorted(layout.options_at, reverse=True):
            options, place = layout.options_at[d], layout.places[d]
            ahead = self._ahead(least, d, options, num_stages) + sums[options, None, :]
            if place not in edges_of:
                ends, extra = self._edge(reach, place, options, transfers)
                ends = np.minimum(ends[:, :, None, :], memory[options])
                runs = RunMinima(ahead.shape, np.arange(1, units + 1), ends)
                edges_of[place] = runs, (extra + each - sums[options, :-1])[:, :, None, :]
            runs, extra = edges_of[place]
            self.work += ahead.size * len(place.sizes)
            least[layout.rows[d], list(place.sizes), 1:, :units] = (runs.of(ahead) + extra).min(
                axis=1
            )
        return least, memory

    def _ahead(self, least: Floats, device: int, options: Ints, num_stages: int | None) -> Floats:
        """[options, depth, U + 1]: least sums behind a stage that begins at a device, if it is the
        first of 1, 2, ... stages.
        """
        rows = [self._layout.rows[device + n] for n in self._counts[options].tolist()]
        after = least[rows, self._size_of[options]]
        ahead = after[:, :-1]
        if num_stages is None:
            ahead = ahead.copy()
            np.minimum(ahead[:, -1], after[:, -1], out=ahead[:, -1])
        return np.asarray(ahead)

    def _place(self, device: int, options: Ints, before: set[int]) -> _Place:
        crosses = self.chain.num_hosts > 1 and device % self.chain.devices_per_host == 0
        return _Place(crosses=crosses, sizes=tuple(sorted(before)), options=tuple(options.tolist()))

    def _edge(
        self, reach: Reach, place: _Place, options: Ints, transfers: float
    ) -> tuple[Ints, Floats]:
        """For each size of the stage before and each option: the furthest ends under the limits on
        time, and the transfer's part of the sum, both [sizes, options, U].
        """
        sizes = np.array(place.sizes, np.int64)[:, None]
        # The index after all sizes stands for no stage before, not for a large one.
        smaller = np.where(
            sizes == len(self._sizes), sizes, np.minimum(sizes, self._size_of[options])
        )
        row = place.crosses * (len(self._sizes) + 1) + smaller
        ends = reach.ends[row if len(reach.ends) > 1 else np.zeros((1, 1), np.int64), options]
        return ends, transfers * self._transfers_s[int(place.crosses), smaller] + reach.blocked[row]

    def _walk(
        self, least: Floats, reach: Reach, memory: Ints, count: int, num_stages: int | None
    ) -> Stages:
        """The stages that reach the least sum, reconstructed from the first to the last."""
        stages: list[StageChoice] = []
        device, unit, size = 0, 0, len(self._sizes)
        sums, steps = self.form.sums, np.arange(self.chain.num_units + 1)
        while unit < self.chain.num_units:
            options = self._layout.options_at[device]
            place = replace(self._layout.places[device], sizes=(size,))
            ends, extra = self._edge(reach, place, options, self.form.transfers)
            end = np.minimum(ends[0, :, unit], memory[options, count - 1, unit])[:, None]
            values = (
                self._ahead(least, device, options, num_stages)[:, count - 1]
                + sums[options]
                + (extra[0, :, unit] - sums[options, unit])[:, None]
            )
            values = np.where((steps > unit) & (steps <= end), values, np.inf)
            o, last = np.unravel_index(values.argmin(), values.shape)
            stages.append(
                StageChoice(
                    first_unit=unit,
                    last_unit=int(last),
                    option=int(options[o]),
                    first_device=device,
                )
            )
            device, unit, size = (
                device + int(self._counts[options[o]]),
                int(last),
                int(self._size_of[options[o]]),
            )
            after = least[self._layout.rows[device], size, :, unit]
            count -= not (
                num_stages is None
                and count == least.shape[2] - 1
                and after[count] <= after[count - 1]
            )
        return tuple(stages)


def _usable_options(chain: Chain, counts: Ints, options: Ints) -> dict[int, Ints]:
    """For each first device that stages can reach from device 0, those of some options that fit
    there and leave devices that other stages can fill exactly.
    """
    sizes = sorted({int(n) for n in counts[options]})
    reached, ahead = {0}, [0]
    fitting: dict[int, list[int]] = {}
    while ahead:
        d = ahead.pop()
        fitting[d] = [n for n in sizes if chain.fits_at(d, n)]
        fresh = {d + n for n in fitting[d]} - reached - {chain.num_devices}
        reached |= fresh
        ahead += fresh
    filled = {chain.num_devices}
    usable: dict[int, Ints] = {}
    known: dict[tuple[int, ...], Ints] = {}
    for d in sorted(reached, reverse=True):
        filling = tuple([n for n in fitting[d] if d + n in filled])
        if filling:
            if filling not in known:
                known[filling] = options[np.isin(counts[options], filling)]
            usable[d] = known[filling]
            filled.add(d)
    # Drop devices that are reached only through options that were just removed.
    reached = {0}
    for d in sorted(usable):
        if d in reached:
            reached |= {d + int(n) for n in set(counts[usable[d]].tolist())}
    return {d: options for d, options in usable.items() if d in reached}
