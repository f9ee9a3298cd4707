"""A parallel step is the plain step: a sample that covers every choice, and (slow) one that covers
every pair of choices. The benchmark runs the whole table.
"""

from __future__ import annotations

import pytest
from runtime.equality import LEAF, LOSS, _pairs, all_cases, compare, covering

_SAMPLE = covering(all_cases())
# The first of them combine the most choices.
_QUICK = _SAMPLE[:6]


@pytest.mark.parametrize(
    "case",
    [*_QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in _SAMPLE[6:])],
    ids=str,
)
def test_a_parallel_step_is_the_plain_step(case):
    found = compare(case)
    assert found.loss <= LOSS[case.dtype], found
    assert found.leaf <= LEAF[case.dtype], found


def test_the_samples_cover_every_choice_and_every_pair_of_choices():
    pairs, every = ({p for c in cases for p in _pairs(c)} for cases in (_SAMPLE, all_cases()))
    assert pairs == every
    quick, every = (
        {choice for c in cases for p in _pairs(c) for choice in p}
        for cases in (_QUICK, all_cases())
    )
    assert quick == every
