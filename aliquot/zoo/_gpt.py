"""GPT: LayerNorm before each half of a block, biases, learned positions, GELU, output head tied to
the embedding.

Two modules, as in `_llama.py`: `Block`, one of `num_layers` equal layers, and `Ends`, the parts
before and after them.

Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ._attention import attention, merge_heads, split_heads
from ._cached import Cache, CachedBlock, attend_to_cache, filled, written
from ._config import ModelConfig
from ._fp8 import Fp8Linear
from ._precision import Precision
from ._recompute import named_product
from ._t5_config import T5Config

_NORMAL = nnx.initializers.normal(0.02)


class Attention(nnx.Module):
    """Attention with separate query, key and value projections; queries are computed from `x`, keys
    and values from `source`, by default also from `x`. `kernel` is as for `attention`.
    """

    def __init__(
        self,
        config: ModelConfig | T5Config,
        precision: Precision,
        *,
        is_causal: bool = True,
        kernel: str = "plain",
        rngs: nnx.Rngs,
    ) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.is_causal, self.kernel = is_causal, kernel
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        self.q = linear(config.hidden_size, q_size, precision, rngs)
        self.k = linear(config.hidden_size, kv_size, precision, rngs)
        self.v = linear(config.hidden_size, kv_size, precision, rngs)
        self.out = linear(q_size, config.hidden_size, precision, rngs, depth=config.num_layers)

    def __call__(self, x: jax.Array, source: jax.Array | None = None) -> jax.Array:
        q, k, v = self._heads(x, x if source is None else source)
        attended = attention(q, k, v, is_causal=self.is_causal, kernel=self.kernel)
        return self.out(merge_heads(attended))

    def prefill(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """As called, and the cache with the keys and values of `x`."""
        q, k, v = self._heads(x, x)
        attended = attention(q, k, v, is_causal=True, kernel=self.kernel)
        return self.out(merge_heads(attended)), filled(cache, k, v)

    def decode(self, x: jax.Array, cache: Cache, position: jax.Array) -> tuple[jax.Array, Cache]:
        """One token `(B, hidden_size)` of each sequence, at its position."""
        q, k, v = self._heads(x, x)
        cache = written(cache, k, v, position)
        return self.out(merge_heads(attend_to_cache(q, cache, position))), cache

    def _heads(self, x: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = split_heads(self.q(x), self.num_heads)
        k = split_heads(self.k(source), self.num_kv_heads)
        return q, k, split_heads(self.v(source), self.num_kv_heads)


class FeedForward(nnx.Module):
    """Two projections with a GELU (in its tanh form) between them."""

    def __init__(
        self, config: ModelConfig | T5Config, precision: Precision, *, rngs: nnx.Rngs
    ) -> None:
        self.up = linear(config.hidden_size, config.ffn_size, precision, rngs)
        self.down = linear(
            config.ffn_size, config.hidden_size, precision, rngs, depth=config.num_layers
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(CachedBlock):
    """One layer: attention, then feed-forward; each reads its normalised input, and its result is
    added to the input.
    """

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
    """Embeddings before the blocks; norm and output head after them."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.tied = config.tied_embedding
        self.embed = embedding(config, precision, rngs)
        self.position = positions(config.seq_len, config.hidden_size, precision, rngs)
        self.norm = norm(config, precision, rngs)
        if not self.tied:
            self.head = linear(
                config.hidden_size, config.vocab_size, precision, rngs, use_bias=False
            )

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """`(B, S)` token ids to `(B, S, hidden_size)`."""
        x = self.embed(tokens)
        position = self.position[...]
        if tokens.shape[1] < position.shape[0]:
            position = position[: tokens.shape[1]]
        return x + position.astype(x.dtype)

    def embed_token(self, token: jax.Array, position: jax.Array) -> jax.Array:
        """`(B,)` token ids at their positions to `(B, hidden_size)`."""
        x = self.embed(token)
        return x + jnp.take(self.position[...], position, axis=0).astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """`(..., hidden_size)` to `(..., vocab_size)`, in the compute dtype."""
        x = self.norm(x).astype(x.dtype)
        return self.embed.attend(x) if self.tied else self.head(x)


def embedding(config: ModelConfig | T5Config, precision: Precision, rngs: nnx.Rngs) -> nnx.Embed:
    """Token embeddings."""
    return nnx.Embed(
        config.vocab_size,
        config.hidden_size,
        dtype=precision.compute,
        param_dtype=precision.params,
        embedding_init=_NORMAL,
        rngs=rngs,
    )


def positions(
    seq_len: int, hidden_size: int, precision: Precision, rngs: nnx.Rngs
) -> nnx.Param[jax.Array]:
    """Learned position embeddings."""
    return nnx.Param(_NORMAL(rngs.params(), (seq_len, hidden_size), precision.params))


def linear(
    size_in: int,
    size_out: int,
    precision: Precision,
    rngs: nnx.Rngs,
    *,
    depth: int = 0,
    use_bias: bool = True,
) -> nnx.Linear | Fp8Linear:
    """A projection. If its result is added to the residual stream, `depth` is the number of
    layers.
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


def norm(config: ModelConfig | T5Config, precision: Precision, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm in float32 or wider."""
    return nnx.LayerNorm(
        config.hidden_size,
        epsilon=config.norm_epsilon,
        dtype=jnp.promote_types(precision.compute, jnp.float32),
        param_dtype=precision.params,
        use_fast_variance=False,
        rngs=rngs,
    )
