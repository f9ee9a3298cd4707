"""A parallel step is the plain step: a sample that covers every pair of choices, and (slow) the
whole table.
"""

from __future__ import annotations

import pytest
from runtime.equality import LEAF, LOSS, all_cases, compare, covering

_SAMPLE = covering(all_cases())
_REST = [case for case in all_cases() if case not in _SAMPLE]


@pytest.mark.parametrize(
    "case", [*_SAMPLE, *(pytest.param(case, marks=pytest.mark.slow) for case in _REST)], ids=str
)
def test_a_parallel_step_is_the_plain_step(case):
    found = compare(case)
    assert found.loss <= LOSS[case.dtype], found
    assert found.leaf <= LEAF[case.dtype], found


def test_the_sample_covers_every_pair_of_choices():
    from runtime.equality import _pairs

    assert {p for c in _SAMPLE for p in _pairs(c)} == {p for c in all_cases() for p in _pairs(c)}
