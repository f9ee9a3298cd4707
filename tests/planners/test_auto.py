"""`Auto`: one program or a pipeline, and when pipelines are searched."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from offloaded import batch_of, offloaded_step, shapes_of
from planners.small_steps import mlp

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.cost import make_problem
from aliquot.planners import (
    Auto,
    Interrupted,
    PipeshardParallel,
    Task,
    WholeProgram,
    least_compute_s,
)
from aliquot.planners._base import TooSlowError

STEP = mlp((256, 512, 512, 256), 64)
CLUSTER = Cluster.preset("2x4xH100")
SLOW_LINKS = Cluster.preset("2x1xV100-16GB")


def least_bytes(step):
    """Bytes of the state on each device if all share it evenly."""
    task = Task(graph=aq.capture(*step), cluster=CLUSTER)
    return sum(task.state_bytes.values()) / CLUSTER.num_devices


def deep(rows, width, layers):
    """A step whose gradients weigh more than what passes between layers."""

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32) for _ in range(layers)]
    return step, {"layers": weights}, {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}


@functools.cache
def plan_of_heavy_weights(method):
    """On slow links; several tests look at it."""
    return aq.plan(*deep(1024, 4096, 4), cluster=SLOW_LINKS, method=method)


@pytest.mark.parametrize(
    ("cluster", "count"),
    [
        pytest.param(CLUSTER, 2, id="2x4xH100-2"),
        pytest.param(SLOW_LINKS, None, id="2x1xV100-None"),
        *(
            pytest.param(cluster, count, id=f"{name}-{count}", marks=pytest.mark.slow)
            for name, cluster, count in (
                ("2x4xH100", CLUSTER, None),
                ("2x4xH100", CLUSTER, 1),
                ("2x1xV100", SLOW_LINKS, 1),
                ("2x1xV100", SLOW_LINKS, 2),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "step",
    [STEP, pytest.param(deep(1024, 4096, 4), marks=pytest.mark.slow)],
    ids=["small", "heavy weights"],
)
def test_auto_is_no_slower_than_one_program_or_pipelines(step, cluster, count):
    seconds = [
        aq.plan(
            *step, cluster=cluster, method=method, num_micro_batches=count
        ).prediction.step_time_s
        for method in (Auto(), WholeProgram(), PipeshardParallel())
    ]
    assert seconds[0] <= min(seconds[1:]) * (1 + 1e-9)


def test_auto_makes_a_pipeline_where_that_is_faster():
    plan, whole = map(plan_of_heavy_weights, (Auto(), WholeProgram()))
    assert plan.method == "auto" and len(plan.stages) == 2
    assert plan.prediction.step_time_s < whole.prediction.step_time_s


def test_one_micro_batch_is_searched_for_where_computing_takes_little_of_the_step():
    step, cluster = mlp((512, 2048, 512, 2048, 512), 64), Cluster.preset("2x4xA100-40GB")
    free, one, two = (
        aq.plan(*step, cluster=cluster, num_micro_batches=count) for count in (None, 1, 2)
    )
    assert len(free.stages) > 1 and free.num_micro_batches == 1
    assert free.prediction.step_time_s == one.prediction.step_time_s < two.prediction.step_time_s


@pytest.mark.slow
def test_fewer_stages_are_tried_with_one_micro_batch():
    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def step(weights, x):
        def loss(weights):
            return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    shapes = (4, 1024, 4096), (4, 4096, 1024), (1024, 1024)
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    seconds = [
        aq.plan(
            step, (up, down), x, cluster=Cluster.preset("2x8xH100"), method=method
        ).prediction.step_time_s
        for method in (Auto(), PipeshardParallel(num_stages=2))
    ]
    assert seconds[0] <= seconds[1] * 1.002


def no_pipelines(monkeypatch, error):
    def refuse(pipelines, search):
        raise error

    monkeypatch.setattr("aliquot.planners._pipelines.Pipelines.open", refuse)


@pytest.mark.parametrize(
    ("method", "cluster"),
    [(Auto(), "1xH100"), (Auto(mesh_shape=(2, 4)), "2x4xH100")],
    ids=["one device", "a given mesh"],
)
def test_pipelines_are_not_searched_where_they_cannot_help(method, cluster, monkeypatch):
    no_pipelines(monkeypatch, AssertionError("pipelines were searched"))
    plan = aq.plan(*STEP, cluster=Cluster.preset(cluster), method=method)
    assert len(plan.stages) == 1 and plan.method == "auto"


def test_pipelines_are_not_searched_where_one_program_is_all_compute(monkeypatch):
    no_pipelines(monkeypatch, AssertionError("pipelines were searched"))
    monkeypatch.setattr("aliquot.planners._auto.least_compute_s", lambda problem: 1.0)
    assert len(aq.plan(*STEP, cluster=CLUSTER).stages) == 1


def test_plans_for_very_many_devices_say_that_pipelines_were_not_searched(monkeypatch):
    monkeypatch.setattr(
        "aliquot.planners._pipelines._price_ends", lambda *args: pytest.fail("layers were priced")
    )
    monkeypatch.setattr("aliquot.planners._auto._MOST_DEVICES", 1)
    plan = aq.plan(*deep(1024, 4096, 4), cluster=SLOW_LINKS)
    assert len(plan.stages) == 1
    assert any("not searched: more than" in c["outcome"] for c in plan.provenance.candidates)


def test_pipelines_are_searched_on_many_devices_and_plans_say_which_numbers_were_not(monkeypatch):
    for module in ("_counts", "_pipelines"):
        monkeypatch.setattr(f"aliquot.planners.{module}.MANY_DEVICES", 1)
    step = deep(1024, 4096, 4)
    plans = [
        aq.plan(*step, cluster=SLOW_LINKS, method=method)
        for method in (Auto(), PipeshardParallel())
    ]
    assert plans[0].prediction.step_time_s <= plans[1].prediction.step_time_s
    tried = [
        each["outcome"]
        for each in plans[0].provenance.candidates
        if each["name"].startswith("pipeshard")
    ]
    assert tried and any("not searched: limit" in outcome for outcome in tried)


@pytest.mark.parametrize(
    ("method", "cluster"),
    [
        pytest.param(WholeProgram(), CLUSTER, id="program"),
        pytest.param(PipeshardParallel(num_stages=2), SLOW_LINKS, id="two stages"),
        pytest.param(WholeProgram(), SLOW_LINKS, marks=pytest.mark.slow),
        pytest.param(PipeshardParallel(num_stages=2), CLUSTER, marks=pytest.mark.slow),
    ],
)
def test_no_plan_undercuts_the_least_compute(method, cluster):
    step = deep(1024, 4096, 4)
    least_s = least_compute_s(make_problem(aq.capture(*step), cluster))
    assert 0 < least_s <= aq.plan(*step, cluster=cluster, method=method).prediction.step_time_s


def test_the_least_compute_is_that_of_all_micro_batches():
    task = Task(graph=aq.capture(*deep(1024, 4096, 4)), cluster=CLUSTER)
    whole, parts = (least_compute_s(task.problem(count)) for count in (1, 4))
    # Smaller products are no more efficient; the update runs once.
    assert whole * (1 - 1e-9) <= parts < 2 * whole


@pytest.mark.parametrize(
    "error", [InputError("no"), CaptureError("no")], ids=["devices", "micro-batches"]
)
def test_one_program_is_planned_where_no_pipeline_can_be(error, monkeypatch):
    no_pipelines(monkeypatch, error)
    assert len(aq.plan(*STEP, cluster=CLUSTER).stages) == 1
    with pytest.raises(InfeasibleError):
        aq.plan(*STEP, cluster=CLUSTER, memory_limit_bytes=100.0)


def test_an_interrupted_search_for_pipelines_keeps_the_program(monkeypatch):
    no_pipelines(monkeypatch, Interrupted(None))
    with pytest.raises(Interrupted) as stopped:
        aq.plan(*STEP, cluster=CLUSTER)
    assert stopped.value.plan is not None and stopped.value.plan.method == "auto"


def test_a_program_that_cannot_be_fast_enough_is_not_searched_closely():
    problem = make_problem(aq.capture(*deep(1024, 4096, 4)), CLUSTER)
    best = WholeProgram().solve(problem)
    found = WholeProgram(faster_than_s=best.step_time_s / 10).solve(problem)
    assert found.lower_bound_s <= best.step_time_s <= found.step_time_s
    assert all(
        each.outcome == "slower"
        for each in found.candidates
        if each.step_time_s != found.step_time_s
    )
    assert (
        WholeProgram(faster_than_s=10 * best.step_time_s).solve(problem).step_time_s
        == best.step_time_s
    )


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("method", [Auto(), PipeshardParallel()], ids=["auto", "pipeshard"])
def test_stages_are_not_solved_as_wholes_where_they_promise_no_less(method, count, monkeypatch):
    step = mlp((1024, 4096, 1024), 8192)
    program = aq.plan(*step, cluster=CLUSTER, method=WholeProgram(), num_micro_batches=count)
    # As if layers promised ten times as much as the program takes.
    for name, value in [("_SMALL", 0), ("_IDLE_WITH_ONE", math.inf), ("_LESS_AS_WHOLES", -9.0)]:
        monkeypatch.setattr(f"aliquot.planners._pipelines.{name}", value)
    monkeypatch.setattr("aliquot.planners._auto.least_compute_s", lambda problem: 0.0)
    monkeypatch.setattr(
        "aliquot.planners._pipelines.solve_with", lambda *args: pytest.fail("solved as wholes")
    )
    plan = aq.plan(*step, cluster=CLUSTER, method=method, num_micro_batches=count)
    assert plan.prediction.step_time_s == program.prediction.step_time_s
    assert any("micro-batches" in tried["name"] for tried in plan.provenance.candidates)


def test_the_plan_that_was_taken_is_not_said_to_be_beaten():
    plan = aq.plan(*mlp((1024, 4096, 1024), 8192), cluster=CLUSTER, method=WholeProgram())
    outcomes = {
        c["outcome"]
        for c in plan.provenance.candidates
        if c["step_time_s"] == plan.prediction.step_time_s
    }
    assert outcomes and "slower" not in outcomes


def test_a_search_for_faster_plans_finds_what_is_faster_and_may_find_nothing_else():
    step = deep(1024, 4096, 4)
    free = plan_of_heavy_weights(Auto())
    least_s = free.prediction.step_time_s
    below = aq.plan(*step, cluster=SLOW_LINKS, method=Auto(faster_than_s=least_s * 1.01))
    assert below.prediction.step_time_s == least_s
    try:
        slow_s = aq.plan(
            *step, cluster=SLOW_LINKS, method=Auto(faster_than_s=least_s / 10)
        ).prediction.step_time_s
    except InfeasibleError:
        slow_s = math.inf
    assert slow_s >= least_s


def test_auto_without_pipelines_is_the_best_program():
    (alone, whole) = (
        plan_of_heavy_weights(method).prediction.step_time_s
        for method in (Auto(pipelines=False), WholeProgram())
    )
    assert alone == whole


@functools.cache
def tight_problem():
    """A problem whose program without a memory limit does not fit, and the problem without it."""
    cluster = Cluster.preset("2x2xH100")
    # Without overlap the relaxations of the free problem are integral: nothing is left to search.
    calibration = {"overlap_fraction": 0.0, "activation_overlap": 0.0}
    device = replace(cluster.device, calibration=calibration)
    problem = make_problem(aq.capture(*deep(1024, 4096, 4)), replace(cluster, device=device))
    free = WholeProgram().solve(problem)
    return replace(problem, memory_limit_bytes=0.9 * free.picked.memory.peak_bytes), problem


@functools.cache
def tight_program():
    tight, _ = tight_problem()
    return WholeProgram().solve(tight)


def raced(problem, sent_s):
    """The decision of a program, and what it had when it paused, where it does."""
    race = WholeProgram().race(problem, None, faster_than_s=math.inf, pauses=True)
    unfinished = "no pause"
    try:
        unfinished = next(race)
        race.send(sent_s)
    except StopIteration as end:
        return end.value, unfinished
    pytest.fail("it paused twice")


def test_a_search_pauses_only_where_memory_is_short():
    tight, free = tight_problem()
    assert raced(free, math.inf)[1] == "no pause"
    (found, unfinished), alone = raced(tight, math.inf), tight_program()
    assert unfinished is None or unfinished.step_time_s >= found.step_time_s
    assert (found.step_time_s, found.lower_bound_s) == (alone.step_time_s, alone.lower_bound_s)


def test_programs_that_other_plans_undercut_are_not_searched():
    tight, _ = tight_problem()
    alone = tight_program()
    try:
        found, _ = raced(tight, alone.step_time_s / 10)
    except TooSlowError as error:
        assert "takes less than" in str(error)
    else:
        assert found.lower_bound_s <= alone.lower_bound_s <= found.step_time_s
    # A little slower than the best program, it changes nothing.
    found, _ = raced(tight, alone.step_time_s * 1.01)
    assert found.step_time_s == alone.step_time_s


def test_no_number_of_micro_batches_is_searched_twice_where_nothing_fits(monkeypatch):
    counts = []
    race = WholeProgram.race

    def counting(method, problem, progress, **settings):
        counts.append(problem.num_micro_batches)
        return race(method, problem, progress, **settings)

    monkeypatch.setattr(WholeProgram, "race", counting)
    # The search must find that nothing fits, though an even share of the state does.
    monkeypatch.setattr("aliquot.planners._programs.cannot_fit", lambda problem: False)
    with pytest.raises(InfeasibleError):
        aq.plan(*STEP, cluster=CLUSTER, memory_limit_bytes=1.01 * least_bytes(STEP))
    assert len(counts) > 2 and len(counts) == len(set(counts))


def test_an_interrupt_while_programs_are_searched_keeps_the_pipeline_found_before(monkeypatch):
    def stopped(method, problem, progress, **settings):
        yield None
        raise Interrupted(None)

    monkeypatch.setattr(WholeProgram, "race", stopped)
    for method in (Auto(), PipeshardParallel()):
        with pytest.raises(Interrupted) as interrupted:
            aq.plan(*deep(1024, 4096, 4), cluster=SLOW_LINKS, method=method)
        assert interrupted.value.plan is not None and len(interrupted.value.plan.stages) == 2


@pytest.mark.parametrize("method", [Auto(), PipeshardParallel(), WholeProgram()])
def test_state_that_all_devices_cannot_share_is_refused_before_anything_is_searched(
    method, monkeypatch
):
    limit_bytes = least_bytes(STEP) - 1
    monkeypatch.setattr("aliquot.planners._base.make_problem", None)
    with pytest.raises(InfeasibleError, match="even if all devices share it evenly") as refused:
        aq.plan(*STEP, cluster=CLUSTER, method=method, memory_limit_bytes=limit_bytes)
    assert refused.value.required_bytes == least_bytes(STEP) == sum(refused.value.parts.values())
    assert f"at least {CLUSTER.num_devices + 1} devices" in str(refused.value)


@pytest.mark.parametrize("moments", ["device", "host"])
def test_state_in_host_memory_needs_none_of_the_devices(moments):
    step, init = offloaded_step("save", moments=moments)
    state = jax.eval_shape(init, jax.random.key(0))
    graph = aq.capture(step, shapes_of(state, moments), batch_of())
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state["params"]))
    held = Task(graph=graph, cluster=CLUSTER).state_bytes
    assert sum(held.values()) == (size if moments == "host" else 2 * size)
