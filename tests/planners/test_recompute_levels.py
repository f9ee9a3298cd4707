"""Selective recomputation in pipelines: what is searched, that it wins where memory is short, and
that plans run right.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from planners.inter.chains import try_all
from runtime.equality import largest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import Cluster
from aliquot.graph import capture
from aliquot.planners import StageDP, Task, _solve_stages
from aliquot.planners._helper import HelperProcess
from aliquot.planners._layer_costs import price_layers, solve_layers
from aliquot.planners._recompute_levels import chain_with_levels, recompute_levels
from aliquot.planners._solve_stages import solve_with
from aliquot.planners.inter import NoFasterStages
from aliquot.sharding import layer_step, operators_of

SIZES = {
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_size": 64,
    "vocab_size": 64,
    "seq_len": 64,
}
METHOD = aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule="1f1b")
LIMIT_BYTES = 2.3e6


@functools.cache
def small_gpt(num_layers=2):
    sizes = SIZES | {"num_layers": num_layers}
    return zoo.build("gpt-10m", global_batch=16, overrides=sizes, dtype="float64", recompute="none")


@pytest.fixture(scope="module")
def short():
    """A plan with levels, as memory is short."""
    with jax.enable_x64(True):
        return planned(small_gpt(), LIMIT_BYTES)


def planned(work, limit_bytes):
    cluster = Cluster.preset("4xcpu")
    return aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=cluster,
        method=METHOD,
        memory_limit_bytes=limit_bytes,
    )


@functools.cache
def graph(num_layers=2):
    """The captured step. Called in double precision."""
    work = small_gpt(num_layers)
    return capture(work.train_step, work.state, work.batch)


@functools.cache
def layer_costs():
    """What four layers cost on two devices. Called in double precision."""
    task = Task(graph=graph(num_layers=4), cluster=Cluster.preset("2xcpu"))
    step = layer_step(task.graph, 4, layers=None)
    return solve_layers(step, task, intra=aq.ILP(), counts=[4])


def test_a_pipeline_that_recomputes_some_operators_runs_as_the_plain_step(short):
    with jax.enable_x64(True):
        work, plan = small_gpt(), short
        assert [stage.recompute for stage in plan.stages] == ["operators", "none"]
        assert any(entry.recompute for entry in plan.stages[0].interior)
        assert plan.prediction.peak_memory_bytes <= LIMIT_BYTES
        assert aq.estimate(plan, work.train_step, work.state, work.batch) == plan.prediction
        start = jax.device_get(jax.jit(work.init)(jax.random.key(0)))
        plain, step = jax.jit(work.train_step), aq.parallelize(work.train_step, plan)
        random = np.random.default_rng(0)
        wanted = found = start
        for _ in range(3):
            batch = {
                name: random.integers(0, 64, x.shape, np.int32) for name, x in work.batch.items()
            }
            wanted, expected = plain(wanted, batch)
            found, metrics = step(found, batch)
            assert abs(float(metrics["loss"]) - float(expected["loss"])) <= 1e-9 * float(
                expected["loss"]
            )
        leaf, path = largest("float64", start, jax.device_get(found), jax.device_get(wanted))
        assert leaf <= 1e-9, path


def test_plans_are_faster_with_levels_where_memory_is_short(short, monkeypatch):
    monkeypatch.setattr(
        _solve_stages, "chain_with_levels", lambda costs, levels, chain: (chain, ())
    )
    with jax.enable_x64(True):
        without = planned(small_gpt(), LIMIT_BYTES)
    assert short.prediction.step_time_s < without.prediction.step_time_s


def test_levels_are_not_made_where_memory_is_ample(monkeypatch):
    def refuse(costs):
        raise AssertionError("levels were made")

    monkeypatch.setattr(_solve_stages, "recompute_levels", refuse)
    with jax.enable_x64(True):
        plan = planned(small_gpt(), None)
    assert [stage.recompute for stage in plan.stages] == ["none", "none"]


def test_later_levels_repeat_more_and_free_more():
    with jax.enable_x64(True):
        costs = layer_costs()
    levels = recompute_levels(costs)
    assert 2 <= len(levels) <= 3
    for before, after in zip(levels.step_ops, levels.step_ops[1:], strict=False):
        assert before < after
    chain = costs.chain(4, np.inf)
    more, repeated = chain_with_levels(costs, levels, chain)
    assert len(repeated) == len(more.options)
    plain = [k for k, o in enumerate(chain.options) if o.recompute == "none"]
    width = len(plain)
    for level in range(len(levels)):
        start = len(chain.options) + level * width
        before = plain if level == 0 else range(start - width, start)
        columns = range(start, start + width)
        assert (more.in_flight_bytes[:, columns] <= more.in_flight_bytes[:, before]).all()
        assert (more.backward_s[:, columns] >= more.backward_s[:, before]).all()
        # What is kept less of each micro-batch is held once.
        sums = more.in_flight_bytes + more.recomputed_bytes
        np.testing.assert_allclose(sums[:, columns], sums[:, plain])


def test_the_first_level_repeats_what_frees_most_for_its_seconds():
    with jax.enable_x64(True):
        costs = layer_costs()
    levels = recompute_levels(costs)
    inner = costs.kinds[2]
    problem, chosen = costs.problems[inner], levels.nodes[0][inner]
    ops = operators_of(problem.nodes, chosen)
    shapes = {problem.graph.values[problem.graph.ops[op].outputs[0]].shape[-2:] for op in ops}
    assert (64, 64) in shapes, "attention scores make more than they read"
    assert ops < operators_of(problem.nodes, levels.nodes[-1][inner])


@pytest.mark.parametrize("share", [1.2, 1.6, 2.5])
def test_stages_with_levels_are_those_of_brute_force(share):
    with jax.enable_x64(True):
        costs = layer_costs()
    chain, _ = chain_with_levels(costs, recompute_levels(costs), costs.chain(4, np.inf))
    tried = try_all(chain, "1f1b")
    limit = share * min(t.peak_bytes for t in tried)
    best = min(t.step_time_s for t in tried if t.peak_bytes <= limit)
    planner = StageDP(schedules=("1f1b",), relative_gap=1e-12, simulated=1)
    plan = planner.solve([replace(chain, memory_limit_bytes=limit)])
    assert plan.closed_form_s == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
def test_a_search_with_levels_is_deterministic_and_no_slower():
    with jax.enable_x64(True):
        cluster, helper = Cluster.preset("4xcpu"), HelperProcess(wanted=False)
        task = Task(graph=graph(), cluster=cluster, num_micro_batches=4, memory_limit_bytes=2.3e6)
        priced = price_layers(task, [4], intra=METHOD.intra, layers=None, helper=helper)
        first, second = (solve_with(METHOD, task, priced, helper) for _ in range(2))
        assert first.step_time_s == second.step_time_s
        assert [s.repeat for s in first.stages] == [s.repeat for s in second.stages]


def test_selective_recomputation_is_tried_only_where_it_may_be_the_fastest(monkeypatch):
    tried = []

    def counting(costs, levels, chain):
        tried.append(chain.num_micro_batches)
        return chain_with_levels(costs, levels, chain)

    monkeypatch.setattr(_solve_stages, "chain_with_levels", counting)
    with jax.enable_x64(True):
        helper = HelperProcess(wanted=False)
        task = Task(
            graph=graph(),
            cluster=Cluster.preset("4xcpu"),
            num_micro_batches=4,
            memory_limit_bytes=LIMIT_BYTES,
        )
        priced = price_layers(task, [4], intra=METHOD.intra, layers=None, helper=helper)
        selective = solve_with(METHOD, task, priced, helper)
        assert {s.recompute for s in selective.stages} == {"operators", "none"} and tried == [4]
        # With any amount of memory stages would take 94% of that.
        possible = solve_with(METHOD, task, priced, helper, 1.1 * selective.step_time_s)
        assert possible.step_time_s == selective.step_time_s and tried == [4, 4]


def test_stages_that_promise_too_little_are_not_solved(monkeypatch):
    with jax.enable_x64(True):
        helper = HelperProcess(wanted=False)
        task = Task(graph=graph(), cluster=Cluster.preset("4xcpu"), num_micro_batches=4)
        priced = price_layers(task, [4], intra=METHOD.intra, layers=None, helper=helper)
        found = solve_with(METHOD, task, priced, helper)
        monkeypatch.delattr(_solve_stages._Stages, "solve")
        with pytest.raises(NoFasterStages):
            solve_with(METHOD, task, priced, helper, 0.9 * found.step_time_s)
