"""T5: an encoder that attends in both directions, and a decoder that attends to its own earlier
tokens and to the encoder's result.

Three modules: `EncoderBlock` and `DecoderBlock`, `num_layers` of each, and `Ends`, the parts
before, between and after them. The operators are GPT's, with learned positions, as in the T5 of
Megatron-LM; the paper's T5 has RMSNorm, no biases, and relative positions.

Reference: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", 2020, section 2.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from . import _gpt
from ._precision import Precision
from ._t5_config import T5Config

_START = 0


class EncoderBlock(nnx.Module):
    """One layer of the encoder: attention, then feed-forward; each reads its normalised input, and
    its result is added to the input.
    """

    def __init__(
        self, config: T5Config, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.norm1 = _gpt.norm(config, precision, rngs)
        self.attn = _gpt.Attention(config, precision, is_causal=False, kernel=attention, rngs=rngs)
        self.norm2 = _gpt.norm(config, precision, rngs)
        self.mlp = _gpt.FeedForward(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x).astype(x.dtype))
        return x + self.mlp(self.norm2(x).astype(x.dtype))


class DecoderBlock(nnx.Module):
    """One layer of the decoder: causal self-attention, attention to the encoder's result, then
    feed-forward; each reads its normalised input, and its result is added to the input.
    """

    def __init__(
        self, config: T5Config, precision: Precision, *, attention: str = "plain", rngs: nnx.Rngs
    ) -> None:
        self.norm1 = _gpt.norm(config, precision, rngs)
        self.attn = _gpt.Attention(config, precision, kernel=attention, rngs=rngs)
        self.norm2 = _gpt.norm(config, precision, rngs)
        self.cross = _gpt.Attention(config, precision, is_causal=False, kernel=attention, rngs=rngs)
        self.norm3 = _gpt.norm(config, precision, rngs)
        self.mlp = _gpt.FeedForward(config, precision, rngs=rngs)

    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x).astype(x.dtype))
        x = x + self.cross(self.norm2(x).astype(x.dtype), encoded)
        return x + self.mlp(self.norm3(x).astype(x.dtype))


class Ends(nnx.Module):
    """Embeddings before the encoder and before the decoder, a norm after each, and the output
    head.

    Both embeddings and, if tied, the head share one table of tokens; encoder and decoder have their
    own positions.
    """

    def __init__(self, config: T5Config, precision: Precision, *, rngs: nnx.Rngs) -> None:
        self.tied = config.tied_embedding
        self.embed = _gpt.embedding(config, precision, rngs)
        self.position = _gpt.positions(config.seq_len, config.hidden_size, precision, rngs)
        self.encoder_norm = _gpt.norm(config, precision, rngs)
        self.target_position = _gpt.positions(
            config.target_len, config.hidden_size, precision, rngs
        )
        self.decoder_norm = _gpt.norm(config, precision, rngs)
        if not self.tied:
            self.head = _gpt.linear(
                config.hidden_size, config.vocab_size, precision, rngs, use_bias=False
            )

    def embed_inputs(self, tokens: jax.Array) -> jax.Array:
        """`(B, S)` token ids to `(B, S, hidden_size)`, for the encoder."""
        x = self.embed(tokens)
        return x + self.position[...].astype(x.dtype)

    def encoded(self, x: jax.Array) -> jax.Array:
        """The arrays that the decoder attends to, from the result of the encoder's last layer."""
        normed: jax.Array = self.encoder_norm(x).astype(x.dtype)
        return normed

    def embed_targets(self, targets: jax.Array) -> jax.Array:
        """`(B, T)` token ids to `(B, T, hidden_size)`, for the decoder: at each position the target
        before it, and token 0 at the first.
        """
        x = self.embed(jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=_START))
        return x + self.target_position[...].astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """`(B, T, hidden_size)` to `(B, T, vocab_size)`, in the compute dtype."""
        x = self.decoder_norm(x).astype(x.dtype)
        return self.embed.attend(x) if self.tied else self.head(x)
