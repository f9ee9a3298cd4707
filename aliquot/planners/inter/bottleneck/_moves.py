"""The moves of bottleneck relief: from the stages of a pipeline to those of its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....core import divisors
from ....cost import AbstractChain
from ....plans import schedule_kind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Devices that are divided among stages in every order; more have too many orders.
_MOST_ORDERED = 8
# Ways to divide the devices into a number of stages that is asked for.
_MOST_PARTS = 200
_COUNTS = (1, 2, 3, 5, 8, 13, 26, 52)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """A chain with its memory figures under a schedule; `number` is its place among those given."""

    number: int
    chain: AbstractChain
    schedule: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """Stages in order on consecutive devices.

    Attributes:
        variant: position of its chain and schedule among those searched.
        options, units: for each stage its option, and its number of units.
        num_submeshes: fewer than stages if these are interleaved.
    """

    variant: int
    options: tuple[int, ...]
    units: tuple[int, ...]
    num_submeshes: int


class Neighbours:
    """What moves need to know of the chains, and which candidates can be run.

    Args:
        most_stages: of a candidate.
        most_chunks: the most stages on one submesh, in interleaved schedules.
        num_stages: the only number of stages, or None for any.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        *,
        most_stages: int,
        most_chunks: int = 1,
        num_stages: int | None = None,
    ) -> None:
        self.variants, self._most_stages = variants, most_stages
        self._most_chunks, self._num_stages = most_chunks, num_stages
        self.sizes = [v.chain.device_counts().tolist() for v in variants]
        # For each variant, its options by their number of devices.
        self.options: list[Mapping[int, list[int]]] = []
        for sizes in self.sizes:
            by_size: dict[int, list[int]] = {}
            for option, size in enumerate(sizes):
                by_size.setdefault(size, []).append(option)
            self.options.append(by_size)

    def balanced(self) -> Iterator[Candidate]:
        """For each chain and every way to divide the devices among stages, candidates with balanced
        stages: for each policy of recomputation, one with the first and one with the last of the
        options of that policy, which are ordered by tensor parallelism.
        """
        begun = set()
        for v, variant in enumerate(self.variants):
            chain, interleaves = variant.chain, schedule_kind(variant.schedule).interleaves
            # Other schedules that place stages alike differ little, and moves lead to them.
            if (variant.number, interleaves) in begun:
                continue
            begun.add((variant.number, interleaves))
            splits = self._rounds(v) if interleaves else self._divided(v)
            ends = np.arange(1, chain.num_units + 1)
            sums_of = {
                o: np.append(0.0, chain.least_s(o, 0, ends)) for o in range(len(chain.options))
            }
            begins = [
                options
                for options in self._with_options(v, splits)
                if all(np.isfinite(sums_of[o][-1]) for o in options)
            ]
            units: dict[tuple[int, ...], tuple[int, ...]] = {}
            for count in {len(options) for options in begins}:
                alike = [options for options in begins if len(options) == count]
                sums = np.array([[sums_of[o] for o in options] for options in alike])
                units |= zip(alike, map(tuple, balanced_units(sums).tolist()), strict=True)
            for options in begins:
                submeshes = len(options)
                if interleaves:
                    submeshes = chain.num_devices // self.sizes[v][options[0]]
                yield Candidate(v, options, units[options], submeshes)

    def _divided(self, v: int) -> list[tuple[int, ...]]:
        """Numbers of devices of stages, for every way to divide the devices that is tried: those of
        each host alike, or whole hosts alike.
        """
        chain, sizes = self.variants[v].chain, self.options[v]
        hosts, per_host = chain.num_hosts, chain.devices_per_host
        ways = [share * hosts for share in _shares(per_host)]
        ways += [(n * per_host,) * (hosts // n) for n in divisors(hosts)[1:]]
        if self._num_stages is not None:
            parts = _parts(chain.num_devices, self._num_stages, sorted(sizes, reverse=True))
            for way in itertools.islice(parts, _MOST_PARTS):
                # The last stage has the loss, and may need the devices of a larger part.
                ways += [way, (way[0], *reversed(way[1:]))]
        return [
            way
            for way in dict.fromkeys(ways)
            if self._may_have(len(way)) and set(way) <= set(sizes)
            if all(map(chain.fits_at, itertools.accumulate(way, initial=0), way))
        ]

    def _rounds(self, v: int) -> list[tuple[int, ...]]:
        """Numbers of devices of interleaved stages, on equal submeshes."""
        chain = self.variants[v].chain
        found = []
        for size in self.options[v]:
            for submeshes in (chain.num_devices // size,):
                if (
                    submeshes > 1
                    and submeshes * size == chain.num_devices
                    and all(chain.fits_at(k * size, size) for k in range(submeshes))
                ):
                    for chunks in range(2, self._most_chunks + 1):
                        if self._may_have(chunks * submeshes):
                            found.append((size,) * (chunks * submeshes))
        return found

    def _may_have(self, num_stages: int) -> bool:
        return num_stages <= self._most_stages and self._num_stages in (None, num_stages)

    def _with_options(self, v: int, splits: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        options = self.variants[v].chain.options
        policies = list(dict.fromkeys(o.recompute for o in options))
        ends: dict[tuple[int, str, int], int] = {}
        for size, rows in self.options[v].items():
            for policy in policies:
                alike = [o for o in rows if options[o].recompute == policy]
                if alike:
                    ends[size, policy, 0], ends[size, policy, 1] = alike[0], alike[-1]
        for split, policy, end in itertools.product(splits, policies, (0, 1)):
            if all((size, policy, end) in ends for size in split):
                yield tuple([ends[size, policy, end] for size in split])

    def layout(self, candidate: Candidate) -> tuple[int, ...]:
        """The number of submeshes of a candidate, and the numbers of devices of its stages."""
        sizes = self.sizes[candidate.variant]
        return candidate.num_submeshes, *[sizes[option] for option in candidate.options]

    def can_run(self, candidate: Candidate) -> bool:
        """True if every stage has units and lies within a host or is made of whole hosts, and all
        devices are used.
        """
        chain, sizes = self.variants[candidate.variant].chain, self.sizes[candidate.variant]
        device = 0
        for option, units in zip(candidate.options, candidate.units, strict=True):
            if units < 1 or not chain.fits_at(device, sizes[option]):
                return False
            device += sizes[option]
        return device == chain.num_devices and self._may_have(len(candidate.options))

    def reached(self, at: Candidate, worst: int, *, relieves_memory: bool) -> list[Candidate]:
        """The candidates that one move of a stage leads to, each once."""
        # Interleaved stages share their submeshes.
        shares = at.num_submeshes < len(at.options)
        reached: dict[Candidate, None] = {}
        for kind in _MOVES:
            if kind.relieves_memory >= relieves_memory and kind.keeps_submeshes >= shares:
                reached |= dict.fromkeys(kind.move(self, at, worst))
        return list(reached)


def _shares(devices: int) -> list[tuple[int, ...]]:
    """Ways to divide devices into powers of two: up to eight devices in every order, more than that
    only into equal parts, because 16 devices have 5,272 orders and 64 more than can be listed.

    >>> _shares(3)
    [(1, 1, 1), (1, 2), (2, 1)]
    >>> _shares(12)
    [(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2), (4, 4, 4)]
    """
    if not devices:
        return [()]
    sizes = [2**k for k in range(devices.bit_length()) if 2**k <= devices]
    if devices > _MOST_ORDERED:
        return [(size,) * (devices // size) for size in sizes if devices % size == 0]
    found = []
    for size in sizes:
        for rest in _shares(devices - size):
            found.append((size, *rest))
    return found


def _parts(devices: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to divide devices into a number of parts of given sizes, larger parts first.

    >>> list(_parts(8, 3, (8, 4, 2, 1)))
    [(4, 2, 2)]
    """
    if not count or not sizes:
        if not count and not devices:
            yield ()
        return
    largest = sizes[0]
    if largest * count < devices or sizes[-1] * count > devices:
        return
    if largest <= devices:
        for rest in _parts(devices - largest, count - 1, sizes):
            yield (largest, *rest)
    yield from _parts(devices, count, sizes[1:])


def balanced_units(sums: Floats) -> Ints:
    """[C, S], numbers of units of the stages of C pipelines, which take about the same time.

    Args:
        sums: [C, S, U + 1], for each stage prefix sums of the times of all units as it runs them.
    """
    num_rows, num_stages, num_units = sums.shape[0], sums.shape[1], sums.shape[2] - 1
    rows = np.arange(num_rows)
    low, high = np.zeros(num_rows), 2 * sums[:, :, -1].max(axis=1)
    best = np.zeros((num_rows, num_stages), np.int64)
    for bisected in range(16):
        bar = (low + high) / 2 if bisected else high
        ends = np.zeros_like(best)
        at = np.zeros(num_rows, np.int64)
        for k in range(num_stages):
            stage = sums[:, k]
            furthest = (stage <= (stage[rows, at] + bar)[:, None]).sum(axis=1) - 1
            # Every later stage needs at least one unit.
            at = np.minimum(np.maximum(furthest, at + 1), num_units - (num_stages - 1 - k))
            ends[:, k] = at
        done = at == num_units
        low, high = np.where(done, low, bar), np.where(done, bar, high)
        best = np.where(done[:, None], ends, best)
    return np.diff(best, axis=1, prepend=0)


def with_moved(at: Candidate, source: int, target: int, count: int) -> Candidate:
    """The candidate with `count` units fewer in stage `source` and more in stage `target`; stages
    between are shifted.
    """
    units = list(at.units)
    units[source] -= count
    units[target] += count
    return replace(at, units=tuple(units))


def _with_options(at: Candidate, changes: Mapping[int, int]) -> Candidate:
    return replace(at, options=tuple([changes.get(k, o) for k, o in enumerate(at.options)]))


def _move_units(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Move units to another stage; all stages between are shifted."""
    for partner in range(len(at.units)):
        for count in _COUNTS:
            if partner != worst and count < at.units[worst]:
                yield with_moved(at, worst, partner, count)


def _change_option(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Change the degrees or the recomputation of a stage on the same devices."""
    size = around.sizes[at.variant][at.options[worst]]
    for option in around.options[at.variant][size]:
        if option != at.options[worst]:
            yield _with_options(at, {worst: option})


def _take_devices(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Exchange devices with another stage that has twice as many."""
    sizes, options = around.sizes[at.variant], around.options[at.variant]
    size = sizes[at.options[worst]]
    for partner, other in enumerate(at.options):
        if sizes[other] != 2 * size:
            continue
        for more, less in itertools.product(options[2 * size], options[size]):
            candidate = _with_options(at, {worst: more, partner: less})
            if around.can_run(candidate):
                yield candidate


def _give_units_for_devices(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Merge two neighbours into one stage with the devices of both."""
    sizes = around.sizes[at.variant]
    for first in (worst - 1, worst):
        if first < 0 or first + 1 >= len(at.options):
            continue
        pair = slice(first, first + 2)
        size = sum(sizes[option] for option in at.options[pair])
        for option in around.options[at.variant].get(size, ()):
            candidate = _replaced(at, pair, (option,), (sum(at.units[pair]),))
            if around.can_run(candidate):
                yield candidate


def _split_stage(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Split a stage into two with half of its devices each."""
    for k, (option, units) in enumerate(zip(at.options, at.units, strict=True)):
        half, odd = divmod(around.sizes[at.variant][option], 2)
        if odd or units < 2:
            continue
        parts = units // 2, units - units // 2
        for part in around.options[at.variant].get(half, ()):
            candidate = _replaced(at, slice(k, k + 1), (part, part), parts)
            if around.can_run(candidate):
                yield candidate


def _replaced(
    at: Candidate, stages: slice, options: tuple[int, ...], units: tuple[int, ...]
) -> Candidate:
    new_options = (*at.options[: stages.start], *options, *at.options[stages.stop :])
    new_units = (*at.units[: stages.start], *units, *at.units[stages.stop :])
    return Candidate(at.variant, new_options, new_units, len(new_options))


def _change_variant(around: Neighbours, at: Candidate, worst: int) -> Iterator[Candidate]:
    """Take the next larger or smaller micro-batch for all stages, or another schedule; degrees and
    recomputation stay if possible.
    """
    variant = around.variants[at.variant]
    # Variants with the chains before and after, then those of other schedules that put stages on
    # submeshes in the same way.
    places = []
    interleaves = schedule_kind(variant.schedule).interleaves
    for step in (-1, 1, 0):
        for v, each in enumerate(around.variants):
            if each.number != variant.number + step:
                continue
            if step and each.schedule == variant.schedule:
                places.append(v)
            same_places = schedule_kind(each.schedule).interleaves == interleaves
            if not step and each.schedule != variant.schedule and same_places:
                places.append(v)
    for other in places:
        options = []
        for option in at.options:
            old = variant.chain.options[option]
            rows = around.options[other].get(old.num_devices, ())
            new = around.variants[other].chain.options
            alike = [
                o for o in rows if (new[o].tp, new[o].recompute) == (old.tp, old.recompute)
            ] or [o for o in rows if new[o].tp == old.tp]
            options += [*alike, *rows][:1]
        if len(options) == len(at.options):
            yield replace(at, variant=other, options=tuple(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A move, whether it can relieve memory, and whether it leaves submeshes as they are."""

    move: Callable[[Neighbours, Candidate, int], Iterator[Candidate]]
    relieves_memory: bool = True
    keeps_submeshes: bool = True


_MOVES = (
    _Kind(move=_move_units),
    _Kind(move=_change_option),
    _Kind(move=_take_devices, keeps_submeshes=False),
    _Kind(move=_give_units_for_devices, keeps_submeshes=False),
    _Kind(move=_split_stage, keeps_submeshes=False, relieves_memory=False),
    _Kind(move=_change_variant),
)
