"""Options of the optimizer: the schedule that they make."""

import pytest

from aliquot.cli._optimizer_options import RateOptions
from aliquot.core import InputError
from aliquot.zoo._schedule import schedule


def rate(steps, **options):
    return RateOptions(lr=1.0, **options).read(steps)["learning_rate"]


def test_a_decay_may_end_before_or_behind_the_last_step():
    options = {"decay": "linear", "min_lr": 0.1, "warmup_steps": "0.1"}
    early = rate(100, decay_steps=50, **options)
    assert (early["steps"], early["warmup_steps"]) == (50, 5)
    value = schedule(early)
    assert [float(value(k)) for k in (5, 50, 99)] == pytest.approx([1.0, 0.1, 0.1])
    late = schedule(rate(100, decay_steps=200, **options))
    assert float(late(100)) == pytest.approx(1 - 0.9 * 80 / 180)
    assert rate(100, **options)["steps"] == 100


def test_a_length_of_no_decay_is_refused():
    with pytest.raises(InputError, match=r"--decay-steps 50 is the length of a decay: add"):
        rate(100, decay_steps=50)
    with pytest.raises(InputError, match=r"--decay-steps must be at least 1, got 0"):
        rate(100, decay_steps=0, decay="cosine")
