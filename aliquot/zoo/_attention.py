"""Self-attention of a block, shared by the model families.

Shape suffixes: B batch, S and T positions, H query heads, K key and value heads, G = H / K, E
elements per head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """`(B, S, H * E) -> (B, S, H, E)`; heads are the outer part of the merged dim, so a split of
    that dim is a split of the heads.
    """
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def merge_heads(x: jax.Array) -> jax.Array:
    """`(B, S, H, E) -> (B, S, H * E)`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def attention(
    q_bshe: jax.Array, k_btke: jax.Array, v_btke: jax.Array, *, is_causal: bool
) -> jax.Array:
    """Softmax attention to all positions, or, if causal, to a position itself and those before it;
    returns `(B, S, H, E)`.

    Products run in the dtype of the operands, the softmax in float32 or wider. If several query
    heads share a key head, the query heads are grouped, so that keys need not be copied.
    """
    seq_len, num_heads, head_dim = q_bshe.shape[1:]
    num_kv_heads = k_btke.shape[2]
    softmax = _causal_softmax if is_causal else _softmax
    q_bshe = q_bshe * jnp.asarray(head_dim**-0.5, q_bshe.dtype)
    if num_kv_heads == num_heads:
        weights = softmax(jnp.einsum("bshe,bthe->bhst", q_bshe, k_btke))
        return jnp.einsum("bhst,bthe->bshe", weights, v_btke)
    q_bskge = q_bshe.reshape(*q_bshe.shape[:2], num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Heads come first: otherwise JAX would transpose the scores, which are large because they have
    # two dims of sequence length.
    q_bkgse = q_bskge.transpose(0, 2, 3, 1, 4)
    weights = softmax(jnp.einsum("bkgse,btke->bkgst", q_bkgse, k_btke))
    out_bkgse = jnp.einsum("bkgst,btke->bkgse", weights, v_btke)
    return out_bkgse.transpose(0, 3, 1, 2, 4).reshape(q_bshe.shape)


def _softmax(scores: jax.Array) -> jax.Array:
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    return jax.nn.softmax(wide, axis=-1).astype(scores.dtype)


def _causal_softmax(scores: jax.Array) -> jax.Array:
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    square = scores.shape[-2:]
    # Two iotas instead of a table, which would be a constant of the trace: one more array to place
    # and to move.
    visible = jax.lax.broadcasted_iota(jnp.int32, square, 0) >= jax.lax.broadcasted_iota(
        jnp.int32, square, 1
    )
    masked = jnp.where(visible, wide, -1e30)
    return jax.nn.softmax(masked, axis=-1).astype(scores.dtype)
