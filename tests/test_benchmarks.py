"""What benchmarks count by formula."""

import runpy
from pathlib import Path

import pytest

HLO = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "_hlo.py"))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_an_all_reduce_sends_what_its_halves_send(n):
    """Of 64 bytes the first half leaves 64/n on each device; in a ring of n each passes on all but
    one part, twice.
    """
    sent = HLO["sent_bytes"]
    halves = sent("reduce-scatter", 64 / n, n), sent("all-gather", 64, n)
    assert halves == pytest.approx((64 * (n - 1) / n,) * 2)
    assert sent("all-reduce", 64, n) == pytest.approx(sum(halves))
    assert sent("all-to-all", 64, n) == pytest.approx(64 * (n - 1) / n)
    assert sent("collective-permute", 64, n) == 64
