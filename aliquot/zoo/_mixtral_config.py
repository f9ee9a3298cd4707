"""Configurations of models in which every layer has gated experts: Mixtral, and its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._config import (
    ROUTINGS,
    AbstractTextConfig,
    ModelConfig,
    not_positive,
    out_of_range,
    refuse,
    scaled_ffn,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(AbstractTextConfig):
    """The shape of a Llama whose layers have experts in place of one feed-forward network.

    A router chooses `top_k` of `num_experts` for each token. Experts are SwiGLU with `ffn_size`
    elements inside. All tokens also go through shared experts of `shared_ffn_size` elements inside,
    all together, if that is not 0. `routing` is "dropless": an expert takes all tokens that choose
    it (`aliquot.experts`), or "capacity": of the tokens in a group of `group_size` (0 for a
    sequence) it takes up to `capacity_factor * top_k * group_size / num_experts`, and the others
    skip it. With `normalized_weights` the weights of a token's experts sum to one.
    `balance_weight` is the weight of the loss that rewards equal use of the experts, which is
    computed for each sequence, so that micro-batches do not change it. The other fields are those
    of `ModelConfig`.

    Raises:
        InputError: some sizes are not positive, or do not divide each other; every such fault is
            listed.
    """

    name: str
    family: str = "mixtral"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    num_experts: int
    top_k: int
    shared_ffn_size: int = 0
    routing: str = "dropless"
    group_size: int = 0
    capacity_factor: float = 1.25
    normalized_weights: bool = True
    balance_weight: float = 0.0
    tied_embedding: bool = False
    head_size: int = 0
    norm_epsilon: float = 1e-5
    rope_theta: float = 1e6
    qk_norm: bool = False

    def __post_init__(self) -> None:
        faults = [] if self.family == "mixtral" else [f"family={self.family!r} is not mixtral"]
        faults += out_of_range(self, ("num_experts", "top_k"))
        for field in ("shared_ffn_size", "group_size", "balance_weight"):
            if not getattr(self, field) >= 0:
                faults.append(f"{field}={getattr(self, field)} must not be negative")
        if self.top_k > self.num_experts > 0:
            faults.append(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.routing not in ROUTINGS:
            faults.append(f"routing={self.routing!r} is not one of {', '.join(ROUTINGS)}")
        if self.group_size > 0 and self.seq_len % self.group_size:
            faults.append(
                f"seq_len={self.seq_len} is not a multiple of group_size={self.group_size}"
            )
        faults += not_positive(self, ("capacity_factor",))
        refuse(self.name, faults)
        # Its own checks are those of the other fields.
        _ = self.dense

    @property
    def batch_multiple(self) -> int:
        """1: no sequence depends on another."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.dense.head_dim

    @property
    def dense(self) -> ModelConfig:
        """The Llama of the same sizes, with one expert as its feed-forward network."""
        return ModelConfig(
            name=self.name,
            family="llama",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            ffn_size=self.ffn_size,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            tied_embedding=self.tied_embedding,
            head_size=self.head_size,
            norm_epsilon=self.norm_epsilon,
            rope_theta=self.rope_theta,
            qk_norm=self.qk_norm,
        )

    @property
    def tokens_of_group(self) -> int:
        """Tokens that share the places of experts."""
        return self.group_size or self.seq_len

    @property
    def capacity(self) -> int:
        """Tokens of one group that an expert takes, where it has a capacity."""
        places = self.capacity_factor * self.top_k * self.tokens_of_group / self.num_experts
        return max(1, int(places))

    @property
    def flops_per_token(self) -> int:
        """Floating point operations to train on one token, as for `ModelConfig`: through `top_k`
        experts, the shared ones and the router.
        """
        inside = (self.top_k - 1) * self.ffn_size + self.shared_ffn_size
        more = self.hidden_size * (3 * inside + self.num_experts)
        return self.dense.flops_per_token + 6 * self.num_layers * more

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """As for `ModelConfig`; shared experts follow `hidden_size`, groups follow `seq_len`."""
        follow = self.dense.consequences(changes)
        if "hidden_size" in changes and self.shared_ffn_size:
            follow["shared_ffn_size"] = scaled_ffn(
                self.shared_ffn_size, self.hidden_size, changes["hidden_size"]
            )
        if "seq_len" in changes and self.group_size:
            follow["group_size"] = max(1, changes["seq_len"] * self.group_size // self.seq_len)
        return follow
