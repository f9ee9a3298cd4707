"""What is least in a plan of a function without gradients: one call, or the time between calls."""

import functools

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.core import InputError
from aliquot.planners import Streaming
from aliquot.plans import time_between_calls_s


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def products(params, batch):
    x = batch["x"]
    for w in params["w"]:
        x = jnp.tanh(x @ w)
    return x


def residual(params, batch):
    x = batch["x"]
    for w in params["w"]:
        x = x + jax.nn.relu(x @ w) @ w.T
    return x.sum(1)


def decode(params, cache, batch):
    x, rows = batch["x"], []
    for w, row in zip(params["w"], cache["rows"], strict=True):
        here = jnp.arange(row.shape[1]) == batch["position"][:, None]
        row = jnp.where(here[..., None], (x @ w)[:, None], row)
        x = x + jnp.einsum("bt,bth->bh", jnp.einsum("bh,bth->bt", x, row), row)
        rows.append(row)
    return {"rows": rows}, x


def weights(*sizes):
    return {"w": [shape(m, n) for m, n in zip(sizes, sizes[1:])]}


def batch(size, rows=16):
    return {"x": shape(rows, size)}


TOKEN = {"x": shape(16, 64), "position": jax.ShapeDtypeStruct((16,), jnp.int32)}
STEPS = {
    "narrow": (products, weights(*[128] * 5), batch(128)),
    "wide": (products, weights(*[2048] * 5), batch(2048)),
    "uneven": (products, weights(256, 4096, 256, 256, 256), batch(256)),
    "residual": (residual, weights(*[512] * 5), batch(512)),
    "many rows": (products, weights(*[256] * 5), batch(256, 4096)),
    "decode": (decode, weights(*[64] * 5), {"rows": [shape(16, 32, 64)] * 4}, TOKEN),
}


@functools.cache
def plans(name):
    fn, *args = STEPS[name]
    cluster = aq.Cluster.preset("4xV100-16GB")
    return [
        aq.plan(fn, *args, cluster=cluster, objective=objective)
        for objective in ("latency", "throughput")
    ]


SLOW = ("uneven", "residual", "many rows", "decode")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in STEPS]
)
def test_each_objective_is_least_under_its_own_plan(name):
    one_call, stream = plans(name)
    assert one_call.prediction.step_time_s <= stream.prediction.step_time_s * (1 + 1e-9)
    assert time_between_calls_s(stream) <= time_between_calls_s(one_call) * (1 + 1e-9)


def test_stages_take_calls_more_often_than_one_program_ends_them():
    one_call, stream = plans("narrow")
    assert len(one_call.stages) == 1 and len(stream.stages) > 1
    assert time_between_calls_s(stream) < 0.7 * one_call.prediction.step_time_s
    assert "time between calls" in str(stream) and "time between calls" not in str(one_call)


def test_methods_are_compared_by_what_is_asked_for():
    fn, *args = STEPS["narrow"]
    asked = {"clusters": aq.Cluster.preset("2xV100-16GB"), "methods": ["dp", "pipeshard"]}
    calls = aq.compare(fn, *args, **{**asked, "methods": ["dp"]})
    stream = aq.compare(fn, *args, objective="throughput", **asked)
    assert [c.method for c in stream.candidates] == ["pipeshard", "dp"]
    fast, slow = stream.to_dict()["candidates"]
    assert fast["time_between_calls_s"] == time_between_calls_s(stream.best)
    assert slow["time_between_calls_s"] == slow["step_time_s"]
    assert fast["examples_per_s"] == pytest.approx(16 / fast["time_between_calls_s"])
    assert "x as long: a call every" in slow["loses"]
    assert fast["mfu"] == pytest.approx(
        slow["mfu"] * slow["time_between_calls_s"] / fast["time_between_calls_s"]
    )
    assert "a call every" in str(stream) and "call" not in str(calls)


def test_stages_of_a_stream_are_even():
    """The way through all stages is as long wherever equal layers are cut."""
    fn, *args = STEPS["wide"]
    plan = aq.plan(
        fn,
        *args,
        cluster=aq.Cluster.preset("2xV100-16GB"),
        method=aq.PipeshardParallel(inter=Streaming()),
        num_micro_batches=1,
    )
    assert [len(stage.layer_names) for stage in plan.stages] == [2, 2]


@pytest.mark.parametrize(
    ("objective", "said"),
    [("speed", "there is no objective 'speed'"), ("latency", "step takes gradients: a training")],
)
def test_objectives_that_cannot_be(objective, said):
    def step(w, batch):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)

    with pytest.raises(InputError, match=said):
        aq.plan(
            step, shape(8, 8), batch(8), cluster=aq.Cluster.preset("2xcpu"), objective=objective
        )
    asked = {"clusters": aq.Cluster.preset("2xcpu"), "objective": objective}
    with pytest.raises(InputError, match=said):
        aq.compare(step, shape(8, 8), batch(8), **asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": "8xH100"}, "write cluster=aliquot.Cluster.preset('8xH100'), or Cluster.load"),
        ({"cluster": ["8xH100"]}, "write cluster=aliquot.Cluster.preset("),
        ({"method": "fsdp"}, "method is 'fsdp': write method=aliquot.Zero3Parallel()"),
        ({"method": "megatron:dp4,pp2"}, "write method=aliquot.Megatron(data=4, pipeline=2)"),
        ({"method": "blocks"}, "write method=aliquot.ShardParallel(intra=aliquot.Blocks())"),
        ({"method": "anything"}, "write method=aliquot.Auto()"),
        ({"method": aq.Zero2Parallel}, "the class Zero2Parallel: write method=aliquot.Zero2Parall"),
        ({"plan": aq.Zero2Parallel()}, "a method: write method=aliquot.Zero2Parallel()"),
        ({"plan": "plan.json"}, "write plan=aliquot.Plan.load('plan.json')"),
    ],
)
def test_arguments_of_another_kind_are_refused_before_anything_is_traced(options, said):
    with pytest.raises(InputError) as refusal:
        aq.parallelize(**options)
    assert said in str(refusal.value)
    if "plan" not in options:
        with pytest.raises(InputError) as refusal:
            aq.plan(None, **options)
        assert said in str(refusal.value)


def test_arguments_of_another_kind_are_listed_at_once():
    with pytest.raises(
        InputError, match="(?s)cluster is 7.*method is 'tp:8'.*TensorParallel.degree=8"
    ):
        aq.parallelize(cluster=7, method="tp:8")
