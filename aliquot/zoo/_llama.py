"""Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases, an output head of
its own; and what Qwen 2 (biases of queries, keys and values) and Qwen 3 (normalised queries and
keys) change.

Two modules, as in `_gpt.py`: `Block`, one of `num_layers` equal layers, and `Ends`, the parts
before and after them.

Reference: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, section 2.2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ._attention import attention, merge_heads, split_heads
from ._cached import Cache, CachedBlock, attend_to_cache, filled, written
from ._config import ModelConfig
from ._fp8 import Fp8Linear
from ._precision import Precision
from ._recompute import named_product


class Attention(nnx.Module):
    """Self-attention with separate query, key and value projections and rotary positions. `kernel`
    is as for `attention`.
    """

    def __init__(
        self, config: ModelConfig, precision: Precision, *, kernel: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.theta, self.factor, self.kernel = config.rope_theta, config.rope_factor, kernel
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        biased = config.qkv_bias
        self.q = linear(config.hidden_size, q_size, precision, rngs, use_bias=biased)
        self.k = linear(config.hidden_size, kv_size, precision, rngs, use_bias=biased)
        self.v = linear(config.hidden_size, kv_size, precision, rngs, use_bias=biased)
        self.out = linear(q_size, config.hidden_size, precision, rngs, depth=config.num_layers)
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm = norm(config, precision, rngs, size=config.head_dim)
            self.k_norm = norm(config, precision, rngs, size=config.head_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self._heads(x)
        return self.out(merge_heads(attention(q, k, v, is_causal=True, kernel=self.kernel)))

    def prefill(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """As called, and the cache with the keys and values of `x`."""
        q, k, v = self._heads(x)
        attended = attention(q, k, v, is_causal=True, kernel=self.kernel)
        return self.out(merge_heads(attended)), filled(cache, k, v)

    def decode(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """One token `(B, hidden_size)` of each sequence, at its position."""
        q, k, v = self._heads(x, position)
        cache = written(cache, k, v, position)
        return self.out(merge_heads(attend_to_cache(q, cache, position))), cache

    def _heads(
        self, x: jax.Array, position: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Heads of queries and keys, rotated by their positions, and of values: of whole sequences,
        or of one token of each at its position.
        """
        q = split_heads(self.q(x), self.num_heads)
        k = split_heads(self.k(x), self.num_kv_heads)
        if self.qk_norm:
            q, k = self.q_norm(q).astype(q.dtype), self.k_norm(k).astype(k.dtype)
        v = split_heads(self.v(x), self.num_kv_heads)
        if position is None:
            return rotate(q, self.theta, self.factor), rotate(k, self.theta, self.factor), v
        q = _rotated_at(q, self.theta, self.factor, position)
        return q, _rotated_at(k, self.theta, self.factor, position), v


class FeedForward(nnx.Module):
    """SwiGLU: a projection gated by the SiLU of another, then projected back. `size` is that of
    both, by default `ffn_size`.
    """

    def __init__(
        self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs, size: int = 0
    ) -> None:
        inside = size or config.ffn_size
        self.gate = linear(config.hidden_size, inside, precision, rngs)
        self.up = linear(config.hidden_size, inside, precision, rngs)
        self.down = linear(inside, config.hidden_size, precision, rngs, depth=config.num_layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(CachedBlock):
    """One layer: attention, then feed-forward, each added to its normalised input's origin."""

    def __init__(
        self, config: ModelConfig, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.norm1 = norm(config, precision, rngs)
        self.attn = Attention(config, precision, kernel=attention, rngs=rngs)
        self.norm2 = norm(config, precision, rngs)
        self.mlp = FeedForward(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x).astype(x.dtype))
        out: jax.Array = x + self.mlp(self.norm2(x).astype(x.dtype))
        return out


class Ends(nnx.Module):
    """Embedding before the blocks; norm and output head after them."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.tied = config.tied_embedding
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=precision.compute,
            param_dtype=precision.params,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.norm = norm(config, precision, rngs)
        if not self.tied:
            self.head = linear(config.hidden_size, config.vocab_size, precision, rngs)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """`(B, S)` token ids to `(B, S, hidden_size)`."""
        return self.embed(tokens)

    def embed_token(self, token: jax.Array, position: jax.Array) -> jax.Array:
        """`(B,)` token ids to `(B, hidden_size)`, whatever their positions."""
        return self.embed(token)

    def logits(self, x: jax.Array) -> jax.Array:
        """`(..., hidden_size)` to `(..., vocab_size)`, in the compute dtype."""
        x = self.norm(x).astype(x.dtype)
        return self.embed.attend(x) if self.tied else self.head(x)


def _rotated_at(x_bhe: jax.Array, theta: float, factor: float, position_b: jax.Array) -> jax.Array:
    """As `rotate`, for one token of each sequence at its position."""
    wide, half = jnp.promote_types(x_bhe.dtype, jnp.float32), x_bhe.shape[2] // 2
    exponent = jax.lax.broadcasted_iota(wide, (1, 1, half), 2) * (-1.0 / half)
    angle = position_b.astype(wide)[:, None, None] * _frequency(exponent, theta, factor)
    return _turned(x_bhe, angle)


def rotate(x_bshe: jax.Array, theta: float, factor: float = 1.0) -> jax.Array:
    """Rotate the pair `(x[i], x[i + E/2])` at position `s` by the angle `s * theta ** (-2 i / E)`,
    in float32 or wider.

    Reference: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    section 3.2.
    """
    wide = jnp.promote_types(x_bshe.dtype, jnp.float32)
    seq_len, half = x_bshe.shape[1], x_bshe.shape[3] // 2
    position = jax.lax.broadcasted_iota(wide, (seq_len, 1, half), 0)
    exponent = jax.lax.broadcasted_iota(wide, (seq_len, 1, half), 2) * (-1.0 / half)
    angle = position * _frequency(exponent, theta, factor)
    return _turned(x_bshe, angle)


def _frequency(exponent: jax.Array, theta: float, factor: float) -> jax.Array:
    """`theta ** exponent` in radians per token. With a factor, rotations longer than 8192 tokens
    are slower by it, those shorter than a quarter of that are as they were, and those between are
    mixed.

    Reference: Llama 3.1, as released (`apply_scaling`: 8192 tokens, factors 1 and 4).
    """
    frequency = jnp.exp(exponent * jnp.log(jnp.asarray(theta, exponent.dtype)))
    if factor == 1:
        return frequency
    turns = frequency * (8192 / (2 * math.pi))
    share = jnp.clip((turns - 1) / 3, 0, 1)
    return frequency * (share + (1 - share) / factor)


def _turned(x: jax.Array, angle: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(angle.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def linear(
    size_in: int,
    size_out: int,
    precision: Precision,
    rngs: nnx.Rngs,
    *,
    depth: int = 0,
    use_bias: bool = False,
) -> nnx.Linear | Fp8Linear:
    """A product with a matrix, `(size_in, size_out)`; `depth` is given for those that add to the
    residual stream: the layers of the model.
    """
    # Projections into the residual stream start the smaller, the deeper the model is, so that the
    # stream keeps its variance.
    scale = 0.02 if not depth else 0.02 / (2 * depth) ** 0.5
    init = nnx.initializers.normal(scale)
    if precision.is_fp8:
        return Fp8Linear(size_in, size_out, precision, rngs, use_bias=use_bias, kernel_init=init)
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=use_bias,
        dtype=precision.compute,
        param_dtype=precision.params,
        kernel_init=init,
        dot_general=named_product,
        rngs=rngs,
    )


def norm(
    config: ModelConfig, precision: Precision, rngs: nnx.Rngs, *, size: int = 0
) -> nnx.RMSNorm:
    """An RMSNorm of the last dim, by default of `hidden_size` elements."""
    return nnx.RMSNorm(
        size or config.hidden_size,
        epsilon=config.norm_epsilon,
        dtype=jnp.promote_types(precision.compute, jnp.float32),
        param_dtype=precision.params,
        rngs=rngs,
    )
