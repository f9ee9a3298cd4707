"""`PipeshardParallel`: what is wanted is honoured or refused, and what comes out is a plan that
holds together.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot._variants import Variant, plan_variants
from aliquot.core import InfeasibleError, InputError
from aliquot.planners import AbstractInter, _base, _pipelines, _solve_stages
from aliquot.planners._layer_costs import price_layers
from aliquot.planners._pipelines import Pipelines
from aliquot.planners.inter.stages import _solve
from aliquot.plans import Plan, summary_rows, violations

LAYERS = 6
CLUSTER = "8xV100-16GB"


def init(key, width=64):
    keys = jax.random.split(key, LAYERS + 2)
    scale = width**-0.5
    return {
        "embed": jax.random.normal(keys[0], (256, width)),
        "layers": [
            {"w": scale * jax.random.normal(k, (width, width)), "b": jnp.zeros((width,))}
            for k in keys[1:-1]
        ],
        "head": scale * jax.random.normal(keys[-1], (width, 256)),
    }


def train_step(state, batch):
    def loss(params):
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logits, batch["targets"][:, None], 1).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    mu = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1.0), state["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu)
    return {"params": params, "mu": mu}, {"loss": value, "norm": norm}


def state_of(params):
    return {"params": params, "mu": jax.tree.map(jnp.zeros_like, params)}


STATE = jax.eval_shape(lambda: state_of(init(jax.random.key(0))))
WIDE = jax.eval_shape(lambda: state_of(init(jax.random.key(0), 4096)))
BATCH = {name: jax.ShapeDtypeStruct((64,), jnp.int32) for name in ("tokens", "targets")}


def plan_of(cluster=CLUSTER, state=STATE, limit=None, recompute=None, **options):
    return aq.plan(
        train_step,
        state,
        BATCH,
        cluster=aq.Cluster.preset(cluster),
        method=aq.PipeshardParallel(**options),
        memory_limit_bytes=limit,
        recompute=recompute,
    )


# For tests that only look at a plan.
known_plan = functools.cache(plan_of)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_number_of_stages_is_honoured(num_stages):
    plan = known_plan(num_stages=num_stages, num_micro_batches=4)
    assert len(plan.stages) == num_stages
    assert violations(plan) == []
    ends = [stage.first_layer + len(stage.layer_names) for stage in plan.stages]
    assert [0, *ends[:-1]] == [stage.first_layer for stage in plan.stages]


def test_a_pipeline_is_listed_among_what_was_tried():
    plan = known_plan(num_stages=2, num_micro_batches=4, recompute="none")
    (tried,) = plan.provenance.candidates
    assert tried["name"].startswith("pipeshard, 2 stages") and tried["name"].endswith(
        "4 micro-batches"
    )
    assert tried["step_time_s"] == plan.prediction.step_time_s
    assert "Tried in the search" in str(plan)
    assert "pipeline: 2 stages" in dict(summary_rows(plan))["parallelism"]


def test_the_parts_of_the_step_add_up():
    p = known_plan(num_stages=2, num_micro_batches=4).prediction
    assert p.step_time_s == pytest.approx(
        p.compute_s + p.communication_s + p.gradient_s - p.hidden_s + p.bubble_s
    )
    assert p.bubble_s > 0
    assert sum(p.memory_bytes.values()) == pytest.approx(p.peak_memory_bytes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved-1f1b"])
def test_a_schedule_is_honoured(schedule):
    plan = known_plan(num_stages=4, num_micro_batches=8, schedule=schedule)
    assert plan.schedule == schedule
    assert (plan.num_submeshes < 4) == (schedule == "interleaved-1f1b")


def test_micro_batches_in_flight_are_those_of_the_schedule():
    plan = known_plan(num_stages=4, num_micro_batches=8, schedule="1f1b")
    assert [stage.prediction.in_flight for stage in plan.stages] == [4, 3, 2, 1]


def test_a_plan_is_deterministic_and_survives_its_file():
    first, second = (of(num_stages=2, num_micro_batches=4) for of in (known_plan, plan_of))
    assert first == second
    assert Plan.from_json(first.to_json()) == first


def test_a_plan_file_is_the_same_when_it_is_read_and_saved():
    text = plan_of(num_stages=2, num_micro_batches=4, limit=10**10).to_json()
    assert Plan.from_json(text).to_json() == text


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="50 stages were asked for, but the step has .* layers"):
        plan_of(num_stages=50, num_micro_batches=4)


def test_a_search_for_stages_may_return_one_program(monkeypatch):
    open_pipelines = Pipelines.open

    def slowly(pipelines, search):
        time.sleep(0.5)
        return open_pipelines(pipelines, search)

    monkeypatch.setattr(Pipelines, "open", slowly)
    plan = plan_of(cluster="1xV100-16GB")
    assert (len(plan.stages), plan.schedule) == (1, "single")
    # To search for stages is no tracing.
    assert plan.provenance.search_s >= 0.5


def test_nothing_fits():
    with pytest.raises(InfeasibleError, match="fits"):
        plan_of(limit=1000, num_micro_batches=4)


def test_a_refusal_asks_for_more_memory_than_there_is(monkeypatch):
    """Also where the search under a tighter limit finds no stages at all."""
    monkeypatch.setattr(
        _solve_stages._Stages, "solve", lambda stages, *_: 1000.0 * stages.task.limit_bytes
    )
    with pytest.raises(InfeasibleError, match="1000.00 times") as refusal:
        plan_of(num_stages=2, num_micro_batches=4)
    assert refusal.value.required_bytes == 1000 * refusal.value.available_bytes


def test_what_would_fit_is_worked_out_only_where_no_other_numbers_are_left(monkeypatch):
    """Few micro-batches do not fit, many do not, and one does: only the refusal of the many could
    have been the answer.
    """
    worked_out, refuse = [], _solve.nothing_fits

    def counting(chains, *args):
        worked_out.append([chain.num_micro_batches for chain in chains])
        return refuse(chains, *args)

    monkeypatch.setattr(_solve, "nothing_fits", counting)
    plan = plan_of(cluster="2xV100-16GB", state=WIDE, limit=0.7e9, num_stages=2, recompute="none")
    assert plan.num_micro_batches == 1 and plan.prediction.peak_memory_bytes <= 0.7e9
    assert worked_out == [[64]]


def test_no_proposal_is_made_twice(monkeypatch):
    """Where one far below the limit does not fit, the next has a limit that excludes it."""
    proposed = []

    def never(self, chain, found, repeated):
        stages = tuple((s.last_unit, s.option) for s in found.stages)
        proposed.append((bool(repeated), found.schedule, stages))
        return 1.001 * self.task.limit_bytes

    monkeypatch.setattr(_solve_stages._Stages, "solve", never)
    with pytest.raises(InfeasibleError, match="need at least 1.00 times"):
        plan_of(num_stages=2, num_micro_batches=4, recompute="none")
    assert len(set(proposed)) == len(proposed) > 2


def test_more_memory_is_never_slower():
    """The first stages that are proposed need 0.82 GB, though their layers promise 0.63 GB, and
    those that fit less promise 0.56 GB.
    """
    limits = (0.65e9, 0.7e9, 0.8e9, 0.9e9)
    plans = [plan_of(cluster="2xV100-16GB", state=WIDE, limit=n, num_stages=2) for n in limits]
    seconds = [plan.prediction.step_time_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert [plan.num_micro_batches for plan in plans] == [1, 1, 1, 1]


def test_proposals_have_stages_in_common(monkeypatch):
    """What a stage that was solved once looks like is known when it is proposed again."""
    module, made = _solve_stages, []
    make, solve_stages = module.make_problem, module._Stages.solve

    def counted(graph, *args, **options):
        made.append(len(graph.ops))
        return make(graph, *args, **options)

    def twice(*args):
        first = solve_stages(*args)
        before = len(made)
        second = solve_stages(*args)
        assert len(made) == before > 0
        assert [s.picked.choices for s in first.stages] == [s.picked.choices for s in second.stages]
        return second

    monkeypatch.setattr(module, "make_problem", counted)
    monkeypatch.setattr(module._Stages, "solve", twice)
    assert len(plan_of(num_stages=3, num_micro_batches=4).stages) == 3


def test_less_memory_makes_stages():
    """Six layers of 4096 x 4096 with momentum: 1.2 GB of state in all."""
    free = plan_of(cluster="2xV100-16GB", state=WIDE, num_micro_batches=4)
    tight = plan_of(cluster="2xV100-16GB", state=WIDE, num_micro_batches=4, limit=1.3e9)
    assert tight.prediction.peak_memory_bytes <= 1.3e9
    assert tight.prediction.step_time_s >= free.prediction.step_time_s


def test_layers_by_number_and_by_pattern():
    assert plan_of(num_stages=2, num_micro_batches=4, layers=2).stages[1].first_layer == 1
    plan = plan_of(num_stages=2, num_micro_batches=4, layers="params.layers[*]")
    assert sum(len(stage.layer_names) for stage in plan.stages) >= LAYERS


def test_equal_stages_share_their_interior():
    bounds = ((0, 2), (2, 4), (4, 6), (6, 7))
    manual = aq.ManualStages(boundaries=bounds, options=("dp2 tp1",) * 4)
    plan = plan_of(inter=manual, num_micro_batches=4, layers="params.layers[*]")
    assert [stage.like for stage in plan.stages][2] == 1
    assert all(bool(stage.interior) == (stage.like is None) for stage in plan.stages)
    assert violations(plan) == []


def test_a_grid_and_stages_by_hand():
    grid = plan_of(inter=aq.Grid(), num_micro_batches=8)
    assert grid.method == "grid"
    assert len({stage.mesh_shape for stage in grid.stages}) == 1
    manual = aq.ManualStages(boundaries=((0, 2), (2, 6)), options=("dp4 tp1", "dp4 tp1"))
    plan = plan_of(inter=manual, num_micro_batches=4, layers=6)
    assert [stage.first_layer for stage in plan.stages] == [0, 2]


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="no schedule"):
        aq.PipeshardParallel(schedule="gpip")


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
def test_a_plan_runs_and_gives_the_numbers_of_the_plain_step(schedule):
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule=schedule)
    plan = aq.plan(train_step, STATE, BATCH, cluster=aq.Cluster.detect(), method=method)
    step = aq.parallelize(train_step, Plan.from_json(plan.to_json()))
    key = jax.random.key(0)
    plain = state_of(init(key))
    placed = step.init(lambda k: state_of(init(k)), key)
    for number in range(3):
        tokens = jax.random.randint(jax.random.key(number), (64,), 0, 256)
        batch = {"tokens": tokens, "targets": (tokens * 7) % 256}
        plain, wanted = jax.jit(train_step)(plain, batch)
        placed, found = step(placed, batch)
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(plain), strict=True):
        assert jnp.abs(jax.device_get(a) - jax.device_get(b)).max() <= 1e-5 * max(
            1e-3, float(jnp.abs(b).max())
        )


def scanned_step(state, batch):
    def loss(params):
        def layer(x, p):
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        x, _ = jax.lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])
        logits = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logits, batch["targets"][:, None], 1).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu), "mu": mu}, {
        "loss": value
    }


def scanned_state(key):
    params = init(key)
    return state_of(
        params | {"layers": jax.tree.map(lambda *rows: jnp.stack(rows), *params["layers"])}
    )


def test_a_loop_over_layers_is_cut_between_any_two():
    state = jax.eval_shape(scanned_state, jax.random.key(0))
    method = aq.PipeshardParallel(num_stages=4, num_micro_batches=4)
    plan = aq.plan(scanned_step, state, BATCH, cluster=aq.Cluster.preset(CLUSTER), method=method)
    assert violations(plan) == []
    assert (plan.scan_bounds[0], plan.scan_bounds[-1], len(plan.scan_bounds)) == (0, LAYERS, 5)
    assert [name for stage in plan.stages for name in stage.layer_names] == [
        f"layers[{k}]" for k in range(LAYERS)
    ]
    last = plan.scan_bounds[-2]
    assert f"state.params.layers.w[{last}:{LAYERS}]" in plan.stages[-1].shardings


@dataclass(frozen=True, kw_only=True)
class OnlySmall(AbstractInter):
    """Finds room for micro-batches of two examples and fewer alone."""

    def solve(self, chains, **options):
        small = [chain for chain in chains if chain.num_micro_batches >= 32]
        if not small:
            raise InfeasibleError("too large", required_bytes=2, available_bytes=1)
        return aq.StageDP(num_stages=2).solve(small)


def test_smaller_micro_batches_are_tried_if_nothing_else_fits():
    assert plan_of(num_stages=2).num_micro_batches <= 8
    assert plan_of(inter=OnlySmall()).num_micro_batches >= 32


def contrastive_step(state, batch):
    """Sets examples against one another, so that it has no micro-batches of the same numbers."""

    def loss(params):
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jax.nn.logsumexp(x @ x.T, axis=1).mean() - (x * x).sum(1).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "mu": state["mu"]}, value


@pytest.mark.parametrize(
    "method",
    [aq.PipeshardParallel(num_stages=2), aq.Megatron(data=4, pipeline=2)],
    ids=["searched", "equal stages"],
)
@pytest.mark.parametrize("count", [None, 1])
def test_a_step_that_does_not_decompose_is_one_micro_batch(method, count):
    state = {**STATE, "params": {k: v for k, v in STATE["params"].items() if k != "head"}}
    plan = aq.plan(
        contrastive_step,
        state,
        BATCH,
        cluster=aq.Cluster.preset(CLUSTER),
        method=method,
        num_micro_batches=count,
    )
    assert (len(plan.stages), plan.num_micro_batches) == (2, 1)
    if count is None and isinstance(method, aq.PipeshardParallel):
        outcomes = [each["outcome"] for each in plan.provenance.candidates]
        assert "the step does not decompose" in outcomes


def test_a_step_that_does_not_decompose_is_priced_once(monkeypatch):
    priced, planned = [], []

    def spy(of, log, count):
        def called(task, counts, *args, **settings):
            log.append(count(counts))
            return of(task, counts, *args, **settings)

        return called

    monkeypatch.setattr(_pipelines, "price_layers", spy(price_layers, priced, tuple))
    for module, name in ((_pipelines, "plan_micro_batches"), (_base, "runs_in_groups")):
        monkeypatch.setattr(module, name, spy(getattr(module, name), planned, int))
    state = {**STATE, "params": {k: v for k, v in STATE["params"].items() if k != "head"}}
    method = aq.PipeshardParallel(num_stages=2)
    where = aq.Cluster.preset(CLUSTER)
    aq.plan(contrastive_step, state, BATCH, cluster=where, method=method, recompute="none")
    assert priced == [(1,)]
    # Nor is a number asked for of which a divisor was refused, after the first.
    assert len(planned) >= 2
    assert not any(n % m == 0 for k, n in enumerate(planned) for m in planned[1:k])


def test_a_refusal_advises_no_number_of_micro_batches_that_was_searched():
    with pytest.raises(InfeasibleError) as refused:
        plan_of(limit=1e5, num_stages=2)
    assert "micro-batches (now" not in str(refused.value)
    assert "more micro-batches" not in str(refused.value)


def test_given_stages_are_refused_by_what_they_need_as_wholes():
    config = aq.zoo.configure(
        "gpt-125m", num_layers=4, hidden_size=256, num_heads=4, vocab_size=512, seq_len=128
    )
    work = aq.zoo.build(config, 16, dtype="float32", recompute="none", attention="plain")
    given = aq.ManualStages(boundaries=((0, 2), (2, 5)), options=("dp1 tp1",) * 2)
    method = aq.PipeshardParallel(inter=given, num_micro_batches=4, layers="layers[*]")

    def plan(limit_bytes=None):
        # Layers do as the step does, so that stages choose what they recompute.
        step = Variant(step=work.train_step, args=(work.state, work.batch), layers="none")
        return plan_variants(
            (step,),
            cluster=aq.Cluster.preset("2xV100-16GB"),
            method=method,
            memory_limit_bytes=limit_bytes,
        )

    needed = plan().prediction.peak_memory_bytes
    with pytest.raises(InfeasibleError, match="stage 1 needs") as refused:
        plan(needed * 0.9)
    by_layers = refused.value.required_bytes
    assert by_layers > needed
    fits = plan((needed + by_layers) / 2).prediction
    assert fits.peak_memory_bytes <= needed
