"""A time limit of a search."""

import dataclasses
import gc
import threading
import time
import weakref

import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot.core import InputError, TimeLimit, TimeLimitError
from aliquot.planners import AbstractMethod, Interrupted

STEP = mlp((256, 512, 512, 256), 64)
CLUSTER = aq.Cluster.preset("2x4xH100")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endless(AbstractMethod):
    """A method that finds nothing for a minute."""

    def solve(self, problem, progress=None):
        time.sleep(60)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Talkative(AbstractMethod):
    """A method that only tells its progress, for a minute."""

    def solve(self, problem, progress=None):
        for k in range(600):
            time.sleep(0.1)
            progress("nothing", k, 600)


def test_a_limit_that_is_not_reached_changes_nothing():
    plans = [aq.plan(*STEP, cluster=CLUSTER, time_limit_s=limit) for limit in (None, 3600.0)]
    assert plans[0].stages == plans[1].stages and plans[0].prediction == plans[1].prediction
    assert plans[0].provenance.status == plans[1].provenance.status


def test_a_search_without_a_plan_by_then_does_not_claim_that_none_fits():
    with pytest.raises(TimeLimitError, match="whether one fits is not known") as error:
        aq.plan(*STEP, cluster=CLUSTER, time_limit_s=1e-6)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("method", [Endless(), Talkative()], ids=["silent", "with progress"])
def test_a_search_ends_at_its_limit(method):
    started = time.perf_counter()
    with pytest.raises(TimeLimitError):
        aq.plan(*STEP, cluster=CLUSTER, method=method, time_limit_s=0.5)
    assert time.perf_counter() - started < 30


def test_a_search_in_another_thread_ends_when_it_tells_its_progress():
    errors = []

    def search():
        try:
            aq.plan(*STEP, cluster=CLUSTER, method=Talkative(), time_limit_s=0.5)
        except TimeLimitError as error:
            errors.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    thread.join(30)
    assert errors


@pytest.mark.parametrize(
    "stopped", [KeyboardInterrupt(), Interrupted(None)], ids=["in between", "in a race"]
)
def test_the_best_plan_so_far_is_the_answer_with_its_gap(stopped, monkeypatch):
    def stop(pipelines, search):
        monkeypatch.setattr(TimeLimit, "is_over", property(lambda limit: True))
        raise stopped

    monkeypatch.setattr("aliquot.planners._pipelines.Pipelines.open", stop)
    monkeypatch.setattr("aliquot.planners._auto.least_compute_s", lambda problem: 0.0)
    plan = aq.plan(*STEP, cluster=CLUSTER, time_limit_s=3600.0)
    known = plan.provenance
    assert known.status == "time limit reached" and "time limit reached" in " ".join(
        str(plan).split()
    )
    assert known.lower_bound_s <= plan.prediction.step_time_s and known.gap is not None
    assert known.bound_holds_for.startswith("plans without a pipeline")


def test_a_plan_without_a_bound_of_its_own_is_compared_with_compute_alone(monkeypatch):
    found = []

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Stopped(AbstractMethod):
        def solve(self, problem, progress=None):
            found.append(aq.DataParallel().solve(problem))
            monkeypatch.setattr(TimeLimit, "is_over", property(lambda limit: True))
            raise Interrupted(found[0])

    plan = aq.plan(
        *STEP, cluster=CLUSTER, method=Stopped(), time_limit_s=3600.0, num_micro_batches=2
    )
    assert found[0].lower_bound_s is None
    assert 0 < plan.provenance.lower_bound_s <= plan.prediction.step_time_s
    assert "compute alone" in plan.provenance.bound_holds_for
    assert aq.estimate(plan, *STEP) == plan.prediction


def test_what_a_single_stage_had_found_is_no_plan_of_the_step(monkeypatch):
    def stop(method, problem, option):
        raise Interrupted(aq.DataParallel().solve(problem))

    monkeypatch.setattr("aliquot.planners._solve_stages._solve_stage", stop)
    with pytest.raises(Interrupted) as stopped:
        aq.plan(*STEP, cluster=CLUSTER, method=aq.PipeshardParallel(num_stages=2))
    assert stopped.value.decision is None and stopped.value.plan is None


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_limits_are_positive(limit_s):
    with pytest.raises(InputError, match="time limit must be positive"):
        aq.plan(*STEP, cluster=CLUSTER, time_limit_s=limit_s)


# In two micro-batches, ZeRO-3 inside each host is the fastest: fewer gathers cross hosts.
@pytest.mark.parametrize(
    ("count", "fixed", "name"),
    [(None, aq.Zero3Parallel(), "zero3"), (2, aq.Zero3Parallel(shard_within="host"), "hsdp")],
    ids=["zero3", "hsdp"],
)
@pytest.mark.parametrize("method", [aq.Auto(), aq.WholeProgram(), aq.ShardParallel()], ids=str)
def test_a_search_that_found_nothing_by_then_falls_back_on_a_fixed_method(
    method, count, fixed, name, monkeypatch
):
    def stop(*args, **kwargs):
        monkeypatch.setattr(TimeLimit, "is_over", property(lambda limit: True))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(method), "decide", stop)
    monkeypatch.setattr(type(method), "solve", stop)
    asked = {"cluster": CLUSTER, "num_micro_batches": count}
    plan = aq.plan(*STEP, **asked, method=method, time_limit_s=3600.0)
    simple = aq.plan(*STEP, **asked, method=fixed)
    assert plan.prediction == simple.prediction and plan.method == name
    assert plan.provenance.status == "time limit reached"


def test_a_limit_that_is_reached_while_garbage_is_collected_is_not_lost():
    until_s = time.perf_counter() + 0.1

    def told_by_garbage_collector(phase, info):
        while phase == "stop" and time.perf_counter() < until_s + 0.1:
            pass

    gc.callbacks.append(told_by_garbage_collector)
    try:
        limit = TimeLimit(seconds=0.1, began_s=until_s - 0.1)
        with pytest.raises(KeyboardInterrupt), limit.ringing():
            gc.collect()
            assert time.perf_counter() > until_s
            time.sleep(2)
    finally:
        gc.callbacks.remove(told_by_garbage_collector)


@pytest.mark.parametrize("deletes_slowly", ["method", "callback"])
def test_a_limit_that_is_reached_while_objects_are_deleted_is_not_lost(deletes_slowly):
    class Key:
        pass

    class Slow:
        def __del__(self):
            wait_until(until_s + 0.1)

    def wait_until(moment_s):
        while time.perf_counter() < moment_s:
            pass

    until_s = time.perf_counter() + 0.1
    key = Key()
    if deletes_slowly == "method":
        held = [Slow()]
    else:
        held = weakref.WeakKeyDictionary({key: Slow()})
    limit = TimeLimit(seconds=0.1, began_s=until_s - 0.1)
    with pytest.raises(KeyboardInterrupt), limit.ringing():
        del key
        held.clear()
        assert time.perf_counter() > until_s
        wait_until(until_s + 1)


def test_a_limit_that_is_reached_within_a_set_of_weak_references_is_not_lost():
    """As these call back where an exception is printed and dropped."""

    class Slow:
        def __hash__(self):
            while time.perf_counter() < until_s + 0.1:
                pass
            return 0

    until_s = time.perf_counter() + 0.1
    held, key = weakref.WeakSet(), Slow()
    limit = TimeLimit(seconds=0.1, began_s=until_s - 0.1)
    with pytest.raises(KeyboardInterrupt), limit.ringing():
        held.add(key)
        time.sleep(1)
    assert key in held
