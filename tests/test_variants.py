"""`aliquot.plan_fastest`, and factories with an argument `recompute`: steps that can be built in
several ways.
"""

import functools
import json
import math
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import pytest
from command_line import refused, run

import aliquot as aq
from aliquot import _variants, zoo
from aliquot.cost import make_problem
from aliquot.planners import _base, simple_plan
from aliquot.plans import RECOMPUTED_BY_STAGE, ModelReference, Plan, how_recomputed

CLUSTER = aq.Cluster.preset("1x2xV100-32GB")
LAYERS, WIDTH = 4, 256


def build(recompute=False, batch=8192):
    """Layers that keep much for the backward pass, or are computed again."""

    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1]

    each = jax.checkpoint(layer) if recompute else layer

    def loss(params, x):
        for w in params:
            x = each(x, w)
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        step,
        [(shape((WIDTH, 4 * WIDTH)), shape((4 * WIDTH, WIDTH)))] * LAYERS,
        shape((batch, WIDTH)),
    )


WAYS = [{"recompute": False}, {"recompute": True}]


def record_problems(monkeypatch):
    """A list that gets the number of micro-batches of each problem from now on."""
    made = []

    def recorded(graph, cluster, **options):
        made.append(options["num_micro_batches"])
        return make_problem(graph, cluster, **options)

    monkeypatch.setattr(_base, "make_problem", recorded)
    return made


@pytest.fixture(scope="module")
def alone():
    """The memory and time of each way, planned by itself."""
    return [
        aq.plan(
            *build(**way),
            cluster=CLUSTER,
            method=aq.DataParallel(),
            recompute=None if way["recompute"] else "none",
        )
        for way in WAYS
    ]


def fastest(ways=WAYS, **options):
    return aq.plan_fastest(build, ways, cluster=CLUSTER, method=aq.DataParallel(), **options)


def test_the_fastest_that_fits_is_kept_and_says_how_to_build_it(alone):
    keeps, again = (each.prediction for each in alone)
    assert keeps.step_time_s < again.step_time_s
    assert keeps.peak_memory_bytes > again.peak_memory_bytes
    plan = fastest()
    assert plan.prediction == keeps and plan.model.settings == {"recompute": False}
    assert [each["name"] for each in plan.provenance.candidates[1:]] == ["recompute=True"]
    between = (keeps.peak_memory_bytes + again.peak_memory_bytes) / 2
    small = fastest(memory_limit_bytes=between)
    assert small.prediction.step_time_s == again.step_time_s
    assert small.model.settings == {"recompute": True}
    assert small.model.name == f"{__name__}:build" and small.model.kind == "factory"
    step, state, batch = build(**small.model.settings)
    assert aq.estimate(small, step, state, batch) == small.prediction


def test_the_seconds_of_a_search_are_those_of_all_ways():
    started = time.perf_counter()
    p = fastest().provenance
    elapsed_s = time.perf_counter() - started
    assert 0.8 * elapsed_s < p.trace_s + p.search_s <= elapsed_s


def test_no_problem_of_a_way_is_made_twice(monkeypatch):
    """Neither while ways are compared, nor by other methods, clusters and limits."""
    made = []

    def counted(graph, cluster, **options):
        made.append((id(options["whole"]), options["num_micro_batches"]))
        return make_problem(graph, cluster, **options)

    monkeypatch.setattr(_base, "make_problem", counted)
    variants = tuple(
        _variants.Variant(step=step, args=args) for step, *args in (build(**way) for way in WAYS)
    )
    larger = aq.Cluster.preset("1x4xV100-32GB")
    limit_bytes = 16e9
    for options in (
        {"cluster": CLUSTER, "method": aq.DataParallel()},
        {"cluster": CLUSTER, "method": aq.Zero3Parallel(), "num_micro_batches": 2},
        {"cluster": larger, "method": aq.ShardParallel(), "time_limit_s": 60.0},
        {"cluster": CLUSTER, "method": aq.Zero2Parallel(), "memory_limit_bytes": limit_bytes},
    ):
        plan = _variants.plan_variants(variants, **options)
        assert plan.cluster["name"] == options["cluster"].name
    assert plan.prediction.memory_limit_bytes == limit_bytes
    assert len(made) == len(set(made)) and (id(variants[0].traced()[0]), 1) in made


def test_ways_are_compared_with_the_micro_batches_that_are_asked_for(monkeypatch):
    asked, simple_plan = [], _variants.simple_plan

    def spied(task, **options):
        asked.append(task.semantics)
        return simple_plan(task, **options)

    monkeypatch.setattr(_variants, "simple_plan", spied)
    said = list[str]()
    plan = aq.plan(
        *build(),
        cluster=CLUSTER,
        micro_batch_semantics="independent",
        progress=lambda what, done, of: said.append(what),
    )
    assert asked and {*asked} == {"independent"} and plan.provenance.candidates
    assert said[0].startswith("simple plans, ")


def test_where_no_way_fits_whole_the_middle_one_tells_of_those_that_keep_more(monkeypatch):
    looked_at = []

    def simple(task, *, fewest=1):
        how = task.graph.calling.recompute
        looked_at.append(how.name if how else "none")
        fits = looked_at[-1] in ("save_attention", "block")
        return aq.Zero3Parallel().solve(task.problem(1)) if fits else None

    monkeypatch.setattr(_variants, "simple_plan", simple)
    monkeypatch.setattr(_variants, "cannot_fit", lambda problem: True)
    monkeypatch.setattr(_variants, "least_compute_s", lambda problem: 0.0)
    made = zoo.build("gpt-125m", 8, recompute="none")
    variant = _variants.Variant(step=made.train_step, args=(made.state, made.batch))
    ways = variant.ways_to_recompute(None)
    task = functools.cache(lambda each: each.task(CLUSTER))
    found = {each.layers: s for each, s in _variants._simple_times(ways, task, None)}
    assert looked_at == ["block", "narrow", "save_attention", "save_qkv"]
    assert math.isfinite(found["save_attention"]) and found["block"] == math.inf
    assert {*found} == {"save_attention", "block", "fused"}


def test_the_whole_batch_tells_which_micro_batches_are_too_large(monkeypatch):
    """Its problem bounds the compute and the memory of others, which then need none."""
    made = record_problems(monkeypatch)
    asked = {"num_micro_batches": 1, "method": aq.Zero3Parallel(), "cluster": CLUSTER}
    needs = [
        aq.plan(*build(), **asked | {"num_micro_batches": n}).prediction.peak_memory_bytes
        for n in (1, 8)
    ]
    made.clear()
    step, *args = build()
    (variant,) = _variants.Variant(step=step, args=tuple(args)).ways_to_recompute("none")
    task = variant.task(CLUSTER, memory_limit_bytes=needs[1] * 1.01)
    found = simple_plan(task, fewest=2)
    assert found.num_micro_batches > 2 and needs[0] > needs[1]
    assert 1 in made and 2 not in made


def test_the_finest_micro_batches_are_not_looked_at_where_the_next_are_likely_to_fit(monkeypatch):
    step, *args = build()
    asked = {"num_micro_batches": 2, "method": aq.Zero3Parallel(), "cluster": CLUSTER}
    limit_bytes = aq.plan(step, *args, **asked).prediction.peak_memory_bytes * 0.9
    made = record_problems(monkeypatch)
    (variant,) = _variants.Variant(step=step, args=tuple(args)).ways_to_recompute("none")
    found = simple_plan(variant.task(CLUSTER, memory_limit_bytes=limit_bytes))
    assert found.num_micro_batches == 4 and made == [1, 2, 4]


def test_any_number_of_ways_in_their_order(monkeypatch):
    made, seconds = [], {16: 5.0, 8: 1e3, 4: 2.0}

    def planned(graph, *, model, **options):
        batch = model.settings["batch"]
        made.append(batch)
        plan = _planned(batch)
        return _timed(plan, seconds[batch])

    for batch in seconds:
        _planned(batch)
    monkeypatch.setattr(_variants, "plan_graph", planned)
    plan = fastest([{"batch": n} for n in seconds])
    assert made == [*seconds] and plan.model.settings == {"batch": 4}
    tried = [(each["name"], each["step_time_s"]) for each in plan.provenance.candidates[-2:]]
    assert tried == [("batch=8", 1e3), ("batch=16", 5.0)]


@functools.cache
def _planned(batch):
    settings = {"batch": batch}
    model = ModelReference(kind="closure", name="build", settings=settings)
    return aq.plan(*build(**settings), cluster=CLUSTER, method=aq.DataParallel(), model=model)


def _timed(plan, step_time_s):
    prediction = msgspec.structs.replace(plan.prediction, step_time_s=step_time_s)
    return msgspec.structs.replace(plan, prediction=prediction)


def test_pipelines_of_a_second_way_are_searched_only_below_those_of_the_first(monkeypatch):
    """Stages choose what they recompute themselves, so the way that computes least comes first."""
    limits = []

    def planned(graph, *, method, **options):
        limits.append(method.faster_than_s)
        return plan_graph(graph, method=method, **options)

    plan_graph = _variants.plan_graph
    monkeypatch.setattr(_variants, "plan_graph", planned)
    method = aq.PipeshardParallel(num_stages=2)
    small = [{**way, "batch": 1024} for way in WAYS]
    both = aq.plan_fastest(build, small, cluster=CLUSTER, method=method, num_micro_batches=4)
    assert limits[0] == math.inf and limits[1:] == [both.prediction.step_time_s]
    first = aq.plan(*build(**small[0]), cluster=CLUSTER, method=method, num_micro_batches=4)
    assert both.prediction.step_time_s == first.prediction.step_time_s
    assert both.provenance.candidates[-1]["name"] == "recompute=True, batch=1024"


def test_stages_that_recompute_are_never_called_without_recomputation(monkeypatch):
    """Where the first of two stages has to recompute, what was tried says so, and a plan that is
    asked to recompute nothing is refused.
    """
    small = {"batch": 1024}
    limit_bytes = 14.5 * 2**20
    options = {
        "cluster": CLUSTER,
        "method": aq.PipeshardParallel(num_stages=2),
        "num_micro_batches": 4,
    }
    by_stage = aq.plan(*build(**small), **options, memory_limit_bytes=limit_bytes)
    assert [stage.recompute for stage in by_stage.stages] == ["operators", "none"]
    with pytest.raises(aq.InfeasibleError, match="No stage may recompute"):
        aq.plan(*build(**small), **options, memory_limit_bytes=limit_bytes, recompute="none")
    ample = aq.plan(*build(**small), **options, recompute="none")
    assert {stage.recompute for stage in ample.stages} == {"none"}
    with pytest.raises(aq.InputError, match="there is no recompute 'blok'.*block"):
        aq.plan(*build(**small), **options, recompute="blok")
    with pytest.raises(aq.InputError, match="'nothing_saveable': write 'block', which keeps only"):
        aq.plan(*build(**small), **options, recompute="nothing_saveable")
    for odd in (True, ["block"]):
        with pytest.raises(aq.InputError, match="is no name: give one of none, fused, minimal"):
            aq.plan(*build(**small), **options, recompute=odd)
    # Beside another way it is listed under the name of what its stages do.
    variant = _variants.Variant(step=build()[0], args=(), name="--recompute none")
    assert variant.named(ample) == "--recompute none"
    assert variant.named(by_stage) == "--recompute none, recomputed by stage"
    told = replace(variant, name_by_stage=RECOMPUTED_BY_STAGE)
    assert told.named(by_stage) == how_recomputed(by_stage) == "recomputed by stage"
    assert how_recomputed(ample) is None
    of_zoo = ModelReference(kind="zoo", name="gpt-10m", settings={"recompute": "block"})
    both = msgspec.structs.replace(by_stage, model=of_zoo)
    assert how_recomputed(both) == "block, recomputed by stage"
    faster = msgspec.structs.replace(ample.prediction, step_time_s=1e-6)
    found = iter([by_stage, msgspec.structs.replace(ample, prediction=faster)])
    monkeypatch.setattr(_variants, "plan_graph", lambda graph, **options: next(found))
    best = aq.plan_fastest(build, [{**way, **small} for way in WAYS], **options)
    slower = best.provenance.candidates[-1]
    assert slower["name"] == "recompute=False, batch=1024, recomputed by stage"
    assert slower["outcome"] == "slower"


def test_an_ordinary_step_recomputes_where_it_would_not_fit_and_where_that_is_asked(alone):
    keeps, again = (each.prediction for each in alone)
    options = {"cluster": CLUSTER, "method": aq.DataParallel(), "num_micro_batches": 1}
    assert aq.plan(*build(), **options).recompute in ("none", "fused")
    between = (keeps.peak_memory_bytes + again.peak_memory_bytes) / 2
    small = aq.plan(*build(), **options, memory_limit_bytes=between)
    assert small.recompute in ("narrow", "block")
    assert small.prediction.peak_memory_bytes <= between < keeps.peak_memory_bytes
    tried = [each["name"] for each in small.provenance.candidates]
    assert "--recompute none" in tried
    # The step as it is written is rewritten for whoever prices, checks or runs the plan.
    assert aq.estimate(small, *build()) == small.prediction
    asked = aq.plan(*build(), **options, recompute="block")
    assert asked.recompute == "block"
    assert math.isclose(asked.prediction.step_time_s, again.step_time_s, rel_tol=0.01)


def test_where_nothing_fits_the_way_that_keeps_least_is_described(alone):
    with pytest.raises(aq.InfeasibleError) as error:
        fastest(memory_limit_bytes=1e6)
    least = alone[1].prediction.peak_memory_bytes
    assert math.isclose(error.value.required_bytes, least, rel_tol=0.01)


def test_bad_ways_are_refused():
    with pytest.raises(aq.InputError, match="at least one way"):
        fastest([])
    with pytest.raises(aq.InputError, match="cannot be written"):
        fastest([{"recompute": object()}])


FACTORY = """
from test_variants import build
def switch(recompute=False): return build(recompute)
def words(recompute="block"):
    assert recompute in ("none", "block"), recompute
    return build(recompute == "block")
def fixed(): return build()
def twice(): return build(True)
def other(recompute=None):
    assert recompute is None
    return build()
"""


@pytest.mark.parametrize("function", ["switch", "words"])
def test_a_factory_with_the_argument_is_planned_in_both_ways(
    function, alone, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"own_{function}.py").write_text(FACTORY)
    name, path = f"own_{function}:{function}", tmp_path / "plan.json"
    on = ("plan", name, "--cluster", "1x2xV100-32GB", "--method", "dp", "--no-remedies")
    between = sum(each.prediction.peak_memory_bytes for each in alone) / 2
    limit = ("--memory-limit", f"{int(between)}B", "--out", path)
    found = run(*on, *limit)
    assert found.exit_code == 0, found.stderr
    plan = Plan.load(path)
    assert plan.model.settings == {"recompute": False if function == "switch" else "none"}
    assert plan.recompute not in ("none", "minimal")
    # Less recomputation is slower here, because it takes more micro-batches.
    names = [each["name"] for each in plan.provenance.candidates[1:]]
    assert plan.num_micro_batches == 1 and "--recompute none, 2 micro-batches" in names
    # The same step is built again.
    explained = run("explain", path, "--model", name, "--no-alternatives")
    assert explained.exit_code == 0, explained.stderr
    whole = ("--recompute", "none", "--micro-batches", "1")
    refused(run(*on, *limit, *whole), "fit", code=1)
    answer = json.loads(run(*on, "--recompute", "block", "--json").stdout)
    assert math.isclose(answer["step_time_s"], alone[1].prediction.step_time_s, rel_tol=0.01)
    assert answer["recompute"] == "block"


def test_a_factory_without_it_recomputes_by_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_fixed.py").write_text(FACTORY)
    on = ("--cluster", "1x2xV100-32GB", "--method", "dp", "--json")
    for function in ("fixed", "other"):
        found = run("plan", f"own_fixed:{function}", *on, "--recompute", "block")
        assert json.loads(found.stdout)["recompute"] == "block"
    refused(run("plan", "own_fixed:fixed", *on, "--recompute", "save_qkv"), "no attention")
    refused(run("plan", "own_fixed:twice", *on, "--recompute", "block"), "recomputes already")


def test_a_factory_that_repeats_no_layers_is_built_with_its_own_recomputation(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_single.py").write_text(SINGLE)
    on = ("plan", "own_single:build", "--cluster", "1x2xV100-32GB", "--method", "dp", "--json")
    found = json.loads(run(*on).stdout)
    assert found["recompute"] is False
    found = json.loads(run(*on, "--recompute", "block").stdout)
    assert found["recompute"] is True


SINGLE = """
import jax, jax.numpy as jnp
def build(recompute=False):
    def layer(w, x):
        return jnp.tanh(x @ w)
    def loss(w, x):
        return jnp.mean((jax.checkpoint(layer) if recompute else layer)(w, x) ** 2)
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return w - grads, value
    shape = jax.ShapeDtypeStruct
    return step, shape((64, 64), jnp.float32), shape((32, 64), jnp.float32)
"""
