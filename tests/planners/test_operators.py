"""Pipelines whose stages are cut between the operators of a captured step: `layers="operators"`."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planners.small_steps import mlp

import aliquot as aq
from aliquot import zoo
from aliquot.core import InputError
from aliquot.graph import Phase, capture, cut_layers
from aliquot.planners import Bottleneck, Interrupted, StageDP, Task
from aliquot.planners._helper import HelperProcess
from aliquot.planners._layer_costs import price_layers
from aliquot.planners.intra import ILP
from aliquot.plans import Plan

GPT = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "ffn_size": 64,
    "vocab_size": 64,
    "seq_len": 8,
}
RESNET = {"num_layers": 14, "num_channels": 4, "image_size": 64, "num_classes": 8}


def _zoo_step(model, sizes, rows):
    work = zoo.build(zoo.configure(model, **sizes), rows, dtype="float64")
    return work.train_step, work.init, work.batch


def _plain_mlp():
    step, state, batch = mlp((16, 32, 24, 32, 32, 8), 32)
    state, batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64), (state, batch)
    )

    def init(key):
        leaves, tree = jax.tree.flatten(state)
        keys = jax.random.split(key, len(leaves))
        drawn = [0.3 * jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves)]
        return jax.tree.unflatten(tree, drawn)

    return step, init, batch


STEPS = {
    "gpt": functools.partial(_zoo_step, "gpt-125m", GPT, 16),
    "wide-resnet": functools.partial(_zoo_step, "wide-resnet-250m", RESNET, 16),
    "mlp": _plain_mlp,
}


def _inside(names):
    """The operators inside of blocks, without the first of each."""
    blocks = [(re.match(r".*?layers\[\d+\]", name) or [""])[0] for name in names]
    return [k for k in range(1, len(names)) if blocks[k] and blocks[k] == blocks[k - 1]]


def _drawn(batch, key):
    """A batch of random numbers; whole numbers below 8 stand for tokens and classes."""
    return jax.tree.map(
        lambda a: (
            jax.random.randint(key, a.shape, 0, 8, a.dtype)
            if jnp.issubdtype(a.dtype, jnp.integer)
            else jax.random.normal(key, a.shape, a.dtype)
        ),
        batch,
    )


# More stages than layers; the statistics of BatchNorm are those of the whole batch.
@pytest.mark.parametrize(
    ("name", "micro_batches", "num_stages"),
    [
        ("gpt", 4, 6),
        pytest.param("wide-resnet", 1, 3, marks=pytest.mark.slow),
        pytest.param("mlp", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_stages_between_operators_give_the_numbers_of_the_plain_step(
    name, micro_batches, num_stages
):
    with jax.enable_x64(True):
        step, init, batch = STEPS[name]()
        state = jax.eval_shape(init, jax.random.key(0))
        layers = cut_layers(capture(step, state, batch), layers="operators")
        inside = sorted(layers.inner or _inside(layers.names))
        inter = Bottleneck(num_stages=num_stages)
        if len(layers) - len(layers.inner) >= num_stages:
            # Stages over layers could be the answer.
            bounds = [0, inside[len(inside) // 3], inside[2 * len(inside) // 3], len(layers)]
            inter = aq.ManualStages(
                boundaries=tuple(itertools.pairwise(bounds)),
                options=("dp2 tp2", "dp2 tp1, recompute", "dp1 tp2"),
            )
        method = aq.PipeshardParallel(
            inter=inter, num_micro_batches=micro_batches, layers="operators"
        )
        plan = aq.plan(step, state, batch, cluster=aq.Cluster.detect(), method=method)
        assert len(plan.stages) == num_stages
        assert set(inside) & {stage.first_layer for stage in plan.stages}
        plan = Plan.from_json(plan.to_json())
        run = aq.parallelize(step, plan)
        plain = init(jax.random.key(0))
        placed = run.init(init, jax.random.key(0))
        for number in range(2):
            data = _drawn(batch, jax.random.key(number))
            plain, wanted = jax.jit(step)(plain, data)
            placed, found = run(placed, data)
        for a, b in zip(jax.tree.leaves((placed, found)), jax.tree.leaves((plain, wanted))):
            want = np.asarray(b, np.float64)
            off = np.abs(np.asarray(jax.device_get(a), np.float64) - want).max()
            assert off <= 1e-9 * max(1.0, np.abs(want).max())


@functools.cache
def _task():
    sizes = {"num_layers": 3, "hidden_size": 512, "num_heads": 8, "ffn_size": 2048, "seq_len": 128}
    work = zoo.build(zoo.configure("gpt-125m", **sizes), 64)
    graph = capture(work.train_step, work.state, work.batch)
    return Task(graph=graph, cluster=aq.Cluster.preset("8xV100-16GB"), num_micro_batches=8)


@functools.cache
def _priced(layers):
    return price_layers(
        _task(), [8], intra=ILP(), layers=layers, helper=HelperProcess(wanted=False)
    )


def test_operators_share_what_their_layer_costs_as_a_whole():
    costs = _priced("operators").costs
    assert costs.whole is not None
    inner = costs.step.layers.inner
    starts = [k for k in range(len(costs.step.layers)) if k not in inner]
    assert inner
    for name in ("forward_s", "backward_s", "once_s", "state_bytes", "in_flight_bytes"):
        found, whole = costs.figures(name), costs.whole.figures(name)
        assert np.add.reduceat(found, starts, axis=0) == pytest.approx(whole, rel=1e-9)
        # The costs of a layer are those that it has where layers are units.
        assert whole == pytest.approx(_priced(None).costs.figures(name), rel=1e-9)
    working = np.maximum.reduceat(costs.figures("working_bytes"), starts, axis=0)
    assert working == pytest.approx(costs.whole.figures("working_bytes"), rel=1e-9)


def test_stages_over_layers_cost_as_much_where_operators_are_units():
    operators, layers = _priced("operators"), _priced(None)
    bounds = [k for k in range(len(operators.kinds) + 1) if k not in operators.sketch.layers.inner]
    of_operators, of_layers = operators.chains[0], layers.chains[0]
    assert [o.name for o in of_operators.options] == [o.name for o in of_layers.options]
    for option, (a, b) in itertools.product(
        range(len(of_layers.options)), [(0, 1), (1, 3), (0, len(bounds) - 1)]
    ):
        assert of_operators.least_s(option, bounds[a], bounds[b]) == pytest.approx(
            of_layers.least_s(option, a, b), rel=1e-9
        )
    # Recomputation keeps the inputs of stages, and only layers are charged for a share of theirs.
    inner = sorted(operators.sketch.layers.inner)
    recomputes = [k for k, o in enumerate(of_operators.options) if o.recompute == "stage"]
    assert not of_operators.in_flight_bytes[np.ix_(inner, recomputes)].any()


@pytest.mark.parametrize(
    "inter", [Bottleneck(), pytest.param(StageDP(), marks=pytest.mark.slow)], ids=["relief", "dp"]
)
def test_stages_between_operators_are_faster_where_layers_balance_badly(inter):
    """Three stages of three layers and a head that takes as long as them all."""
    method = aq.PipeshardParallel(inter=inter, num_stages=3, num_micro_batches=8)
    over_layers = method.decide(_task())
    over_operators = replace(method, layers="operators").decide(_task())
    assert over_operators.step_time_s < 0.95 * over_layers.step_time_s
    assert over_layers.step_time_s in [c.step_time_s for c in over_operators.candidates]
    # Each operator has degrees of its own: one splits the batch (0), others columns or rows.
    splits = [
        {
            choice
            for node, choice in zip(stage.problem.nodes.nodes, stage.picked.choices, strict=True)
            if node.kind == "product" and node.phase is Phase.FORWARD
        }
        for stage in over_operators.stages
    ]
    assert any({(0,), (2,), (3,)} <= of_stage for of_stage in splits)


def test_operators_may_be_more_stages_than_layers():
    step, state, batch = mlp((64, 64, 64), 64)
    task = Task(graph=capture(step, state, batch), cluster=aq.Cluster.preset("2xV100-16GB"))
    method = aq.PipeshardParallel(inter=Bottleneck(), num_stages=2, num_micro_batches=4)
    with pytest.raises(InputError, match=r"(?s)the step has 1 layer.*layers='operators'"):
        method.decide(task)
    assert len(replace(method, layers="operators").decide(task).stages) == 2
    with pytest.raises(InputError, match="9 stages were asked for, but the step has 2 layers"):
        replace(method, layers="operators", num_stages=9).decide(task)


@pytest.mark.parametrize("method", [aq.Grid(), aq.Megatron(data=1, tensor=1, pipeline=2)])
def test_planners_of_equally_many_layers_refuse_operators(method):
    step, state, batch = mlp((64, 64, 64), 64)
    task = Task(graph=capture(step, state, batch), cluster=aq.Cluster.preset("2xV100-16GB"))
    with pytest.raises(InputError, match=r"equally many layers. Leave .*--method bottleneck"):
        if isinstance(method, aq.Megatron):
            replace(method, layers="operators").decide(task)
        aq.PipeshardParallel(inter=method, layers="operators")


def test_ctrl_c_among_operators_gives_the_plan_over_layers():
    step, state, batch = mlp((16, 32, 24, 32, 32, 8), 32)
    graph = capture(step, state, batch)
    layers = cut_layers(graph, layers="operators")
    inner = {f"layer {layers.names[k]}" for k in layers.inner}

    def stop(text, *_):
        if text in inner:
            raise KeyboardInterrupt

    task = Task(graph=graph, cluster=aq.Cluster.preset("2xV100-16GB"), progress=stop)
    method = aq.PipeshardParallel(inter=Bottleneck(), num_stages=2, num_micro_batches=4)
    with pytest.raises(Interrupted) as stopped:
        replace(method, layers="operators").decide(task)
    over_layers = method.decide(replace(task, progress=None))
    assert stopped.value.decision.step_time_s == over_layers.step_time_s
