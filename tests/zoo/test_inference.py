"""Functions of the zoo without gradients: token by token they give what a whole sequence gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aliquot.core import InputError
from aliquot.zoo import build, build_inference

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 40, "seq_len": 12}
TINY = {
    "gpt-125m": SIZES,
    "llama-70b": {**SIZES, "num_kv_heads": 2},
    "qwen3-8b": {**SIZES, "num_kv_heads": 2, "head_size": 4, "qkv_bias": True, "rope_factor": 8},
}
LENGTHS = np.array([3, 5, 1, 5])


def tiny(name, **options):
    options = {"dtype": "float64", "cache_len": 10, "prompt_len": 5} | options
    return build_inference(name, 4, overrides=TINY[name], **options)


def weights(model, seed=0):
    """Random weights; quicker to make than those of `init`."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (0.3 * rng.normal(size=x.shape)).astype(x.dtype), model.params)


@functools.cache
def texts(seed=0):
    return np.random.default_rng(seed).integers(0, 40, (4, 12)).astype(np.int32)


@pytest.mark.parametrize(
    ("name", "scan"), [("gpt-125m", False), ("llama-70b", True), ("qwen3-8b", True)]
)
def test_token_by_token_is_the_whole_sequence(name, scan):
    """Prompts have lengths of their own, and what lies behind them in `tokens` does not count."""
    with jax.enable_x64(True):
        model = tiny(name, scan=scan)
        params = weights(model)
        want = np.asarray(jax.jit(model.forward)(params, {"inputs": texts()}))
        prompt = {"tokens": texts()[:, :5], "length": LENGTHS.astype(np.int32)}
        cache, logits = jax.jit(model.prefill)(params, model.new_cache(), prompt)
        decode = jax.jit(model.decode, donate_argnums=1)
        rows = np.arange(4)
        for step in range(6):
            at = LENGTHS - 1 + step
            np.testing.assert_allclose(logits, want[rows, at], rtol=1e-9, atol=1e-12)
            if step == 5:
                break
            token = {"token": texts()[rows, at + 1], "position": (at + 1).astype(np.int32)}
            cache, logits = decode(params, cache, token)


def test_parameters_and_logits_are_those_of_the_training_step():
    workload = build("gpt-125m", 4, overrides=SIZES, dtype="float32")
    model = tiny("gpt-125m", dtype="float32")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), workload.state["params"]) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.params
    )
    params = weights(model)
    logits = jax.jit(model.forward)(params, {"inputs": texts()})
    targets = jnp.roll(texts(), -1, axis=1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    want = jax.jit(workload.evaluate)({"params": params}, {"inputs": texts(), "targets": targets})
    mine = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
    np.testing.assert_allclose(mine, want["loss"], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_shapes_and_types_are_as_said(dtype):
    model = tiny("llama-70b", dtype=dtype)
    with jax.numpy_dtype_promotion("strict"):
        for fn, given in ((model.prefill, model.prompt), (model.decode, model.token)):
            cache, logits = jax.eval_shape(fn, model.params, model.cache, given)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == jax.tree.map(
                lambda x: (x.shape, x.dtype), model.cache
            )
            assert logits.shape == (4, 40)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "bert-base",
            {},
            "bert-base has no decode: of the zoo, only models of the families gpt and",
        ),
        ("moe-380m", {}, "this one is of the family moe"),
        ("wide-resnet-250m", {}, "has no decode"),
        ("gpt-125m", {"cache_len": 2000}, "cache_len=2000 must be from 1 to seq_len=1024"),
        ("gpt-125m", {"cache_len": 9, "prompt_len": 10}, "prompt_len=10 must be from 1 to"),
        ("gpt-125m", {"dtype": "int3"}, "there is no dtype 'int3'"),
    ],
)
def test_models_and_sizes_that_cannot_be(name, options, said):
    with pytest.raises(InputError, match=said):
        build_inference(name, 4, **options)


@pytest.mark.parametrize("name", list(TINY))
def test_weights_can_be_held_in_half_precision(name):
    """Half the memory, and the logits of the same weights in float32 to rounding."""
    half = tiny(name, dtype="bf16", params_dtype="bf16")
    whole = tiny(name, dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype(jnp.bfloat16)}
    made = jax.eval_shape(half.init, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), half.params
    )
    params = weights(half)
    batch = {"inputs": texts()}
    found = np.asarray(half.forward(params, batch), np.float32)
    want = whole.forward(jax.tree.map(lambda x: x.astype(np.float32), params), batch)
    assert np.abs(found - want).max() < 0.05 * np.abs(want).max()
    with pytest.raises(InputError, match="no dtype 'int8'"):
        tiny(name, dtype="bf16", params_dtype="int8")
