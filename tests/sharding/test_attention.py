"""Fused attention by cuDNN, which no CPU runs: its rules, its price and plans with it, traced where
no cuDNN is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.graph import capture
from aliquot.sharding import dim_rule

B, T, N, K, H = 16, 512, 8, 4, 64


def heads(count=N, length=T):
    return jax.ShapeDtypeStruct((B, length, count, H), jnp.bfloat16)


def rules(*extra, shared=N, **settings):
    """The rules of the forward and the backward operator; `extra` arrays go with the names
    `settings` gives them.
    """
    names = settings.pop("names", ())

    def loss(q, k, v, *given):
        with_names = dict(zip(names, given, strict=True))
        out = jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn", **with_names, **settings
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    grad = jax.grad(loss, argnums=tuple(range(3 + ("bias" in names))))
    graph = capture(grad, heads(), heads(shared), heads(shared), *extra)
    found = {
        op.name: dim_rule(op, graph)
        for op in graph.ops
        if op.name.startswith("dot_product_attention")
    }
    return found["dot_product_attention_fwd_wrapper"], found["dot_product_attention_bwd_wrapper"]


def split(dims):
    """The letters that may be split, dim by dim."""
    return ["".join(c for c in names if c.islower()) for names in dims]


def test_batch_and_heads():
    for rule in rules():
        assert (
            split(rule.operands[0])
            == split(rule.operands[2])
            == split(rule.results[0])
            == ["a", "", "b", ""]
        )
        assert (rule.sizes["a"], rule.sizes["b"]) == (B, N) and set(rule.factors) == {"a", "b"}
    forward, _ = rules()
    assert split(forward.results[1]) == ["a", "b", ""]


def test_shared_heads_of_keys_are_the_factor():
    """Each head of the keys goes with the heads of the queries that share it."""
    for rule in rules(shared=K):
        assert rule.sizes["b"] == K and rule.operands[1][2] == "b"
        assert len(rule.operands[0][2]) == 2 and rule.operands[0][2][0] == "b"
    for rule in rules(shared=1):
        assert rule.factors == ("a",)


def test_masks_of_examples_are_split_with_the_batch():
    mask = jax.ShapeDtypeStruct((B, 1, T, T), jnp.bool_)
    for rule in rules(mask, names=("mask",)):
        assert split(rule.operands[3]) == ["a", "", "", ""]


def test_a_bias_for_all_examples_has_the_sum_of_their_gradients():
    bias = jax.ShapeDtypeStruct((1, N, T, T), jnp.bfloat16)
    _, backward = rules(bias, names=("bias",))
    assert split(backward.results[3]) == ["", "b", "", ""] and backward.summed == {3}


def test_sequence_lengths_are_split_with_the_batch():
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    for rule in rules(lengths, lengths, names=("query_seq_lengths", "key_value_seq_lengths")):
        assert rule.operands[4] == rule.operands[5] == ("a",)


@pytest.mark.parametrize("size", [160, 192, 256])
def test_large_heads_are_traced_without_a_gpu(size):
    """Which GPU will run them is not known here: Hopper takes heads of up to 256."""
    x = jax.ShapeDtypeStruct((B, T, N, size), jnp.bfloat16)
    graph = capture(
        jax.grad(
            lambda q: jnp.sum(
                jax.nn.dot_product_attention(q, q, q, implementation="cudnn").astype(jnp.float32)
            )
        ),
        x,
    )
    assert any(op.name == "dot_product_attention_bwd_wrapper" for op in graph.ops)


def test_scores():
    """Queries of all examples and heads, and the scores of each that a mask keeps."""
    forward, backward = (rule.scores for rule in rules(is_causal=True))
    assert (forward.rows, forward.keys, forward.is_backward) == (B * N * T, T / 2, False)
    assert (backward.rows, backward.keys, backward.is_backward) == (B * N * T, T / 2, True)
    assert rules()[0].scores.keys == T
    assert rules(is_causal=True, local_window_size=(63, 0))[0].scores.keys == 64


def test_work():
    """Two products forward, five backward; half of them where scores of the future are masked
    away.
    """
    product = 2 * B * N * T * T * H
    assert [rule.flops for rule in rules()] == pytest.approx([2 * product, 5 * product])
    assert [rule.flops for rule in rules(is_causal=True)] == pytest.approx([product, 2.5 * product])
    assert rules(is_causal=True, local_window_size=(63, 0))[0].flops == pytest.approx(
        2 * product * 64 / T
    )


def step(implementation):
    def train_step(params, batch):
        def loss(params):
            q, k, v = (jnp.einsum("btd,dnh->btnh", batch, params[name]) for name in "qkv")
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )
            return jnp.mean(jnp.einsum("btnh,dnh->btd", out, params["o"]).astype(jnp.float32) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: jax.ShapeDtypeStruct((N * H, N, H), jnp.bfloat16) for name in "qkvo"}
    return train_step, params, jax.ShapeDtypeStruct((64, 4096, N * H), jnp.bfloat16)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("method", [aq.DataParallel(), aq.ShardParallel()], ids=["dp", "shard"])
def test_plans_hold_no_scores(method, num_micro_batches):
    cluster = aq.Cluster.preset("8xH100")
    fused, plain = (
        aq.plan(
            *step(kind), cluster=cluster, method=method, num_micro_batches=num_micro_batches
        ).prediction
        for kind in ("cudnn", "xla")
    )
    assert fused.peak_memory_bytes < plain.peak_memory_bytes / 4
    assert 0 < fused.step_time_s < plain.step_time_s


def test_jax_looks_for_cudnn_again_after_a_capture():
    rules()
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"))(
            heads()
        )
