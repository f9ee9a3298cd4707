"""How long a search may take, and whether that time is over."""

import math
import time

import pytest

from aliquot.core import InputError, OutOfTime, TimeLimit


def ends(limit):
    """Whether a check ends the search. As on Ctrl-C, what it raises would end the tests, too."""
    try:
        limit.check()
    except OutOfTime:
        return True
    return False


def test_a_limit_is_over_once_its_seconds_have_passed():
    now = time.perf_counter()
    over, left = TimeLimit.since(now - 2.0, 1.0), TimeLimit.since(now - 2.0, 1000.0)
    assert over.is_over and not left.is_over and not TimeLimit().is_over
    assert 2.0 <= left.elapsed_s < 100.0
    assert ends(over) and not ends(left)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_limit_must_be_positive(seconds):
    with pytest.raises(InputError, match="must be positive"):
        TimeLimit.since(0.0, seconds)


def test_a_block_ends_at_its_limit_and_only_then():
    with TimeLimit(seconds=60.0).ringing():
        time.sleep(0.05)
    with pytest.raises(OutOfTime), TimeLimit(seconds=0.1).ringing():
        time.sleep(60)
    time.sleep(0.2)
