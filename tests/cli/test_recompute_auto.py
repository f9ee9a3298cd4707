"""`aliquot plan --recompute auto`: never slower than with any policy of recomputing."""

import functools
import json
import math

import msgspec
import pytest
from command_line import TINY, run

import aliquot as aq
from aliquot._plan_graph import plan_graph
from aliquot._variants import _simple_times, plan_variants
from aliquot.cli._model import ZooOptions
from aliquot.cli._recomputation import model_to_plan, variants_of
from aliquot.cluster import Cluster
from aliquot.planners import Interrupted, simple_plan

POLICIES = ("none", "fused", "minimal", "narrow", "save_qkv", "save_attention", "block")
DEEP = (*"gpt-125m --cluster 1x4xA100-80GB --global-batch 32 --scan --method zero3".split(),)


@functools.cache
def planned(args, recompute, *more):
    found = run("plan", *args, "--recompute", recompute, "--json", "--no-remedies", *more)
    return json.loads(found.stdout) if found.exit_code == 0 else None


@pytest.mark.parametrize("limit", [pytest.param("60GiB", marks=pytest.mark.slow), "5GiB", "100MiB"])
def test_auto_is_the_fastest_of_all(limit):
    on = ("--memory-limit", limit, "--micro-batches", "1")
    auto = planned(DEEP, "auto", *on)
    seconds = {how: planned(DEEP, how, *on) for how in POLICIES}
    fitting = {how: each["step_time_s"] for how, each in seconds.items() if each}
    assert (auto and auto["step_time_s"]) == min(fitting.values(), default=None)
    assert auto is None or fitting[auto["recompute"]] == auto["step_time_s"]


def test_the_limits_of_the_test_decide_differently():
    answers = [
        [
            planned(DEEP, how, "--memory-limit", size, "--micro-batches", "1") is None
            for how in ("none", "block")
        ]
        for size in ("60GiB", "5GiB")
    ]
    assert answers == [[False, False], [True, False]]


def test_a_method_by_name_takes_the_fewest_micro_batches_in_which_it_fits():
    on = ("--memory-limit", "5GiB")
    found = planned(DEEP, "none", *on)
    count = found["num_micro_batches"]
    assert count > 1 and planned(DEEP, "none", *on, "--micro-batches", str(count)) is not None
    assert planned(DEEP, "none", *on, "--micro-batches", str(count // 2)) is None


ODD = (*"gpt-125m --cluster 1x4xA100-80GB --global-batch 24 --scan --method zero3".split(),)


def test_numbers_of_micro_batches_are_all_divisors_of_the_rows_of_a_device():
    """Six rows on each device: one micro-batch or two do not fit, three do."""
    of_three = planned(ODD, "none", "--micro-batches", "3")
    limit = ("--memory-limit", f"{int(1.01 * of_three['peak_memory_bytes'])}B")
    for count in ((), ("--micro-batches", "auto")):
        assert planned(ODD, "none", *limit, *count)["num_micro_batches"] == 3


def test_the_other_way_is_listed_among_what_was_tried(tmp_path):
    path = tmp_path / "plan.json"
    found = run("plan", *TINY, "--method", "dp", "--recompute", "auto", "--out", path)
    assert found.exit_code == 0, found.stderr
    plan = json.loads(path.read_text())
    assert plan.get("recompute", "none") == "none"
    assert "--recompute block" in [each["name"] for each in plan["provenance"]["candidates"]]


def test_a_time_limit_is_kept_over_both():
    found = run("plan", *TINY, "--recompute", "auto", "--time-limit", "1us")
    assert found.exit_code == 1 and "whether one fits is not known" in found.stderr


# Computing blocks twice costs more than storing what they keep and reading it. Scanned, all of it
# is also copied into stacks of all layers and back, which is predicted to cost more still.
@pytest.mark.parametrize(
    ("device", "scan", "fastest"),
    [
        pytest.param("V100-32GB", False, "none", marks=pytest.mark.slow),
        ("H100", True, "minimal"),
    ],
)
def test_the_default_of_auto_is_never_slower_than_any(device, scan, fastest):
    on = (*f"gpt-125m --cluster 1x4x{device} --global-batch 32 --mesh 4".split(),)
    on = (*on, "--scan") if scan else (*on, "--set", "num_layers=2")
    unasked = json.loads(run("plan", *on, "--json", "--no-remedies").stdout)
    seconds = {how: planned(on, how)["step_time_s"] for how in POLICIES}
    assert unasked["step_time_s"] == min(seconds.values())
    assert unasked["recompute"] == min(seconds, key=seconds.__getitem__) == fastest, seconds
    assert unasked["space"].endswith(f"with --recompute {fastest}")
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
        plan_variants(all_ways(where), cluster=where)
    kept = caught.value.plan
    assert kept.prediction.step_time_s == (1e-6 if later == "faster" else 1e3)
    outcomes = [each["outcome"] for each in kept.provenance.candidates]
    assert ("interrupted" in outcomes) == (later != "faster")


def test_ctrl_c_before_any_search_is_complete_keeps_the_fastest_simple_plan(monkeypatch):
    where = Cluster.preset("1x2xH100")
    monkeypatch.setattr("aliquot.planners.Auto.decide", _stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        plan_variants(all_ways(where), cluster=where)
    assert caught.value.plan.provenance.status == "given"


def _stop(*_):
    raise Interrupted(None)


def _timed(plan, step_time_s):
    prediction = msgspec.structs.replace(plan.prediction, step_time_s=step_time_s)
    return msgspec.structs.replace(plan, prediction=prediction)


def all_ways(where, *, scan=True, batch=8, layers=2):
    """Scanned by default: what a loop keeps is copied, so that any policy may be the fastest."""
    options = ZooOptions(global_batch=batch, scan=scan, overrides={"num_layers": layers})
    (model,) = variants_of(model_to_plan("gpt-10m", options, where))
    return model.ways_to_recompute(None)


def asked(monkeypatch, limit, found_s, devices=2):
    """What is searched in which order: the policy, how fast, with pipelines or not."""
    searched = []

    def make(graph, *, started, method, model, **options):
        how = graph.calling.recompute
        name = how.name if how else "none"
        searched.append((name, method.faster_than_s, method.pipelines))
        where = Cluster.preset("1x2xH100")
        plan = plan_graph(graph, started=started, cluster=where, method=aq.DataParallel())
        return _timed(plan, found_s)

    where = Cluster.preset(f"1x{devices}xH100")
    ways = all_ways(where)
    with monkeypatch.context() as patch:
        patch.setattr("aliquot._variants.plan_graph", make)
        plan_variants(ways, cluster=where, memory_limit_bytes=limit)
    times = _simple_times(ways, lambda way: way.task(where, memory_limit_bytes=limit), None)
    simple_s = {way.layers: seconds for way, seconds in times}
    return searched, {name: seconds for name, seconds in simple_s.items() if seconds < math.inf}


def test_policies_are_searched_in_the_order_of_their_simple_plans(monkeypatch):
    searched, simple_s = asked(monkeypatch, None, 1e-9)
    first = min(simple_s, key=simple_s.__getitem__)
    # All others promise to take longer.
    assert searched[0] == (first, simple_s[first] * (1 + 1e-9), first == "none")
    assert all(each[0] == "none" for each in searched[1:])
    searched, simple_s = asked(monkeypatch, None, 1e3)
    assert [each[0] for each in searched] == sorted(simple_s, key=simple_s.__getitem__)
    assert len(searched) > 1 and {each[1] for each in searched[1:]} == {1e3}
    # Pipelines choose by stage what they recompute.
    assert [each[0] for each in searched if each[2]] == ["none"]


def test_what_fits_as_a_whole_is_not_recomputed_where_no_loop_copies_it():
    where = Cluster.preset("1x2xH100")
    ways = all_ways(where, scan=False)
    times = dict(_simple_times(ways, lambda way: way.task(where), None))
    assert set(times) == set(ways)
    assert [times[way] < math.inf for way in ways] == [True] + [False] * 6
    # None of the others was traced.
    assert [bool(way._traced) for way in ways] == [True] + [False] * 6
    plan = plan_variants(ways, cluster=where, method=aq.WholeProgram())
    outcomes = {each["name"]: each["outcome"] for each in plan.provenance.candidates}
    others = [outcomes[f"--recompute {name}"] for name in POLICIES[1:]]
    assert set(others) == {"not searched: it would compute or keep more, without need"}


def test_simple_plans_begin_where_the_policy_that_keeps_least_fits(monkeypatch):
    where = Cluster.preset("1x2xH100")
    ways = all_ways(where, batch=256)
    in_two = plan_variants(ways[-1:], cluster=where, method=aq.Zero3Parallel(), num_micro_batches=2)
    limit = 1.01 * in_two.prediction.peak_memory_bytes
    begun = []

    def noted(task, *, fewest=1):
        begun.append(fewest)
        return simple_plan(task, fewest=fewest)

    monkeypatch.setattr("aliquot._variants.simple_plan", noted)
    times = dict(_simple_times(ways, lambda way: way.task(where, memory_limit_bytes=limit), None))
    assert begun[0] == 1 and len(begun) > 2 and set(begun[1:]) == {2}
    assert times[ways[-1]] < math.inf


def test_what_products_are_made_of_is_kept_only_where_there_is_memory_for_it():
    """Looked at where keeping the results of products is the fastest, and leaves room."""
    where = Cluster.preset("1x2xH100")
    ways = all_ways(where, scan=False, batch=256, layers=8)
    of = {way.layers: way for way in ways}
    alone = {
        name: plan_variants((of[name],), cluster=where, method=aq.Zero3Parallel())
        for name in ("none", "fused", "minimal")
    }
    most = alone["fused"].prediction.peak_memory_bytes
    assert alone["minimal"].prediction.peak_memory_bytes < most
    assert most < alone["none"].prediction.peak_memory_bytes
    for limit, is_looked_at in (
        (1.01 * most, True),
        (1.01 * alone["minimal"].prediction.peak_memory_bytes, False),
    ):
        times = dict(
            _simple_times(
                ways,
                lambda way, limit=limit: way.task(
                    where, memory_limit_bytes=limit, num_micro_batches=1
                ),
                None,
            )
        )
        assert (times[of["fused"]] < math.inf) == is_looked_at
        assert times[of["minimal"]] < math.inf


def test_where_no_simple_plan_fits_the_first_whose_batch_may_fit_comes_first(monkeypatch):
    searched, simple_s = asked(monkeypatch, 1e6, 1e3)
    assert not simple_s and searched[0] == ("block", math.inf, True)
    assert searched[1] == ("none", 1e3, True)
    # The others choose for one program alone, and come last.
    assert [each[0] for each in searched[2:]] == list(POLICIES[1:-1])
    searched, _ = asked(monkeypatch, 1e4, 1e3, 256)
    assert searched[:2] == [("block", math.inf, True), ("none", 1e3, False)]


@pytest.mark.parametrize(
    ("batch", "time_limit_s", "left_out"),
    [
        (8, None, set(POLICIES[1:-1])),
        (9, None, set()),
        pytest.param(8, 1e-9, set(), marks=pytest.mark.slow),
    ],
)
def test_beside_a_pipeline_no_policy_of_programs_is_searched_where_all_are_too_large(
    batch, time_limit_s, left_out, monkeypatch
):
    """Nothing is known of their size where the devices cannot divide the batch, or the time was
    over before it was looked at.
    """
    where, searched = Cluster.preset("1x2xH100"), []

    def make(graph, *, started, **options):
        searched.append(how.name if (how := graph.calling.recompute) else "none")
        in_stages = aq.PipeshardParallel(num_stages=2, num_micro_batches=1)
        return plan_graph(graph, started=started, cluster=where, method=in_stages)

    monkeypatch.setattr("aliquot._variants.plan_graph", make)
    ways = all_ways(where, scan=False, batch=batch)
    limits = {"memory_limit_bytes": 1e6, "time_limit_s": time_limit_s}
    plan = plan_variants(ways, cluster=where, **limits)
    assert len(plan.stages) == 2 and set(searched) == set(POLICIES) - left_out
    outcomes = {each["name"]: each["outcome"] for each in plan.provenance.candidates}
    said = {name for name, outcome in outcomes.items() if "no simple method" in outcome}
    assert said == {f"--recompute {name}" for name in left_out}
    assert not any(way._traced for way in ways if way.layers in left_out)
