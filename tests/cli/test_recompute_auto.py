"""`aliquot plan --recompute auto`: never slower than with either way of recomputing."""

import functools
import json
import math

import msgspec
import pytest
from command_line import TINY, run

import aliquot as aq
from aliquot._plan_graph import plan_graph
from aliquot._variants import plan_variants
from aliquot.cli._model import ZooOptions
from aliquot.cli._recomputation import variants_of, ways_to_build
from aliquot.cluster import Cluster
from aliquot.planners import Interrupted

DEEP = (*"gpt-125m --cluster 1x4xA100-80GB --global-batch 32 --scan --method zero3".split(),)


@functools.cache
def planned(args, recompute, *more):
    found = run("plan", *args, "--recompute", recompute, "--json", "--no-remedies", *more)
    return json.loads(found.stdout) if found.exit_code == 0 else None


@pytest.mark.parametrize("limit", ["60GiB", "5GiB", "100MiB"])
def test_auto_is_the_faster_of_both(limit):
    auto, none, block = (
        planned(DEEP, how, "--memory-limit", limit) for how in ("auto", "none", "block")
    )
    fitting = [each["step_time_s"] for each in (none, block) if each]
    assert (auto and auto["step_time_s"]) == min(fitting, default=None)


def test_the_limits_of_the_test_decide_differently():
    answers = [
        [planned(DEEP, how, "--memory-limit", size) is None for how in ("none", "block")]
        for size in ("60GiB", "5GiB")
    ]
    assert answers == [[False, False], [True, False]]


def test_the_other_way_is_listed_among_what_was_tried(tmp_path):
    path = tmp_path / "plan.json"
    found = run("plan", *TINY, "--method", "dp", "--recompute", "auto", "--out", path)
    assert found.exit_code == 0, found.stderr
    plan = json.loads(path.read_text())
    assert plan["model"]["settings"]["recompute"] == "none"
    assert "--recompute block" in [each["name"] for each in plan["provenance"]["candidates"]]


def test_a_time_limit_is_kept_over_both():
    found = run("plan", *TINY, "--recompute", "auto", "--time-limit", "1us")
    assert found.exit_code == 1 and "whether one fits is not known" in found.stderr


# Computing blocks twice costs more than storing what they keep and reading it. Scanned, all of it
# is also copied into stacks of all layers and back, which is predicted to cost more still.
@pytest.mark.parametrize(
    ("device", "scan", "faster"), [("V100-32GB", False, "none"), ("H100", True, "block")]
)
def test_the_default_of_auto_is_never_slower_than_either(device, scan, faster):
    on = (*f"gpt-125m --cluster 1x4x{device} --global-batch 32 --mesh 4".split(),)
    on = (*on, "--scan") if scan else (*on, "--set", "num_layers=2")
    unasked = json.loads(run("plan", *on, "--json", "--no-remedies").stdout)
    seconds = {how: planned(on, how)["step_time_s"] for how in ("none", "block")}
    assert unasked["step_time_s"] == min(seconds.values())
    assert min(seconds, key=seconds.__getitem__) == faster, seconds
    assert seconds["none"] != seconds["block"]


def test_other_methods_choose_too():
    limit = ("--memory-limit", "60GiB")
    found = json.loads(run("plan", *DEEP, *limit, "--json", "--no-remedies").stdout)
    assert found["step_time_s"] == planned(DEEP, "auto", *limit)["step_time_s"]


@pytest.mark.parametrize("later", ["none", "faster", "slower"])
def test_ctrl_c_during_the_second_search_keeps_the_faster(later, monkeypatch):
    where = Cluster.preset("1x2xH100")
    made = []

    def make(graph, *, started, cluster, method, **options):
        plan = plan_graph(graph, started=started, cluster=cluster, method=aq.DataParallel())
        seconds = {"faster": 1e-6, "slower": 1e6}
        if not made:
            # So long that blocks may be faster.
            made.append(_timed(plan, 1e3))
            return made[0]
        stopped = Interrupted(None)
        stopped.plan = _timed(plan, seconds[later]) if later in seconds else None
        made.append(stopped.plan)
        raise stopped

    monkeypatch.setattr("aliquot._variants.plan_graph", make)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan_variants(both_ways(where), cluster=where)
    kept = caught.value.plan
    assert kept.prediction.step_time_s == (1e-6 if later == "faster" else 1e3)
    names = [(each["name"], each["outcome"]) for each in kept.provenance.candidates]
    assert (("--recompute block", "interrupted") in names) == (later != "faster")


def _timed(plan, step_time_s):
    prediction = msgspec.structs.replace(plan.prediction, step_time_s=step_time_s)
    return msgspec.structs.replace(plan, prediction=prediction)


def both_ways(where):
    return variants_of(
        ways_to_build("gpt-10m", ZooOptions(global_batch=8, overrides={"num_layers": 1}), where)
    )


def asked(monkeypatch, limit, first_s, devices=2):
    """What is searched in which order: with blocks or without, how fast, with pipelines or not."""
    searched = []

    def make(graph, *, started, method, model, **options):
        searched.append((model.settings["recompute"], method.faster_than_s, method.pipelines))
        where = Cluster.preset("1x2xH100")
        plan = plan_graph(graph, started=started, cluster=where, method=aq.DataParallel())
        return _timed(plan, first_s)

    where = Cluster.preset(f"1x{devices}xH100")
    with monkeypatch.context() as patch:
        patch.setattr("aliquot._variants.plan_graph", make)
        plan_variants(both_ways(where), cluster=where, memory_limit_bytes=limit)
    return searched


def test_what_cannot_be_faster_is_not_searched(monkeypatch):
    # Blocks compute longer, and pipelines without them choose what they recompute.
    assert asked(monkeypatch, None, 1e-9) == [("none", math.inf, True)]
    assert asked(monkeypatch, None, 1e3) == [("none", math.inf, True), ("block", 1e3, False)]
    # The whole batch does not fit without recomputation.
    assert asked(monkeypatch, 1e6, 1e3) == [("block", math.inf, True), ("none", 1e3, True)]
    assert asked(monkeypatch, 1e4, 1e3, 256) == [("block", math.inf, True), ("none", 1e3, False)]
