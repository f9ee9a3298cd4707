"""BERT: masked tokens are predicted from both sides."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from aliquot.zoo import build, configure
from aliquot.zoo._bert import Block
from aliquot.zoo._network import masked_cross_entropy
from aliquot.zoo._precision import PRECISIONS

TINY = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "seq_len": 16}


def masked_batch(share=0.25):
    random = np.random.default_rng(0)
    tokens = random.integers(0, 63, (4, 16), np.int32)
    is_masked = random.random(tokens.shape) < share
    return {
        "inputs": np.where(is_masked, np.int32(63), tokens),
        "targets": np.where(is_masked, tokens, np.int32(-1)),
    }


def stacked(params):
    return params | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def test_a_block_attends_in_both_directions_and_ends_in_a_norm():
    block = Block(configure("bert-base", **TINY), PRECISIONS["float32"], rngs=nnx.Rngs(params=0))
    x = jax.random.normal(jax.random.key(1), (1, 16, 32))
    run = jax.jit(lambda module, x: module(x))
    changed = run(block, x.at[:, -1, 0].add(1.0))
    assert (np.abs(changed - run(block, x)).max(axis=-1) > 1e-6).all()
    np.testing.assert_allclose(run(block, x).mean(axis=-1), 0, atol=1e-6)
    np.testing.assert_allclose(run(block, x).std(axis=-1), 1, rtol=1e-4)


def test_only_masked_tokens_count():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 7))
    targets = np.array([[1, -1, 2, -1, 6], [-1] * 5, [-1, 0, -1, -1, -1]], np.int32)
    some = targets >= 0
    want = optax.softmax_cross_entropy_with_integer_labels(logits[some], targets[some]).mean()
    assert float(masked_cross_entropy(logits, targets)) == pytest.approx(float(want), rel=1e-6)
    assert float(masked_cross_entropy(logits, np.full((3, 5), -1, np.int32))) == 0.0


def test_loss_starts_near_a_uniform_guess_and_falls():
    workload = build("bert-base", 4, overrides=TINY, dtype="float32", learning_rate=1e-2)
    state, step = jax.jit(workload.init)(jax.random.key(0)), jax.jit(workload.train_step)
    losses = []
    for _ in range(8):
        state, metrics = step(state, masked_batch())
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(64), rel=0.02)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_scanned_and_unrolled_forms_agree(recompute, x64):
    def work(**form):
        return build(
            "bert-base",
            4,
            overrides=TINY,
            dtype="float64",
            optimizer="sgd",
            recompute=recompute,
            **form,
        )

    start = jax.jit(work().init)(jax.random.key(0))
    state, metrics = jax.jit(work().train_step)(start, masked_batch())
    loop = start | {"params": stacked(start["params"])}
    other, other_metrics = jax.jit(work(scan=True).train_step)(loop, masked_batch())
    assert float(metrics["loss"]) == pytest.approx(float(other_metrics["loss"]), rel=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
        stacked(state["params"]),
        other["params"],
    )
