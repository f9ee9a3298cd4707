"""accelerate's configuration and DeepSpeed's: ZeRO, with tensor and sequence parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ._settings import Settings
from ._table import Words

_STRATEGIES = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
    "5": 2,
}
_DTYPES = {"bf16": "bf16", "fp16": "float16", "fp8": "fp8", "no": "float32", "": "float32"}
DEVICES_OF_A_HOST = 8


def model(words: Words) -> dict[str, Any]:
    """Fields of the zoo's configuration: no more than a length; `config.json` says the model."""
    return {"seq_len": words.number("seq_len")} if "seq_len" in words.said else {}


def read_accelerate(words: Words) -> Settings:
    """The layout that accelerate's configuration says."""
    tensor, ring = words.degree("tensor"), words.degree("context")
    ulysses = words.degree("ulysses")
    if ring > 1 and ulysses > 1:
        words.faults.append(
            f"{words.name('context')} and {words.name('ulysses')} exclude each other"
        )
    ranks = tensor * ring * ulysses
    devices = words.num_devices or words.number("world")
    replicas, shards = words.degree("replicas"), words.number("shards")
    data = replicas * (shards or 1) if {"replicas", "shards"} & set(words.said) else None
    if data is None and devices and devices % ranks == 0:
        data = devices // ranks
    zero, within = _zero(words, data, replicas, ranks)
    if tensor > 1:
        words.assumed.append(f"{words.name('tensor')} = {tensor}: without sequence parallelism")
    attention = None
    if ring > 1:
        said = words.text("attention", "allgather")
        attention = {"allgather": "gather", "alltoall": "ring"}.get(said, "gather")
    elif ulysses > 1:
        attention = "ulysses"
    dtype = words.text("dtype")
    if dtype not in _DTYPES:
        words.faults.append(f"{words.name('dtype')} = {dtype}: {', '.join(filter(None, _DTYPES))}")
    return Settings(
        data=data,
        tensor=tensor,
        context=ring * ulysses,
        attention=attention,
        zero_stage=zero,
        shard_within=within,
        num_micro_batches=words.number("accumulation"),
        recompute="block" if words.flag("recompute") else "none",
        dtype=_DTYPES.get(dtype, "bf16"),
        seq_len=words.number("seq_len"),
    )


def _zero(words: Words, data: int | None, replicas: int, ranks: int) -> tuple[int, int | None]:
    kind = words.text("kind", "fsdp")
    if kind == "deepspeed":
        stage = words.value("zero_stage", 0)
        if stage not in (0, 1, 2, 3):
            words.faults.append(f"{words.name('zero_stage')} = {stage}: write 0, 1, 2 or 3")
            stage = 0
        return int(stage), None
    if kind == "megatron_lm":
        words.lost.append(
            f"{words.name('kind')} = MEGATRON_LM: Megatron's arguments say the layout: give these"
        )
    if kind != "fsdp":
        return 0, None
    said = words.value("reshard", words.value("sharding", True))
    named = _STRATEGIES.get(str(said).lower().removeprefix("sharding_strategy."))
    # With FSDP2 the setting is a truth value, and its older name may hold a strategy.
    zero = named if named is not None else 3 if words.flag("reshard", default=True) else 2
    within = None
    if replicas > 1 and data and data % replicas == 0:
        within = data // replicas
        if within == 1:
            words.faults.append(
                f"{words.name('replicas')} = {replicas} with {words.table.name_of('shards')} 1:"
                " accelerate refuses it with FSDP: use shards of 2 or more, or MULTI_GPU"
            )
    elif "hybrid" in str(said).lower() and data:
        within = min(data, DEVICES_OF_A_HOST)
        words.assumed.append(f"{said}: groups of {within}, the devices of a host")
    if within == data:
        within = None
    if within and (ranks > 1 or zero < 2):
        words.lost.append(
            f"{words.name('replicas')} = {replicas}: the state is split over all data ranks in a"
            f" plan, not in groups of {within}, which takes less memory"
        )
        within = None
    return zero, within


def read_deepspeed(words: Words) -> Settings:
    """The layout that DeepSpeed's configuration says."""
    tensor, ulysses = words.degree("tensor"), words.degree("ulysses")
    if tensor > 1 and ulysses > 1:
        words.faults.append(
            f"{words.name('tensor')} and {words.name('ulysses')} exclude each other"
        )
    stage = words.value("zero_stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        words.faults.append(f"{words.name('zero_stage')} = {stage}: write 0, 1, 2 or 3")
        stage = 0
    data = None
    if words.num_devices and words.num_devices % (tensor * ulysses) == 0:
        data = words.num_devices // (tensor * ulysses)
    within = words.number("shard_within") if words.value("shard_within", -1) != -1 else None
    if within:
        words.advice.append(
            f"{words.name('shard_within')}: DeepSpeed 0.19.8 refuses it, as MiCS was removed; read"
            " as earlier versions have it"
        )
    if within and (stage != 3 or tensor * ulysses > 1):
        words.lost.append(
            f"{words.name('shard_within')} = {within}: the state is split over all data ranks"
        )
        within = None
    if (words.number("hpz") or 1) > 1:
        words.lost.append(
            f"{words.name('hpz')} = {words.number('hpz')}: a second copy of the parameters on each"
            " group of ranks, which takes more memory and gathers inside it, is not in a plan"
        )
    sizes = [words.number(word) for word in ("global_batch", "micro_batch", "accumulation")]
    batch, micro, count = sizes
    if data and all(sizes) and batch != (micro or 1) * (count or 1) * data:
        words.faults.append(
            f"{words.name('global_batch')} = {batch} is not {words.name('micro_batch')} = {micro} x"
            f" {words.name('accumulation')} = {count} x {data} data ranks"
        )
    if micro and not batch and data:
        batch = micro * (count or 1) * data
    if batch and data and not micro and batch % ((count or 1) * data) == 0:
        micro = batch // ((count or 1) * data)
    words.assumed.append(
        "recomputation and sequence length are not in the file: --recompute and --seq-len say them"
    )
    return Settings(
        data=data,
        tensor=tensor,
        context=ulysses,
        attention="ulysses" if ulysses > 1 else None,
        zero_stage=int(stage),
        shard_within=None if within == data else within,
        micro_batch=micro,
        global_batch=batch,
        num_micro_batches=count,
        dtype="bf16" if words.flag("bf16") else "float16" if words.flag("fp16") else "float32",
    )


def sayable(settings: Settings, who: str, lose: Callable[[str], None]) -> Settings:
    """The settings on the same devices without what neither can be told."""
    if settings.pipeline > 1:
        data = (settings.data or 1) * settings.pipeline
        lose(
            f"pp{settings.pipeline}: {who}'s file has no pipeline: the devices of its stages are"
            f" {data} data ranks"
        )
        settings = replace(_divided(settings, data, lose), pipeline=1, chunks=1)
    if settings.expert > 1:
        lose(f"ep{settings.expert}: {who}'s file has no expert parallelism")
    if settings.sequence:
        lose(f"sp: {who} has no sequence parallelism over tensor ranks")
    return settings


def _divided(settings: Settings, data: int, lose: Callable[[str], None]) -> Settings:
    """With the batch over this many data ranks, in micro-batches of no more rows than before."""
    batch = settings.global_batch or data
    rows = math.gcd(batch // data, settings.micro_batch or 1) or 1
    count = max(1, batch // (data * rows))
    if data * rows * count != batch:
        lose(f"a batch of {batch}: {data} data ranks do not divide it, {data * rows * count} do")
    return replace(
        settings,
        data=data,
        micro_batch=rows,
        num_micro_batches=count,
        global_batch=data * rows * count,
    )


def write_accelerate(settings: Settings, lose: Callable[[str], None]) -> list[tuple[str, Any]]:
    """The layout as pairs of a word and a value; `sayable` settings."""
    data = settings.data or 1
    pairs: list[tuple[str, Any]] = []
    name, _, every = settings.recompute.partition(":")
    if name not in ("none", "block") or every:
        lose(f"recompute {settings.recompute}: accelerate recomputes every layer, or none")
    hybrid = settings.tensor * settings.context > 1 or bool(settings.shard_within)
    if settings.zero_stage == 0:
        pairs.append(("kind", "MULTI_GPU"))
        shards = 1
    else:
        shards = settings.shard_within or data
        pairs += [
            ("kind", "FSDP"),
            ("fsdp_version", 2),
            ("reshard", settings.zero_stage == 3),
            ("recompute", name != "none"),
        ]
        if settings.zero_stage == 1:
            lose("zero1: FSDP2 splits gradients, too, as zero2 does")
    if settings.zero_stage == 0 and name != "none":
        lose(f"recompute {settings.recompute}: without FSDP the model's own code recomputes")
    if hybrid:
        pairs += [("replicas", data // shards), ("shards", shards)]
    if settings.tensor > 1:
        pairs.append(("tensor", settings.tensor))
    if settings.context > 1 and settings.attention == "ulysses":
        pairs.append(("ulysses", settings.context))
        lose("context parallelism by ulysses: accelerate has it with DeepSpeed, not with FSDP2")
    elif settings.context > 1:
        pairs.append(("context", settings.context))
        pairs.append(("attention", "alltoall" if settings.attention == "ring" else "allgather"))
    dtype = next((name for name, each in _DTYPES.items() if each == settings.dtype), "bf16")
    devices = data * settings.tensor * settings.context
    lose(
        f"a batch of {settings.global_batch} in micro-batches of {settings.micro_batch} rows and"
        f" sequences of {settings.seq_len}: set them in the script, as"
        f" per_device_train_batch_size={settings.micro_batch} and"
        f" gradient_accumulation_steps={settings.num_micro_batches}"
    )
    return [*pairs, ("dtype", dtype), ("world", devices)]


def write_deepspeed(settings: Settings, lose: Callable[[str], None]) -> list[tuple[str, Any]]:
    """The layout as pairs of a word and a value; `sayable` settings."""
    pairs: list[tuple[str, Any]] = [("zero_stage", settings.zero_stage)]
    if settings.shard_within:
        lose(
            f"the state in groups of {settings.shard_within}: DeepSpeed 0.19 splits it over all"
            " data ranks"
        )
    if settings.tensor > 1:
        pairs.append(("tensor", settings.tensor))
    if settings.context > 1:
        pairs.append(("ulysses", settings.context))
        if settings.attention != "ulysses":
            lose(f"context parallelism by {settings.attention}: DeepSpeed's is ulysses")
        if settings.tensor > 1:
            lose("tp beside cp: DeepSpeed refuses tensor parallelism beside Ulysses")
    if settings.recompute != "none":
        lose(f"recompute {settings.recompute}: the model's own code recomputes")
    pairs += [
        ("global_batch", settings.global_batch),
        ("micro_batch", settings.micro_batch),
        ("accumulation", settings.num_micro_batches or 1),
    ]
    if settings.dtype in ("bf16", "float16"):
        pairs.append(("bf16" if settings.dtype == "bf16" else "fp16", True))
    elif settings.dtype == "fp8":
        lose("dtype fp8: DeepSpeed's file has bf16, fp16 or float32; bf16 is written")
        pairs.append(("bf16", True))
    if settings.seq_len:
        lose(f"sequences of {settings.seq_len} tokens: set them in the script")
    return pairs
