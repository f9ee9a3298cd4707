"""Rules of primitives for which none is declared, found out by evaluating the operator alone.

A factor that runs through some operands and through every result may be split if the slices of the
results are the results of the slices. That is tried on small random operands of two sizes, as it
may hold by chance for one. A dim that the operator's parameters name cannot be cut, as the operator
takes no other size there. Factors that are reduced are not inferred, nor is linearity: without them
a plan is slower, never wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..graph import DimRule, Dims, Factors, HasShape, LoneOperator, Shape

# Candidates grow with the number of operands and of equal dims; the likeliest come first.
_MOST_SHAPES_TRIED = 128
_MOST_FACTORS_TRIED = 24
_MOST_ELEMENTS = 1 << 16
_DRAWS = 3
# Small stand-ins for the sizes of dims, in increasing order. Each is cut in two unequal pieces.
_SMALL = ((4, 8, 10, 12, 14, 16, 18), (6, 9, 15, 20, 21, 24, 27))

Places: TypeAlias = frozenset[tuple[int, int]]
"""Dims of arrays: positions among operands or results, and dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factor:
    """Dims of operands and of results that are split together."""

    operands: Places
    results: Places


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Operands of small shapes, and where to cut the dims of a factor in two."""

    shapes: tuple[Shape, ...]
    at: int


def infer_rule(eqn: Any, operands: Sequence[HasShape], results: Sequence[Shape]) -> DimRule | None:
    """The rule of an operator as far as it can be found out; None if nothing may be split.

    Operators that have effects or that cannot be evaluated on the host have none. The same operator
    always gets the same rule: operands are drawn from a fixed seed.
    """
    lone = LoneOperator.of(eqn)
    if lone is None:
        return None
    factors = _factors(lone, tuple(o.shape for o in operands), tuple(results))
    return _as_rule(factors, operands, results) if factors else None


@functools.lru_cache(maxsize=1 << 12)
def _factors(
    lone: LoneOperator, shapes: tuple[Shape, ...], results: tuple[Shape, ...]
) -> tuple[_Factor, ...]:
    """The factors that may be split, no two of which share a dim."""
    small = [_small_shapes(lone, shapes, which) for which in range(len(_SMALL))]
    tests: list[tuple[_Factor, tuple[_Trial, ...]]] = []
    for places in itertools.islice(_candidates(shapes), _MOST_SHAPES_TRIED):
        factor = _factor_through(lone, shapes, results, places)
        trials = _trials(lone, shapes, small, factor) if factor is not None else None
        if factor is not None and trials is not None:
            tests.append((factor, trials))
        if len(tests) == _MOST_FACTORS_TRIED:
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
    for size in sorted({n for shape in shapes for n in shape if n > 1}):
        having = [[d for d, n in enumerate(shape) if n == size] for shape in shapes]
        yield from (frozenset({(k, d)}) for k, dims in enumerate(having) for d in dims)
        seen: set[Places] = set()
        for from_end in (False, True):
            offsets = {
                d - (len(shapes[k]) if from_end else 0)
                for k, dims in enumerate(having)
                for d in dims
            }
            for offset in sorted(offsets):
                places = frozenset(
                    (k, offset + (len(shapes[k]) if from_end else 0))
                    for k, dims in enumerate(having)
                    if offset + (len(shapes[k]) if from_end else 0) in dims
                )
                if len(places) > 1 and places not in seen:
                    seen.add(places)
                    yield places
        having_any = [k for k, dims in enumerate(having) if dims]
        for count in range(2, len(having_any) + 1):
            for chosen in itertools.combinations(having_any, count):
                for dims in itertools.product(*(having[k] for k in chosen)):
                    places = frozenset(zip(chosen, dims, strict=True))
                    if places not in seen:
                        yield places


def _factor_through(
    lone: LoneOperator, shapes: tuple[Shape, ...], results: tuple[Shape, ...], places: Places
) -> _Factor | None:
    """The factor that these dims of operands form with dims of the results; None if they form none.

    Doubling them must double one dim of every result, of the same size, and change no other.
    """
    size = _size_at(shapes, places)
    result_shapes = lone.shapes_made(_resized(shapes, places, 2 * size))
    if result_shapes is None or not result_shapes:
        return None
    followed = []
    for k, (new, old) in enumerate(zip(result_shapes, results, strict=True)):
        differing = [d for d, (n, o) in enumerate(zip(new, old, strict=False)) if n != o]
        if len(new) != len(old) or len(differing) != 1:
            return None
        (dim,) = differing
        if (old[dim], new[dim]) != (size, 2 * size):
            return None
        followed.append((k, dim))
    return _Factor(operands=places, results=frozenset(followed))


@functools.lru_cache(maxsize=1 << 12)
def _small_shapes(lone: LoneOperator, shapes: tuple[Shape, ...], which: int) -> tuple[Shape, ...]:
    """The same shapes with a small number in the place of each size, wherever the operator takes
    it.

    Sizes that are equal stay equal, and larger ones larger.
    """
    small = shapes
    for size in _sizes(shapes):
        places = frozenset(
            (k, d) for k, shape in enumerate(shapes) for d, n in enumerate(shape) if n == size
        )
        trial = _resized(small, places, _stand_in(shapes, size, which))
        # A size that the operator's parameters name is refused, and stays.
        if lone.shapes_made(trial) is not None:
            small = trial
    return small


def _trials(
    lone: LoneOperator,
    shapes: tuple[Shape, ...],
    small: Sequence[tuple[Shape, ...]],
    factor: _Factor,
) -> tuple[_Trial, ...] | None:
    """Trials of a factor at small shapes; None if the operator does not take these, or they are too
    large.
    """
    trials = []
    for which, others in enumerate(small):
        size = _stand_in(shapes, _size_at(shapes, factor.operands), which)
        whole = _resized(others, factor.operands, size)
        # Pieces of different sizes: what holds for halves may hold by chance.
        at = size // 3
        pieces = [lone.shapes_made(_resized(whole, factor.operands, n)) for n in (at, size - at)]
        result_shapes = lone.shapes_made(whole)
        if result_shapes is None or any(
            p != _resized(result_shapes, factor.results, n)
            for p, n in zip(pieces, (at, size - at), strict=True)
        ):
            return None
        if (
            _size_at(result_shapes, factor.results) != size
            or sum(map(math.prod, (*whole, *result_shapes))) > _MOST_ELEMENTS
        ):
            return None
        trials.append(_Trial(shapes=whole, at=at))
    return tuple(trials)


def _sizes(shapes: Sequence[Shape]) -> list[int]:
    return sorted({n for shape in shapes for n in shape if n > 1})


def _stand_in(shapes: Sequence[Shape], size: int, which: int) -> int:
    rank = _sizes(shapes).index(size)
    return _SMALL[which][min(rank, len(_SMALL[which]) - 1)]


def _size_at(shapes: Sequence[Shape], places: Places) -> int:
    """The size of dims that are equally long; 0 if they are not."""
    size, *others = {shapes[k][d] for k, d in places}
    return 0 if others else size


def _resized(shapes: Sequence[Shape], places: Places, size: int) -> tuple[Shape, ...]:
    return tuple(
        tuple(size if (k, d) in places else n for d, n in enumerate(shape))
        for k, shape in enumerate(shapes)
    )


@functools.lru_cache(maxsize=1 << 10)
def _passing(
    lone: LoneOperator, tests: tuple[tuple[_Factor, tuple[_Trial, ...]], ...]
) -> tuple[_Factor, ...]:
    """The factors that pass: the slices of the results are the results of the slices, at both sizes
    and for all draws of random operands.

    All are tested in one program, as compiling takes most of the time; each by itself where that
    program cannot be compiled.
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
    wholes = list(dict.fromkeys(trial.shapes for _, trials in tests for trial in trials))
    # Whole operands first, then both pieces of each trial; results come in the same order.
    draws = []
    for draw in range(_DRAWS):
        given = {shapes: lone.operands(shapes, draw) for shapes in wholes}
        cut = [
            part
            for factor, trials in tests
            for trial in trials
            for part in _cut(given[trial.shapes], factor.operands, trial.at)
        ]
        draws.append([*given.values(), *cut])
    results_of_draws = lone.run(draws)
    if results_of_draws is None:
        return None
    passed = []
    position = len(wholes)
    for factor, trials in tests:
        good = True
        for trial in trials:
            # Numbers are compared wherever there are some: a root of negative numbers is none.
            compared = False
            for results in results_of_draws:
                want = _cut(results[wholes.index(trial.shapes)], factor.results, trial.at)
                good &= all(
                    _same(a, b) for a, b in zip(results[position : position + 2], want, strict=True)
                )
                compared |= all(_is_mostly_finite(r) for r in results[wholes.index(trial.shapes)])
            good &= compared
            position += 2
        passed.append(good)
    return passed


def _cut(arrays: Sequence[NDArray[Any]], places: Places, at: int) -> list[list[NDArray[Any]]]:
    """Both pieces of arrays cut along some of their dims."""
    dims = dict(places)
    return [
        [a[(slice(None),) * dims[k] + (piece,)] if k in dims else a for k, a in enumerate(arrays)]
        for piece in (slice(None, at), slice(at, None))
    ]


def _same(results: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]]) -> bool:
    """True if arrays are equal, of floats up to rounding."""
    return all(_equal(a, b) for a, b in zip(results, wanted, strict=True))


def _equal(result: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return False
    if result.dtype.kind in "biu":
        return bool((result == wanted).all())
    # Slices may be summed in another order than the whole. A factor that may not be split differs
    # by far more.
    rounding = min(64 * _epsilon(result.dtype), 0.05)
    wide = np.complex128 if result.dtype.kind == "c" else np.float64
    a, b = result.astype(wide), wanted.astype(wide)
    largest = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    return bool(np.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True))


def _epsilon(dtype: Any) -> float:
    limits: Any = jnp.finfo  # Not annotated in JAX.
    return float(limits(dtype).eps)


def _is_mostly_finite(array: NDArray[Any]) -> bool:
    if array.dtype.kind in "biu":
        return True
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return bool(np.isfinite(wide).mean() > 0.25) if array.size else False


def _as_rule(
    factors: Sequence[_Factor], operands: Sequence[HasShape], results: Sequence[Shape]
) -> DimRule:
    f = Factors()
    shapes = [o.shape for o in operands]
    # Dims that belong to no factor stay whole.
    letters = [f.split(_size_at(shapes, factor.operands)) for factor in factors]

    def dims(k: int, shape: Shape, places: Sequence[Places]) -> Dims:
        return tuple(
            next(
                (
                    letter
                    for letter, dims_of_factor in zip(letters, places, strict=True)
                    if (k, d) in dims_of_factor
                ),
                None,
            )
            or f.whole(n)
            for d, n in enumerate(shape)
        )

    return f.rule(
        [dims(k, shape, [factor.operands for factor in factors]) for k, shape in enumerate(shapes)],
        [dims(k, shape, [factor.results for factor in factors]) for k, shape in enumerate(results)],
    )
