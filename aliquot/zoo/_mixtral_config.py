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

_GATINGS = ("softmax", "sigmoid")
_OF_LATENT = ("kv_rank", "query_rank", "head_size", "rope_head_size", "value_head_size")
_MAY_BE_ZERO = (
    "shared_ffn_size",
    "group_size",
    "balance_weight",
    "num_dense_layers",
    "dense_ffn_size",
    *(name for name in _OF_LATENT if name != "head_size"),
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
    They are multiplied by `routed_scale`. `gating` makes a token's scores of experts "softmax" or
    "sigmoid". `balance_weight` is the weight of the loss that rewards equal use of the experts,
    which is computed for each sequence, so that micro-batches do not change it. The first
    `num_dense_layers` have one network of `dense_ffn_size` in place of experts.

    With `kv_rank` attention is latent: keys and values are made of `kv_rank` elements of a token,
    and queries of `query_rank`, if that is not 0. Heads of queries and keys have `head_size`
    elements without a position and `rope_head_size` with one, which keys of all heads share; heads
    of values have `value_head_size`. The other fields are those of `ModelConfig`.

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
    routed_scale: float = 1.0
    gating: str = "softmax"
    num_dense_layers: int = 0
    dense_ffn_size: int = 0
    kv_rank: int = 0
    query_rank: int = 0
    rope_head_size: int = 0
    value_head_size: int = 0
    balance_weight: float = 0.0
    tied_embedding: bool = False
    head_size: int = 0
    norm_epsilon: float = 1e-5
    rope_theta: float = 1e6
    qk_norm: bool = False

    def __post_init__(self) -> None:
        faults = [] if self.family == "mixtral" else [f"family={self.family!r} is not mixtral"]
        faults += out_of_range(self, ("num_experts", "top_k"))
        for field in _MAY_BE_ZERO:
            if not getattr(self, field) >= 0:
                faults.append(f"{field}={getattr(self, field)} must not be negative")
        faults += self._of_dense_layers() + self._of_latent_attention()
        if self.top_k > self.num_experts > 0:
            faults.append(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.routing not in ROUTINGS:
            faults.append(f"routing={self.routing!r} is not one of {', '.join(ROUTINGS)}")
        if self.group_size > 0 and self.seq_len % self.group_size:
            faults.append(
                f"seq_len={self.seq_len} is not a multiple of group_size={self.group_size}"
            )
        if self.gating not in _GATINGS:
            faults.append(f"gating={self.gating!r} is not one of {', '.join(_GATINGS)}")
        faults += not_positive(self, ("capacity_factor", "routed_scale"))
        refuse(self.name, faults)
        # Its own checks are those of the other fields.
        _ = self.dense

    def _of_dense_layers(self) -> list[str]:
        faults = []
        if self.num_dense_layers >= self.num_layers > 0:
            faults.append(
                f"num_dense_layers={self.num_dense_layers} leaves none of num_layers="
                f"{self.num_layers} with experts: take family llama"
            )
        if bool(self.num_dense_layers) != bool(self.dense_ffn_size):
            faults.append(
                f"num_dense_layers={self.num_dense_layers} and dense_ffn_size="
                f"{self.dense_ffn_size} go together"
            )
        return faults

    def _of_latent_attention(self) -> list[str]:
        sizes = {name: getattr(self, name) for name in _OF_LATENT}
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        if not self.kv_rank:
            more = self.query_rank or self.rope_head_size or self.value_head_size
            return [f"{said}: without kv_rank attention is not latent"] if more else []
        faults = []
        if not all(sizes[name] > 0 for name in _OF_LATENT if name != "query_rank"):
            faults.append(f"{said}: with kv_rank all of these but query_rank must be positive")
        if self.rope_head_size % 2:
            faults.append(
                f"rope_head_size={self.rope_head_size} is odd, rotary positions turn pairs of"
                " elements"
            )
        if self.num_kv_heads != self.num_heads or self.qk_norm:
            faults.append(
                f"num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads} and qk_norm="
                f"{self.qk_norm}: with kv_rank each head has keys of its own, not normalised"
            )
        return faults

    @property
    def batch_multiple(self) -> int:
        """1: no sequence depends on another."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements per attention head, of queries and keys."""
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
            head_size=self.head_size + self.rope_head_size,
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
        with_experts = self.num_layers - self.num_dense_layers
        dense = 3 * self.hidden_size * (self.dense_ffn_size - self.ffn_size)
        rest = 6 * (with_experts * more + self.num_dense_layers * dense)
        return self.dense.flops_per_token + rest + self.num_layers * self._latent_flops()

    def _latent_flops(self) -> int:
        """What a layer of latent attention takes more than one with ordinary heads of the same
        size.
        """
        if not self.kv_rank:
            return 0
        heads, queries = self.num_heads, self.num_heads * self.head_dim
        weights = self.hidden_size * (self.kv_rank + self.rope_head_size)
        weights += self.kv_rank * heads * (self.head_size + self.value_head_size)
        weights += self.hidden_size * heads * self.value_head_size
        weights += (
            self.query_rank * (self.hidden_size + queries)
            if self.query_rank
            else self.hidden_size * queries
        )
        narrower = 6 * self.seq_len * heads * (self.head_dim - self.value_head_size)
        return 6 * (weights - 4 * self.hidden_size * queries) - narrower

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """As for `ModelConfig`; `shared_ffn_size` and `dense_ffn_size` follow `hidden_size`, groups
        follow `seq_len`.
        """
        follow = self.dense.consequences(changes)
        for field in ("shared_ffn_size", "dense_ffn_size"):
            size = getattr(self, field)
            if "hidden_size" in changes and size:
                follow[field] = scaled_ffn(size, self.hidden_size, changes["hidden_size"])
        if "seq_len" in changes and self.group_size:
            follow["group_size"] = max(1, changes["seq_len"] * self.group_size // self.seq_len)
        return follow
