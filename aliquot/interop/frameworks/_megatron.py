"""Megatron-LM's arguments and Megatron-Bridge's recipes: two spellings of the same settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ._settings import Settings, ceil_to, is_even
from ._table import Words, model_named

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_ATTENTION = {"p2p": "ring", "a2a": "ulysses", "all_gather": "gather", "allgather": "gather"}


def read(
    words: Words, layers_of: Callable[[Mapping[str, Any]], int | None]
) -> tuple[Settings, dict[str, Any]]:
    """The layout and the model that Megatron's settings say."""
    model = _model(words)
    num_layers = layers_of(model)
    tensor, pipeline = words.degree("tensor"), words.degree("pipeline")
    context, expert = words.degree("context"), words.degree("expert")
    expert_tensor = words.number("expert_tensor", tensor)
    if expert > 1 and expert_tensor != tensor:
        words.lost.append(
            f"{words.name('expert_tensor')} = {expert_tensor}: experts are split over {tensor}"
            " tensor ranks in a plan, as all else"
        )
    sequence = words.flag("sequence")
    if sequence and tensor == 1:
        words.advice.append(
            f"{words.name('sequence')}: with {words.table.name_of('tensor')} 1 there is nothing to"
            " split along the sequence: leave it out"
        )
    elif tensor > 1 and not sequence:
        words.advice.append(
            f"{words.name('tensor')} = {tensor} without {words.table.name_of('sequence')}: every"
            " tensor rank repeats the norms and keeps whole residual streams: add it"
        )
    data = None
    if words.num_devices and words.num_devices % (tensor * pipeline * context) == 0:
        data = words.num_devices // (tensor * pipeline * context)
    zero, within = _sharding(words, data, tensor * pipeline * context * expert > 1)
    chunks, layers = _chunks(words, num_layers, pipeline)
    micro = words.number("micro_batch")
    words.not_said("micro_batch", micro)
    settings = Settings(
        data=data,
        expert=expert,
        tensor=tensor,
        sequence=sequence and tensor > 1,
        context=context,
        attention=_attention(words, context),
        pipeline=pipeline,
        chunks=chunks,
        zero_stage=zero,
        shard_within=within,
        stage_layers=layers,
        schedule="" if pipeline == 1 else "interleaved-1f1b" if chunks > 1 else "1f1b",
        micro_batch=micro,
        global_batch=words.number("global_batch"),
        recompute=_recompute(words, num_layers, pipeline * chunks),
        dtype=_dtype(words),
        seq_len=model.get("seq_len"),
    )
    if words.table.framework == "megatron" and (data or 2) > 1:
        _overlaps(words, zero, tensor)
    return settings, model


def _sharding(words: Words, data: int | None, others: bool) -> tuple[int, int | None]:
    """The stage of ZeRO, and the ranks that hold one copy of the state."""
    zero = 1 if words.flag("distributed_optimizer") else 0
    if words.flag("torch_fsdp"):
        zero = 3
    elif words.flag("own_fsdp"):
        strategy = words.text("sharding", "optim_grads_params")
        words.not_said("sharding", strategy)
        if strategy not in _STRATEGIES:
            words.faults.append(f"{words.name('sharding')} = {strategy}: {', '.join(_STRATEGIES)}")
        zero = _STRATEGIES.get(strategy, 3)
    replicas = words.degree("replicas")
    if replicas == 1:
        return zero, None
    if zero >= 2 and not others and data and data % replicas == 0:
        return zero, data // replicas
    words.lost.append(
        f"{words.name('replicas')} = {replicas}: the state is split over all data ranks in a plan,"
        f" not in {replicas} groups, which takes less memory"
    )
    return zero, None


def _chunks(words: Words, num_layers: int | None, pipeline: int) -> tuple[int, tuple[int, ...]]:
    """Chunks of layers on each stage, and their layers where they are unequal."""
    per_stage, per_chunk = words.number("chunks"), words.number("layers_per_chunk")
    if per_stage and per_chunk:
        words.faults.append(
            f"{words.name('chunks')} and {words.name('layers_per_chunk')} exclude each other"
        )
    if layout := words.value("pipeline_layout"):
        layers = parse_layout(layout)
        if not layers or len(layers) % pipeline:
            words.faults.append(
                f"{words.name('pipeline_layout')} = {layout}: write a stage for each of"
                f" {pipeline} stages or a multiple, with t for each layer"
            )
            return per_stage or 1, ()
        if num_layers and sum(layers) != num_layers:
            words.faults.append(
                f"{words.name('pipeline_layout')} has {sum(layers)} layers, the model {num_layers}"
            )
        chunks = len(layers) // pipeline
        if per_stage and per_stage != chunks:
            words.faults.append(
                f"{words.name('chunks')} = {per_stage}, and {words.name('pipeline_layout')} has"
                f" {chunks} for each stage"
            )
        return chunks, () if is_even(layers) else layers
    chunks = per_stage or 1
    if per_chunk and num_layers:
        if num_layers % (pipeline * per_chunk):
            words.faults.append(
                f"{words.name('layers_per_chunk')} = {per_chunk}: {num_layers} layers are no"
                f" multiple of {pipeline} stages x {per_chunk}"
            )
        chunks = max(1, num_layers // (pipeline * per_chunk))
    # The embedding, and the loss, may count as a layer each.
    counted = [words.flag("embedding_is_layer"), words.flag("loss_is_layer")]
    if any(counted) and num_layers and pipeline > 1:
        each, rest = divmod(num_layers + sum(counted), pipeline * chunks)
        if rest:
            words.faults.append(
                f"{num_layers} layers and {sum(counted)} for embedding and loss are no multiple of"
                f" {pipeline * chunks} stages"
            )
            return chunks, ()
        spread = [each] * (pipeline * chunks)
        spread[0] -= counted[0]
        spread[-1] -= counted[1]
        return chunks, tuple(spread)
    first, last = words.number("first_layers"), words.number("last_layers")
    if (first or last) and num_layers and chunks == 1 and pipeline > 1:
        inner = pipeline - bool(first) - bool(last)
        rest = num_layers - (first or 0) - (last or 0)
        if inner and (rest % inner or rest < 1):
            words.faults.append(f"{rest} layers cannot be split evenly over {inner} stages")
            return chunks, ()
        middle = [rest // inner] * inner if inner else []
        layers = (*([first] if first else ()), *middle, *([last] if last else ()))
        return chunks, () if is_even(layers) else layers
    return chunks, ()


def parse_layout(layout: Any) -> tuple[int, ...]:
    """Layers of each chunk from a `pipeline_model_parallel_layout`, in which E is the embedding, t
    a layer, L the loss, and | ends a chunk; empty if it cannot be read.

    >>> parse_layout("Et*2|(t*2|)*2,t*3|tL")
    (2, 2, 2, 3, 1)
    """
    if isinstance(layout, list):
        chunks = [[chunk] if isinstance(chunk, str) else list(chunk) for chunk in layout]
        return tuple(chunk.count("t") + chunk.count("decoder") for chunk in chunks)
    text = re.sub(r"[,\s]", "", str(layout))
    if len(text) > 10_000:
        return ()
    for pattern in (r"\(([^()]*)\)\*(\d{1,4})", r"([A-Za-z])\*(\d{1,4})"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if not re.fullmatch(r"[EtmL|]{1,20000}", text):
        return ()
    return tuple(chunk.count("t") for chunk in text.split("|"))


def layout_text(layers: tuple[int, ...]) -> str:
    """Layers of each chunk as a `pipeline_model_parallel_layout`.

    >>> layout_text((2, 3, 1))
    'Ett|ttt|tL'
    """
    chunks = ["t" * count for count in layers]
    return "|".join(["E" + chunks[0], *chunks[1:-1], chunks[-1] + "L"])


def _attention(words: Words, context: int) -> str | None:
    if context == 1:
        return None
    said = words.value("attention", "p2p")
    words.not_said("attention", "p2p")
    kinds = {str(each).lower() for each in (said if isinstance(said, list) else [said])}
    if len(kinds) > 1 or not kinds <= set(_ATTENTION):
        words.lost.append(
            f"{words.name('attention')} = {said}: a plan takes the fastest of"
            f" {', '.join(sorted(set(_ATTENTION.values())))} in each layer"
        )
        return None
    return _ATTENTION[kinds.pop()]


def _recompute(words: Words, num_layers: int | None, chunks: int) -> str:
    granularity = words.text("recompute_granularity")
    if words.flag("recompute_selective") and not granularity:
        granularity = "selective"
    if granularity in ("", "none"):
        return "none"
    if granularity == "selective":
        said = words.value("recompute_modules", ["core_attn"])
        modules = {str(each) for each in (said if isinstance(said, list) else [said])}
        if modules <= {"core_attn"}:
            words.assumed.append(
                f"{words.name('recompute_granularity')} = selective: nothing else is recomputed, as"
                " fused attention keeps no scores"
            )
            return "none"
        words.assumed.append(
            f"{words.name('recompute_modules')} = {', '.join(sorted(modules))}: read as minimal,"
            " which keeps the results of products with weights"
        )
        return "minimal"
    if granularity != "full":
        words.faults.append(
            f"{words.name('recompute_granularity')} = {granularity}: write full or selective"
        )
        return "none"
    method, count = words.text("recompute_method", "uniform"), words.degree("recompute_layers")
    if method == "block" and num_layers:
        inside = max(1, num_layers // chunks)
        if count < inside:
            every = max(1, round(inside / count))
            words.assumed.append(
                f"{words.name('recompute_layers')} = {count} of {inside} layers of a stage: read as"
                f" every {every}. layer, block:{every}"
            )
            return "block" if every == 1 else f"block:{every}"
    elif method == "uniform" and count > 1:
        words.lost.append(
            f"{words.name('recompute_layers')} = {count}: what enters each layer is kept in a plan,"
            f" not of each {count}. layer, which takes more memory"
        )
    return "block"


def _dtype(words: Words) -> str:
    precision = words.text("precision")
    if words.value("fp8") not in (None, False) or "fp8" in precision or "fp4" in precision:
        return "fp8"
    if words.flag("bf16") or "bf16" in precision:
        return "bf16"
    if words.flag("fp16") or "fp16" in precision or "16" in precision:
        return "float16"
    if words.table.framework == "bridge":
        words.assumed.append("mixed_precision = bf16_mixed, as recipes have it")
        return "bf16"
    words.assumed.append("neither bf16 nor fp16: it computes in float32")
    return "float32"


def _overlaps(words: Words, zero: int, tensor: int) -> None:
    """Advice on transfers that could hide beside compute; a plan has them hide."""
    hidden = [("overlap_gradients", "gradients")]
    hidden += [("overlap_parameters", "gathers of parameters")] if zero else []
    for word, what in hidden:
        if not words.flag(word):
            words.advice.append(
                f"{words.table.name_of(word)} is off: {what} do not hide beside compute, as the"
                " predicted step time assumes: add it"
            )
    if tensor > 1 and not words.flag("overlap_tensor"):
        words.advice.append(
            f"{words.table.name_of('overlap_tensor')} is off: transfers of tensor ranks hide less"
            " beside their products: add it, with --sequence-parallel"
        )


def _model(words: Words) -> dict[str, Any]:
    """Fields of the zoo's configuration."""
    sizes = (
        "num_layers",
        "hidden_size",
        "num_heads",
        "ffn_size",
        "seq_len",
        "head_size",
        "num_experts",
        "top_k",
        "shared_ffn_size",
    )
    model: dict[str, Any] = {word: words.number(word) for word in sizes if word in words.said}
    if words.table.framework == "bridge":
        if "num_kv_heads" in words.said:
            model["num_kv_heads"] = words.number("num_kv_heads")
        named = model_named(str(words.value("like", "")))
        if not named and words.value("like", "planned") != "planned":
            words.unknown.append(f"{words.value('like')}: no model of the zoo has such a name")
        if "vocab_size" in words.said:
            model["vocab_size"] = words.number("vocab_size")
        return {**named, **model}
    if not {"num_layers", "hidden_size"} <= set(model):
        # A model that another file gives.
        return {"seq_len": model["seq_len"]} if "seq_len" in model else {}
    heads = model.get("num_heads")
    kv = words.number("num_kv_heads", heads) if words.flag("has_groups") else heads
    gated, norm = words.flag("swiglu"), words.text("normalization", "layernorm")
    is_llama = gated or norm == "rmsnorm" or words.text("positions") == "rope"
    if is_llama and not (gated and norm == "rmsnorm"):
        words.assumed.append(
            f"a layer with {norm} and {'SwiGLU' if gated else 'no SwiGLU'} is read as one of Llama"
        )
    ffn = model.get("ffn_size") or (
        ceil_to(int(4 * model["hidden_size"] * 2 / 3), 64) if gated else 4 * model["hidden_size"]
    )
    model |= {
        "family": "llama" if is_llama else "gpt",
        "num_kv_heads": kv,
        "ffn_size": ffn,
        "tied_embedding": not words.flag("untied"),
    }
    if is_llama:
        theta = words.value("rope_theta")
        model |= {"rope_theta": float(theta)} if isinstance(theta, int | float) else {}
        for word in ("qk_norm", "qkv_bias"):
            if words.flag(word):
                model[word] = True
    if "num_experts" in model:
        model["family"] = "mixtral"
        model["ffn_size"] = words.number("expert_ffn_size", ffn)
        model.setdefault("top_k", 2)
        dense = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(words.value("moe_layers", "")))
        if dense:
            model |= {"num_dense_layers": int(dense[1]), "dense_ffn_size": ffn}
    if words.flag("latent"):
        ranks = ("kv_rank", "query_rank", "rope_head_size", "value_head_size")
        latent = {name: words.number(name) for name in ranks if name in words.said}
        usual = {"kv_rank": 512, "head_size": 128, "rope_head_size": 64, "value_head_size": 128}
        model = {**usual, **model, **latent, "num_kv_heads": heads}
    vocab = words.number("padded_vocab_size")
    if vocab is None and (said := words.number("vocab_size")):
        multiple = (words.number("vocab_multiple") or 128) * words.degree("tensor")
        vocab = ceil_to(said, multiple)
        if vocab != said:
            words.assumed.append(f"vocabulary of {said}, padded to {vocab} as Megatron does")
    if vocab is None:
        kind = words.text("tokenizer")
        vocab = 51200 if "gpt2" in kind or not kind else 32000 if "llama2" in kind else 128256
        words.assumed.append(
            f"vocabulary of {vocab}, as the tokenizer's is not in the file: --set vocab_size=N"
            " says another"
        )
    return {**model, "vocab_size": vocab}


def write(
    settings: Settings, model: Mapping[str, Any], lose: Callable[[str], None], *, bridge: bool
) -> list[tuple[str, Any]]:
    """The layout as pairs of a name and a value, in the words of Megatron or of Bridge."""
    data = settings.data or 1
    pairs: list[tuple[str, Any]] = [
        ("tensor", settings.tensor),
        ("pipeline", settings.pipeline),
        ("context", settings.context),
    ]
    if settings.expert > 1:
        pairs += [("expert", settings.expert), ("expert_tensor", settings.tensor)]
    if settings.sequence:
        pairs.append(("sequence", True))
    if settings.context > 1 and settings.attention:
        kind = next(name for name, each in _ATTENTION.items() if each == settings.attention)
        pairs.append(("attention", kind))
    if settings.stage_layers:
        pairs.append(("pipeline_layout", layout_text(settings.stage_layers)))
    elif settings.chunks > 1:
        pairs.append(("chunks", settings.chunks))
    if settings.zero_stage == 1:
        pairs.append(("distributed_optimizer", True))
    elif settings.zero_stage > 1 or settings.shard_within:
        strategy = {stage: name for name, stage in _STRATEGIES.items()}[settings.zero_stage]
        pairs += [("own_fsdp", True), ("sharding", strategy)]
        if settings.shard_within and settings.shard_within < data:
            pairs.append(("replicas", data // settings.shard_within))
    if bridge and not settings.zero_stage:
        pairs.append(("distributed_optimizer", False))
    pairs += [("micro_batch", settings.micro_batch or 1), ("global_batch", settings.global_batch)]
    if settings.zero_stage < 4 and not bridge and data > 1:
        pairs.append(("overlap_gradients", True))
        pairs += [("overlap_parameters", True)] if settings.zero_stage else []
    pairs += _recompute_pairs(settings, model, lose)
    precision = {"bf16": "bf16", "float16": "fp16", "fp8": "fp8", "float32": "", "": ""}
    name = precision.get(settings.dtype)
    if name is None:
        lose(f"dtype {settings.dtype}: Megatron computes in bf16, fp16, fp8 or float32")
    elif bridge and name:
        mixed = {"fp8": "bf16_with_fp8_current_scaling_mixed"}.get(name, f"{name}_mixed")
        pairs.append(("precision", mixed))
    elif name == "fp8":
        pairs += [("bf16", True), ("fp8", "hybrid")]
    elif name:
        pairs.append((name, True))
    if settings.schedule not in ("", "1f1b", "interleaved-1f1b"):
        lose(
            f"schedule {settings.schedule}: Megatron runs 1f1b, interleaved where stages have"
            " chunks"
        )
    return pairs


def _recompute_pairs(
    settings: Settings, model: Mapping[str, Any], lose: Callable[[str], None]
) -> list[tuple[str, Any]]:
    name, _, every = settings.recompute.partition(":")
    if name == "none":
        return []
    if name == "block" and every and int(every) > 1:
        layers = model.get("num_layers") or 0
        inside = max(1, layers // (settings.pipeline * settings.chunks))
        count = max(1, round(inside / int(every)))
        lose(
            f"recompute {settings.recompute}: Megatron recomputes the first {count} layers of each"
            f" chunk of {inside}, not every {every}."
        )
        return [
            ("recompute_granularity", "full"),
            ("recompute_method", "block"),
            ("recompute_layers", count),
        ]
    if name == "block":
        return [
            ("recompute_granularity", "full"),
            ("recompute_method", "uniform"),
            ("recompute_layers", 1),
        ]
    modules = ["core_attn", "layernorm", "mlp"]
    if name == "minimal":
        lose("recompute minimal: Megatron's nearest is selective, of attention, norms and MLPs")
        return [("recompute_granularity", "selective"), ("recompute_modules", modules)]
    lose(f"recompute {settings.recompute}: Megatron has none that keeps these; full is written")
    return _recompute_pairs(Settings(recompute="block", pipeline=settings.pipeline), model, lose)
