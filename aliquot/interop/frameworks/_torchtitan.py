"""torchtitan: the TOML of 2025, which counts rows, and dataclasses since, which count tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._settings import Settings, even_layers, is_even
from ._table import Table, Words, model_named

_SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "gpipe": "gpipe",
    "zbvzerobubble": "zero-bubble",
    "interleavedzerobubble": "zero-bubble",
    "dualpipev": "zero-bubble",
}
_WRITTEN = {"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B", "gpipe": "GPipe"}
_ONE_STAGE = ("1f1b", "gpipe")


def model(words: Words) -> dict[str, Any]:
    """Fields of the zoo's configuration."""
    names = [str(words.value(word, "")) for word in ("model", "flavor", "like")]
    found = (
        model_named(names[0] + names[1])
        or model_named(names[0])
        or model_named(names[2])
        or model_named(names[2] + names[1])
    )
    if not found and any(names) and names[0] != "planned":
        words.unknown.append(
            f"{words.name('model')} {' '.join(filter(None, names))}: no model of the zoo has such a"
            " name"
        )
    words.not_said("seq_len", words.number("seq_len"))
    return {**found, "seq_len": words.number("seq_len")}


def read(words: Words, num_layers: int | None) -> Settings:
    """The layout that a configuration says, of a model of so many layers."""
    tensor, context = words.degree("tensor"), words.degree("context")
    pipeline, expert = words.degree("pipeline"), words.degree("expert")
    replicas, shards = words.degree("replicas"), words.value("shards", -1)
    ranks = tensor * context * pipeline
    data = replicas * shards if isinstance(shards, int) and shards > 0 else None
    if data is None and words.num_devices and words.num_devices % (ranks * replicas) == 0:
        data = words.num_devices // ranks
    if isinstance(shards, int) and shards == 0 or not isinstance(shards, int):
        words.faults.append(f"{words.name('shards')} = {shards}: write -1, or 1 or more")
    sequence = tensor > 1 and words.flag("sequence", default=True)
    if tensor > 1 and not sequence:
        words.advice.append(
            f"{words.name('sequence')} is off: every tensor rank repeats the norms and keeps whole"
            " residual streams: leave it on"
        )
    inner = data // replicas if data else None
    zero = _zero(words, pipeline) if inner != 1 or context > 1 else 0
    within = inner if zero >= 2 and replicas > 1 and inner else None
    if within and ranks * expert > 1:
        words.lost.append(
            f"{words.name('replicas')} = {replicas}: the state is split over all data ranks in a"
            f" plan, not in {replicas} groups, which takes less memory"
        )
        within = None
    schedule, chunks, layers = _stages(words, pipeline, num_layers)
    seq_len = words.number("seq_len") or 2048
    micro, batch = _batch(words, pipeline, data, seq_len)
    attention = None
    if context > 1:
        attention = "ring" if words.text("attention", "allgather") == "alltoall" else "gather"
    return Settings(
        data=data,
        expert=expert,
        tensor=tensor,
        sequence=sequence,
        context=context,
        attention=attention,
        pipeline=pipeline,
        chunks=chunks,
        zero_stage=zero,
        shard_within=within,
        stage_layers=layers,
        schedule=schedule,
        micro_batch=micro,
        global_batch=batch,
        recompute=_recompute(words),
        dtype=_dtype(words),
        seq_len=seq_len,
    )


def _zero(words: Words, pipeline: int) -> int:
    reshard = words.text("reshard", "default")
    if reshard == "default" and pipeline > 1:
        words.assumed.append(
            f"{words.table.name_of('reshard')} = default: with a pipeline parameters stay gathered"
            " after the forward pass, as in zero2"
        )
    return 2 if reshard == "never" or (reshard == "default" and pipeline > 1) else 3


def _stages(
    words: Words, pipeline: int, num_layers: int | None
) -> tuple[str, int, tuple[int, ...]]:
    """The schedule, chunks of each stage, and the layers of chunks where they are unequal."""
    if pipeline == 1:
        return "", 1, ()
    said = words.text("schedule")
    words.not_said("schedule", said)
    schedule = _SCHEDULES.get(said)
    if schedule is None:
        words.lost.append(f"{words.name('schedule')} = {said}: read as 1f1b")
        schedule = "1f1b"
    elif schedule == "zero-bubble":
        words.lost.append(f"{words.name('schedule')} = {said}: judged as interleaved 1f1b")
    if parts := words.value("parts"):
        layers: tuple[int, ...] = ()
        for part in parts:
            if isinstance(part, list):
                layers += (sum(str(module).startswith("layers.") for module in part),)
        if len(layers) % pipeline:
            words.faults.append(
                f"{words.name('parts')} has {len(layers)} parts, no multiple of {pipeline} stages"
            )
        return schedule, max(1, len(layers) // pipeline), () if is_even(layers) else layers
    chunks = 1 if said in _ONE_STAGE else 2
    less = [int(words.value(word, 1) or 0) for word in ("first_less", "last_less")]
    if num_layers is None:
        return schedule, chunks, ()
    each = words.number("layers_per_chunk")
    if each:
        chunks = max(1, -(-(num_layers + sum(less)) // each) // pipeline)
    spread = list(even_layers(num_layers + sum(less), chunks * pipeline))
    spread[0] -= less[0]
    spread[-1] -= less[1]
    if min(spread) < 0:
        words.faults.append(f"{num_layers} layers are too few for {chunks * pipeline} chunks")
        return schedule, chunks, ()
    if not is_even(spread) and not {"first_less", "last_less"} & set(words.said):
        words.not_said(
            "first_less", less[0], "the first stage has less layers, and so has the last"
        )
    return schedule, chunks, () if is_even(spread) else tuple(spread)


def _batch(
    words: Words, pipeline: int, data: int | None, seq_len: int
) -> tuple[int | None, int | None]:
    """Rows of a micro-batch on a data rank, and of a step."""
    if "local_tokens" in words.table.layout.values():
        tokens = words.number("local_tokens") or seq_len
        words.not_said("local_tokens", tokens)
        if tokens % seq_len:
            words.faults.append(
                f"{words.name('local_tokens')} = {tokens} is no multiple of"
                f" {words.name('seq_len')} = {seq_len}"
            )
        micro, step = max(1, tokens // seq_len), words.value("global_tokens", -1)
        if isinstance(step, int) and step > 0:
            return micro, max(1, step // seq_len)
        parts = words.degree("pipeline_micro_batches") if pipeline > 1 else 1
        return micro, micro * parts * data if data else None
    local = words.number("local_batch") or 1
    words.not_said("local_batch", local)
    micro = min(local, words.degree("pipeline_micro_batch")) if pipeline > 1 else local
    step = words.value("global_batch", -1)
    if isinstance(step, int) and step > 0:
        return micro, step
    return micro, local * data if data else None


def _recompute(words: Words) -> str:
    said = words.text("recompute")
    words.not_said("recompute", said)
    if said.startswith("full"):
        return "block"
    if said in ("none", ""):
        return "none"
    every = str(words.value("recompute_every", "op"))
    if said == "selective" and every.isdecimal() and int(every) > 0:
        return "block" if every == "1" else f"block:{every}"
    words.assumed.append(
        f"{words.name('recompute')} = {said}: read as minimal, which keeps the results of products"
        " with weights"
    )
    return "minimal"


def _dtype(words: Words) -> str:
    converters = str(words.value("converters", "")).lower()
    if any(each in converters for each in ("float8", "mx", "fp4")):
        words.assumed.append(
            f"{words.name('converters')}: read as fp8 with scales from the last step's maxima."
            " Scales of this step, by tensor or by row, read every input once more before its"
            " product, and take longer"
        )
        return "fp8"
    return {"float32": "float32"}.get(words.text("dtype", "bfloat16"), "bf16")


def write(
    settings: Settings, lose: Callable[[str], None], table: Table, num_layers: int | None
) -> list[tuple[str, Any]]:
    """The layout as pairs of a word and a value, in the words of a version."""
    words = set(table.layout.values())
    in_tokens, has_classes = "local_tokens" in words, "sequence" in words
    data = settings.data or 1
    shards = settings.shard_within or (data if settings.zero_stage else 1)
    pairs: list[tuple[str, Any]] = [
        ("replicas", data // shards),
        ("shards", shards),
        ("tensor", settings.tensor),
        ("context", settings.context),
        ("pipeline", settings.pipeline),
        ("expert", settings.expert),
    ]
    if settings.zero_stage in (1, 2):
        pairs.append(("reshard", "never"))
        if settings.zero_stage == 1:
            lose("zero1: torchtitan splits gradients, too, as zero2 does")
    elif settings.zero_stage == 3 and settings.pipeline > 1:
        pairs.append(("reshard", "always"))
    if settings.zero_stage == 0 and settings.context > 1:
        lose("a whole state on each context rank: torchtitan splits it over them")
    if settings.tensor > 1 and has_classes:
        pairs.append(("sequence", settings.sequence))
    elif settings.tensor > 1 and not settings.sequence:
        lose("tp without sp: torchtitan 0.2 has sequence parallelism with tensor parallelism")
    if settings.context > 1 and settings.attention not in (None, "gather"):
        if settings.attention == "ring" and not has_classes:
            pairs.append(("attention", "alltoall"))
        else:
            lose(f"context parallelism by {settings.attention}: torchtitan gathers keys and values")
    if settings.pipeline > 1:
        schedule = _WRITTEN.get(settings.schedule)
        if schedule is None:
            lose(f"schedule {settings.schedule}: written as 1F1B")
            schedule = "1F1B"
        pairs.append(("schedule", schedule))
        if settings.stage_layers:
            pairs.append(("parts", _parts(settings.stage_layers)))
        else:
            pairs += [("first_less", 0), ("last_less", 0)]
            if num_layers and settings.chunks > 2:
                each = num_layers // (settings.pipeline * settings.chunks)
                pairs.append(("layers_per_chunk", each))
    micro, batch = settings.micro_batch or 1, settings.global_batch or data
    seq_len = settings.seq_len or 2048
    if in_tokens:
        pairs += [("local_tokens", micro * seq_len), ("global_tokens", batch * seq_len)]
        if settings.pipeline > 1:
            pairs.append(("pipeline_micro_batches", batch // (micro * data)))
    elif settings.pipeline > 1:
        pairs += [("local_batch", batch // data), ("pipeline_micro_batch", micro)]
        pairs.append(("global_batch", batch))
    else:
        pairs += [("local_batch", micro), ("global_batch", batch)]
    # A plan's step is always compiled.
    pairs += [("seq_len", seq_len), ("compiled", True)]
    return (
        pairs
        + _recompute_pairs(settings, lose, has_classes)
        + _dtype_pairs(settings, lose, has_classes)
    )


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{first + i}" for i in range(count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute_pairs(
    settings: Settings, lose: Callable[[str], None], has_classes: bool
) -> list[tuple[str, Any]]:
    name, _, every = settings.recompute.partition(":")
    mode = {"none": "none", "block": "full", "minimal": "selective"}.get(name)
    if mode is None:
        lose(f"recompute {settings.recompute}: written as full")
        mode = "full"
    if every and int(every) > 1:
        if has_classes:
            lose(f"recompute {settings.recompute}: written as full, of every layer")
            return [("recompute", "full")]
        return [("recompute", "selective"), ("recompute_every", every)]
    op = mode == "selective" and not has_classes
    return [("recompute", mode), *([("recompute_every", "op")] if op else [])]


def _dtype_pairs(
    settings: Settings, lose: Callable[[str], None], has_classes: bool
) -> list[tuple[str, Any]]:
    if settings.dtype == "fp8":
        if has_classes:
            lose("dtype fp8: add Float8LinearConverter.Config() to the converters of model_spec")
            return [("dtype", "bfloat16")]
        return [("dtype", "bfloat16"), ("converters", ["float8"])]
    if settings.dtype in ("bf16", "float32", ""):
        return [("dtype", "float32" if settings.dtype == "float32" else "bfloat16")]
    lose(f"dtype {settings.dtype}: torchtitan computes in bfloat16 or float32")
    return [("dtype", "bfloat16")]
