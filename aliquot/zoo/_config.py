"""Sizes of the language models: what a name such as `gpt-1.3b` stands for, and how to change it.

Nothing here imports JAX or Flax, so that a command line can list and check names for free. `_gpt.py` and `_llama.py`
turn a `ModelConfig` into modules; `_step.py` turns those into a training step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..core import InputError, nearest

_FAMILIES = ("gpt", "llama")
_POSITIVE = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "seq_len")
_FIXED = ("name", "family")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only language model.

    `family` decides the operators: `"gpt"` has LayerNorm, biases, learned positions and GELU; `"llama"` has RMSNorm,
    rotary positions, SwiGLU and no biases. Sizes are counts of elements; `seq_len` counts tokens. With
    `num_kv_heads < num_heads` several query heads share one key and value head. `rope_theta` only matters to Llama.

    Raises:
        InputError: some sizes are not positive, or do not divide each other; every such fault is listed.
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
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        faults = []
        if self.family not in _FAMILIES:
            faults.append(f"family={self.family!r} is not one of {', '.join(_FAMILIES)}")
        small = [field for field in _POSITIVE if getattr(self, field) < 1]
        faults += [f"{field}={getattr(self, field)} must be at least 1" for field in small]
        if not small:
            faults += self._indivisible()
        faults += [
            f"{field}={getattr(self, field)} must be positive"
            for field in ("norm_epsilon", "rope_theta")
            if not getattr(self, field) > 0
        ]
        if faults:
            raise InputError(f"Model {self.name!r} cannot be built: {'; '.join(faults)}.")

    def _indivisible(self) -> list[str]:
        faults = []
        if self.hidden_size % self.num_heads:
            faults.append(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        elif self.family == "llama" and self.head_dim % 2:
            faults.append(f"hidden_size / num_heads = {self.head_dim} is odd, rotary positions turn pairs of elements")
        if self.num_heads % self.num_kv_heads:
            faults.append(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return faults

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def flops_per_token(self) -> int:
        """Floating point operations to train on one token: forward and backward, without recomputation.

        A weight that multiplies the token costs two operations forward and four backward. Attention adds
        `12 * seq_len * hidden_size` per layer: two products with all `seq_len` positions, the causal half not deducted.

        Reference: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B; here only
        weights that take part in a matrix product count, so an embedding lookup is free and the output head is not.
        """
        heads = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = (3 if self.family == "llama" else 2) * self.hidden_size * self.ffn_size
        weights = self.num_layers * (heads + ffn) + self.hidden_size * self.vocab_size
        return 6 * weights + 12 * self.num_layers * self.seq_len * self.hidden_size


def _gpt(name: str, layers: int, hidden: int, heads: int, *, seq_len: int = 1024, vocab: int = 51200) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=vocab,
        seq_len=seq_len,
        tied_embedding=True,
    )


def _llama(
    name: str, layers: int, hidden: int, heads: int, *, kv_heads: int, ffn: int, seq_len: int, epsilon: float = 1e-5
) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        vocab_size=32000,
        seq_len=seq_len,
        tied_embedding=False,
        norm_epsilon=epsilon,
    )


# Sources. GPT up to 2.6B, 6.7B, 15B, 39B, 76B: the benchmark suite of Alpa (Zheng et al., OSDI 2022). 13B and 175B:
# Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, 13B with 40 heads of 128 as its width, and the
# vocabulary padded as in the suite. Llama 7B and 13B: Touvron et al., "LLaMA", 2023, table 2; 70B: "Llama 2", 2023.
_ALL = (
    _gpt("gpt-10m", 6, 384, 8, seq_len=128, vocab=256),
    _gpt("gpt-125m", 12, 768, 12),
    _gpt("gpt-350m", 24, 1024, 16),
    _gpt("gpt-760m", 24, 1536, 16),
    _gpt("gpt-1.3b", 24, 2048, 32),
    _gpt("gpt-2.6b", 32, 2560, 32),
    _gpt("gpt-6.7b", 32, 4096, 32),
    _gpt("gpt-13b", 40, 5120, 40, seq_len=2048),
    _gpt("gpt-15b", 48, 5120, 40),
    _gpt("gpt-39b", 48, 8192, 64),
    _gpt("gpt-76b", 60, 10240, 80),
    _gpt("gpt-175b", 96, 12288, 96, seq_len=2048),
    _llama("llama-7b", 32, 4096, 32, kv_heads=32, ffn=11008, seq_len=2048, epsilon=1e-6),
    _llama("llama-13b", 40, 5120, 40, kv_heads=40, ffn=13824, seq_len=2048, epsilon=1e-6),
    _llama("llama-70b", 80, 8192, 64, kv_heads=8, ffn=28672, seq_len=4096),
)

MODELS: dict[str, ModelConfig] = {config.name: config for config in _ALL}
"""Every named size, smallest first within a family; `gpt-10m` reads bytes and trains on a laptop."""


def configure(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named model with some fields changed.

    Values may be text, as a command line gives them; they take the type of their field. What follows from a changed
    field changes with it unless it is given too: `ffn_size` keeps its ratio to `hidden_size` (rounded up to a multiple
    of 8), and `num_kv_heads` its ratio to `num_heads`.

        >>> configure("gpt-125m", hidden_size="64", num_heads=4).ffn_size
        256

    Raises:
        InputError: no such model, no such field, or a value its field cannot take; all bad fields are listed.
    """
    if name not in MODELS:
        raise InputError(f"There is no model {name!r}: {nearest(name, MODELS)}")
    base = MODELS[name]
    fields = {f.name: type(getattr(base, f.name)) for f in dataclasses.fields(base) if f.name not in _FIXED}
    changes: dict[str, Any] = {}
    faults = []
    for key, value in overrides.items():
        if key not in fields:
            faults.append(f"it has no field {key!r}: {nearest(key, fields)}")
            continue
        try:
            changes[key] = _parse(fields[key], value)
        except ValueError:
            faults.append(f"{key}={value!r} is not {_KINDS[fields[key]]}")
    if faults:
        raise InputError(f"Model {name!r} cannot be changed as asked: {'; '.join(faults)}")
    return dataclasses.replace(base, **(_consequences(base, changes) | changes))


_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def _parse(kind: type, value: Any) -> Any:
    if kind is bool:
        text = str(value).lower()
        if text not in _YES + _NO:
            raise ValueError(value)
        return text in _YES
    if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    try:
        return kind(value)
    except TypeError as error:
        raise ValueError(value) from error


def _consequences(base: ModelConfig, changes: dict[str, Any]) -> dict[str, Any]:
    follow: dict[str, Any] = {}
    if "hidden_size" in changes:
        exact = -(-base.ffn_size * changes["hidden_size"] // base.hidden_size)
        follow["ffn_size"] = -(-exact // 8) * 8
    if "num_heads" in changes:
        follow["num_kv_heads"] = max(1, changes["num_heads"] * base.num_kv_heads // base.num_heads)
    return follow
