"""`aliquot size` and `plan --max-batch`: how many hosts, which cluster, how large a batch."""

import json
import re
from importlib import resources

import pytest
from command_line import TINY, refused, run

import aliquot as aq
from aliquot import _size
from aliquot.cli._interrupts import INTERRUPTED
from aliquot.cli._size import read_count, read_duration
from aliquot.cluster import DEVICES, SAMPLE_PRICES, load_prices
from aliquot.core import recompute_ways
from aliquot.zoo import build

# One layer is planned in less time than two, and two devices in less time than eight.
ONE_LAYER = ["num_layers=1" if part == "num_layers=2" else part for part in TINY]
SMALL = [part for part in ONE_LAYER if part not in ("--cluster", "8xH100")] + [
    "--recompute",
    "none",
]
PRICES = "# mine\ndevice, devices per host, price per hour\nH100, 2, 50\nA100-80GB, 2, 10\n"


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    return path


def test_the_cheapest_in_time_is_chosen(prices):
    found = run(
        "size",
        *SMALL,
        "--tokens",
        "1B",
        "--by",
        "30d",
        "--prices",
        prices,
        "--max-hosts",
        "1",
        "--json",
    )
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    in_time = [o for o in answer["options"] if o["in_time"]]
    assert answer["choice"] == min(in_time, key=lambda o: o["cost"])["cluster"]
    assert answer["prices"].startswith(f"{prices}, written on 20")
    one = answer["options"][0]
    assert one["training_s"] == pytest.approx(1e9 / (8 * 1024) * one["step_time_s"])
    assert one["cost"] == pytest.approx(one["price_per_hour"] * one["training_s"] / 3600)
    assert [s["slower"] for s in answer["sensitivity"]] == [0.8, 1.0, 1.25, 1.5]
    # The device whose compute is cheapest is planned first, and listed where its price stands.
    assert [o["cluster"] for o in answer["options"]] == ["1x2xH100", "1x2xA100-80GB"]
    assert re.search(
        r"1x2xA100-80GB: .* days \(1 of about 2 clusters, .* left\)\n(.*\n)*1x2xH100: .* days\n",
        found.stderr,
    ), found.stderr


def test_every_way_to_recompute_is_planned_unless_one_is_asked_for(monkeypatch, prices):
    asked = []

    def noted(variants, **options):
        asked.append([variant.name for variant in variants[0].ways_to_recompute(None)])
        raise KeyboardInterrupt

    monkeypatch.setattr(_size, "plan_variants", noted)
    typed = [part.replace("num_layers=1", "num_layers=2") for part in SMALL]
    free = [part for part in typed if part not in ("--recompute", "none")]
    for step in (free, typed):
        run("size", *step, "--tokens", "1B", "--by", "30d", "--prices", prices)
    every = [f"--recompute {name}" for name in recompute_ways(has_attention=True)]
    assert asked == [every, ["--recompute none"]]


def test_ctrl_c_keeps_the_clusters_that_are_planned(monkeypatch, prices):
    known = _size.plan_variants
    asked, made = [], {}

    def interrupted_later(variants, *, cluster, **options):
        asked.append(cluster.name)
        if len(asked) > allowed:
            raise KeyboardInterrupt
        if cluster.name not in made:
            made[cluster.name] = known(variants, cluster=cluster, **options)
        return made[cluster.name]

    monkeypatch.setattr(_size, "plan_variants", interrupted_later)
    command = ["size", *SMALL, "--tokens", "1B", "--by", "30d", "--prices", prices]
    allowed = 1
    found = run(*command, "--max-hosts", "1")
    assert found.exit_code == INTERRUPTED
    assert "interrupted: other clusters" in found.stdout and asked[0] in found.stdout
    asked.clear()
    found = run(*command, "--max-hosts", "1", "--json")
    answer = json.loads(found.stdout)
    assert not answer["is_complete"] and answer["choice"] == asked[0] == "1x2xA100-80GB"
    asked.clear()
    allowed = 0
    found = run(*command, "--max-hosts", "1")
    assert found.exit_code == INTERRUPTED and "interrupted; nothing was written" in found.output


def test_a_deadline_that_nothing_meets_is_an_answer():
    found = run(
        "size", *SMALL, "--device", "H100", "--tokens", "900T", "--by", "1h", "--max-hosts", "1"
    )
    assert found.exit_code == 1
    assert "none of up to 1 host meets the deadline; the fastest: 1x8xH100 (1 host)" in found.stdout
    assert "No more hosts that divide the batch would meet it" in found.stdout
    assert re.search(r" days, cost USD \d", found.stdout) and "(USD)" in found.stdout
    assert "900T tokens in 1 hour, batch 8" in found.stdout
    assert "Prices: samples, no offer: pass yours as --prices FILE. H100: " in found.stdout
    assert "1x8xH100: " in found.stderr and " days" in found.stderr


def test_devices_without_a_price_are_sized_by_hosts():
    found = json.loads(
        run(
            "size",
            *SMALL,
            "--device",
            "v5e",
            "--devices-per-host",
            "4",
            "--tokens",
            "1M",
            "--by",
            "1d",
            "--json",
        ).stdout
    )
    assert found["prices"] is None and found["choice"] == "1x4xv5e"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100, 8, 50\n", "do not begin with a line that names the columns"),
        ("device, devices per host, price per hour\n", "there is no price"),
        ("device, devices per host, price per hour\nH1000, x, -3\nH100\n", "row 2 has 1 cells"),
    ],
)
def test_prices_that_cannot_be_used_say_why(tmp_path, text, message):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(aq.InputError, match=message):
        load_prices(path)


def test_odd_sizes_are_refused(tmp_path, prices):
    refused(run("size", *SMALL, "--by", "30d"), "time that they may take: add --tokens 2T, for")
    refused(run("size", *SMALL, "--tokens", "2T"), "time that they may take: add --by 30d, for")
    refused(run("size", *SMALL), "add --tokens 2T --by 30d, for example")
    asked = ("--tokens", "2T", "--by", "30d", "--device", "H1000")
    refused(run("size", *SMALL, *asked), "--device H1000: there is no such device: did you mean")
    refused(run("size", *SMALL, "--tokens", "many", "--by", "30d"), "--tokens 'many'")
    refused(run("size", *SMALL, "--tokens", "2T", "--by", "soon"), "--by 'soon'")
    refused(
        run("size", *SMALL, "--tokens", "2T", "--by", "3d", "--prices", tmp_path / "no"),
        "cannot be read",
    )
    refused(
        run("size", *SMALL, "--tokens", "2T", "--by", "3d", "--prices", prices, "--device", "L4"),
        "none for it",
    )
    assert (read_count("2T"), read_duration("6w")) == (2e12, 6 * 7 * 86400)


def test_each_sample_price_has_a_source_and_a_day_and_each_device_to_rent_a_line():
    prices = load_prices()
    assert {price.device for price in prices} >= {"H100", "A100-80GB", "MI300X"}
    assert all(re.search(r"\d{4}-\d{2}-\d{2}", price.source) for price in prices)
    sample = resources.files("aliquot.cluster").joinpath(SAMPLE_PRICES).read_text()
    rows = [line.split(",")[0] for line in sample.splitlines() if line and line[0] != "#"]
    assert set(rows[1:]) == set(DEVICES) - {"cpu"}


def test_a_host_may_have_no_price_in_a_list(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text(
        'device, devices per host, price per hour (USD), source\nH100, 8, 50, "ours, 2026-01-02"\n'
        "v5p, 4, no price\n"
    )
    (price,) = load_prices(path)
    assert (price.device, price.source) == ("H100", "ours, 2026-01-02")


def test_the_largest_batch_is_where_one_more_does_not_fit(tmp_path):
    path = tmp_path / "plan.json"
    found = run(
        "plan",
        *ONE_LAYER,
        "--max-batch",
        "--memory-limit",
        "150MiB",
        "--method",
        "ddp",
        "--json",
        "--out",
        path,
    )
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    tried = {t["global_batch"]: t for t in answer["trials"]}
    largest = answer["largest_batch"]
    assert (
        answer["is_limited_by_memory"]
        and tried[largest]["feasible"]
        and not tried[largest + 8]["feasible"]
    )
    best = max((t for t in tried.values() if t["feasible"]), key=lambda t: t["examples_per_s"])
    assert answer["fastest_batch"] == best["global_batch"]
    assert aq.Plan.load(path).inputs[-1].shape[0] == answer["fastest_batch"]


@pytest.mark.slow
def test_batches_hold_whole_groups_of_tokens():
    sizes = (
        "num_layers=2 hidden_size=16 num_heads=2 vocab_size=32 seq_len=8 num_experts=4"
        " group_size=32".split()
    )
    settings = [part for size in sizes for part in ("--set", size)]
    model = ["moe-380m", *settings, "--cluster", "2xH100", "--method", "dp", "--global-batch", "6"]
    found = run("plan", *model, "--max-batch", "--memory-limit", "500KiB", "--json")
    answer = json.loads(found.stdout)
    assert answer["multiple_of"] == 4 and answer["largest_batch"] >= 4
    refused(
        run("plan", *model),
        "global_batch=6 is not a multiple of 4, the sequences whose tokens choose",
    )
    model[-1] = "4"
    refused(
        run("plan", *model, "--micro-batches", "2"), "on a micro-batch", "use fewer micro-batches"
    )


def test_one_call_finds_the_largest_batch():
    def make(batch):
        work = build(
            "gpt-10m", batch, overrides={"num_layers": 1, "vocab_size": 64, "hidden_size": 64}
        )
        return work.train_step, work.state, work.batch

    found = aq.largest_batch(
        make, cluster=aq.Cluster.preset("2xH100"), unit=2, most=8, method=aq.DataParallel()
    )
    assert [t.global_batch for t in found.trials] == [2, 4, 8]
    assert not found.is_limited and "larger ones were not tried" in str(found)
    with pytest.raises(aq.InputError, match="1 <= unit <= most"):
        aq.largest_batch(make, cluster=aq.Cluster.preset("2xH100"), unit=4, most=2)


def test_a_batch_that_never_fits_is_an_answer():
    found = run("plan", *ONE_LAYER, "--method", "dp", "--max-batch", "--memory-limit", "1MiB")
    assert found.exit_code == 1 and "No batch fits" in found.stdout
