"""Attention by a ring, and by an exchange of the sequence for heads, is that of one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime.cudnn_stand_in import cudnn_on_cpu as cudnn_on_cpu
from runtime.cudnn_stand_in import heads_first_attention

import aliquot as aq
from aliquot.planners import method_by_name

ROWS, SEQ, HEADS, SHARED, SIZE = 4, 32, 8, 4, 4
BARS = {"float64": 1e-9, "float32": 1e-5}


def plain_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """In the precision of its operands, unlike JAX's."""
    grouped = q.reshape(*q.shape[:2], SHARED, HEADS // SHARED, SIZE) * SIZE**-0.5
    scores = jnp.einsum("bskge,btke->bkgst", grouped, k)
    if is_causal:
        place = jnp.arange(SEQ)
        scores = jnp.where(place[:, None] >= place, scores, -jnp.inf)
    return jnp.einsum("bkgst,btke->bskge", jax.nn.softmax(scores), v).reshape(q.shape)


def train_step(kernel: str, is_causal: bool, params: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhe->bshe", batch, params[name]) for name in "qkv")
        match kernel:
            case "fused":
                out = jax.nn.dot_product_attention(
                    q, k, v, is_causal=is_causal, implementation="cudnn"
                )
            case "heads first":
                out = heads_first_attention(q, k, v, is_causal)
            case _:
                out = plain_attention(q, k, v, is_causal)
        return jnp.mean((batch + jnp.einsum("bshe,hed->bsd", out, params["out"])) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@functools.cache
def start() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    width = HEADS * SIZE
    params = {name: random.normal(size=(width, SHARED, SIZE)) * 0.3 for name in "kv"}
    params["q"] = random.normal(size=(width, HEADS, SIZE)) * 0.3
    params["out"] = random.normal(size=(HEADS, SIZE, width)) * 0.3
    return params, random.normal(size=(ROWS, SEQ, width))


@functools.cache
def plain(is_causal: bool, dtype: str) -> Any:
    arrays = jax.tree.map(lambda x: x.astype(dtype), start())
    return jax.device_get(jax.jit(functools.partial(train_step, "plain", is_causal))(*arrays))


LAYOUTS = [
    ("fused", "megatron:dp4,cp2,ring"),
    ("fused", "megatron:dp2,cp4,ring"),
    ("fused", "megatron:dp1,cp8,ring"),
    ("fused", "megatron:dp1,cp4,tp2,ring"),
    ("heads first", "megatron:dp2,cp4,ring"),
    ("fused", "megatron:dp2,cp4,ulysses"),
    ("fused", "megatron:dp4,cp2,ulysses"),
    ("plain", "megatron:dp2,cp4,ulysses"),
    ("plain", "megatron:dp1,cp8,gather"),
]
# Each way, each number of devices and each kernel once.
QUICK = {
    (*LAYOUTS[0], True, "float64"),
    (*LAYOUTS[2], True, "float64"),
    (*LAYOUTS[3], False, "float32"),
    (*LAYOUTS[4], True, "float64"),
    (*LAYOUTS[5], True, "float64"),
}


@pytest.mark.parametrize(
    ("kernel", "name", "is_causal", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for kernel, name in LAYOUTS
        for case in [(kernel, name, True, "float64"), (kernel, name, False, "float32")]
    ],
)
def test_equal_to_one_device(
    kernel: str, name: str, is_causal: bool, dtype: str, cudnn_on_cpu: None
) -> None:
    with jax.enable_x64(dtype == "float64"):
        params, batch = jax.tree.map(lambda x: x.astype(dtype), start())
        wanted = plain(is_causal, dtype)
        step = aq.parallelize(
            functools.partial(train_step, kernel, is_causal),
            cluster=aq.Cluster.preset("8xcpu"),
            method=method_by_name(name),
        )
        found = dict(jax.tree.leaves_with_path(jax.device_get(step(params, batch))))
        sent = {use.kind for use in step.plan.prediction.collectives}
        assert ("collective-permute" in sent) == name.endswith("ring")
    for path, leaf in jax.tree.leaves_with_path(wanted):
        worst = np.abs(found[path] - leaf).max() / np.abs(leaf).max()
        assert worst <= BARS[dtype], (path, worst)
