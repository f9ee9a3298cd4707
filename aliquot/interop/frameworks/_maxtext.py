"""MaxText: degrees of mesh axes, inside a slice (`ici_`) and between slices (`dcn_`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...core import MAXTEXT_RECOMPUTE
from ._settings import Settings
from ._table import Words, model_named

_AXES = (
    *("data", "fsdp", "fsdp_transpose", "sequence", "context", "ulysses"),
    *("tensor", "tensor_sequence", "pipeline", "expert"),
)
_WRITTEN = tuple(axis for axis in _AXES if axis not in ("sequence", "ulysses"))
_EXACT = ("none", "full", "minimal", "minimal_flash", "save_qkv_proj", "save_out_proj")
_ATTENTION = {"all_gather": "gather", "ring": "ring", "ulysses": "ulysses"}


def model(words: Words) -> dict[str, Any]:
    """Fields of the zoo's configuration."""
    named = words.text("like", "default")
    seq_len = words.number("seq_len")
    words.not_said("seq_len", seq_len)
    sizes = {
        word: words.number(word)
        for word in (*words.table.base_model, "num_experts", "top_k")
        if word in words.said
    }
    if named != "default":
        found = model_named(named)
        if not found:
            words.unknown.append(
                f"{words.name('like')} = {named}: no model of the zoo has this name"
            )
        return {**found, **sizes, "seq_len": seq_len}
    scale = words.degree("scale")
    made: dict[str, Any] = {**words.table.base_model, **sizes}
    # The scale is a power of two, of which layers, then heads and widths get equal parts.
    whole, rest = divmod(math.floor(math.log2(scale)), 3)
    for field, more in (
        ("hidden_size", rest > 1),
        ("num_heads", rest > 0),
        ("num_kv_heads", rest > 0),
        ("ffn_size", rest > 0),
        ("num_layers", False),
    ):
        made[field] *= 2 ** (whole + more)
    family = "gpt" if words.text("block") == "gpt3" else "llama"
    if (sizes.get("num_experts") or 1) > 1:
        family = "mixtral"
        made["ffn_size"] = words.number("expert_ffn_size", made["ffn_size"])
    else:
        made.pop("num_experts", None)
        made.pop("top_k", None)
    tied = words.flag("tied_embedding")
    return {**made, "family": family, "seq_len": seq_len, "tied_embedding": tied}


def read(words: Words, num_layers: int | None) -> Settings:
    """The layout that the settings say, of a model of so many layers."""
    axes = _axes(words)
    pipeline, expert = axes["pipeline"], axes["expert"]
    tensor = axes["tensor"] * axes["tensor_sequence"]
    context = axes["sequence"] * axes["context"] * axes["ulysses"]
    shards = axes["fsdp"] * axes["fsdp_transpose"]
    if axes["tensor"] > 1:
        words.assumed.append(
            f"{words.name('ici_tensor')} = {axes['tensor']}: residual streams, which MaxText splits"
            " there along their width, are judged as split along the sequence: the same memory"
        )
    replicas, ranks = axes["data"], tensor * context * pipeline * expert
    zero = 3 if shards > 1 else 1 if words.flag("zero1") else 0
    within = shards if zero == 3 and replicas > 1 else None
    if within and ranks > 1:
        words.lost.append(
            f"{words.name('ici_data')} beside fsdp: the state is split over all data ranks in a"
            f" plan, not in {replicas} groups, which takes less memory"
        )
        within = None
    data = replicas * shards * expert
    devices = data * tensor * context * pipeline
    micro, batch = _batch(words, devices, data, pipeline)
    return Settings(
        data=data,
        expert=expert,
        tensor=tensor,
        sequence=axes["tensor_sequence"] > 1,
        context=context,
        attention=_attention(words, axes, context),
        pipeline=pipeline,
        chunks=_chunks(words, num_layers, pipeline),
        zero_stage=zero,
        shard_within=within,
        schedule="" if pipeline == 1 else "gpipe",
        micro_batch=micro,
        global_batch=batch,
        recompute=_recompute(words),
        dtype=_dtype(words),
        seq_len=words.number("seq_len"),
    )


def _axes(words: Words) -> dict[str, int]:
    """The size of each axis, over all slices."""
    sizes: dict[str, dict[str, int]] = {"ici": {}, "dcn": {}}
    left: dict[str, int] = {}
    for where, found in sizes.items():
        for axis in _AXES:
            word = f"{where}_{axis}"
            value = words.value(word, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < -1 or value == 0:
                words.faults.append(f"{words.name(word)} = {value}: write -1, or 1 or more")
                value = 1
            found[axis] = value
        filled = [axis for axis, size in found.items() if size == -1]
        if len(filled) > 1:
            names = " and ".join(words.name(f"{where}_{axis}") for axis in filled)
            words.faults.append(f"{names} are -1: only one can be what is left")
        left[where] = math.prod(size for size in found.values() if size > 0)
    devices = words.num_devices
    if devices is None:
        slices = left["dcn"]
    elif -1 in sizes["ici"].values():
        slices = words.number("slices", left["dcn"]) or 1
    else:
        slices = max(1, devices // left["ici"])
    totals = {"ici": max(1, (devices or left["ici"] * slices) // slices), "dcn": slices}
    for where, found in sizes.items():
        for axis, size in found.items():
            if size == -1:
                found[axis] = max(1, totals[where] // left[where])
                words.assumed.append(
                    f"{words.name(f'{where}_{axis}')} = -1: {found[axis]}, what is left"
                )
    return {axis: sizes["ici"][axis] * sizes["dcn"][axis] for axis in _AXES}


def _attention(words: Words, axes: dict[str, int], context: int) -> str | None:
    if context == 1:
        return None
    said = words.text("attention", "ulysses" if axes["ulysses"] == context else "all_gather")
    if said not in _ATTENTION:
        words.lost.append(f"{words.name('attention')} = {said}: a plan takes the fastest way")
    return _ATTENTION.get(said)


def _chunks(words: Words, num_layers: int | None, pipeline: int) -> int:
    if pipeline == 1:
        return 1
    words.lost.append(
        "a circular pipeline of one program: judged as stages that run 1f1b, interleaved where"
        " layers repeat"
    )
    repeats = words.value("repeats", -1)
    if isinstance(repeats, int) and repeats > 0:
        return repeats
    each = words.degree("layers_per_chunk")
    return max(1, num_layers // (pipeline * each)) if num_layers else 1


def _batch(words: Words, devices: int, data: int, pipeline: int) -> tuple[int | None, int | None]:
    """Rows of a micro-batch on a data rank, and of a step."""
    each = words.value("device_batch")
    words.not_said("device_batch", each)
    if not isinstance(each, int | float) or isinstance(each, bool) or each <= 0:
        words.faults.append(f"{words.name('device_batch')} = {each}: write a number above 0")
        return None, None
    rows = each * devices
    if rows != int(rows) or int(rows) % data:
        near = max(1, round(rows / data)) * data
        words.faults.append(
            f"{words.name('device_batch')} = {each}: {rows:g} rows on {devices} devices cannot be"
            f" split over {data} data ranks: {near / devices:g} makes {near}"
        )
        return None, None
    accumulated = words.degree("accumulation")
    micro = int(rows) // data
    if pipeline > 1:
        said = words.value("pipeline_micro_batches", -1)
        parts = said if isinstance(said, int) and said > 0 else pipeline
        micro = max(1, micro // parts)
    return micro, int(rows) * accumulated


def _recompute(words: Words) -> str:
    said = words.text("recompute")
    words.not_said("recompute", said)
    found = MAXTEXT_RECOMPUTE.get(said)
    if found is None:
        words.lost.append(f"{words.name('recompute')} = {said}: read as full")
        return "block"
    if "offload" in said:
        words.lost.append(
            f"{words.name('recompute')} = {said}: what it keeps on the host stays on the devices in"
            " a plan, which takes more memory"
        )
    elif said not in _EXACT:
        words.assumed.append(f"{words.name('recompute')} = {said}: read as {found}")
    return found


def _dtype(words: Words) -> str:
    quantized = words.text("quantization")
    if quantized:
        if "fp8" not in quantized:
            words.lost.append(f"{words.name('quantization')} = {quantized}: read as fp8")
        return "fp8"
    return {"float32": "float32", "float16": "float16"}.get(words.text("dtype"), "bf16")


def write(
    settings: Settings,
    lose: Callable[[str], None],
    axes: Mapping[str, int],
    num_layers: int | None,
) -> list[tuple[str, Any]]:
    """The layout as pairs of a word and a value.

    Args:
        axes: sizes of mesh axes where rules say the splits; empty where degrees do.
    """
    data, expert = settings.data or 1, settings.expert
    ranks = data // expert
    shards = settings.shard_within or (ranks if settings.zero_stage >= 2 else 1)
    if settings.zero_stage == 2 and not axes:
        lose("zero2: MaxText splits parameters, too, or optimizer state alone; fsdp is written")
    sequence = settings.sequence
    pairs: list[tuple[str, Any]] = [
        ("ici_data", ranks // shards),
        ("ici_fsdp", shards),
        ("ici_tensor_sequence" if sequence else "ici_tensor", settings.tensor),
        ("ici_context", settings.context),
        ("ici_pipeline", settings.pipeline),
        ("ici_expert", expert),
        ("dcn_data", 1),
    ]
    if axes:
        pairs = [(f"ici_{axis}", axes.get(axis, 1)) for axis in _WRITTEN] + [("dcn_data", 1)]
    if settings.zero_stage == 1:
        pairs.append(("zero1", True))
    if settings.context > 1 and settings.attention:
        names = {each: name for name, each in _ATTENTION.items()}
        pairs.append(("attention", names[settings.attention]))
    devices = data * settings.model_ranks
    count = settings.num_micro_batches or 1
    rows = settings.global_batch or data
    if settings.pipeline > 1:
        pairs.append(("pipeline_micro_batches", count))
        if num_layers:
            each = num_layers // (settings.pipeline * settings.chunks)
            pairs.append(("layers_per_chunk", each))
        else:
            pairs.append(("repeats", settings.chunks))
            lose("pp: num_layers_per_pipeline_stage follows from the number of layers: set it")
        if settings.stage_layers:
            lose("stages of unequal layers: MaxText's are equal")
        if settings.schedule not in ("", "gpipe"):
            lose(f"schedule {settings.schedule}: MaxText runs a circular pipeline in one program")
        count = 1
    share = rows / (devices * count)
    pairs.append(("device_batch", int(share) if share == int(share) else share))
    if count > 1:
        pairs.append(("accumulation", count))
    if settings.seq_len:
        pairs.append(("seq_len", settings.seq_len))
    name, _, every = settings.recompute.partition(":")
    if every and int(every) > 1:
        lose(f"recompute {settings.recompute}: MaxText recomputes every layer alike")
    pairs.append(
        ("recompute", next(said for said, each in MAXTEXT_RECOMPUTE.items() if each == name))
    )
    if settings.dtype == "fp8":
        pairs.append(("quantization", "fp8"))
    elif settings.dtype:
        pairs.append(("dtype", {"bf16": "bfloat16"}.get(settings.dtype, settings.dtype)))
    return pairs
