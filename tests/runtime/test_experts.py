"""Experts without a capacity on eight devices: equal to one device, and none gathered whole."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot import zoo
from aliquot.cluster import TARGETS
from aliquot.planners import method_by_name

ROWS, SEQ, WIDTH, INNER, EXPERTS, TOP = 16, 4, 8, 24, 8, 2
BARS = {"float64": 1e-9, "float32": 1e-5}


def swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        x = jnp.tanh(batch @ params["enter"])
        for layer in params["layers"]:
            weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ layer["router"]), TOP)
            into = layer["gate"], layer["up"]
            x = x + aq.experts(x, chosen, weights, into, layer["down"], activation=swiglu)
        return jnp.mean((x @ params["leave"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 3 * g, params, grads), value


@functools.cache
def start(num_layers: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return random.normal(size=shape) * 0.5

    layers = [
        {
            "router": draw(WIDTH, EXPERTS),
            "gate": draw(EXPERTS, WIDTH, INNER),
            "up": draw(EXPERTS, WIDTH, INNER),
            "down": draw(EXPERTS, INNER, WIDTH),
        }
        for _ in range(num_layers)
    ]
    for layer in layers:
        # Far from equal: most tokens choose the first experts.
        layer["router"][:, :3] *= 4
    params = {"enter": draw(WIDTH, WIDTH), "layers": layers, "leave": draw(WIDTH, WIDTH)}
    return params, 2 * draw(ROWS, SEQ, WIDTH)


@functools.cache
def plain(num_layers: int, dtype: str) -> Any:
    arrays = jax.tree.map(lambda x: x.astype(dtype), start(num_layers))
    return jax.device_get(jax.jit(train_step)(*arrays))


LAYOUTS = [
    ("dp", None),
    ("zero3", 2),
    ("megatron:dp1,ep8", None),
    ("megatron:dp2,ep4", 2),
    ("megatron:dp2,ep2,tp2", None),
    ("megatron:dp2,ep4,fsdp", None),
    ("megatron:dp1,tp8", None),
    ("megatron:dp2,cp2,ep2", None),
    ("zero2", 2),
    ("shard", None),
    ("megatron:dp1,ep2,tp2,pp2", 4),
    ("megatron:dp2,ep2,pp2", 2),
    ("megatron:dp1,ep4,pp2", 1),
    ("megatron:dp2,ep2,pp2,vpp2", 2),
]
QUICK = {(LAYOUTS[1], "float32"), (LAYOUTS[2], "float64"), (LAYOUTS[3], "float64")}
QUICK |= {(LAYOUTS[4], "float64"), (LAYOUTS[7], "float32"), (LAYOUTS[10], "float64")}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        # All in double precision, which sees more, and some in single.
        for layout in LAYOUTS
        for case in [(layout, "float64"), (layout, "float32")]
        if case[1] == "float64" or case in QUICK
    ],
)
def test_equal_to_one_device(layout: tuple[str, int | None], dtype: str) -> None:
    name, micro_batches = layout
    num_layers = 4 if "vpp" in name else 2 if "pp" in name else 1
    with jax.enable_x64(dtype == "float64"):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), start(num_layers))
        wanted = plain(num_layers, dtype)
        step = aq.parallelize(
            train_step,
            cluster=aq.Cluster.preset("8xcpu"),
            method=method_by_name(name),
            num_micro_batches=micro_batches,
        )
        found = dict(jax.tree.leaves_with_path(jax.device_get(step(params, batch))))
    for path, leaf in jax.tree.leaves_with_path(wanted):
        worst = np.abs(found[path] - leaf).max() / np.abs(leaf).max()
        assert worst <= BARS[dtype], (path, worst)


@pytest.mark.parametrize("name", ["megatron:dp1,ep8", "megatron:dp2,ep4"])
def test_experts_stay_and_tokens_travel(name: str) -> None:
    plan = aq.plan(
        train_step,
        *jax.tree.map(lambda x: x.astype("float32"), start(1)),
        cluster=aq.Cluster.preset("8xcpu"),
        method=method_by_name(name),
    )
    uses = plan.prediction.collectives
    # Forward: tokens there and results back; backward: tokens, gradients, and those of tokens. With
    # them, what was chosen and its weight, and back the gradient of that.
    sent = [use for use in uses if use.kind == "all-to-all" and "expert" in use.axes]
    assert sum(use.count for use in sent) == 5 + 5
    assert not [use for use in uses if use.kind == "all-gather" and "down" in use.cause]


def test_tensor_parallelism_splits_what_is_inside_experts() -> None:
    plan = aq.plan(
        train_step,
        *jax.tree.map(lambda x: x.astype("float32"), start(1)),
        cluster=aq.Cluster.preset("8xcpu"),
        method=method_by_name("megatron:dp2,ep2,tp2"),
    )
    specs = {name.rpartition(".")[2]: spec for name, spec in plan.partition_specs().items()}
    assert specs["gate"] == specs["up"] == jax.P("expert", None, "tensor")
    assert specs["down"] == jax.P("expert", "tensor", None)


@pytest.mark.parametrize(("preset", "more"), [("8xH100", 0.22), ("v5e-8", 0.0)])
def test_places_of_experts_are_priced_where_products_are_not_grouped(
    preset: str, more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = aq.Cluster.preset(preset)
    # So slow in products that nothing else counts. An eighth are not those of experts.
    slow = dataclasses.replace(
        cluster.device, peak_flops_per_s={"float32": 1e6}, calibration={"product_tile": 1}
    )

    def compute_s() -> float:
        plan = aq.plan(
            train_step,
            *jax.tree.map(lambda x: x.astype("float32"), start(1)),
            cluster=dataclasses.replace(cluster, device=slow),
            method=method_by_name("megatron:dp4,ep2"),
        )
        return plan.prediction.compute_s

    seconds, target = compute_s(), TARGETS[slow.kind]
    monkeypatch.setitem(TARGETS, slow.kind, dataclasses.replace(target, groups_products=True))
    assert seconds / compute_s() - 1 == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize(
    ("model", "routing"),
    [
        pytest.param(model, routing, marks=() if routing == quick else pytest.mark.slow)
        # Each model and each routing.
        for model, quick in (("mixtral-8x7b", "dropless"), ("moe-380m", "capacity"))
        for routing in zoo.ROUTINGS
    ],
)
def test_models_in_pipelines_with_split_experts(model: str, routing: str) -> None:
    sizes: dict[str, Any] = {
        # Every other block of MoE has experts; each stage shall have some.
        "num_layers": 2 if model.startswith("mixtral") else 4,
        "hidden_size": 16,
        "num_heads": 4,
        "ffn_size": 32,
        "vocab_size": 64,
        "seq_len": 8,
        "num_experts": 4,
        "balance_weight": 0.1,
        "routing": routing,
    }
    if model.startswith("mixtral"):
        sizes |= {"num_kv_heads": 2, "shared_ffn_size": 16}
    with jax.enable_x64(True):
        work = zoo.build(model, 16, overrides=sizes, dtype="float64", attention="plain")
        random = np.random.default_rng(0)
        batch = {
            name: random.integers(0, 64, array.shape).astype("int32")
            for name, array in work.batch.items()
        }
        state = work.init(jax.random.key(0))
        wanted = jax.device_get(jax.jit(work.train_step)(state, batch))
        step = aq.parallelize(
            work.train_step,
            cluster=aq.Cluster.preset("8xcpu"),
            method=method_by_name("megatron:dp2,ep2,pp2"),
            num_micro_batches=2,
        )
        found = jax.device_get(step(state, batch))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
