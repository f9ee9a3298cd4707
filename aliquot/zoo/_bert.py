"""BERT: GPT's operators with attention in both directions, a LayerNorm after each half of a block,
and a head that predicts masked tokens.

Two modules, as in `_gpt.py`: `Block`, one of `num_layers` equal layers, and `Ends`, the parts
before and after them. As in RoBERTa (Liu et al., 2019, section 4.2), the next sentence is not
predicted, so there are neither segment embeddings nor a pooler.

Reference: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", 2019, sections 3 and 3.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from . import _gpt
from ._config import ModelConfig
from ._precision import Precision


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each added to its input and then normalised."""

    def __init__(
        self, config: ModelConfig, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.attn = _gpt.Attention(config, precision, is_causal=False, kernel=attention, rngs=rngs)
        self.norm1 = _gpt.norm(config, precision, rngs)
        self.mlp = _gpt.FeedForward(config, precision, rngs=rngs)
        self.norm2 = _gpt.norm(config, precision, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attn(x)).astype(x.dtype)
        y: jax.Array = self.norm2(x + self.mlp(x)).astype(x.dtype)
        return y


class Ends(nnx.Module):
    """Embeddings and their norm before the blocks; the head of the masked language model after
    them.
    """

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.tied = config.tied_embedding
        self.embed = _gpt.embedding(config, precision, rngs)
        self.position = _gpt.positions(config.seq_len, config.hidden_size, precision, rngs)
        self.norm = _gpt.norm(config, precision, rngs)
        self.transform = _gpt.linear(config.hidden_size, config.hidden_size, precision, rngs)
        self.transform_norm = _gpt.norm(config, precision, rngs)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), precision.params))
        if not self.tied:
            self.head = _gpt.linear(
                config.hidden_size, config.vocab_size, precision, rngs, use_bias=False
            )

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """`(B, S)` token ids to `(B, S, hidden_size)`."""
        x = self.embed(tokens)
        normed: jax.Array = self.norm(x + self.position[...].astype(x.dtype)).astype(x.dtype)
        return normed

    def logits(self, x: jax.Array) -> jax.Array:
        """`(B, S, hidden_size)` to `(B, S, vocab_size)`, in the compute dtype."""
        x = self.transform_norm(jax.nn.gelu(self.transform(x))).astype(x.dtype)
        y = self.embed.attend(x) if self.tied else self.head(x)
        return y + self.bias[...].astype(y.dtype)
