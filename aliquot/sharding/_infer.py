"""Inference of rules for primitives without a declared one, by evaluating the operator alone.

A factor that runs through some operands and through every result may be split if slicing the
operands and then applying the operator gives the slices of the whole result. This is tested on
random operands of two small sizes, since it may hold by chance for one. A dim whose size is fixed
by the operator's parameters is never split: the operator accepts no slice of it. Neither reduced
factors nor linearity are inferred; without them a plan may be slower, but it is never wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import msgspec
import numpy as np
from numpy.typing import NDArray

from ..graph import DimRule, Dims, Factors, HasShape, LoneOperator, Shape

# The number of candidates explodes with the numbers of operands and of dims of equal size. The
# likeliest come first: at most `_MOST_CANDIDATES` are checked by their shapes, and at most
# `_MOST_TESTS` of these by numbers.
_MOST_CANDIDATES = 128
_MOST_TESTS = 24
# Elements of all operands and results in one trial, so that it is quick.
_MOST_ELEMENTS = 1 << 16
# Sets of random operands for each trial, since one may agree by chance.
_NUM_DRAWS = 3
# Two series of small sizes that replace the sizes of dims, the smallest by the first and so on.
# Each is cut in two unequal pieces.
_SMALL_SIZES = ((4, 8, 10, 12, 14, 16, 18), (6, 9, 15, 20, 21, 24, 27))

Places: TypeAlias = frozenset[tuple[int, int]]
"""Dims of arrays: pairs of an array's position among operands (or results) and one of its dims."""


class _Factor(msgspec.Struct, frozen=True, kw_only=True):
    """Dims of operands and of results that are split together."""

    operands: Places
    results: Places


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A test of one factor at one series of small sizes.

    Attributes:
        shapes: of the operands.
        cut_at: index at which the dims of the factor are cut in two.
    """

    shapes: tuple[Shape, ...]
    cut_at: int


def infer_rule(eqn: Any, operands: Sequence[HasShape], results: Sequence[Shape]) -> DimRule | None:
    """The rule of an operator as far as it can be inferred; None if nothing may be split.

    None, too, for operators that have effects or that cannot be evaluated on the host. The same
    operator always gets the same rule: random operands come from a fixed seed.
    """
    lone = LoneOperator.of(eqn)
    if lone is None:
        return None
    shapes = tuple(o.shape for o in operands)
    factors = _infer_factors(lone, shapes, tuple(results))
    if not factors:
        return None
    f = Factors()
    letters, of_operands, of_results = [], [], []
    for factor in factors:
        letters.append(f.split(_size_at(shapes, factor.operands)))
        of_operands.append(factor.operands)
        of_results.append(factor.results)

    def dims(k: int, shape: Shape, places: Sequence[Places]) -> Dims:
        named = []
        for d, n in enumerate(shape):
            # A dim that belongs to no factor gets one of its own that must stay whole.
            factors_of_dim = (a for a, of in zip(letters, places, strict=True) if (k, d) in of)
            named.append(next(factors_of_dim, None) or f.whole(n))
        return tuple(named)

    return f.rule(
        [dims(k, shape, of_operands) for k, shape in enumerate(shapes)],
        [dims(k, shape, of_results) for k, shape in enumerate(results)],
    )


@functools.lru_cache(maxsize=1 << 12)
def _infer_factors(
    lone: LoneOperator, shapes: tuple[Shape, ...], results: tuple[Shape, ...]
) -> tuple[_Factor, ...]:
    """The factors that may be split, no two of which share a dim."""
    small = [_small_shapes(lone, shapes, series) for series in range(len(_SMALL_SIZES))]
    tests: list[tuple[_Factor, tuple[_Trial, ...]]] = []
    for places in itertools.islice(_candidates(shapes), _MOST_CANDIDATES):
        factor = _factor_through(lone, shapes, results, places)
        trials = _trials(lone, shapes, small, factor) if factor is not None else None
        if factor is not None and trials is not None:
            tests.append((factor, trials))
        if len(tests) == _MOST_TESTS:
            break
    factors: list[_Factor] = []
    # A dim belongs to one factor: of candidates that share one, the first that passes is taken.
    for factor in _passing(lone, tuple(tests)):
        if all(
            f.operands.isdisjoint(factor.operands) and f.results.isdisjoint(factor.results)
            for f in factors
        ):
            factors.append(factor)
    return tuple(sorted(factors, key=lambda factor: min(factor.operands)))


def _candidates(shapes: Sequence[Shape]) -> Iterator[Places]:
    """Sets of dims that may be one factor: dims of equal size, at most one of each operand.

    The likeliest come first, as only so many are tried: single dims, then the same dim of all
    operands, counted from the front or, as broadcasting does, from the back; then all others.
    """
    # Single dims need no agreement with other operands, and are most of what an operator lets
    # split.
    for size in _sizes(shapes):
        dims_of_size = []
        for shape in shapes:
            dims_of_size.append([d for d, n in enumerate(shape) if n == size])
        for k, own_dims in enumerate(dims_of_size):
            for d in own_dims:
                yield frozenset({(k, d)})
        seen: set[Places] = set()
        for from_end in (False, True):
            offsets = set()
            for k, places_of_size in enumerate(dims_of_size):
                for d in places_of_size:
                    offsets.add(d - (len(shapes[k]) if from_end else 0))
            for offset in sorted(offsets):
                places = frozenset(
                    (k, offset + (len(shapes[k]) if from_end else 0))
                    for k, dims in enumerate(dims_of_size)
                    if offset + (len(shapes[k]) if from_end else 0) in dims
                )
                if len(places) > 1 and places not in seen:
                    seen.add(places)
                    yield places
        operands_with_size = [k for k, dims in enumerate(dims_of_size) if dims]
        for count in range(2, len(operands_with_size) + 1):
            for chosen in itertools.combinations(operands_with_size, count):
                for dims in itertools.product(*(dims_of_size[k] for k in chosen)):
                    places = frozenset(zip(chosen, dims, strict=True))
                    if places not in seen:
                        yield places


def _factor_through(
    lone: LoneOperator, shapes: tuple[Shape, ...], results: tuple[Shape, ...], places: Places
) -> _Factor | None:
    """The factor that these dims of operands form with dims of the results; None if they form none.

    Doubling them must double one dim of every result, of the same size, and change no other.
    """
    # A dim that fixes the size of the result in another way, as a window does, does not double it
    # exactly.
    size = _size_at(shapes, places)
    result_shapes = lone.shapes_made(_resized(shapes, places, 2 * size))
    if result_shapes is None or not result_shapes:
        return None
    result_dims = []
    for k, (new, old) in enumerate(zip(result_shapes, results, strict=True)):
        differing = [d for d, (n, o) in enumerate(zip(new, old, strict=False)) if n != o]
        if len(new) != len(old) or len(differing) != 1:
            return None
        (dim,) = differing
        if (old[dim], new[dim]) != (size, 2 * size):
            return None
        result_dims.append((k, dim))
    return _Factor(operands=places, results=frozenset(result_dims))


@functools.lru_cache(maxsize=1 << 12)
def _small_shapes(lone: LoneOperator, shapes: tuple[Shape, ...], series: int) -> tuple[Shape, ...]:
    """The operands' shapes with each size replaced by a small one, where the operator accepts it.

    Equal sizes stay equal, and larger ones larger, so that the operator's checks still pass.

    Args:
        series: index into `_SMALL_SIZES`.
    """
    small = shapes
    for size in _sizes(shapes):
        places = set()
        for k, shape in enumerate(shapes):
            places |= {(k, d) for d, n in enumerate(shape) if n == size}
        trial = _resized(small, frozenset(places), _small_size(shapes, size, series))
        # The operator accepts no other size where its parameters fix one: that size stays.
        if lone.shapes_made(trial) is not None:
            small = trial
    return small


def _trials(
    lone: LoneOperator,
    shapes: tuple[Shape, ...],
    small: Sequence[tuple[Shape, ...]],
    factor: _Factor,
) -> tuple[_Trial, ...] | None:
    """One trial of a factor for each series of small sizes.

    None if the operator refuses these shapes or slices of them, or if they are too large.

    Args:
        small: the operands' shapes for each series, from `_small_shapes`.
    """
    trials = []
    for series, small_shapes in enumerate(small):
        size = _small_size(shapes, _size_at(shapes, factor.operands), series)
        # A size that the parameters fix in one dim was kept in all dims of that size. The factor's
        # dims may still take the small one.
        whole = _resized(small_shapes, factor.operands, size)
        # A third and two thirds, since an operator may treat equal halves alike by chance.
        cut_at = size // 3
        sizes = (cut_at, size - cut_at)
        pieces = [lone.shapes_made(_resized(whole, factor.operands, n)) for n in sizes]
        result_shapes = lone.shapes_made(whole)
        if result_shapes is None or any(
            p != _resized(result_shapes, factor.results, n)
            for p, n in zip(pieces, sizes, strict=True)
        ):
            return None
        if (
            _size_at(result_shapes, factor.results) != size
            or sum(map(math.prod, (*whole, *result_shapes))) > _MOST_ELEMENTS
        ):
            return None
        trials.append(_Trial(shapes=whole, cut_at=cut_at))
    return tuple(trials)


def _sizes(shapes: Sequence[Shape]) -> list[int]:
    """The different sizes of dims above 1, in increasing order."""
    return sorted({n for n in itertools.chain(*shapes) if n > 1})


def _small_size(shapes: Sequence[Shape], size: int, series: int) -> int:
    """The small size of a series that replaces a size, by its rank among all sizes."""
    rank = _sizes(shapes).index(size)
    return _SMALL_SIZES[series][min(rank, len(_SMALL_SIZES[series]) - 1)]


def _size_at(shapes: Sequence[Shape], places: Places) -> int:
    """The common size of some dims; 0 if their sizes differ."""
    size, *others = {shapes[k][d] for k, d in places}
    return 0 if others else size


def _resized(shapes: Sequence[Shape], places: Places, size: int) -> tuple[Shape, ...]:
    """The shapes with `size` at some dims."""
    return tuple(
        tuple(size if (k, d) in places else n for d, n in enumerate(shape))
        for k, shape in enumerate(shapes)
    )


@functools.lru_cache(maxsize=1 << 10)
def _passing(
    lone: LoneOperator, tests: tuple[tuple[_Factor, tuple[_Trial, ...]], ...]
) -> tuple[_Factor, ...]:
    """The factors for which slices give the slices of the result, in all trials and draws.

    All are tested in one program, since compiling takes most of the time. If that program cannot be
    compiled, each factor is tested in its own, and those that cannot be compiled fail.
    """
    if not tests:
        return ()
    passed = _pass_together(lone, tests)
    if passed is None:
        each = [_pass_together(lone, (test,)) for test in tests]
        passed = [p is not None and p[0] for p in each]
    return tuple(factor for (factor, _), good in zip(tests, passed, strict=True) if good)


def _pass_together(
    lone: LoneOperator, tests: Sequence[tuple[_Factor, tuple[_Trial, ...]]]
) -> list[bool] | None:
    """For each factor True if it passes; None if the program of all tests cannot be compiled."""
    all_trials = itertools.chain(*(trials for _, trials in tests))
    wholes = list(dict.fromkeys(trial.shapes for trial in all_trials))
    # A draw lists all whole operands, then both pieces of each trial's; results come in that order.
    draws = []
    for draw in range(_NUM_DRAWS):
        given = {shapes: lone.operands(shapes, draw) for shapes in wholes}
        cut = []
        for factor, trials in tests:
            for trial in trials:
                cut += _cut(given[trial.shapes], factor.operands, trial.cut_at)
        draws.append([*given.values(), *cut])
    results_of_draws = lone.run(draws)
    if results_of_draws is None:
        return None
    passed = []
    position = len(wholes)
    for factor, trials in tests:
        good = True
        for trial in trials:
            # Results that are nearly all NaN or infinite (roots of negative numbers) would agree
            # without proving anything: at least one draw must have finite ones.
            is_proved = False
            for results in results_of_draws:
                want = _cut(results[wholes.index(trial.shapes)], factor.results, trial.cut_at)
                for piece, wanted in zip(results[position : position + 2], want, strict=True):
                    good &= all(map(_equal, piece, wanted))
                is_proved |= all(map(_is_finite_enough, results[wholes.index(trial.shapes)]))
            good &= is_proved
            position += 2
        passed.append(good)
    return passed


def _cut(arrays: Sequence[NDArray[Any]], places: Places, at: int) -> list[list[NDArray[Any]]]:
    """The first and the second pieces of arrays that are cut in two along some dims.

    Arrays that have none of the dims are whole in both.
    """
    dims = dict(places)
    found = []
    for piece in (slice(None, at), slice(at, None)):
        found.append(
            [
                a[(slice(None),) * dims[k] + (piece,)] if k in dims else a
                for k, a in enumerate(arrays)
            ]
        )
    return found


def _equal(result: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """True if two arrays are equal; floats may differ by rounding."""
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return False
    if result.dtype.kind in "biu":
        return bool((result == wanted).all())
    # Another order of summation changes the last bits; a split that is wrong changes far more. For
    # narrow types 64 rounding steps would accept almost anything, so the tolerance is at most 5%.
    limits: Any = jnp.finfo  # Not annotated in JAX.
    rounding = min(64 * float(limits(result.dtype).eps), 0.05)
    wide = np.complex128 if result.dtype.kind == "c" else np.float64
    a, b = result.astype(wide), wanted.astype(wide)
    largest = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    return bool(np.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True))


def _is_finite_enough(array: NDArray[Any]) -> bool:
    """True if more than a quarter of the numbers are finite."""
    if array.dtype.kind in "biu":
        return True
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return bool(np.isfinite(wide).mean() > 0.25) if array.size else False
