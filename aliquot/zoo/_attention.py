"""Attention of a block, shared by the model families: plain, or by the fused kernel of a library.

Shape suffixes: B batch, S and T positions, H query heads, K key and value heads, G = H / K, E
elements per head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Largest blocks of queries and of keys: of these sizes the kernel is fastest on v5e and v5p, as in
# the defaults of MaxText.
_LARGEST_BLOCK = 512
_LANES = 128


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """`(B, S, H * E) -> (B, S, H, E)`; heads are the outer part of the merged dim, so a split of
    that dim is a split of the heads.
    """
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def merge_heads(x: jax.Array) -> jax.Array:
    """`(B, S, H, E) -> (B, S, H * E)`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def attention(
    q_bshe: jax.Array,
    k_btke: jax.Array,
    v_btke: jax.Array,
    *,
    is_causal: bool,
    kernel: str = "plain",
) -> jax.Array:
    """Softmax attention to all positions, or, if causal, to a position itself and those before it;
    returns `(B, S, H, E)`, with as many elements in each head as `v_btke` has.

    If several query heads share a key head, keys and values are not copied.

    Args:
        kernel: `"plain"`, which writes all scores; `"cudnn"` or `"splash"`, which compute them
            block by block.
    """
    # The names by which policies of recomputation keep arrays; see `_recompute.py`.
    q_bshe, k_btke, v_btke = (
        checkpoint_name(x, name)
        for x, name in ((q_bshe, "query"), (k_btke, "key"), (v_btke, "value"))
    )
    width = v_btke.shape[-1]
    missing = q_bshe.shape[-1] - width
    if missing and kernel != "plain":
        # Kernels have heads of one size.
        v_btke = jnp.pad(v_btke, [(0, 0)] * 3 + [(0, missing)])
    out = _KERNELS[kernel](q_bshe, k_btke, v_btke, is_causal)[..., :width]
    named: jax.Array = checkpoint_name(out, "attention")
    return named


def _plain(q_bshe: jax.Array, k_btke: jax.Array, v_btke: jax.Array, is_causal: bool) -> jax.Array:
    """Products run in the dtype of the operands, the softmax in float32 or wider. Query heads that
    share a key head are grouped.
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


def _cudnn(q_bshe: jax.Array, k_btke: jax.Array, v_btke: jax.Array, is_causal: bool) -> jax.Array:
    attended: jax.Array = jax.nn.dot_product_attention(
        q_bshe, k_btke, v_btke, is_causal=is_causal, implementation="cudnn"
    )
    return attended


def _splash(q_bshe: jax.Array, k_btke: jax.Array, v_btke: jax.Array, is_causal: bool) -> jax.Array:
    """The kernel has one mask, and `vmap` adds examples and key heads: so each of them may be on
    any device.
    """
    seq_len, num_heads, head_dim = q_bshe.shape[1:]
    num_kv_heads = k_btke.shape[2]
    grouped = (*q_bshe.shape[:2], num_kv_heads, num_heads // num_kv_heads, head_dim)
    q_bkgse = (q_bshe * jnp.asarray(head_dim**-0.5, q_bshe.dtype)).reshape(grouped)
    q_bkgse = q_bkgse.transpose(0, 2, 3, 1, 4)
    k_bkte, v_bkte = k_btke.transpose(0, 2, 1, 3), v_btke.transpose(0, 2, 1, 3)
    one = _splash_kernel(grouped[3], seq_len, k_btke.shape[1], is_causal)
    out_bkgse = jax.vmap(jax.vmap(one))(q_bkgse, k_bkte, v_bkte)
    attended: jax.Array = out_bkgse.transpose(0, 3, 1, 2, 4).reshape(q_bshe.shape)
    return attended


@functools.lru_cache(maxsize=64)
def _splash_kernel(
    num_heads: int, seq_len: int, key_len: int, is_causal: bool
) -> Callable[..., Any]:
    """The kernel of `num_heads` query heads that share one key head."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, keys = (_block(length) for length in (seq_len, key_len))
    make = splash.CausalMask if is_causal else splash.FullMask
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=rows,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=rows,
        block_kv_dq=keys,
    )
    # The tables of blocks are arrays of the step, whoever traces it first.
    with jax.ensure_compile_time_eval():
        kernel: Callable[..., Any] = splash.make_splash_mqa_single_device(
            splash.MultiHeadMask([make((seq_len, key_len))] * num_heads), block_sizes=sizes
        )
    return kernel


def _block(length: int) -> int:
    """The largest block, a multiple of 128, into which a sequence can be cut."""
    return max(n for n in range(_LANES, _LARGEST_BLOCK + 1, _LANES) if length % n == 0)


_KERNELS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]] = {
    "plain": _plain,
    "cudnn": _cudnn,
    "splash": _splash,
}


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
