"""Attention and rotary positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aliquot.zoo._attention import attention, merge_heads, split_heads
from aliquot.zoo._llama import rotate as rotate_pairs

causal_attention = partial(attention, is_causal=True)
attend, rotate = jax.jit(causal_attention), jax.jit(rotate_pairs, static_argnums=2)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_equals_the_library_function(num_kv_heads):
    q, k, v = draw(0, 2, 6, 4, 8), draw(1, 2, 6, num_kv_heads, 8), draw(2, 2, 6, num_kv_heads, 8)
    want = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v)
    np.testing.assert_allclose(attend(q, k, v), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_scores_are_never_transposed(num_kv_heads):
    """They are what takes most memory where sequences are long."""
    q, k = draw(0, 2, 64, 8, 4), draw(1, 2, 64, num_kv_heads, 4)
    steps = jax.make_jaxpr(jax.grad(lambda *qkv: causal_attention(*qkv).sum(), (0, 1, 2)))(q, k, k)
    moved = [eqn.outvars[0].aval.size for eqn in steps.eqns if eqn.primitive.name == "transpose"]
    assert moved and max(moved) == q.size


def test_later_tokens_do_not_matter():
    q, k, v = (draw(seed, 1, 5, 2, 4) for seed in range(3))
    changed = attend(q, k.at[:, 3:].add(1.0), v.at[:, 3:].add(1.0))
    np.testing.assert_array_equal(changed[:, :3], attend(q, k, v)[:, :3])


def test_all_tokens_matter_where_attention_is_not_causal():
    q, k, v = draw(0, 2, 6, 4, 8), draw(1, 2, 6, 4, 8), draw(2, 2, 6, 4, 8)
    want = jax.jit(jax.nn.dot_product_attention)(q, k, v)
    np.testing.assert_allclose(
        jax.jit(partial(attention, is_causal=False))(q, k, v), want, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_stay_narrow_with_a_wide_softmax(dtype):
    q, k, v = (draw(seed, 1, 5, 2, 4).astype(dtype) for seed in range(3))
    out = attend(q, k, v)
    assert out.dtype == dtype
    want = attend(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=0.05)
    assert "f32[1,2,5,5] = exp" in str(jax.make_jaxpr(causal_attention)(q, k, v))


def test_heads_split_and_merge():
    x = draw(0, 2, 3, 8)
    assert split_heads(x, 4).shape == (2, 3, 4, 2)
    np.testing.assert_array_equal(merge_heads(split_heads(x, 4)), x)


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    q, k = (jnp.broadcast_to(draw(seed, 1, 1, 1, 8), (1, 10, 1, 8)) for seed in range(2))
    turned_q, turned_k = rotate(q, 10000.0, 1.0), rotate(k, 10000.0, 1.0)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned_q, axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5
    )
    scores = jnp.einsum("bshe,bthe->st", turned_q, turned_k)
    for distance in range(-9, 10):
        diagonal = jnp.diagonal(scores, distance)
        np.testing.assert_allclose(
            diagonal, jnp.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5
        )
    assert float(scores[0, 0]) != pytest.approx(float(scores[0, 5]), abs=1e-3)
