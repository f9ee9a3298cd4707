"""DeepSeek's models: latent attention, dense first layers, sigmoid gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aliquot as aq
from aliquot.cluster import DEVICES
from aliquot.core import InputError
from aliquot.graph import ATTENTION, capture
from aliquot.planners import method_by_name
from aliquot.zoo import _attention, build, configure
from aliquot.zoo._latent import LatentAttention
from aliquot.zoo._mixtral import Experts
from aliquot.zoo._precision import PRECISIONS

SIZES = {
    "num_layers": 3,
    "num_dense_layers": 1,
    "hidden_size": 16,
    "num_heads": 4,
    "ffn_size": 24,
    "dense_ffn_size": 32,
    "shared_ffn_size": 16,
    "vocab_size": 40,
    "seq_len": 8,
    "num_experts": 4,
    "top_k": 2,
    "kv_rank": 8,
    "query_rank": 12,
    "head_size": 6,
    "rope_head_size": 4,
    "value_head_size": 5,
}


@pytest.mark.parametrize("query_rank", [0, 12])
def test_latent_attention_is_as_published_head_by_head(query_rank, x64):
    config = configure("deepseek-v3", **(SIZES | {"query_rank": query_rank}))
    module = LatentAttention(config, PRECISIONS["float64"], rngs=nnx.Rngs(params=0))
    x = np.random.default_rng(0).normal(size=(2, 8, 16))

    def times(x, linear):
        return x @ np.asarray(linear.kernel[...])

    def normal(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)

    def turned(x):
        """Pairs `(x[i], x[i + 2])` as complex numbers."""
        angle = np.arange(8)[:, None] * config.rope_theta ** (-np.arange(2) / 2)
        pair = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angle)
        return np.concatenate([pair.real, pair.imag], -1)

    q = times(normal(times(x, module.q_down)) if query_rank else x, module.q)
    down = times(x, module.kv_down)
    latent, shared_key = normal(down[..., :8]), turned(down[..., 8:])
    k, v = times(latent, module.k), times(latent, module.v)
    heads = []
    for h in range(4):
        query, key = q[..., 10 * h : 10 * h + 10], k[..., 6 * h : 6 * h + 6]
        scores = query[..., :6] @ key.swapaxes(1, 2)
        scores += turned(query[..., 6:]) @ shared_key.swapaxes(1, 2)
        scores = np.exp(np.where(np.tri(8), scores / 10**0.5, -np.inf))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[..., 5 * h : 5 * h + 5])
    wanted = times(np.concatenate(heads, -1), module.out)
    np.testing.assert_allclose(module(jnp.asarray(x)), wanted, rtol=1e-9, atol=1e-12)


def test_sigmoid_gates_weigh_the_chosen_experts_by_their_share(x64):
    config = configure("deepseek-v3", **(SIZES | {"shared_ffn_size": 0}))
    module = Experts(config, PRECISIONS["float64"], rngs=nnx.Rngs(params=0))
    x = np.random.default_rng(0).normal(size=(2, 8, 16))
    gates = 1 / (1 + np.exp(-x @ np.asarray(module.router[...])))
    wanted = np.zeros_like(x)
    for place in np.ndindex(2, 8):
        best = np.argsort(-gates[place])[:2]
        for e in best:
            gate, up, down = (np.asarray(m[...])[e] for m in (module.gate, module.up, module.down))
            inner = x[place] @ gate
            made = (inner / (1 + np.exp(-inner)) * (x[place] @ up)) @ down
            wanted[place] += 2.5 * gates[place][e] / gates[place][best].sum() * made
    np.testing.assert_allclose(module(jnp.asarray(x))[0], wanted, rtol=1e-9, atol=1e-12)


def test_parameters_are_as_published_in_all_and_for_a_token():
    work = build("deepseek-v3", 8, scan=True)
    config = work.config
    of_expert = 3 * config.hidden_size * config.ffn_size
    unused = (config.num_layers - config.num_dense_layers) * (config.num_experts - config.top_k)
    assert work.num_parameters == pytest.approx(671e9, rel=0.01)
    assert work.num_parameters - unused * of_expert == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("query_rank", [0, 12])
def test_operations_are_those_of_the_weights_and_scores(query_rank):
    config = configure("deepseek-v3", **(SIZES | {"query_rank": query_rank}))
    work = build(config, 2)
    layers, others = work.state["params"]["layers"], work.state["params"]["head"]
    kernels = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path([layers, others])
        if leaf.ndim > 1
        and not any(name in str(path) for name in ("gate'", "up'", "down'"))
        or "kernel" in str(path)
    ]
    experts = 2 * 2 * 3 * 16 * 24
    scores = 3 * 8 * 4 * (10 + 5)
    assert config.flops_per_token == 6 * (sum(kernels) + experts + scores)


@pytest.mark.parametrize(
    ("device", "kernel"),
    [("H100", "cudnn"), ("B200", "cudnn"), ("A100-80GB", "plain"), ("v5e", "splash")],
)
def test_auto_takes_kernels_for_heads_of_192_elements(device, kernel):
    work = build(
        "deepseek-v2-lite", 8, device=DEVICES[device], overrides={"num_layers": 2, "seq_len": 256}
    )
    assert work.settings["attention"] == kernel
    if kernel == "cudnn":
        graph = capture(work.train_step, work.state, work.batch)
        (op, *_) = [op for op in graph.ops if op.name == ATTENTION[0]]
        # The kernel gets values as wide as keys.
        assert {graph.values[operand].shape[-1] for operand in op.inputs[:3]} == {192}


def test_kernels_of_one_size_of_heads_compute_the_same(monkeypatch):
    monkeypatch.setitem(_attention._KERNELS, "cudnn", _attention._plain)
    q, k, v = (
        jax.random.normal(jax.random.key(n), (2, 8, 4, width))
        for n, width in enumerate((10, 10, 5))
    )
    for kernel in ("plain", "cudnn"):
        made = _attention.attention(q, k, v, is_causal=True, kernel=kernel)
        assert made.shape == v.shape
        if kernel == "plain":
            wanted = made
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)


@functools.cache
def drawn(scan, changes=()):
    """A workload, a state and a batch. Called in double precision."""
    sizes = SIZES | dict(changes)
    work = build("deepseek-v3", 16, overrides=sizes, dtype="float64", scan=scan)
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, 40, (16, 8)).astype("int32") for name in work.batch}
    return work, jax.device_get(work.init(jax.random.key(0))), batch


@functools.cache
def plain(scan, changes):
    """What is drawn, and what the plain step makes of it."""
    work, state, batch = drawn(scan, changes)
    return work, state, batch, jax.device_get(jax.jit(work.train_step)(state, batch))


@pytest.mark.parametrize(
    ("layout", "micro_batches", "scan", "changes"),
    [
        ("zero3", 1, True, {}),
        ("megatron:dp2,ep2,tp2", 2, True, {}),
        pytest.param("megatron:dp2,ep2,tp2", 2, False, {}, marks=pytest.mark.slow),
        pytest.param("megatron:dp2,ep2,pp2", 4, False, {}, marks=pytest.mark.slow),
        pytest.param(
            "megatron:dp1,ep2,tp2,pp2",
            4,
            True,
            {"num_layers": 4, "num_dense_layers": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parallel_steps_equal_plain_ones(layout, micro_batches, scan, changes, x64):
    work, state, batch, wanted = plain(scan, tuple(changes.items()))
    step = aq.parallelize(
        work.train_step,
        cluster=aq.Cluster.preset("8xcpu"),
        method=method_by_name(layout),
        num_micro_batches=micro_batches,
    )
    found = jax.device_get(step(state, batch))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_scanned_and_unrolled_layers_are_the_same(x64):
    losses = []
    for scan in (False, True):
        work, state, batch = drawn(scan)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, work.state)
        losses.append(float(jax.jit(work.evaluate)(state, batch)["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_all_faults_of_a_configuration_are_said_at_once():
    with pytest.raises(InputError) as refusal:
        configure(
            "deepseek-v3",
            num_dense_layers=61,
            gating="top",
            rope_head_size=3,
            num_kv_heads=8,
            value_head_size=0,
        )
    for word in (
        "num_dense_layers=61",
        "gating='top'",
        "rope_head_size=3",
        "num_kv_heads=8",
        "value_head_size=0",
    ):
        assert word in str(refusal.value)
    with pytest.raises(InputError, match="query_rank=4.* without kv_rank attention is not latent"):
        configure("mixtral-8x7b", query_rank=4)
    with pytest.raises(InputError, match="num_dense_layers=1 and dense_ffn_size=0 go together"):
        configure("mixtral-8x7b", num_dense_layers=1)
