"""A step whose sequence is split is the plain step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aliquot as aq
from aliquot.planners import method_by_name

ROWS, SEQ, HIDDEN, HEADS, SIZE, VOCAB = 4, 32, 32, 8, 4, 64


def train_step(params: Any, batch: Any) -> Any:
    """One block that cuts inputs and targets off the tokens itself, and masks what is padded."""

    def loss(params: Any) -> Any:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]] + params["positions"]
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[name]) for name in "qkv")
        scores = jnp.einsum("bshe,bthe->bhst", q, k) * SIZE**-0.5
        place = jnp.arange(SEQ)
        visible = (place[:, None] >= place) & (batch["padding"][:, None, None] > 0)
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30))
        x += jnp.einsum("bhst,bthe,hed->bsd", weights, v, params["out"])
        logs = jax.nn.log_softmax(x @ params["head"])
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@functools.cache
def start() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (HIDDEN, HEADS, SIZE))
    shapes |= {
        "embed": (VOCAB, HIDDEN),
        "positions": (SEQ, HIDDEN),
        "out": (HEADS, SIZE, HIDDEN),
        "head": (HIDDEN, VOCAB),
    }
    params = {name: random.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    padding = np.ones((ROWS, SEQ), np.int32)
    padding[1, -5:] = 0
    tokens = random.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    return params, {"tokens": tokens, "padding": padding}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "name", ["megatron:dp4,cp2,gather", "megatron:dp2,cp4,ulysses", "megatron:dp1,cp8"]
)
def test_plain_attention(name: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        params, batch = start()
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        wanted = jax.device_get(jax.jit(train_step)(params, batch))
        step = aq.parallelize(
            train_step, cluster=aq.Cluster.preset("8xcpu"), method=method_by_name(name)
        )
        found = jax.device_get(step(params, batch))
        assert step.plan.stages[0].axis_names[-1] == "context"
    bar = 1e-9 if dtype == "float64" else 1e-5
    for path, leaf in jax.tree.leaves_with_path(wanted):
        other = dict(jax.tree.leaves_with_path(found))[path]
        np.testing.assert_allclose(other, leaf, rtol=0, atol=bar * abs(leaf).max())
