"""Choices of a node and the splits that they give an array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aliquot.cost._choices import distinct_specs


@st.composite
def chosen(draw):
    """Choices of some factors on some axes, and what each factor splits: a dim, nothing, or a sum."""
    factors, axes = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    choice = st.tuples(*[st.integers(-1, factors - 1)] * axes)
    choices = draw(st.lists(choice, min_size=1, max_size=30))
    return np.array(choices, np.int64), draw(st.tuples(*[st.integers(-4, 4)] * factors))


@given(chosen())
def test_splits_are_listed_once_and_in_order(given_):
    choices, projection = given_
    specs, index = distinct_specs(choices, projection)
    each = [tuple(projection[f] if f >= 0 else -1 for f in row) for row in choices.tolist()]
    assert specs == tuple(sorted(set(each)))
    assert [specs[k] for k in index.tolist()] == each
