"""Configurations of encoder-decoder models; see `_config.py` for models of one stack of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._config import AbstractTextConfig, not_positive, out_of_range, refuse, scaled_ffn


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(AbstractTextConfig):
    """The shape of a T5: an encoder of `num_layers` layers that reads `seq_len` tokens, and a
    decoder of as many layers that predicts `target_len` tokens and attends to the encoder's result.

    `head_size` is the size of one head, 0 for `hidden_size / num_heads`.

    Raises:
        InputError: some sizes are not positive, or do not divide each other; every such fault is
            listed.
    """

    name: str
    family: str = "t5"
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    target_len: int
    head_size: int = 0
    tied_embedding: bool = True
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        faults = [] if self.family == "t5" else [f"family={self.family!r} is not t5"]
        sizes = (
            "num_layers",
            "hidden_size",
            "num_heads",
            "ffn_size",
            "vocab_size",
            "seq_len",
            "target_len",
        )
        small = out_of_range(self, sizes + (("head_size",) if self.head_size else ()))
        faults += small
        if not small and not self.head_size and self.hidden_size % self.num_heads:
            faults.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )
        faults += not_positive(self, ("norm_epsilon",))
        refuse(self.name, faults)

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """As many as query heads."""
        return self.num_heads

    @property
    def batch_multiple(self) -> int:
        """1: no sequence depends on another."""
        return 1

    @property
    def flops_per_example(self) -> int:
        """Floating point operations to train on one sequence and its target: forward and backward,
        without recomputation.

        Counted as for `ModelConfig`. The keys and values of cross-attention are computed from the
        encoder's tokens, its queries from the decoder's.
        """
        source, target = self.seq_len, self.target_len
        projection = self.hidden_size * self.num_heads * self.head_dim
        ffn = 2 * self.hidden_size * self.ffn_size
        encoder = source * (4 * projection + ffn)
        decoder = target * (6 * projection + ffn) + source * 2 * projection
        head = target * self.hidden_size * self.vocab_size
        pairs = source**2 + target**2 + target * source
        attention = 12 * self.num_layers * pairs * self.num_heads * self.head_dim
        return 6 * (self.num_layers * (encoder + decoder) + head) + attention

    @property
    def flops_per_token(self) -> int:
        """The mean over the tokens of encoder and decoder, rounded down."""
        return self.flops_per_example // (self.seq_len + self.target_len)

    def batch(self, global_batch: int, float_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Token ids: those that the encoder reads, and those that the decoder is to predict."""
        return {
            "inputs": ((global_batch, self.seq_len), "int32"),
            "targets": ((global_batch, self.target_len), "int32"),
        }

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """`ffn_size` follows `hidden_size`, `target_len` follows `seq_len`."""
        follow: dict[str, Any] = {}
        if "hidden_size" in changes:
            follow["ffn_size"] = scaled_ffn(self.ffn_size, self.hidden_size, changes["hidden_size"])
        if "seq_len" in changes:
            follow["target_len"] = max(1, changes["seq_len"] * self.target_len // self.seq_len)
        return follow
