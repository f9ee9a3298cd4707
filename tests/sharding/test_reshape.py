"""Splits pass through reshapes: pieces of the reshaped array are the reshaped pieces."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.graph.rules.shape import _reshape


def rule_of(before, after):
    return _reshape([SimpleNamespace(shape=before, dtype="float32")], [after], {"new_sizes": after})


def text(before, after):
    found = rule_of(before, after)
    return "->".join(
        "".join(d if len(d) == 1 else f"({d})" for d in side[0])
        for side in (found.operands, found.results)
    )


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ((4, 32), (4, 8, 4), "a(bA)->abA"),
        ((4, 8, 4), (4, 32), "abA->a(bA)"),
        ((8, 1, 4), (1, 32), "a1A->1(aA)"),
        ((12, 4), (8, 6), "(aA)B->(aC)D"),
        ((6, 4), (4, 6), "(aA)B->(aC)D"),
        ((3, 5), (5, 3), "AB->CD"),
        ((12, 2), (4, 6), "(aA)B->a(AB)"),
        ((2, 3, 4), (24,), "aAB->(aAB)"),
        ((8, 6), (4, 2, 3, 2), "(aA)(bB)->aAbB"),
        ((1,), (), "1->"),
        ((0, 3), (3, 0), "AB->CD"),
    ],
)
def test_factors_of_known_reshapes(before, after, want):
    assert text(before, after) == want


@st.composite
def regrouped(draw):
    """Two shapes with the same elements: prime factors in two orders of grouping, with ones thrown
    in.
    """
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), min_size=1, max_size=6))

    def grouped(items):
        shape, rest = [], list(items)
        while rest:
            taken = draw(st.integers(1, len(rest)))
            shape.append(math.prod(rest[:taken]))
            rest = rest[taken:]
            if draw(st.booleans()):
                shape.append(1)
        return tuple(shape)

    return grouped(primes), grouped(
        draw(st.permutations(primes)) if draw(st.booleans()) else primes
    )


def pieces(array, dims, factor, count):
    """The array cut along the dim whose leading factor this is."""
    (dim,) = [d for d, letters in enumerate(dims) if factor in letters]
    assert dims[dim][0] == factor, "only a major factor may be split"
    return np.split(array, count, axis=dim), dim


@settings(max_examples=300, deadline=None)
@given(shapes=regrouped())
def test_splits_commute_with_reshape(shapes):
    before, after = shapes
    found = rule_of(before, after)
    (old,), (new,) = found.operands, found.results
    array = np.arange(math.prod(before)).reshape(before)
    for side, shape in ((old, before), (new, after)):
        assert [math.prod(found.sizes.get(c, 1) for c in dim) for dim in side] == list(shape)
    for factor in found.factors:
        for count in {n for n in (2, 3, found.sizes[factor]) if found.sizes[factor] % n == 0}:
            parts, _ = pieces(array, old, factor, count)
            wanted, dim = pieces(array.reshape(after), new, factor, count)
            local = tuple(n // count if d == dim else n for d, n in enumerate(after))
            for part, want in zip(parts, wanted, strict=True):
                np.testing.assert_array_equal(part.reshape(local), want)


@given(shapes=regrouped())
def test_a_dim_that_reshape_keeps_may_be_split(shapes):
    before, _ = shapes
    found = rule_of((*before, 7), (math.prod(before), 7))
    assert found.operands[0][-1] == found.results[0][-1] and found.operands[0][-1].islower()
