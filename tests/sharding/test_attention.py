"""Fused attention by cuDNN, which no CPU runs: its rules, its price and plans with it, traced where
no cuDNN is.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import aliquot as aq
from aliquot.cluster import LogicalMesh
from aliquot.cost import make_problem, price
from aliquot.graph import Ring, capture
from aliquot.sharding import dim_rule

B, T, N, K, H = 16, 512, 8, 4, 64
CLUSTER = aq.Cluster.preset("8xH100")


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
            == ["a", "c", "b", ""]
        )
        assert (rule.sizes["a"], rule.sizes["b"]) == (B, N) and set(rule.factors) == set("abc")
    forward, _ = rules()
    assert split(forward.results[1]) == ["a", "b", "c"]


def test_the_sequence_at_the_price_of_a_ring():
    """Of what is causal each device has two chunks, so that half of the length must divide."""
    forward, backward = rules()
    assert forward.ring == Ring(factor="c", travels=(1, 2)) and forward.sizes["c"] == T
    assert backward.ring == Ring(factor="c", travels=(1, 2), returns=(1, 2))
    for rule in rules(is_causal=True):
        assert rule.ring.balanced and rule.sizes["c"] == T // 2
        assert {names for names in rule.operands[1] if "c" in names} == {rule.operands[0][1]}


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({"local_window_size": (63, 0)}, ()),
        ({"names": ("mask",)}, (jax.ShapeDtypeStruct((B, 1, T, T), jnp.bool_),)),
        ({"names": ("key_value_seq_lengths",)}, (jax.ShapeDtypeStruct((B,), jnp.int32),)),
    ],
    ids=["window", "mask", "lengths"],
)
def test_what_speaks_of_positions_keeps_the_sequence_whole(settings, extra):
    for rule in rules(*extra, is_causal="names" not in settings, **settings):
        assert rule.ring is None and set(rule.factors) == {"a", "b"}


def test_a_ring_is_a_permute_to_each_other_device():
    """Forward: keys and values go round. Backward: their gradients too, as float32, and home."""
    params, batch = step("cudnn")[1:]
    problem = make_problem(capture(step("cudnn")[0], params, batch), CLUSTER)
    node = next(n for n in problem.nodes.nodes if "bwd" in n.label and n.kind == "product")
    whole = 64 * 4096 * N * H * 2.0
    # Queries, keys, values, result, its gradient and three gradients, besides the normalisers.
    found = sorted((c.kind, c.num_bytes) for c in node.collectives)
    assert [b for kind, b in found if kind == "ring"] == [whole, whole, 2 * whole, 2 * whole]
    moved = [b for kind, b in found if kind == "collective-permute"]
    assert moved == [64 * N * 4096 * 4.0, *[whole] * 8, *[2 * whole] * 2]
    # A micro-batch is no part of a sequence.
    sequence = node.collectives[0].factors
    assert all(c.factors == sequence for c in node.collectives)


def test_a_ring_is_hidden_beside_its_own_scores():
    params, batch = step("cudnn")[1:]
    problem = make_problem(capture(step("cudnn")[0], params, batch), CLUSTER)
    mesh = LogicalMesh(shape=(8,), axis_names=("context",), cluster=CLUSTER)
    node = next(n for n in problem.nodes.nodes if "fwd" in n.label and n.kind == "product")
    priced = price(problem, mesh).nodes[node.index]
    sequence = node.collectives[0].factors[0]
    ring, heads = (
        next(k for k, c in enumerate(priced.choices.tolist()) if c == [f])
        for f in (sequence, next(f for f in range(3) if node.factors[f].size == N))
    )
    assert priced.compute_s[ring] == pytest.approx(priced.compute_s[heads])
    assert priced.communication_s[heads] == 0 < priced.communication_s[ring]
    assert 0 < priced.hideable_s[ring] < priced.communication_s[ring]


def test_shared_heads_of_keys_are_the_factor():
    """Each head of the keys goes with the heads of the queries that share it."""
    for rule in rules(shared=K):
        assert rule.sizes["b"] == K and rule.operands[1][2] == "b"
        assert len(rule.operands[0][2]) == 2 and rule.operands[0][2][0] == "b"
    for rule in rules(shared=1):
        assert set(rule.factors) == {"a", rule.ring.factor}


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


def capture_in_two_threads():
    """Captures of which the first to begin is the first to end, inside the other."""
    inside, ended = threading.Event(), threading.Event()

    def first(x):
        assert inside.wait(timeout=60)
        return x + 1

    def second(x):
        inside.set()
        assert ended.wait(timeout=60)
        return x + 2

    with ThreadPoolExecutor(1) as thread:
        capturing = thread.submit(capture, first, heads())
        capturing.add_done_callback(lambda _: ended.set())
        capture(second, heads())
        capturing.result()


@pytest.mark.parametrize("captures", [rules, capture_in_two_threads], ids=["one", "threads"])
def test_jax_looks_for_cudnn_again_after_a_capture(captures):
    rules()
    captures()
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(lambda x: jax.nn.dot_product_attention(x, x, x, implementation="cudnn"))(
            heads()
        )
