"""Configurations of models: their fields, checks of these, and the floating-point operations of one
example.

Nothing here imports JAX or Flax, so that a command line can list and check names quickly.
`_sizes.py` names the usual sizes, `_image_config.py` has the models of images, and the networks
turn a configuration into functions.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import InputError, shortened

LARGEST = 2**31 - 1
"""The largest value of any size of a model: the largest index of 32 bits."""

ROUTINGS = ("capacity", "dropless")
"""Whether experts take only as many tokens as they have places, or all that choose them."""

_MOST_LAYERS = 10_000
_ALIKE = ("gpt", "llama", "bert")
_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "ffn_size",
    "vocab_size",
    "seq_len",
)


class AbstractConfig(abc.ABC):
    """Base of all model configurations: frozen fields, checked when they are set.

    `name` is the model's, `family` decides the operators. `examples` names what a batch counts;
    `loops` says whether the layers can be stacked and looped over; `usual_dtype` is the default
    dtype in which the model computes, None if the family has none: then the command line chooses
    one for the device.
    """

    __slots__ = ()

    name: str
    family: str
    num_layers: int
    examples: ClassVar[str]
    loops: ClassVar[bool]
    usual_dtype: ClassVar[str | None]

    @property
    @abc.abstractmethod
    def flops_per_example(self) -> int:
        """Floating point operations to train on one example: forward and backward, without
        recomputation.
        """

    @property
    @abc.abstractmethod
    def batch_multiple(self) -> int:
        """Examples that are computed together; a batch is a multiple of them."""

    @abc.abstractmethod
    def batch(self, global_batch: int, float_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of a batch of that many examples."""

    @abc.abstractmethod
    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Other fields that change along with `changes`, unless these give them, too."""


class AbstractTextConfig(AbstractConfig):
    """A model of sequences of tokens: `inputs` and `targets` of shape `(global_batch, seq_len)`."""

    __slots__ = ()

    seq_len: int
    vocab_size: int
    examples: ClassVar[str] = "sequences"
    loops: ClassVar[bool] = True
    usual_dtype: ClassVar[str | None] = None

    @property
    @abc.abstractmethod
    def head_dim(self) -> int:
        """Elements per attention head."""

    @property
    @abc.abstractmethod
    def flops_per_token(self) -> int:
        """Floating point operations to train on one token: forward and backward, without
        recomputation.
        """

    @property
    def flops_per_example(self) -> int:
        """Floating point operations to train on one sequence: forward and backward, without
        recomputation.
        """
        return self.flops_per_token * self.seq_len

    def batch(self, global_batch: int, float_dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the token ids `inputs` and `targets`."""
        tokens = ((global_batch, self.seq_len), "int32")
        return {"inputs": tokens, "targets": tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(AbstractTextConfig):
    """The shape of a language model whose layers are all alike.

    `family` decides the operators: `"gpt"` has LayerNorm, biases, learned positions and GELU;
    `"llama"` has RMSNorm, rotary positions, SwiGLU and no biases; `"bert"` has those of GPT, but
    attends in both directions, normalises after each half of a layer, and predicts masked tokens.
    Sizes are counts of elements; `seq_len` counts tokens. With `num_kv_heads < num_heads` several
    query heads share one key and value head. `head_size` is the size of one head, 0 for
    `hidden_size / num_heads`. The rest is for `"llama"` only: `rope_theta`; `rope_factor`, by which
    Llama 3.1 slows the rotations that are longer than 8192 tokens; `qkv_bias`, biases of queries,
    keys and values, as in Qwen 2; `qk_norm`, an RMSNorm of each head of queries and keys, as in
    Qwen 3.

    Raises:
        InputError: some sizes are not positive, or do not divide each other; every such fault is
            listed.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    tied_embedding: bool
    head_size: int = 0
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.family not in _ALIKE:
            faults.append(f"family={self.family!r} is not one of {', '.join(_ALIKE)}")
        if self.family != "llama" and (self.qkv_bias or self.qk_norm or self.rope_factor != 1):
            faults.append(f"qkv_bias, qk_norm and rope_factor are for llama, not for {self.family}")
        small = out_of_range(self, _POSITIVE)
        if self.head_size:
            small += out_of_range(self, ("head_size",))
        faults += small
        if not small:
            faults += self._indivisible()
        faults += not_positive(self, ("norm_epsilon", "rope_theta", "rope_factor"))
        refuse(self.name, faults)

    def _indivisible(self) -> list[str]:
        faults = []
        if not self.head_size and self.hidden_size % self.num_heads:
            faults.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )
        elif self.family == "llama" and self.head_dim % 2:
            what = "head_size" if self.head_size else "hidden_size / num_heads"
            faults.append(
                f"{what} = {self.head_dim} is odd, rotary positions turn pairs of elements"
            )
        if self.num_heads % self.num_kv_heads:
            faults.append(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        return faults

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def batch_multiple(self) -> int:
        """1: no sequence depends on another."""
        return 1

    @property
    def flops_per_token(self) -> int:
        """Floating point operations to train on one token: forward and backward, without
        recomputation.

        A weight that multiplies the token costs two operations forward and four backward. Attention
        adds `12 * seq_len * num_heads * head_dim` per layer: two products with all `seq_len`
        positions, without deduction of the half that a causal mask hides. BERT's output head is
        computed for all tokens, masked or not.

        Reference: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix
        B; here only weights that take part in a matrix product count, so an embedding lookup is
        free and the output head is not.
        """
        heads = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = (3 if self.family == "llama" else 2) * self.hidden_size * self.ffn_size
        head = self.hidden_size * (
            self.vocab_size + (self.hidden_size if self.family == "bert" else 0)
        )
        attention = 12 * self.num_layers * self.seq_len * self.num_heads * self.head_dim
        return 6 * (self.num_layers * (heads + ffn) + head) + attention

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """`ffn_size` follows `hidden_size`, `num_kv_heads` follows `num_heads`."""
        follow: dict[str, Any] = {}
        if "hidden_size" in changes:
            follow["ffn_size"] = scaled_ffn(self.ffn_size, self.hidden_size, changes["hidden_size"])
        if "num_heads" in changes:
            follow["num_kv_heads"] = max(
                1, changes["num_heads"] * self.num_kv_heads // self.num_heads
            )
        return follow


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(AbstractTextConfig):
    """The shape of a GPT in which every other layer, beginning with the first, has experts in place
    of a feed-forward network.

    Tokens choose their experts in groups of `group_size`. A group is an equal part of one sequence,
    so that sequences do not depend on each other, or several whole sequences, of which a batch must
    then be a multiple (`batch_multiple`). Micro-batches hold whole groups, so they do not change
    the results. An expert takes up to `capacity_factor * group_size / num_experts` tokens of a
    group, and each token goes to at most two experts. With `routing="dropless"`, in place of
    "capacity", experts take all tokens that choose them (`aliquot.experts`). `balance_weight` is
    the weight of the loss that rewards equal use of the experts.

    Raises:
        InputError: some sizes are not positive, or do not divide each other; every such fault is
            listed.
    """

    name: str
    family: str = "moe"
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    num_experts: int
    group_size: int
    tied_embedding: bool = True
    norm_epsilon: float = 1e-5
    routing: str = "capacity"
    capacity_factor: float = 2.0
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        faults = [] if self.family == "moe" else [f"family={self.family!r} is not moe"]
        sizes = (
            "num_layers",
            "hidden_size",
            "num_heads",
            "ffn_size",
            "vocab_size",
            "seq_len",
            "group_size",
        )
        small = out_of_range(self, sizes)
        faults += small
        if self.num_experts < 2:
            faults.append(
                f"num_experts={self.num_experts} must be at least 2, as each token goes to two"
            )
        if self.routing not in ROUTINGS:
            faults.append(f"routing={self.routing!r} is not one of {', '.join(ROUTINGS)}")
        if not small:
            faults += self._indivisible()
        faults += not_positive(self, ("norm_epsilon", "capacity_factor"))
        if not self.balance_weight >= 0:
            faults.append(f"balance_weight={self.balance_weight} must not be negative")
        refuse(self.name, faults)

    def _indivisible(self) -> list[str]:
        faults = []
        if self.hidden_size % self.num_heads:
            faults.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}"
            )
        if self.num_layers % 2:
            faults.append(
                f"num_layers={self.num_layers} must be even, as every other layer has experts"
            )
        if self.seq_len % self.group_size and self.group_size % self.seq_len:
            faults.append(
                f"seq_len={self.seq_len} is not a multiple of group_size={self.group_size}, nor the"
                " other way round"
            )
        return faults

    @property
    def batch_multiple(self) -> int:
        """Number of sequences in a group of tokens, at least one."""
        return max(1, self.group_size // self.seq_len)

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def dense(self) -> ModelConfig:
        """The GPT of the same sizes, with ordinary feed-forward networks in place of experts."""
        return ModelConfig(
            name=self.name,
            family="gpt",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            ffn_size=self.ffn_size,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            tied_embedding=self.tied_embedding,
            norm_epsilon=self.norm_epsilon,
        )

    @property
    def capacity(self) -> int:
        """Tokens of one group that an expert takes."""
        return max(1, int(self.capacity_factor * self.group_size / self.num_experts))

    @property
    def flops_per_token(self) -> int:
        """Floating point operations to train on one token, as for `ModelConfig`, if each token goes
        to two experts.

        The choice of experts counts. Dispatch to the experts and back, though computed as products
        with masks, counts as free, like a lookup; so do places of experts that stay empty.
        """
        expert = 2 * self.hidden_size * self.ffn_size
        gate = self.hidden_size * self.num_experts
        return self.dense.flops_per_token + 6 * self.num_layers // 2 * (expert + gate)

    def consequences(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """`ffn_size` follows `hidden_size`, `group_size` follows `seq_len`."""
        follow: dict[str, Any] = {}
        if "hidden_size" in changes:
            follow["ffn_size"] = scaled_ffn(self.ffn_size, self.hidden_size, changes["hidden_size"])
        if "seq_len" in changes:
            follow["group_size"] = max(1, changes["seq_len"] * self.group_size // self.seq_len)
        return follow


def out_of_range(config: AbstractConfig, fields: Iterable[str]) -> list[str]:
    """Messages on those fields that count something and are less than one, or larger than a dim of
    an array can be.
    """
    faults = []
    for field in fields:
        value, most = getattr(config, field), _MOST_LAYERS if field == "num_layers" else LARGEST
        if value < 1:
            faults.append(f"{field}={value} must be at least 1")
        elif value > most:
            faults.append(f"{field}={shortened(str(value), 30)} must be at most {most}")
    return faults


def not_positive(config: AbstractConfig, fields: Iterable[str]) -> list[str]:
    """Messages on those fields that are zero, negative, infinite or no number."""
    return [
        f"{field}={getattr(config, field)} must be positive"
        for field in fields
        if not 0 < getattr(config, field) < math.inf
    ]


def refuse(name: str, faults: list[str]) -> None:
    """Refuse a configuration that has faults.

    Raises:
        InputError: there are any faults; all of them are listed.
    """
    if faults:
        raise InputError(f"Model {name!r} cannot be built: {'; '.join(faults)}.")


def scaled_ffn(ffn_size: int, hidden_size: int, new_hidden_size: int) -> int:
    """The feed-forward size with the old ratio to the hidden size, rounded up to a multiple of
    8.
    """
    exact = -(-ffn_size * new_hidden_size // hidden_size)
    return -(-exact // 8) * 8
