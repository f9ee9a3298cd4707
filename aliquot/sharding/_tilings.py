"""Steps of XLA's SPMD partitioner from one tiling of an array to another.

The partitioner looks at tilings, not at mesh axes: how many tiles each dim has, and which device
holds which. So it may divide an axis, and let axes of equal sizes change places. Here an axis is a
row of *atoms*, one for each prime factor, major first; a tiling lists for each dim its atoms, and
those along which tiles are repeated. Ways are tried in the partitioner's order: exchange owners,
exchange tiles between dims, slice what is repeated, gather what should be repeated, two of these in
a row; and otherwise gather down to what both tilings have in common, often everything, and slice,
which XLA calls involuntary full rematerialization.

On two axes this is what XLA emits for all but four of 312 pairs of splits, on three for all but six
of 350. The few differ by one exchange done before a slice instead of after it, or by how much is
gathered.

Reference: OpenXLA, `xla/service/spmd/spmd_partitioner.cc`, `PartitionedHlo::ReshardNoCache` and
what it calls.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from ._spec import Spec, cutting_order

Atom: TypeAlias = tuple[int, int, int]
"""A prime factor of an axis: the axis, its position in it, and the prime."""

Atoms: TypeAlias = tuple[Atom, ...]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One collective over groups of `group` devices along `axes`. `tiles` is how many tiles there
    are before it.
    """

    kind: str
    axes: tuple[int, ...]
    group: int
    tiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The atoms that cut each dim (in order, only dims that are cut), and those along which tiles
    are repeated.
    """

    dims: tuple[tuple[int, Atoms], ...]
    repeated: Atoms
    counts: Mapping[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Number of tiles of each dim that is cut. Computed once, because it is read often.
        object.__setattr__(self, "counts", {d: _product(atoms) for d, atoms in self.dims})

    @property
    def by_dim(self) -> dict[int, Atoms]:
        """Atoms by dim."""
        return dict(self.dims)

    @property
    def tiles(self) -> int:
        """Number of different tiles."""
        return math.prod(self.counts.values())


def tiling(spec: Spec, axis_sizes: Sequence[int], minor: Collection[int] = ()) -> Tiling:
    """The tiling of a spec without partial sums; the axes in `minor` subdivide tiles last."""
    return _tiling_of(tuple(spec), tuple(axis_sizes), tuple(minor))


@functools.lru_cache(maxsize=1 << 14)
def _tiling_of(spec: Spec, axis_sizes: tuple[int, ...], minor: tuple[int, ...]) -> Tiling:
    by_dim: dict[int, Atoms] = {}
    repeated: Atoms = ()
    for axis in cutting_order(len(spec), minor):
        placement = spec[axis]
        atoms = tuple((axis, k, prime) for k, prime in enumerate(_primes(axis_sizes[axis])))
        if placement >= 0:
            by_dim[placement] = by_dim.get(placement, ()) + atoms
        else:
            repeated += atoms
    return _tiling(by_dim, repeated)


def steps(now: Tiling, target: Tiling) -> tuple[Step, ...]:
    """The collectives that turn one tiling into another."""
    way = _steps(now, target)
    if way is not None:
        return way
    # Gather down to the common tiling, and slice.
    want = target.counts
    common = {}
    for d, atoms in now.dims:
        common[d] = _take(atoms, math.gcd(_product(atoms), want.get(d, 1)))[0]
    kept = set(itertools.chain(*common.values()))
    every = itertools.chain(*(atoms for _, atoms in now.dims))
    repeated = [atom for atom in every if atom not in kept]
    coarser = _tiling(common, (*now.repeated, *repeated))
    rest = _steps(coarser, target)
    return _gather_all(now) if rest is None else (*_gather_to(now, coarser), *rest)


def is_direct(now: Tiling, target: Tiling) -> bool:
    """True if the partitioner finds a way other than gathering down to what both tilings have in
    common.
    """
    return _steps(now, target) is not None


@functools.lru_cache(maxsize=1 << 14)
def _steps(now: Tiling, target: Tiling) -> tuple[Step, ...] | None:
    """As `steps`; None if only gathering the array is left."""
    # XLA tries these in the same order, and takes the first that applies, not the cheapest.
    if now == target or not now.dims:
        return ()
    if not target.dims:
        return _gather_all(now)
    if now.counts == target.counts:
        return (_permute(now, target),)
    exchanged = _exchange(now, target)
    if exchanged is not None:
        return exchanged
    if now.repeated:
        sliced = _refined(now, target)
        if sliced is not None:
            return () if sliced == target else (_permute(sliced, target),)
    if target.repeated:
        finer = _refined(target, now)
        if finer is not None:
            return (*(() if finer == now else (_permute(now, finer),)), *_gather_to(finer, target))
    return _two_in_a_row(now, target)


def _two_in_a_row(now: Tiling, target: Tiling) -> tuple[Step, ...] | None:
    """Ways that need an intermediate tiling; None if there is none."""
    # XLA takes the first pair that fits and does not come back to the others.
    for small, large, group in _merges(now, target):
        moved = _move(now, small, large, group)
        rest = _steps(moved, target)
        return None if rest is None else (_all_to_all(now, moved, group), *rest)
    if target.repeated:
        copies = _product(target.repeated)
        for dim, count in now.counts.items():
            # Gathering this dim leaves as many copies as the target has, so that the rest is an
            # exchange of tiles.
            if count * _product(now.repeated) == copies:
                kept = {d: atoms for d, atoms in now.dims if d != dim}
                coarser = _tiling(kept, (*now.repeated, *now.by_dim[dim]))
                rest = _steps(coarser, target)
                return None if rest is None else (*_gather_to(now, coarser), *rest)
    if now.repeated and not target.repeated:
        copies = _product(now.repeated)
        for dim, count in target.counts.items():
            # Slicing the copies along a dim that is whole makes both tilings equally fine, so that
            # the rest is an exchange.
            if dim not in now.counts and count % copies == 0:
                return _steps(_tiling({**now.by_dim, dim: now.repeated}, ()), target)
    return None


def _exchange(now: Tiling, target: Tiling) -> tuple[Step, ...] | None:
    """All-to-alls where the dims' numbers of tiles are the target's in another order; None where
    they are not.
    """
    have, want = now.counts, target.counts
    differing = [d for d in sorted({*have, *want}) if have.get(d, 1) != want.get(d, 1)]
    if sorted(have.get(d, 1) for d in differing) != sorted(want.get(d, 1) for d in differing):
        return None
    exchanges: list[Step] = []
    while True:
        have = now.counts
        open_dims = [d for d in differing if have.get(d, 1) != want.get(d, 1)]
        if not open_dims:
            break
        # The dim with fewest tiles gets the number that it should have, from one that has it.
        least = min(have.get(d, 1) for d in open_dims)
        small = max(d for d in open_dims if have.get(d, 1) == least)
        large = next(d for d in open_dims if have.get(d, 1) == want.get(small, 1))
        group, rest = divmod(have[large], least)
        if rest:
            return None
        moved = _move(now, large, small, group)
        exchanges.append(_all_to_all(now, moved, group))
        now = moved
    return tuple(exchanges) if now == target else (*exchanges, _permute(now, target))


def _merges(now: Tiling, target: Tiling) -> Iterable[tuple[int, int, int]]:
    """Pairs of dims of which one can hand tiles to the other and both then have as many as they
    should.
    """
    if _product(now.repeated) != _product(target.repeated):
        return
    have, want = now.counts, target.counts
    differing = [d for d in sorted({*have, *want}) if have.get(d, 1) != want.get(d, 1)]
    for k, i in enumerate(differing):
        for j in differing[k + 1 :]:
            four = (have.get(i, 1), have.get(j, 1), want.get(i, 1), want.get(j, 1))
            if four.count(1) > 1 or four[0] * four[1] != four[2] * four[3]:
                continue
            source, sink = (i, j) if four[0] > four[2] else (j, i)
            group, rest = divmod(have[source], want.get(source, 1))
            if rest == 0:
                yield source, sink, group


def _refined(coarse: Tiling, fine: Tiling) -> Tiling | None:
    """`coarse` with its repeats sliced into as many tiles as `fine` has in each dim; None if these
    are no multiples.
    """
    have, want = coarse.counts, fine.counts
    if any(want.get(d, 1) % count for d, count in have.items()):
        return None
    if _product(coarse.repeated) % _product(fine.repeated):
        return None
    dims = fine.by_dim
    if all(dims.get(d, ())[: len(atoms)] == atoms for d, atoms in coarse.dims):
        return fine
    left = coarse.repeated
    dims = coarse.by_dim
    for d, count in sorted(want.items()):
        factor = count // have.get(d, 1)
        if _product(left) % factor:
            return None
        taken, left = _take(left, factor)
        dims[d] = dims.get(d, ()) + taken
    return _tiling(dims, left) if _product(left) == _product(fine.repeated) else None


def _gather_to(fine: Tiling, coarse: Tiling) -> tuple[Step, ...]:
    """All-gathers of minor tiles, the last dim first."""
    gathers = []
    want = coarse.counts
    tiles = fine.tiles
    for d, atoms in reversed(fine.dims):
        group = _product(atoms) // want.get(d, 1)
        if group > 1:
            minor = _take(atoms[::-1], group)[0]
            gathers.append(Step(kind="all-gather", axes=_axes(minor), group=group, tiles=tiles))
            tiles //= group
    return tuple(gathers)


def _gather_all(now: Tiling) -> tuple[Step, ...]:
    return _gather_to(now, _tiling({}, ()))


def _move(now: Tiling, source: int, sink: int, group: int) -> Tiling:
    """The tiling after a factor `group` of one dim's minor tiles has become minor tiles of another
    dim.
    """
    dims = now.by_dim
    minor, kept = _take(dims[source][::-1], group)
    dims[source] = kept[::-1]
    dims[sink] = dims.get(sink, ()) + minor[::-1]
    return _tiling(dims, now.repeated)


def _all_to_all(before: Tiling, after: Tiling, group: int) -> Step:
    old, moved = before.by_dim, []
    for d, atoms in after.dims:
        moved += [a for a in atoms if a not in old.get(d, ())]
    return Step(kind="all-to-all", axes=_axes(moved), group=group, tiles=before.tiles)


def _permute(now: Tiling, after: Tiling) -> Step:
    """The collective-permute in which tiles change owners, along the axes whose atoms change
    places.
    """
    places = _places(now) ^ _places(after)
    axes = _axes(atom for atom, _, _ in places)
    group = _product({atom for atom, _, _ in places})
    return Step(kind="collective-permute", axes=axes, group=group, tiles=now.tiles)


def _places(now: Tiling) -> set[tuple[Atom, int, int]]:
    """Each atom with its dim (-1 where tiles are repeated) and the number of tiles that it is minor
    to.
    """
    places = {(atom, -1, 0) for atom in now.repeated}
    for d, atoms in now.dims:
        before = 1
        for atom in atoms:
            places.add((atom, d, before))
            before *= atom[2]
    return places


def _take(atoms: Atoms, count: int) -> tuple[Atoms, Atoms]:
    """The first atoms whose product is `count`, and the rest."""
    taken: list[Atom] = []
    left: list[Atom] = []
    for atom in atoms:
        if count % atom[2] == 0:
            # Atoms are primes, so taking each that divides what is left finds the product if there
            # is one.
            count //= atom[2]
            taken.append(atom)
        else:
            left.append(atom)
    assert count == 1, "a divisor of a product of primes is a product of some of them"
    return tuple(taken), tuple(left)


def _tiling(dims: Mapping[int, Atoms], repeated: Iterable[Atom]) -> Tiling:
    # Repeats have no order of their own.
    return Tiling(
        dims=tuple(sorted((d, a) for d, a in dims.items() if a)), repeated=tuple(sorted(repeated))
    )


def _axes(atoms: Iterable[Atom]) -> tuple[int, ...]:
    return tuple(sorted({axis for axis, _, _ in atoms}))


def _product(atoms: Iterable[Atom]) -> int:
    return math.prod(prime for _, _, prime in atoms)


@functools.lru_cache(maxsize=256)
def _primes(number: int) -> tuple[int, ...]:
    primes = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(primes)
