"""Keys and values of earlier positions, which a decoder keeps, and layers that use them.

Shape suffixes: as in `_attention.py`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

Cache: TypeAlias = dict[str, jax.Array]
"""Keys `k` and values `v` of one layer, `(B, T, K, E)`."""


class CachedBlock(nnx.Module):
    """A layer of attention and feed-forward, each of which reads its normalised input and is added
    to it, with the two ways to run it beside a cache.
    """

    norm1: Any
    attn: Any
    norm2: Any
    mlp: Any

    def prefill(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """As called, and the layer's cache with the keys and values of these positions."""
        attended, cache = self.attn.prefill(self.norm1(x).astype(x.dtype), cache)
        x = x + attended
        return x + self.mlp(self.norm2(x).astype(x.dtype)), cache

    def decode(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """One token `(B, hidden_size)` of each sequence, at its position."""
        attended, cache = self.attn.decode(self.norm1(x).astype(x.dtype), cache, position)
        x = x + attended
        return x + self.mlp(self.norm2(x).astype(x.dtype)), cache


def attend_to_cache(q_bhe: jax.Array, cache: Cache, position_b: jax.Array) -> jax.Array:
    """Attention of one token of each sequence to the positions up to its own; `(B, H, E)`."""
    k_btke, v_btke = cache["k"], cache["v"]
    num_heads, head_dim = q_bhe.shape[1:]
    num_kv_heads = k_btke.shape[2]
    grouped = (q_bhe.shape[0], num_kv_heads, num_heads // num_kv_heads, head_dim)
    q_bkge = (q_bhe * jnp.asarray(head_dim**-0.5, q_bhe.dtype)).reshape(grouped)
    scores = jnp.einsum("bkge,btke->bkgt", q_bkge, k_btke)
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    visible = place <= position_b[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, wide, -1e30), axis=-1).astype(scores.dtype)
    return jnp.einsum("bkgt,btke->bkge", weights, v_btke).reshape(q_bhe.shape)


def written(cache: Cache, k_bke: jax.Array, v_bke: jax.Array, position_b: jax.Array) -> Cache:
    """The cache with keys and values of one token of each sequence, at its position.

    Every sequence has a position of its own, and any dim of the cache may be split: rows are
    selected, not sliced.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, cache["k"].shape[:2], 1)
    here = (place == position_b[:, None])[..., None, None]
    return {
        "k": jnp.where(here, k_bke[:, None], cache["k"]),
        "v": jnp.where(here, v_bke[:, None], cache["v"]),
    }


def filled(cache: Cache, k_bske: jax.Array, v_bske: jax.Array) -> Cache:
    """The cache with keys and values of the first positions."""

    def behind(new: jax.Array, old: jax.Array) -> jax.Array:
        rest = old[:, new.shape[1] :]
        return jnp.concatenate([new, rest], axis=1) if rest.shape[1] else new

    return {"k": behind(k_bske, cache["k"]), "v": behind(v_bske, cache["v"])}
