"""Which numbers of hosts are planned for a training run with a deadline."""

from __future__ import annotations

import dataclasses

import pytest
from planners.small_steps import mlp
from sample_plans import sample_plan

import aliquot as aq
from aliquot import _size
from aliquot._size import Goal, Outlook, SizingInterrupted, _counts, _Kind, _try, size_built
from aliquot._variants import Variant
from aliquot.cluster import HostPrice, ReportedSteps
from aliquot.cluster import _reported as reported
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
        return seconds(count)

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
    every, _ = _counts(variant, "H100", 8, 8, 1e6, 1e9)
    assert every == [1, 2, 3, 4, 6, 8]
    alone = aq.plan(
        variant.step,
        *variant.args,
        cluster=aq.Cluster.preset("1xH100"),
        method=aq.DataParallel(),
    ).prediction.compute_s
    tokens_in_time_on_23 = 48 * 23.0 / alone
    some, one_host_s = _counts(variant, "H100", 8, 8, tokens_in_time_on_23, 1.0)
    assert some[-1] == 8 and some[0] in (2, 3)
    assert one_host_s == pytest.approx(23.0 / 8, rel=0.2)
    assert _counts(variant, "H100", 8, 5, 1e30, 1.0)[0] == [4]


@pytest.fixture
def planned_at_once(monkeypatch):
    """No cluster has a plan, and each takes a minute. The clusters that are asked for; at one that
    is put into `stop` Ctrl-C is pressed.
    """
    asked, stop = [], []

    def refuse(variants, *, cluster, **options):
        asked.append(cluster.name)
        if cluster.name in stop:
            raise KeyboardInterrupt
        if cluster.device.name == "H200":
            return sample_plan()
        raise aq.InfeasibleError("does not fit")

    monkeypatch.setattr(_size, "plan_variants", refuse)
    monkeypatch.setattr(_size.time, "monotonic", lambda: 60.0 * len(asked))
    return asked, stop


def priced(device, price):
    return HostPrice(device=device, devices_per_host=8, price_per_hour=price)


def sized(hosts, max_hosts=64, **options):
    step, *args = mlp((64, 128, 64), 48)
    variants = (Variant(step=step, args=tuple(args)),)
    goal = Goal(hosts=hosts, tokens=1e6, by_s=1e6, max_hosts=max_hosts)
    return size_built(lambda cluster: variants, goal, **options)


def test_devices_on_which_compute_is_cheap_come_first(planned_at_once):
    asked, _ = planned_at_once
    hosts = [priced("V100-16GB", 300.0), priced("H100", 55.0), priced("A100-80GB", 100.0)]
    found = sized(hosts, max_hosts=1)
    assert asked == ["1x8xH100", "1x8xA100-80GB", "1x8xV100-16GB"]
    assert [o.cluster for o in found.options] == ["1x8xV100-16GB", "1x8xH100", "1x8xA100-80GB"]
    asked.clear()
    sized([("V100-16GB", 8), ("H100", 8)], max_hosts=1)
    assert asked == ["1x8xH100", "1x8xV100-16GB"]


def test_devices_that_cannot_be_in_time_come_last():
    kind = _Kind(model="", device="H100", each=8, price_per_hour=9.0, counts=[1, 2], least_s=1000.0)
    late = dataclasses.replace(kind, price_per_hour=1.0, least_s=3000.0)
    unpriced = dataclasses.replace(kind, price_per_hour=None)
    kinds = [late, unpriced, kind]
    assert sorted(kinds, key=lambda each: each.promise(1000.0)) == [kind, unpriced, late]


def test_what_is_left_is_told_before_and_after_each_cluster(planned_at_once):
    asked, _ = planned_at_once
    before, after = [], []
    sized(
        [("H100", 8), ("A100-80GB", 8)],
        max_hosts=8,
        progress=lambda *told: before.append(told),
        found=lambda option, outlook: after.append((option.num_hosts, str(outlook))),
    )
    assert before[:3] == [
        ("comparing the compute of devices", 1, 2),
        ("comparing the compute of devices", 2, 2),
        ("1x8xH100", 0, 2),
    ]
    # One host of each would do if it fitted; if 8 fit and 4 do not, 6 come next.
    assert before[-1] == ("8x8xA100-80GB, about 2 minutes left", 7, 9)
    assert after[0] == (1, "1 of about 3 clusters, about 2 minutes left")
    assert after[-1] == (8, "")


@pytest.mark.parametrize(
    ("left_s", "wanted"),
    [
        (None, "3 of about 9 clusters"),
        (29.0, "3 of about 9 clusters, less than a minute left"),
        (400.0, "3 of about 9 clusters, about 7 minutes left"),
    ],
)
def test_the_time_left_is_told_in_minutes(left_s, wanted):
    assert str(Outlook(done=3, of=9, left_s=left_s)) == wanted


def test_clusters_are_expected_as_training_is_predicted_so_far():
    kind = _Kind(
        model="",
        device="H100",
        each=8,
        price_per_hour=None,
        counts=[1, 2, 4, 8, 16],
        least_s=100.0,
    )
    assert kind.num_expected(150.0, 1.0) == 1
    # 1 is too slow, 2 are in time, and 4 with a margin.
    assert kind.num_expected(140.0, 2.0) == 3
    kind.tried[1] = 500.0
    assert kind.num_expected(140.0, 2.0) == 4


def test_ctrl_c_carries_the_table_so_far(planned_at_once):
    _, stop = planned_at_once
    stop.append("1x8xA100-80GB")
    with pytest.raises(SizingInterrupted) as stopped:
        sized([priced("A100-80GB", 40.0), priced("H200", 50.0)], max_hosts=1)
    sizing = stopped.value.sizing
    assert [o.cluster for o in sizing.options] == ["1x8xH200"] and not sizing.is_complete
    stop.append("1x8xH100")
    with pytest.raises(KeyboardInterrupt) as stopped:
        sized([("H100", 8)])
    assert not isinstance(stopped.value, SizingInterrupted)


def test_the_table_says_what_shard_is():
    sizing = Sizing(
        model="gpt-10m", tokens=1e9, by_s=86_400.0, global_batch=48, options=(option(4, 1e4),)
    )
    assert str(sizing).count("shard: every operator and array split as an integer program") == 1


def test_fewer_tokens_than_those_of_a_step_are_refused():
    step, *args = mlp((64, 128, 64), 48)
    variant = Variant(step=step, args=tuple(args))
    with pytest.raises(aq.InputError, match="2 examples were asked for, and one step takes 48.*2T"):
        _counts(variant, "H100", 8, 8, 2.0, 1e9)


def test_what_is_left_out_is_said_if_some_are_in_time():
    slow, fast = (
        Sizing(
            model="gpt-10m",
            tokens=1e9,
            by_s=86_400.0,
            global_batch=8,
            options=(option(4, seconds),),
        )
        for seconds in (1e6, 1e4)
    )
    assert "Left out: numbers of hosts that do not divide the batch, and fewer hosts" in str(fast)
    assert "Left out" not in str(slow)


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
    ("sooner_s", "more", "said"),
    [
        (40_000.0, 1.02, "much sooner for 2.0% more: 8x8xH100 (8 hosts), 0.5 days, cost USD 102"),
        (40_000.0, 1.2, ""),
        (60_000.0, 1.02, ""),
    ],
)
def test_an_option_that_is_done_much_sooner_for_little_more_is_named(sooner_s, more, said):
    first = dataclasses.replace(option(4, 72_000.0), price_per_hour=5.0)
    second = dataclasses.replace(
        option(8, sooner_s), price_per_hour=more * 100.0 / sooner_s * 3600.0
    )
    sizing = Sizing(
        model="gpt-10m",
        tokens=1e9,
        by_s=86_400.0,
        global_batch=48,
        options=(first, second),
        prices="a list",
        currency="USD",
    )
    assert ("much sooner" in str(sizing)) == bool(said) and said in str(sizing)


def test_costs_are_rounded_as_predictions_are():
    dear = dataclasses.replace(option(4, 36_000.0), price_per_hour=13_611.7)
    sizing = Sizing(
        model="gpt-10m",
        tokens=1e9,
        by_s=86_400.0,
        global_batch=48,
        options=(dear,),
        prices="a list",
    )
    assert "cost 136,000" in str(sizing) and sizing.to_dict()["options"][0]["cost"] == 136_117.0


@pytest.mark.parametrize(
    ("days", "wanted"),
    [
        (
            29.1,
            "even if steps take 3% longer, which is less than the expected error (2 steps",
        ),
        (
            20.0,
            "even if steps take 50% longer, which is more than the expected error (2 steps",
        ),
        (
            2.0,
            "even if steps take 15 times as long, which is more than the expected error (2 steps",
        ),
    ],
)
def test_what_is_left_before_the_deadline_stands_beside_the_expected_error(
    days, wanted, monkeypatch
):
    found = ReportedSteps(
        framework="MaxText", reason="", device="H100", kind="data, FSDP", errors=(-0.08, 0.1)
    )
    monkeypatch.setattr(reported, "_record", lambda: (found,))
    sizing = Sizing(
        model="gpt-10m",
        tokens=1e9,
        by_s=30 * 86_400.0,
        global_batch=48,
        options=(option(8, days * 86_400.0),),
    )
    assert wanted in " ".join(str(sizing).split())


def test_a_price_list_may_name_its_currency(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("device, devices per host, price per hour (eur)\nH100, 8, 50\n")
    (price,) = aq.cluster.load_prices(path)
    assert (price.currency, price.price_per_hour) == ("EUR", 50.0)
    assert {price.currency for price in aq.cluster.load_prices()} == {"USD"}


def test_hosts_that_do_not_divide_the_batch_get_one_near_it():
    """40, 48 and 56 hosts, between 32 and 64 that divide a batch of 1024."""
    found = {n: _size.batch_for(1024, n, 8) for n in (32, 40, 48, 56, 64)}
    assert found == {32: 1024, 40: 960, 48: 1008, 56: 1008, 64: 1024}
    for hosts in range(1, 129):
        batch = _size.batch_for(1024, hosts, 8)
        if batch is not None:
            assert batch % hosts == 0 and abs(batch / 1024 - 1) <= 0.12
    # On a grid of quarters: each of many more would be a search.
    assert sum(_size.batch_for(1024, n, 8) is not None for n in range(33, 64)) == 3


def test_another_batch_is_built_planned_and_shown():
    steps = {batch: mlp((64, 128, 64), batch) for batch in (16, 15)}
    built = []

    def build(cluster, batch=16):
        built.append((cluster.num_hosts, batch))
        step, *args = steps[batch]
        return (Variant(step=step, args=tuple(args)),)

    sizing = size_built(
        build,
        Goal(hosts=[("H100", 1)], tokens=1e9, by_s=1e9, max_hosts=3, goodput=0.5),
        rebuild=build,
        method=aq.DataParallel(),
    )
    assert sizing.global_batch == 16 and sizing.goodput == 0.5
    (option,) = sizing.options
    p = option.plan.prediction
    assert option.training_s == pytest.approx(1e9 / 16 * p.step_time_s / 0.5)
    assert "goodput 50%" in str(sizing)
    quick = size_built(
        build,
        Goal(hosts=[("H100", 1)], tokens=1e9, by_s=option.training_s / 2 / 2.5, max_hosts=3),
        rebuild=build,
        method=aq.DataParallel(),
    )
    three = next(o for o in quick.options if o.num_hosts == 3)
    assert (3, 15) in built and three.training_s == pytest.approx(
        1e9 / 15 * three.plan.prediction.step_time_s
    )
    assert "batch" in str(quick) and " 15 " in str(quick)


def test_a_device_known_by_its_data_sheet_alone_and_no_price_are_called_so():
    unknown = sample_plan(cluster=aq.Cluster.preset("8xMI300X").to_dict())
    rows = (
        dataclasses.replace(option(1, 100.0), price_per_hour=55.0),
        dataclasses.replace(option(1, 120.0), cluster="1x8xMI300X", plan=unknown),
    )
    text = str(Sizing(model="m", tokens=1.0, by_s=200.0, global_batch=8, options=rows))
    words = " ".join(text.split())
    assert (
        "MI300X: the device is known by its data sheet alone; none of its own was compared."
        in words
    )
    assert "no price" in words


def test_a_device_with_plans_of_known_and_of_unknown_error_says_both(monkeypatch):
    from aliquot.report import _sizing

    said = iter(["expected error 9% by steps on H100", "expected error not known"])
    monkeypatch.setattr(_sizing, "said_error", lambda plan: next(said))
    sizing = Sizing(
        model="m", tokens=1.0, by_s=200.0, global_batch=8, options=(option(1, 1.0), option(2, 2.0))
    )
    (line,) = _sizing._unknown_errors(sizing)
    assert line == "H100: expected error 9% by steps on H100; not known of its other plans."


@pytest.mark.parametrize("goodput", [0.0, 1.1, -1.0])
def test_a_goodput_that_is_none_is_refused(goodput):
    with pytest.raises(aq.InputError, match="share of the time"):
        aq.size(*mlp((64, 128, 64), 8), hosts=[("H100", 8)], tokens=1e9, by_s=1e9, goodput=goodput)
