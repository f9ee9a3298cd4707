"""The usual sizes of models: configurations by names such as `gpt-1.3b`, and changes to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from ..core import InputError, nearest, shortened
from ._config import AbstractConfig, ModelConfig, MoEConfig
from ._image_config import WideResNetConfig
from ._mixtral_config import MixtralConfig
from ._t5_config import T5Config
from ._unet_config import UNetConfig

_Config = TypeVar("_Config", bound=AbstractConfig)

FAMILIES: dict[str, type[AbstractConfig]] = {
    "gpt": ModelConfig,
    "bert": ModelConfig,
    "llama": ModelConfig,
    "mixtral": MixtralConfig,
    "moe": MoEConfig,
    "t5": T5Config,
    "wide-resnet": WideResNetConfig,
    "unet": UNetConfig,
}
"""The class of configurations of every family."""

_DEEP = (8, 16, 32, 64, 128, 256, 512, 1024)
_FIXED = ("name", "family")
OWN_CODE = "Plan your own code of it, as package.module:factory."
_CONFIG = "Give its config.json of Hugging Face in place of a name."
# Models that many ask for and that have no name here, by how they begin.
_OTHERS = {
    "mixtral": _CONFIG,
    "qwen3-moe": _CONFIG,
    "qwen2": _CONFIG,
    "qwen-2": _CONFIG,
    "mistral": _CONFIG,
    "smollm": _CONFIG,
    "gpt-oss": (
        "it has sliding windows, attention sinks and biases. gpt-oss-like-20b and -120b have its"
        f" sizes without these. {OWN_CODE}"
    ),
    "deepseek": (
        "it may choose experts on few hosts, scale rotations or predict several tokens."
        f" deepseek-v3, -v2-lite and -moe-16b are without these. {OWN_CODE}"
    ),
    "gemma": f"it has GeGLU and scaled embeddings. {OWN_CODE}",
    "phi": f"its queries, keys and values are one product. {OWN_CODE}",
}
_LLAMA_VOCAB = 32000
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_TYPES: dict[Any, type] = {kind.__name__: kind for kind in _KINDS}


def _gpt(
    name: str, layers: int, hidden: int, heads: int, *, seq_len: int = 1024, vocab: int = 51200
) -> ModelConfig:
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


def _bert(
    name: str, layers: int, hidden: int, heads: int, *, seq_len: int = 1024, vocab: int = 51200
) -> ModelConfig:
    gpt = _gpt(name, layers, hidden, heads, seq_len=seq_len, vocab=vocab)
    return dataclasses.replace(gpt, family="bert", norm_epsilon=1e-12)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    kv_heads: int,
    ffn: int,
    seq_len: int,
    **others: Any,
) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        seq_len=seq_len,
        tied_embedding=False,
        **{"vocab_size": _LLAMA_VOCAB, **others},
    )


def _llama3(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelConfig:
    """As in "The Llama 3 Herd of Models", table 3, at the 8192 tokens of pre-training."""
    return _llama(
        name,
        layers,
        hidden,
        heads,
        kv_heads=8,
        ffn=ffn,
        seq_len=8192,
        vocab_size=128256,
        rope_theta=500000.0,
    )


def _qwen3(
    name: str, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False
) -> ModelConfig:
    """As in the "Qwen3 Technical Report", table 1, at the 4096 tokens of most of pre-training."""
    llama = _llama(
        name,
        layers,
        hidden,
        heads,
        kv_heads=8,
        ffn=ffn,
        seq_len=4096,
        norm_epsilon=1e-6,
        head_size=128,
        vocab_size=151936,
        rope_theta=1e6,
    )
    return dataclasses.replace(llama, tied_embedding=tied, qk_norm=True)


def _moe(name: str, layers: int, hidden: int, experts: int) -> MoEConfig:
    return MoEConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=16,
        ffn_size=8 * hidden,
        vocab_size=32000,
        seq_len=1024,
        num_experts=experts,
        group_size=1024,
    )


def _mixtral(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    kv_heads: int,
    ffn: int,
    experts: int,
    **others: Any,
) -> MixtralConfig:
    return MixtralConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
        seq_len=4096,
        num_experts=experts,
        **{"vocab_size": _LLAMA_VOCAB, **others},
    )


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, ffn: int) -> MixtralConfig:
    """As in the "Qwen3 Technical Report", table 2."""
    return _mixtral(
        name,
        layers,
        hidden,
        heads,
        kv_heads=4,
        ffn=ffn,
        experts=128,
        top_k=8,
        vocab_size=151936,
        head_size=128,
        qk_norm=True,
        norm_epsilon=1e-6,
    )


def _deepseek(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    ffn: int,
    experts: int,
    shared: int,
    **others: Any,
) -> MixtralConfig:
    """With latent attention; at the 4096 tokens of most of pre-training."""
    return _mixtral(
        name,
        layers,
        hidden,
        heads,
        kv_heads=heads,
        ffn=ffn,
        experts=experts,
        shared_ffn_size=shared * ffn,
        kv_rank=512,
        head_size=128,
        rope_head_size=64,
        value_head_size=128,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
        **others,
    )


def _gpt_oss_like(name: str, layers: int, experts: int) -> MixtralConfig:
    """The sizes of the "gpt-oss model card", 2025; without attention sinks, sliding windows,
    biases and the clamps of its experts.
    """
    return _mixtral(
        name,
        layers,
        2880,
        64,
        kv_heads=8,
        ffn=2880,
        experts=experts,
        top_k=4,
        vocab_size=201088,
        head_size=64,
        rope_theta=150000.0,
    )


def _t5(name: str, layers: int, ffn: int, heads: int, *, head_size: int = 128) -> T5Config:
    return T5Config(
        name=name,
        num_layers=layers,
        hidden_size=1024,
        num_heads=heads,
        head_size=head_size,
        ffn_size=ffn,
        vocab_size=30592,
        seq_len=2048,
        target_len=512,
    )


def _wide_resnet(name: str, layers: int, channels: int, factor: int) -> WideResNetConfig:
    return WideResNetConfig(
        name=name, num_layers=layers, num_channels=channels, width_factor=factor
    )


def _unet(name: str, channels: int) -> UNetConfig:
    """The context has as many vectors as the smallest image has points, as wide as it is deep."""
    return UNetConfig(name=name, num_channels=channels, context_len=16, context_size=4 * channels)


# Sources. GPT up to 2.6B, 6.7B, 15B, 39B, 76B, MoE, Wide-ResNet, U-Net: the benchmark suite of Alpa
# (Zheng et al., OSDI 2022); its experts choose among groups of two sequences (group_size=2048),
# ours of one. BERT base and large: Devlin et al., "BERT", 2019, section 3, the vocabulary padded to
# a multiple of 128; from 350M to 2.6B the sizes B to E of CFP's benchmarks (arXiv 2504.00598). GPT
# 13B and 175B: Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1, 13B with 40
# heads of 128 as its width, and the vocabulary padded as in the suite. Llama 7B and 13B: Touvron et
# al., "LLaMA", 2023, table 2; Llama 2 7B, 13B and 70B: "Llama 2", 2023, appendix A.2. Llama 11B:
# the wider of CFP's two, with heads and feed-forward networks of the 7B; CFP runs a few layers of
# each on sequences of 128. T5 770M, 3B and 11B: Raffel et al., "Exploring the Limits of Transfer
# Learning with a Unified Text-to-Text Transformer", 2020, section 3.7; 6B, 22B and the lengths of
# sequences: Aceso (Liu et al., EuroSys 2024), whose GPT of up to 1024 narrow layers is scale-layer.
# Mixtral: Jiang et al., "Mixtral of Experts", 2024, table 1, and the configuration of 8x22B as
# released. DeepSeek 16B: Dai et al., "DeepSeekMoE", 2024, section 5.1; V2 Lite and V3:
# "DeepSeek-V2", 2024, appendix B, and "DeepSeek-V3 technical report", 2024, section 4.2, without
# multi-token prediction. Their sequences are those of most published steps.
_ALL: tuple[AbstractConfig, ...] = (
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
    *(_gpt(f"scale-layer-{layers}", layers, 512, 8, seq_len=2048) for layers in _DEEP),
    _bert("bert-base", 12, 768, 12, seq_len=512, vocab=30592),
    _bert("bert-large", 24, 1024, 16, seq_len=512, vocab=30592),
    _bert("bert-350m", 24, 1024, 16),
    _bert("bert-760m", 24, 1536, 16),
    _bert("bert-1.3b", 24, 2048, 32),
    _bert("bert-2.6b", 32, 2560, 32),
    _llama("llama-7b", 32, 4096, 32, kv_heads=32, ffn=11008, seq_len=2048, norm_epsilon=1e-6),
    _llama("llama-11b", 32, 6656, 32, kv_heads=32, ffn=11008, seq_len=2048, head_size=128),
    _llama("llama-13b", 40, 5120, 40, kv_heads=40, ffn=13824, seq_len=2048, norm_epsilon=1e-6),
    _llama("llama-2-7b", 32, 4096, 32, kv_heads=32, ffn=11008, seq_len=4096),
    _llama("llama-2-13b", 40, 5120, 40, kv_heads=40, ffn=13824, seq_len=4096),
    _llama("llama-70b", 80, 8192, 64, kv_heads=8, ffn=28672, seq_len=4096),
    _llama3("llama3-8b", 32, 4096, 32, 14336),
    _llama3("llama3-70b", 80, 8192, 64, 28672),
    _llama3("llama3.1-405b", 126, 16384, 128, 53248),
    _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
    _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
    _qwen3("qwen3-8b", 36, 4096, 32, 12288),
    _qwen3("qwen3-14b", 40, 5120, 40, 17408),
    _qwen3("qwen3-32b", 64, 5120, 64, 25600),
    _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, 768),
    _qwen3_moe("qwen3-235b-a22b", 94, 4096, 64, 1536),
    _mixtral("mixtral-8x7b", 32, 4096, 32, kv_heads=8, ffn=14336, experts=8, top_k=2),
    _mixtral("mixtral-8x22b", 56, 6144, 48, kv_heads=8, ffn=16384, experts=8, top_k=2),
    _mixtral(
        "deepseek-moe-16b",
        28,
        2048,
        16,
        kv_heads=16,
        ffn=1408,
        experts=64,
        top_k=6,
        vocab_size=102400,
        shared_ffn_size=2 * 1408,
        num_dense_layers=1,
        dense_ffn_size=10944,
        normalized_weights=False,
        norm_epsilon=1e-6,
        rope_theta=10000.0,
    ),
    _deepseek(
        "deepseek-v2-lite",
        27,
        2048,
        16,
        ffn=1408,
        experts=64,
        top_k=6,
        shared=2,
        num_dense_layers=1,
        dense_ffn_size=10944,
        vocab_size=102400,
        normalized_weights=False,
    ),
    _deepseek(
        "deepseek-v3",
        61,
        7168,
        128,
        ffn=2048,
        experts=256,
        top_k=8,
        shared=1,
        num_dense_layers=3,
        dense_ffn_size=18432,
        vocab_size=129280,
        query_rank=1536,
        gating="sigmoid",
        routed_scale=2.5,
    ),
    _gpt_oss_like("gpt-oss-like-20b", 24, 32),
    _gpt_oss_like("gpt-oss-like-120b", 36, 128),
    _moe("moe-380m", 8, 768, 8),
    _moe("moe-690m", 8, 768, 16),
    _moe("moe-1.3b", 16, 768, 16),
    _moe("moe-2.4b", 16, 1024, 16),
    _moe("moe-7.1b", 16, 1280, 32),
    _moe("moe-10b", 16, 1536, 32),
    _moe("moe-27b", 16, 2048, 48),
    _moe("moe-70b", 32, 2048, 64),
    _t5("t5-770m", 24, 4096, 16, head_size=64),
    _t5("t5-3b", 24, 16384, 32),
    _t5("t5-6b", 24, 32768, 64),
    _t5("t5-11b", 24, 65536, 128),
    _t5("t5-22b", 48, 65536, 128),
    _wide_resnet("wide-resnet-250m", 50, 160, 2),
    _wide_resnet("wide-resnet-500m", 50, 224, 2),
    _wide_resnet("wide-resnet-1b", 50, 320, 2),
    _wide_resnet("wide-resnet-2b", 50, 448, 2),
    _wide_resnet("wide-resnet-4b", 50, 640, 2),
    _wide_resnet("wide-resnet-6.8b", 50, 320, 16),
    _wide_resnet("wide-resnet-13b", 101, 320, 16),
    _unet("unet-470m", 320),
    _unet("unet-1b", 480),
    _unet("unet-1.2b", 512),
    _unet("unet-1.8b", 640),
    _unet("unet-2b", 672),
)

MODELS: dict[str, AbstractConfig] = {config.name: config for config in _ALL}
"""Every named size, smallest first within a family; `gpt-10m` reads bytes and trains on a laptop.
"""


def configure(name: str, /, **overrides: Any) -> AbstractConfig:
    """The configuration of a named model with some fields changed.

    Values may be text, as a command line gives them; they are converted to the type of their field.
    Fields that depend on a changed field change along with it unless they are given, too:
    `ffn_size` keeps its ratio to `hidden_size` (rounded up to a multiple of 8), `num_kv_heads` its
    ratio to `num_heads`, and `group_size` and `target_len` their ratio to `seq_len`.

        >>> configure("gpt-125m", hidden_size="64", num_heads=4).ffn_size
        256

    Raises:
        InputError: there is no such model or field, or a field cannot have its value; all bad
            fields are listed.
    """
    if name not in MODELS:
        instead = other_architecture(name) or nearest(name, MODELS)
        raise InputError(f"There is no model {name!r}: {instead}")
    return changed(MODELS[name], overrides)


def changed(base: _Config, overrides: Mapping[str, Any]) -> _Config:
    """A configuration with some fields changed, as by `configure`.

    Raises:
        InputError: as there.
    """
    fields = {field: type(value) for field, value in as_fields(base).items() if field not in _FIXED}
    changes: dict[str, Any] = {}
    faults = []
    for key, value in overrides.items():
        if key not in fields:
            faults.append(f"it has no field {key!r}: {nearest(key, fields)}")
            continue
        try:
            changes[key] = _parse(fields[key], value)
        except ValueError:
            faults.append(f"{key}={shortened(repr(value), 60)} is not {_KINDS[fields[key]]}")
    if faults:
        raise InputError(f"Model {base.name!r} cannot be changed as asked: {'; '.join(faults)}")
    return type(base)(**(as_fields(base) | base.consequences(changes) | changes))


def other_architecture(name: str) -> str:
    """What to do for a model that many ask for and that has no name here, and why; empty for
    others.

    >>> other_architecture("Gemma-7B")[:35]
    'it has GeGLU and scaled embeddings.'
    """
    starts = (start for start in _OTHERS if name.lower().startswith(start))
    return next((_OTHERS[start] for start in starts), "")


def as_fields(config: AbstractConfig) -> dict[str, Any]:
    """A configuration as plain data; `from_fields` is the inverse."""
    return dataclasses.asdict(config)  # type: ignore[call-overload,no-any-return]


def from_fields(fields: dict[str, Any]) -> AbstractConfig:
    """A configuration from plain data, of the class that its `family` names.

    Raises:
        InputError: no such family, or fields that it does not have.
    """
    family = fields.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(
            f"A model's settings name no family: family={shortened(repr(family), 60)} is not one of"
            f" {', '.join(FAMILIES)}."
        )
    kinds = {field.name: field.type for field in dataclasses.fields(FAMILIES[family])}  # type: ignore[arg-type]
    odd = [
        f"{name}={shortened(repr(value), 60)} is not {_KINDS[_TYPES[kinds[name]]]}"
        for name, value in fields.items()
        if name in kinds and not _is(value, _TYPES[kinds[name]])
    ]
    if odd:
        raise InputError(f"A model's settings cannot be used: {'; '.join(odd)}.")
    try:
        return FAMILIES[family](**fields)
    except TypeError as error:
        raise InputError(
            f"A model's settings are not those of a {FAMILIES[family].__name__}: {error}."
        ) from None


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def typed_setting(text: str, kind: Any) -> Any:
    """A setting as a command line gives it, as the type that an argument takes.

    >>> typed_setting("64", int), typed_setting("64", str), typed_setting("no", "bool")
    (64, '64', False)
    >>> typed_setting("64", None), typed_setting("1e-3", None), typed_setting("big", None)
    (64, 0.001, 'big')

    Args:
        kind: int, float, bool or str, or the name of one. Of anything else, numbers, true and false
            become what they say, and the rest stays text.

    Raises:
        InputError: The text is not of that type.
    """
    known = _TYPES.get(getattr(kind, "__name__", kind) if isinstance(kind, type | str) else None)
    if known is not None:
        try:
            return _parse(known, text)
        except ValueError:
            raise InputError(f"{shortened(repr(text), 60)} is not {_KINDS[known]}") from None
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _parse(kind: type, value: Any) -> Any:
    if kind is bool:
        text = str(value).lower()
        if text not in _YES + _NO:
            raise ValueError(value)
        return text in _YES
    if isinstance(value, bool) or (
        kind is int and isinstance(value, float) and not value.is_integer()
    ):
        raise ValueError(value)
    try:
        return kind(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(value) from error
