"""Latent attention, of DeepSeek-V2 and V3: keys and values of all heads are made of a few elements
of a token, and a part of each head, which all heads of keys share, has rotary positions.

Reference: DeepSeek-AI, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts
language model", 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from . import _llama
from ._attention import attention, merge_heads, split_heads
from ._mixtral_config import MixtralConfig
from ._precision import Precision


class LatentAttention(nnx.Module):
    """Self-attention whose queries, keys and values are projected down, normalised and projected
    up. `kernel` is as for `attention`.
    """

    def __init__(
        self, config: MixtralConfig, precision: Precision, *, kernel: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.config, self.kernel = config, kernel
        hidden, heads = config.hidden_size, config.num_heads
        queries, values = heads * config.head_dim, heads * config.value_head_size

        def linear(size_in: int, size_out: int, depth: int = 0) -> nnx.Module:
            return _llama.linear(size_in, size_out, precision, rngs, depth=depth)

        if config.query_rank:
            self.q_down = linear(hidden, config.query_rank)
            self.q_norm = _llama.norm(config.dense, precision, rngs, size=config.query_rank)
        self.q = linear(config.query_rank or hidden, queries)
        self.kv_down = linear(hidden, config.kv_rank + config.rope_head_size)
        self.kv_norm = _llama.norm(config.dense, precision, rngs, size=config.kv_rank)
        self.k = linear(config.kv_rank, heads * config.head_size)
        self.v = linear(config.kv_rank, values)
        self.out = linear(values, hidden, config.num_layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        config, heads = self.config, self.config.num_heads
        of_queries = x
        if config.query_rank:
            of_queries = self.q_norm(self.q_down(x)).astype(x.dtype)
        q, q_turned = jnp.split(split_heads(self.q(of_queries), heads), [config.head_size], axis=-1)
        latent, k_turned = jnp.split(self.kv_down(x), [config.kv_rank], axis=-1)
        latent = self.kv_norm(latent).astype(x.dtype)
        k, v = split_heads(self.k(latent), heads), split_heads(self.v(latent), heads)
        q_turned = _llama.rotate(q_turned, config.rope_theta)
        k_turned = _llama.rotate(k_turned[:, :, None], config.rope_theta)
        k_turned = jnp.broadcast_to(k_turned, (*k.shape[:-1], config.rope_head_size))
        q = jnp.concatenate([q, q_turned], axis=-1)
        k = jnp.concatenate([k, k_turned], axis=-1)
        attended = attention(q, k, v, is_causal=True, kernel=self.kernel)
        y: jax.Array = self.out(merge_heads(attended))
        return y
