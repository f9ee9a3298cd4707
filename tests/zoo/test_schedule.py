"""Learning rates as plain data."""

import math

import pytest

from aliquot.core import InputError
from aliquot.zoo import build, learning_rate
from aliquot.zoo._schedule import rate_faults, schedule


def test_a_rate_rises_falls_and_stays():
    rate = learning_rate(1.0, steps=110, end=0.1, warmup_steps=10, decay="cosine")
    at = schedule(rate)
    assert [float(at(k)) for k in (0, 5, 10)] == pytest.approx([0, 0.5, 1])
    assert float(at(60)) == pytest.approx(0.55)
    assert [float(at(k)) for k in (110, 1000)] == pytest.approx([0.1, 0.1])
    half = 0.1 + 0.9 * (1 + math.cos(math.pi * 0.25)) / 2
    assert float(at(35)) == pytest.approx(half)
    linear = schedule(learning_rate(1.0, steps=100, decay="linear"))
    assert [float(linear(k)) for k in (0, 25, 100)] == pytest.approx([1, 0.75, 0])
    flat = schedule(learning_rate(1.0, steps=100, warmup_steps=0.1))
    assert [float(flat(k)) for k in (5, 10, 99)] == pytest.approx([0.5, 1, 1])


def test_a_constant_rate_is_a_number():
    assert learning_rate(0.5, steps=10) == 0.5
    assert schedule(0.5) == 0.5


def test_everything_that_is_wrong_is_said():
    with pytest.raises(InputError) as error:
        learning_rate(1e-3, steps=10, end=1, warmup_steps=10, decay="cosin")
    for part in ("ends at 1", "leaves nothing of 10 steps", "did you mean 'cosine'"):
        assert part in str(error.value)
    assert "must be a positive number" in " ".join(rate_faults("x"))
    faults = rate_faults({"peak": 1, "ends": 1})
    assert "did you mean 'end'" in faults[0] and "lacks end, warmup_steps" in faults[1]
    with pytest.raises(InputError, match="whole numbers"):
        learning_rate(1e-3, steps=10, warmup_steps=2.5)
    with pytest.raises(InputError, match=r"there is no optimizer.*learning_rate lacks"):
        build("gpt-10m", 1, learning_rate={"peak": 1}, optimizer="x")
