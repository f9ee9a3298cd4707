"""One program with fewer micro-batches: which numbers are tried, and what comes of it."""

import types
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import Cluster
from aliquot.core import CaptureError, InfeasibleError, InputError
from aliquot.cost import make_problem
from aliquot.planners import Decision, ShardParallel, StageDecision, _programs
from aliquot.planners._base import TooSlowError
from aliquot.planners._programs import FewerMicroBatches, Programs, fewer_micro_batches
from aliquot.planners._quick_bounds import is_too_large
from aliquot.planners._search import AbstractFamily, Search
from aliquot.sharding import plan_micro_batches


def problem_with(count):
    """Stands for a problem."""
    return types.SimpleNamespace(num_micro_batches=count)


@dataclass(frozen=True)
class Seconds:
    """A method that knows what a number of micro-batches takes; nothing if it does not fit."""

    seconds: dict
    tried: list = field(default_factory=list)
    limits_s: set = field(default_factory=set)

    def race(self, problem, progress, *, faster_than_s, pauses):
        yield from ()
        count = problem.num_micro_batches
        self.limits_s.add(faster_than_s)
        self.tried.append(count)
        if count not in self.seconds:
            raise InfeasibleError("too large", required_bytes=2, available_bytes=1)
        # Others may be any program that fits.
        if self.seconds[count] >= faster_than_s and count % 2:
            raise TooSlowError("too slow", required_bytes=0, available_bytes=1)
        return types.SimpleNamespace(step_time_s=self.seconds[count], count=count)


@pytest.mark.parametrize(
    ("seconds", "most", "tried", "found"),
    [
        pytest.param(
            {n: 10 + n for n in (1, 2, 4, 8, 16)}, 64, [8, 4, 2, 1], 1, id="the fewest are fastest"
        ),
        pytest.param({4: 14, 8: 12, 16: 16}, 64, [8, 4], 8, id="fewer take longer"),
        pytest.param({8: 12}, 64, [8, 4], 8, id="fewer do not fit"),
        pytest.param({32: 12, 16: 11}, 64, [8, 16], 16, id="more are needed"),
        pytest.param({}, 64, [8, 16, 32], None, id="none fits"),
        pytest.param({8: 30, 4: 31}, 64, [8, 4, 2], None, id="none is faster than stages"),
        pytest.param({8: 30, 4: 25, 2: 15}, 64, [8, 4, 2, 1], 2, id="a few are faster than stages"),
        pytest.param({9: 30, 3: 25, 1: 15}, 81, [9, 3, 1], 1, id="one is fast enough"),
        pytest.param({32: 30, 16: 25}, 64, [8, 16], None, id="the first that fits is slow"),
        pytest.param({3: 5, 1: 6}, 15, [3, 1], 3, id="odd numbers"),
        pytest.param({}, 1, [], None, id="there are no fewer"),
    ],
)
def test_numbers_of_micro_batches_that_are_tried(seconds, most, tried, found, monkeypatch):
    monkeypatch.setattr(_programs, "is_too_large", lambda problem, count: False)
    method = Seconds(seconds)
    best = fewer_micro_batches(method, problem_with, most=most, faster_than_s=20)
    assert method.tried == tried and method.limits_s <= {20}
    assert (best and best.count) == found


def test_numbers_of_micro_batches_that_cannot_fit_are_not_tried(monkeypatch):
    """Each problem tells of fewer micro-batches than it has; the first may be known already."""
    made = []

    def making(count):
        made.append(count)
        return problem_with(count)

    def no_less_than(least):
        return lambda problem, count: problem.num_micro_batches > count and count < least

    seconds = {n: 10 + n for n in (4, 8, 16, 32)}
    monkeypatch.setattr(_programs, "is_too_large", no_less_than(4))
    method = Seconds(seconds)
    best = fewer_micro_batches(method, making, most=64, faster_than_s=20)
    assert (made, method.tried, best.count) == ([8, 4], [8, 4], 4)
    made.clear()
    monkeypatch.setattr(_programs, "is_too_large", no_less_than(32))
    upwards = Seconds({32: 11})
    best = fewer_micro_batches(upwards, making, most=64, faster_than_s=20, known=problem_with(64))
    assert (made, upwards.tried, best.count) == ([32], [32], 32)


WIDTH, ROWS = 4096, 256


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], gradients)
    return {"params": jax.tree.map(lambda w, m: w - 0.1 * m, state["params"], mu), "mu": mu}, {
        "loss": value
    }


def plan_of(**options):
    params = {
        "layers": [{"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)} for _ in range(4)]
    }
    return aq.plan(
        step,
        {"params": params, "mu": params},
        {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)},
        cluster=aq.Cluster.preset("4xV100-16GB"),
        method=aq.PipeshardParallel(**options),
    )


def test_a_search_for_stages_may_end_in_one_program_with_large_micro_batches():
    """Stages want many micro-batches. One program gathers parameters for each of them."""
    free, many = plan_of(num_stages=1), plan_of(num_stages=1, num_micro_batches=64)
    assert (len(free.stages), len(many.stages)) == (1, 1)
    assert free.num_micro_batches < 16 and many.num_micro_batches == 64
    assert free.prediction.step_time_s < 0.8 * many.prediction.step_time_s


def test_given_numbers_of_stages_and_micro_batches_are_kept():
    assert len(plan_of(num_stages=2).stages) == 2
    assert len(plan_of(num_stages=2, schedule="gpipe").stages) == 2
    assert plan_of(num_micro_batches=64).num_micro_batches == 64


def activations_step(w, batch):
    def loss(w):
        x = batch["x"]
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return w - 0.1 * jax.grad(loss)(w)


def problem_of(count, limit_bytes, rows=1 << 15, width=256):
    batch = {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)}
    graph = aq.capture(activations_step, jax.ShapeDtypeStruct((width, width), jnp.float32), batch)
    part = plan_micro_batches(graph, count).part
    cluster = Cluster.preset("4xV100-16GB")
    return make_problem(part, cluster, num_micro_batches=count, memory_limit_bytes=limit_bytes)


@pytest.mark.parametrize("limit_bytes", [4e6, 8e6, 16e6, 32e6, 64e6])
def test_too_few_micro_batches_are_ruled_out_by_a_problem_with_more(limit_bytes):
    """By whatever a problem says of fewer micro-batches, nothing is lost."""
    problem = problem_of(16, limit_bytes)
    said = {count: is_too_large(problem, count) for count in (1, 2, 4, 8, 16, 32)}
    assert not any(said[count] for count in (1, 16, 32))
    for count in (c for c, too_large in said.items() if too_large):
        with pytest.raises(InfeasibleError):
            ShardParallel().solve(problem_of(count, limit_bytes))
    # Six activations of 32 MiB in all on four devices: half of them at once are far too many, or an
    # eighth.
    assert said[2] == (limit_bytes <= 16e6)
    assert said[8] == (limit_bytes <= 4e6)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_search_for_stages_is_never_slower_than_auto(count):
    """Prices of single layers may say that stages are faster; one program is planned all the
    same.
    """
    for rows, width in ((256, 1024), (1024, 512)):
        layers = {
            "layers": [{"w": jax.ShapeDtypeStruct((width, width), jnp.float32)} for _ in range(4)]
        }
        args = (
            {"params": layers, "mu": layers},
            {"x": jax.ShapeDtypeStruct((rows, width), jnp.float32)},
        )
        plans = [
            aq.plan(
                step,
                *args,
                cluster=Cluster.preset("2x8xH100"),
                method=method,
                num_micro_batches=count,
            )
            for method in (aq.PipeshardParallel(), aq.Auto())
        ]
        stages, auto = (plan.prediction.step_time_s for plan in plans)
        assert stages <= auto * (1 + 1e-9)
        if count == 2:
            assert plans[0].num_micro_batches == 2


@pytest.mark.parametrize(
    "refusal",
    [
        InfeasibleError("no pipeline fits", required_bytes=2, available_bytes=1),
        InputError("no pipeline fits these devices"),
        CaptureError("no pipeline fits: it does not decompose"),
    ],
    ids=["memory", "devices", "micro-batches"],
)
def test_one_program_is_planned_where_no_pipeline_fits(refusal, monkeypatch):
    def nothing_fits(pipelines, search):
        raise refusal

    monkeypatch.setattr("aliquot.planners._pipelines.Pipelines.open", nothing_fits)
    plan = plan_of()
    assert len(plan.stages) == 1
    assert "without a pipeline" in plan.provenance.bound_holds_for
    with pytest.raises(type(refusal), match="no pipeline fits"):
        plan_of(num_stages=2)


def test_a_wrong_pattern_of_layers_is_refused_though_one_program_has_none():
    with pytest.raises(InputError, match="no_such_layers"):
        plan_of(layers="no_such_layers[*]")


def decision_of(step_time_s, count=1, method="program"):
    """A plan of one program that knows its step time and micro-batches alone."""
    priced = types.SimpleNamespace(mesh=types.SimpleNamespace(shape=(1,)))
    picked = types.SimpleNamespace(priced=priced)
    return Decision(
        method=method,
        planner="",
        stages=(StageDecision(problem=problem_with(count), picked=picked),),
        step_time_s=step_time_s,
        lower_bound_s=None,
        bound_holds_for="",
        status="optimal",
    )


@dataclass(frozen=True, kw_only=True)
class Racing:
    """Stands for `WholeProgram`: knows what a number of micro-batches takes."""

    seconds: dict
    tried: list

    def race(self, problem, progress, *, faster_than_s, pauses):
        count = problem.num_micro_batches
        self.tried.append(count)
        if count not in self.seconds:
            raise InfeasibleError("too large", required_bytes=2, available_bytes=1)
        return decision_of(self.seconds[count], count)
        yield


@pytest.mark.parametrize(
    ("seconds", "most", "beside_s", "tried", "found"),
    [
        pytest.param({1: 10, 2: 11}, 64, None, [1, 2], 1, id="one is the fastest"),
        pytest.param({2: 12, 4: 11, 8: 13}, 64, None, [1, 2, 4, 8], 4, id="memory asks for more"),
        pytest.param({}, 64, None, [1, 2, 4, 8, 16, 32], None, id="at most six are planned"),
        pytest.param({1: 10, 2: 9}, 1, None, [1], 1, id="no more than the batch has"),
        pytest.param({1: 10, 2: 8}, 64, 6, [1, 2], None, id="none is fast enough"),
        pytest.param({1: 10, 2: 4, 4: 5}, 64, 6, [1, 2, 4], 2, id="one more is tried"),
        pytest.param({1: 10, 2: 12}, 64, 6, [1, 2], None, id="more micro-batches are slower still"),
        pytest.param({2: 4}, 64, 6, [1], None, id="the fewest do not fit"),
    ],
)
def test_programs_with_ever_more_micro_batches(seconds, most, beside_s, tried, found, monkeypatch):
    """Alone, or beside a pipeline that is found after the first program."""
    task, method = task_of_any_count(monkeypatch), Racing(seconds=seconds, tried=[])

    @dataclass(frozen=True, kw_only=True, eq=False)
    class Pipeline(AbstractFamily):
        task: object
        expected_s: float = 0.0

        def open(self, search):
            search.add(decision_of(beside_s, 7), self.task)
            return ()

    counts = [2**k for k in range(7) if 2**k <= most]
    families = [Programs(task=task, method=method, counts=counts)]
    if beside_s is not None:
        families.append(Pipeline(task=task))
    search = Search(task=task)
    best = search.run(families, "auto")
    assert method.tried == tried
    count = best.num_micro_batches if best else None
    assert (None if count == 7 else count) == found


def task_of_any_count(monkeypatch):
    monkeypatch.setattr(_programs, "cannot_fit", lambda problem: False)
    return types.SimpleNamespace(
        problem=problem_with,
        progress=None,
        combine=lambda count: {},
        cluster=types.SimpleNamespace(num_hosts=1, num_devices=2),
        graph=None,
    )


def test_after_a_program_that_does_not_fit_numbers_that_were_passed_over_are_tried(monkeypatch):
    """Of 1, 2, 3, 4, 6 and 12, four do not fit and twelve do, so six are tried, too."""
    task = task_of_any_count(monkeypatch)
    for fitting, tried, found in (
        ({12: 9.0, 6: 8.0}, [1, 2, 4, 12, 6], 6),
        ({12: 9.0}, [1, 2, 4, 12, 6], 12),
    ):
        method = Racing(seconds=fitting, tried=[])
        for until_fits in (False, True):
            method.tried.clear()
            programs = Programs(
                task=task, method=method, counts=(1, 2, 3, 4, 6, 12), until_fits=until_fits
            )
            best = Search(task=task).run([programs], "auto")
            assert method.tried == tried and best.num_micro_batches == found


def test_a_number_that_does_not_cut_the_step_leaves_out_its_multiples_alone(monkeypatch):
    task = task_of_any_count(monkeypatch)

    class Odd(Racing):
        def race(self, problem, progress, **options):
            if problem.num_micro_batches % 2 == 0:
                self.tried.append(problem.num_micro_batches)
                raise InputError("no even number")
            return (yield from super().race(problem, progress, **options))

    method = Odd(seconds={3: 5.0}, tried=[])
    best = Search(task=task).run(
        [Programs(task=task, method=method, counts=(1, 2, 3, 4, 6, 12))], "auto"
    )
    assert method.tried == [1, 2, 3] and best.num_micro_batches == 3


def test_where_the_whole_batch_does_not_fit_the_next_number_is_that_of_the_simple_plan(monkeypatch):
    """Even where another plan is known, since the simple one may be faster. One whose devices share
    rows is no reason to pass over fewer micro-batches.
    """
    task, method = task_of_any_count(monkeypatch), Racing(seconds={8: 3.0}, tried=[])
    simple = decision_of(4.0, 8)
    programs = Programs(
        task=task,
        method=method,
        counts=(1, 2, 4, 8, 16),
        simple=lambda: simple,
        fits_elsewhere=True,
    )
    monkeypatch.setattr(_programs, "batch_size", lambda graph: 16)
    best = Search(task=task).run([programs], "auto")
    assert method.tried == [1, 8, 16] and best.num_micro_batches == 8
    monkeypatch.setattr(_programs, "batch_size", lambda graph: 8)
    method.tried.clear()
    Search(task=task).run([replace(programs, fits_elsewhere=False)], "auto")
    assert method.tried[:4] == [1, 2, 4, 8]


def test_a_pipeline_of_one_stage_that_is_too_slow_is_not_solved_as_a_program(monkeypatch):
    task = task_of_any_count(monkeypatch)
    for of_stage_s, solved in ((4.0, [2]), (6.0, [])):
        tried = []

        def whole(mesh_shape, tried=tried):
            def solve(problem, progress):
                tried.append(problem.num_micro_batches)
                return decision_of(4.0, problem.num_micro_batches)

            return types.SimpleNamespace(solve=solve)

        family = FewerMicroBatches.than(decision_of(of_stage_s, 2), task, whole, None)
        Search(task=task, faster_than_s=5.0).run([family], "auto")
        assert tried == solved
