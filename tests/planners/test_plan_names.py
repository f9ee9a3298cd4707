"""What the line "parallelism" says, against a second reading of a plan's splits and collectives.
`benchmarks/plan_names.py` reads all cases.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from planners.plan_names import CASES, STEPS, Reading, untrue
from planners.small_steps import array

import aliquot as aq
from aliquot.planners import method_by_name
from aliquot.plans import summary_rows

# Every third, and what was once called by a wrong name.
_FEW = (
    *CASES[::3],
    ("indexed", "zero3", None),
    ("models", "shard", None),
    ("models, same examples", "shard", None),
    ("several_steps", "dp", None),
    ("one step in a loop", "dp", None),
    ("each_example", "zero3", None),
)


@functools.cache
def planned(name, method, count):
    case = STEPS[name]()
    hosts = "2x4xH100" if method == "hsdp" else "8xH100"
    plan = aq.plan(
        case.step,
        *case.args,
        cluster=aq.Cluster.preset(hosts),
        method=method_by_name(method),
        num_micro_batches=count,
    )
    return case, plan


def line(*asked):
    return dict(summary_rows(planned(*asked)[1]))["parallelism"]


@pytest.mark.parametrize("asked", dict.fromkeys(_FEW), ids=str)
def test_every_word_holds(asked):
    assert not untrue(*planned(*asked))


@pytest.mark.parametrize(
    ("asked", "role"),
    [
        (("mlp", "dp", None), "data parallel, FSDP (ZeRO-3): parameters sharded"),
        (("mlp", "dp", None), "data parallel, ZeRO-1: optimizer state sharded"),
        (("mlp", "zero2", None), "data parallel, FSDP (ZeRO-3): parameters sharded"),
        (("mlp", "zero3", None), "tensor parallel: parameters sharded, batch sharded"),
        (("mlp", "zero3", None), "independent models: parameters sharded, batch sharded"),
        (("mlp", "zero3", 4), "data parallel, FSDP (ZeRO-3): parameters sharded"),
        (("models", "shard", None), "tensor parallel: parameters sharded, batch sharded"),
        (("models", "shard", None), "data parallel, FSDP (ZeRO-3): parameters sharded"),
        (("several_steps", "dp", None), "context parallel: parameters replicated"),
    ],
)
def test_the_second_reading_finds_wrong_names(asked, role):
    case, plan = planned(*asked)
    assert list(Reading(case=case, plan=plan, stages=plan.stages, axis="x").faults(role))


def test_names_that_were_wrong_are_right():
    assert (
        line("indexed", "zero3", None) == "x (8): data parallel, FSDP (ZeRO-3): parameters sharded"
    )
    assert line("mlp", "zero3", 4) == (
        "x (8): data parallel, FSDP: optimizer state and parameters sharded; gradients are whole"
        " until they are summed after the last micro-batch"
    )
    assert line("models", "shard", None) == (
        "x (8): independent models: parameters sharded, batch sharded"
    )
    for step in ("several_steps", "one step in a loop"):
        assert line(step, "dp", None) == "x (8): data parallel: parameters replicated"


def _said(step, *args, method):
    cluster = aq.Cluster.preset("8xcpu")
    plan = aq.plan(step, *args, cluster=cluster, method=method, recompute="none")
    return dict(summary_rows(plan))["parallelism"]


def _updated(params, grads):
    return jax.tree.map(lambda p, g: p - g, params, grads)


def test_what_a_generator_makes_of_a_key_is_exchanged():
    def scores(judge, x):
        return jax.nn.softplus(jax.nn.relu(x @ judge["a"]) @ judge["b"])

    def step(judge, maker, batch):
        drawn = jax.random.normal(jax.random.key(0), (16, 8))
        made = lambda maker: jnp.tanh(drawn @ maker["a"]) @ maker["b"]  # noqa: E731
        mean = lambda judge, x: jnp.mean(scores(judge, x))  # noqa: E731
        grads = jax.grad(lambda judge: mean(judge, batch) - mean(judge, made(maker)))(judge)
        judge = _updated(judge, grads)
        return judge, _updated(maker, jax.grad(lambda maker: mean(judge, made(maker)))(maker))

    judge = {"a": array(16, 32), "b": array(32, 1)}
    maker = {"a": array(8, 32), "b": array(32, 16)}
    said = _said(step, judge, maker, array(16, 16), method=aq.Zero3Parallel())
    assert "independent models" not in said


def test_a_step_that_draws_its_examples_is_data_parallel():
    def loss(params):
        drawn = jax.random.normal(jax.random.key(0), (65536, 64))
        return jnp.mean((jnp.tanh(drawn @ params["a"]) @ params["b"]) ** 2)

    def step(params):
        return _updated(params, jax.grad(loss)(params))

    params = {"a": array(64, 64), "b": array(64, 64)}
    said = _said(step, params, method=aq.ShardParallel())
    assert said.startswith("x (8): data parallel")
    assert said.endswith("; the step makes its batch itself")
