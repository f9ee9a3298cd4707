"""Which numbers of hosts are planned for a training run with a deadline."""

from __future__ import annotations

import dataclasses

import pytest
from planners.small_steps import mlp
from sample_plans import sample_plan

import aliquot as aq
from aliquot._size import _counts, _try
from aliquot._variants import Variant
from aliquot.report import ClusterOption, Sizing


def option(num_hosts, training_s):
    return ClusterOption(
        cluster=f"{num_hosts}x8xH100",
        num_hosts=num_hosts,
        devices_per_host=8,
        plan=None if training_s is None else sample_plan(),
        training_s=training_s,
    )


def planned(counts, by_s, seconds):
    """The numbers of hosts that are planned, in order."""
    asked = []

    def plan(count):
        asked.append(count)
        return option(count, seconds(count))

    _try(counts, by_s, plan)
    return asked


@pytest.mark.parametrize(
    ("by_s", "seconds", "wanted"),
    [
        # The fewest that are in time are found among all that divide the batch.
        (20.0, lambda n: 100.0 / n, [1, 2, 4, 8, 5]),
        (9.0, lambda n: 100.0 / n, [1, 2, 4, 8, 16, 24, 12]),
        # What does not fit is no reason to end, and none between is left out for it.
        (40.0, lambda n: None if n < 6 else 100.0 / n, [1, 2, 4, 8, 5, 6]),
        # More hosts that take no less time end the search.
        (1.0, lambda n: 50.0, [1, 2]),
        (200.0, lambda n: 100.0, [1]),
    ],
)
def test_numbers_between_are_planned_where_they_may_be_the_fewest(by_s, seconds, wanted):
    counts = [n for n in range(1, 25) if 240 % n == 0]
    assert planned(counts, by_s, seconds) == wanted


def test_numbers_that_are_too_slow_at_best_are_not_planned():
    variant = Variant(step=mlp((64, 128, 64), 48)[0], args=mlp((64, 128, 64), 48)[1:])
    every = _counts(variant, "H100", 8, 8, 1e6, 1e9)
    assert every == [1, 2, 3, 4, 6, 8]
    alone = aq.plan(
        variant.step,
        *variant.args,
        cluster=aq.Cluster.preset("1xH100"),
        method=aq.DataParallel(),
    ).prediction.compute_s
    tokens_in_time_on_23 = 48 * 23.0 / alone
    some = _counts(variant, "H100", 8, 8, tokens_in_time_on_23, 1.0)
    assert some[-1] == 8 and some[0] in (2, 3)
    assert _counts(variant, "H100", 8, 5, 1e30, 1.0) == [4]


def test_where_none_is_in_time_the_first_that_would_be_is_named():
    sizing = Sizing(
        model="gpt-10m",
        tokens=1e9,
        by_s=86_400.0,
        global_batch=48,
        options=(option(4, 2 * 86_400.0), option(8, 1.9 * 86_400.0)),
        max_hosts=8,
    )
    assert sizing.first_in_time == 12 and "--max-hosts 12" in str(sizing)
    assert dataclasses.replace(sizing, by_s=86_400.0 / 20).first_in_time is None
    assert dataclasses.replace(sizing, by_s=2e6).first_in_time is None
    text = str(dataclasses.replace(sizing, options=(option(8, None),)))
    assert "It fits on none of up to 8 hosts: --max-hosts tries more." in text


@pytest.mark.parametrize(
    ("days", "wanted"),
    [
        (29.1, "even if steps take 3% longer: less than the expected error (median 7%"),
        (20.0, "even if steps take 50% longer: more than the expected error (median 7%"),
    ],
)
def test_what_is_left_before_the_deadline_stands_beside_the_expected_error(days, wanted):
    sizing = Sizing(
        model="gpt-10m",
        tokens=1e9,
        by_s=30 * 86_400.0,
        global_batch=48,
        options=(option(8, days * 86_400.0),),
    )
    assert wanted in str(sizing)


def test_a_price_list_may_name_its_currency(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("device, devices per host, price per hour (eur)\nH100, 8, 50\n")
    (price,) = aq.cluster.load_prices(path)
    assert (price.currency, price.price_per_hour) == ("EUR", 50.0)
    assert {price.currency for price in aq.cluster.load_prices()} == {"USD"}
