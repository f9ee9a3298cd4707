"""A `config.json` of Hugging Face as a configuration of the zoo, for the architectures that the zoo
has. What it cannot express is refused by the name and the value of the field.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..core import InputError, faults_of, listing, printable, read_file, shortened
from ._config import LARGEST, ModelConfig
from ._mixtral_config import MixtralConfig
from ._sizes import OWN_CODE, changed, other_architecture

_MOST_BYTES = 2**20
_OF_YAML = (
    " A model's config.json of Hugging Face is read here. Degrees of Megatron-LM or MaxText go to"
    " --method megatron:tp8,pp4, and options of this command to --options FILE.toml."
)
_MOST_TOKENS = 8192


class _Gpt2(msgspec.Struct):
    """Fields of a GPT-2 that decide its operators, with the defaults of Hugging Face."""

    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int
    n_positions: int
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False


class _Llama(msgspec.Struct):
    """Likewise for Llama, Mistral, Qwen 2 and Qwen 3; with experts for Mixtral and Qwen 3."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    # Of experts: Mixtral has the first name for their number, Qwen the second.
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


# Models with experts, each with the fields of which one has their number: files of transformers 5
# have Mixtral's name for Qwen, too.
_EXPERTS = {"mixtral": ("num_local_experts",), "qwen3_moe": ("num_experts", "num_local_experts")}

_KNOWN: dict[str, type[_Gpt2] | type[_Llama]] = {
    "gpt2": _Gpt2,
    "llama": _Llama,
    "mistral": _Llama,
    "mixtral": _Llama,
    "qwen2": _Llama,
    "qwen3": _Llama,
    "qwen3_moe": _Llama,
}
# What may stand in these fields, of any model; what else stands there makes other operators.
_USUAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "router_jitter_noise": (0.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": (None, []),
}
_LLAMA3_SCALING = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def from_config(
    config: str | os.PathLike[str] | Mapping[str, Any], **overrides: Any
) -> ModelConfig | MixtralConfig:
    """A model from a `config.json` of Hugging Face: GPT-2, Llama, Mistral, Mixtral, Qwen 2 or
    Qwen 3, the last also with experts. These drop no tokens, unless `routing="capacity"` is given.

    Unless `seq_len` is given, a sequence has as many tokens as the model has positions, but no more
    than 8192, nor than its attention's window: few train on the longest that a model can read.
    Dropout is left out, as in most of pre-training.

        >>> from_config(
        ...     dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257,
        ...          n_positions=1024),
        ...     seq_len=512,
        ... ).ffn_size
        3072

    Args:
        config: the file, or what it holds.
        overrides: fields of the configuration to change, as for `configure`.

    Raises:
        InputError: the file cannot be read, its architecture is another, or fields have values
            that make other operators; all of them are listed.
    """
    data, where = (config, "") if isinstance(config, Mapping) else (_read(config), str(config))
    asked = f"{shortened(where, 200) or 'this configuration'} cannot be expressed by the zoo"
    kind = data.get("model_type")
    if kind not in _KNOWN:
        why = other_architecture(str(kind).replace("_", "-"))
        fault = f"model_type={shortened(repr(kind), 60)} is not one of {', '.join(_KNOWN)}"
        raise InputError(listing(asked, [fault], why or OWN_CODE))
    faults = list(faults_of(dict(data), _KNOWN[kind], ""))
    for own in ("auto_map", "quantization_config"):
        if data.get(own):
            faults.append(f"{own}={shortened(repr(data[own]), 60)} stands for code of its own")
    if kind in _EXPERTS:
        for fields in (_EXPERTS[kind], ("num_experts_per_tok",)):
            if all(data.get(field) is None for field in fields):
                faults.append(f"{fields[0]} is missing")
    if faults:
        raise InputError(listing(asked, faults, "Give the config.json as it was published."))
    read = msgspec.convert(dict(data), _KNOWN[kind])
    name = _name(data, where)
    dense = _gpt(read, name) if isinstance(read, _Gpt2) else _llama(read, name, kind)
    made: ModelConfig | MixtralConfig = dense
    if isinstance(read, _Llama) and kind in _EXPERTS:
        made = _with_experts(read, dense, kind)
    made = changed(made, overrides)
    if faults := [*_unusual(read), *_other_attention(read, kind, made.seq_len)]:
        raise InputError(listing(asked, faults, OWN_CODE))
    return made


def architecture(config: str | os.PathLike[str]) -> str:
    """The `model_type` of a `config.json`, such as "llama". Raises as `from_config` does."""
    return str(_read(config).get("model_type"))


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    shown = shortened(os.fspath(path), 200)
    try:
        data = msgspec.json.decode(read_file(path, _MOST_BYTES))
    except InputError as error:
        raise InputError(f"{shown} cannot be read: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        advice = _OF_YAML if shown.endswith((".yaml", ".yml", ".toml")) else ""
        raise InputError(f"{shown} is not JSON: {error}.{advice}") from error
    if not isinstance(data, dict):
        raise InputError(f"{shown} is no config.json of Hugging Face: it holds no object.")
    return data


def _name(data: Mapping[str, Any], where: str) -> str:
    """What the file calls the model, or else its folder."""
    path = Path(where)
    said = data.get("_name_or_path")
    if not isinstance(said, str) or not said.strip("/. "):
        # A file that is called config.json lies in a folder that says of what.
        said = path.resolve().parent.name if path.name == "config.json" else path.stem
    last = printable(said.rstrip("/").rpartition("/")[2], keep="").strip()
    return shortened(last, 60).lower() or str(data["model_type"])


def _gpt(read: _Gpt2, name: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        family="gpt",
        num_layers=read.n_layer,
        hidden_size=read.n_embd,
        num_heads=read.n_head,
        num_kv_heads=read.n_head,
        ffn_size=read.n_inner or 4 * read.n_embd,
        vocab_size=read.vocab_size,
        seq_len=min(read.n_positions, _MOST_TOKENS),
        tied_embedding=read.tie_word_embeddings,
        norm_epsilon=read.layer_norm_epsilon,
    )


def _llama(read: _Llama, name: str, kind: str) -> ModelConfig:
    rope = {**(read.rope_scaling or {}), **(read.rope_parameters or {})}
    theta, factor = rope.get("rope_theta", read.rope_theta), rope.get("factor", 1.0)
    return ModelConfig(
        name=name,
        family="llama",
        num_layers=read.num_hidden_layers,
        hidden_size=read.hidden_size,
        num_heads=read.num_attention_heads,
        num_kv_heads=read.num_key_value_heads or read.num_attention_heads,
        ffn_size=read.intermediate_size,
        vocab_size=read.vocab_size,
        seq_len=min(read.max_position_embeddings, _MOST_TOKENS, _window(read, kind) or LARGEST),
        tied_embedding=read.tie_word_embeddings,
        head_size=read.head_dim or (128 if kind.startswith("qwen3") else 0),
        norm_epsilon=read.rms_norm_eps,
        rope_theta=_number(theta, read.rope_theta),
        rope_factor=_number(factor, 1.0) if _rope_kind(rope) == "llama3" else 1.0,
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
    )


def _with_experts(read: _Llama, dense: ModelConfig, kind: str) -> MixtralConfig:
    number = next(filter(None, (getattr(read, field) for field in _EXPERTS[kind])), None)
    assert number is not None and read.num_experts_per_tok is not None, "their absence is refused"
    return MixtralConfig(
        name=dense.name,
        num_layers=dense.num_layers,
        hidden_size=dense.hidden_size,
        num_heads=dense.num_heads,
        num_kv_heads=dense.num_kv_heads,
        ffn_size=read.intermediate_size if kind == "mixtral" else read.moe_intermediate_size or 768,
        vocab_size=dense.vocab_size,
        seq_len=dense.seq_len,
        num_experts=number,
        top_k=read.num_experts_per_tok,
        # Mixtral's weights always sum to one.
        normalized_weights=kind == "mixtral" or bool(read.norm_topk_prob),
        balance_weight=read.router_aux_loss_coef,
        tied_embedding=dense.tied_embedding,
        head_size=dense.head_size,
        norm_epsilon=dense.norm_epsilon,
        rope_theta=dense.rope_theta,
        qk_norm=dense.qk_norm,
    )


def _number(value: Any, otherwise: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else otherwise


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _window(read: _Llama, kind: str) -> int | None:
    """The tokens that a token reads; None if it reads all before it."""
    is_used = read.use_sliding_window if kind.startswith("qwen") else True
    return read.sliding_window if is_used else None


def _unusual(read: _Gpt2 | _Llama) -> Iterator[str]:
    """Fields with values that make other operators."""
    for field, usual in _USUAL.items():
        value = getattr(read, field, usual[0])
        if value not in usual:
            shown = " or ".join(map(str, usual))
            yield f"{field}={value}: its operators are those of {shown}"


def _other_attention(read: _Gpt2 | _Llama, kind: str, seq_len: int) -> Iterator[str]:
    """Rotations that are scaled in another way, and windows shorter than a sequence."""
    if isinstance(read, _Gpt2):
        return
    for field in ("rope_scaling", "rope_parameters"):
        rope = getattr(read, field) or {}
        numbers = {key: rope.get(key) for key in ("rope_theta", "factor") if key in rope}
        is_llama3 = _rope_kind(rope) == "llama3" and all(
            rope.get(key) == value for key, value in _LLAMA3_SCALING.items()
        )
        if kind in _EXPERTS and _rope_kind(rope) != "default":
            yield f"{field}={shortened(repr(rope), 100)}: with experts it has no scaled rotations"
        elif any(_number(value, -1.0) <= 0 for value in numbers.values()) or not (
            is_llama3 or _rope_kind(rope) == "default"
        ):
            yield f"{field}={shortened(repr(rope), 100)}: of scaled rotations it has Llama 3.1's"
    window = _window(read, kind)
    if window is not None and window < seq_len:
        yield (
            f"sliding_window={window} is shorter than a sequence of {seq_len} tokens, all of which"
            f" its attention reads: give seq_len={window} (--seq-len {window})"
        )
    # Those of a window that is no shorter than a sequence read all of it.
    others = {*(read.layer_types or ())} - {"full_attention", "sliding_attention"}
    if others:
        yield f"layer_types has {', '.join(sorted(others))}: all its layers have full_attention"
