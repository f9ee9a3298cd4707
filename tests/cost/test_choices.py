"""Choices of a node and the splits that they give an array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aliquot.cost._choices import distinct_specs, joined_axes, shards


@st.composite
def chosen(draw):
    """Choices of some factors on some axes, and what each factor splits: a dim, nothing, or a
    sum.
    """
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


@given(chosen(), st.sets(st.integers(0, 4), min_size=1))
def test_pieces_and_joined_axes_are_those_of_each_choice(given_, factors):
    choices, projection = given_
    sizes = (2, 4, 3)[: choices.shape[1]]
    split_by = [dim >= 0 for dim in projection]
    cut = [[n for n, f in zip(sizes, row) if f >= 0 and split_by[f]] for row in choices.tolist()]
    assert shards(choices, split_by, sizes).tolist() == [np.prod(own) for own in cut]
    assert shards(choices, split_by, sizes[::-1]).shape == (len(choices),)
    axes_of = {int(k): axes for axes, rows in joined_axes(choices, sorted(factors)) for k in rows}
    each = [tuple(a for a, f in enumerate(row) if f in factors) for row in choices.tolist()]
    assert [axes_of.get(k, ()) for k in range(len(choices))] == each
