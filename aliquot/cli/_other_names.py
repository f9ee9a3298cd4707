"""Options by the names that other tools give them: what to type here instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

_BATCH = ("--global-batch", "--global-batch 64: sequences in a step, over all devices")
_DEVICES = ("--cluster", "--cluster 8xH100, or 4x8xH100 for four hosts")
_ACCUMULATION = ("--micro-batches", "--micro-batches 4: parts of the batch, one after another")
_TENSOR = ("--method", "--method tp:2, or --method megatron:dp4,tp2 with data parallelism")
_PIPELINE = ("--stages", "--method pipeshard --stages 4")
_FSDP = ("--method", "--method fsdp, which is ZeRO-3")
_RECOMPUTE = ("--recompute", "--recompute block: each block keeps its input alone")
_DTYPE = ("--dtype", "--dtype bf16, float16, float32 or float64")
_OUT = ("--out", "--out FILE")

#: For each name elsewhere: the option here, and what to type.
OTHER_NAMES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("--batch-size", "--batch", "--bs", "-b", "--global-batch-size"), _BATCH),
    **dict.fromkeys(("--gpus", "--num-gpus", "--ngpus", "--devices", "--num-devices"), _DEVICES),
    **dict.fromkeys(("--world-size", "--nproc-per-node", "--nnodes", "--num-nodes"), _DEVICES),
    **dict.fromkeys(("--gradient-accumulation-steps", "--grad-accum", "--accum"), _ACCUMULATION),
    **dict.fromkeys(("--num-microbatches", "--microbatches"), _ACCUMULATION),
    **dict.fromkeys(("--micro-batch-size", "--train-micro-batch-size"), _ACCUMULATION),
    **dict.fromkeys(("-tp", "--tp", "--tensor-parallel-size"), _TENSOR),
    **dict.fromkeys(("--tensor-model-parallel-size", "--tensor-parallel"), _TENSOR),
    **dict.fromkeys(("-pp", "--pp", "--pipeline-parallel-size"), _PIPELINE),
    **dict.fromkeys(("--pipeline-model-parallel-size", "--pipeline-parallel"), _PIPELINE),
    **dict.fromkeys(("-dp", "--dp", "--ddp"), ("--method", "--method dp")),
    **dict.fromkeys(("--fsdp", "--zero3", "--full-shard"), _FSDP),
    **dict.fromkeys(("--zero", "--zero-stage"), ("--method", "--method zero2 or zero3")),
    **dict.fromkeys(("--remat", "--checkpointing", "--activation-checkpointing"), _RECOMPUTE),
    **dict.fromkeys(("--gradient-checkpointing", "--recompute-granularity"), _RECOMPUTE),
    **dict.fromkeys(("--precision", "--bf16", "--fp16", "--mixed-precision"), _DTYPE),
    **dict.fromkeys(("--memory", "--max-memory"), ("--memory-limit", "--memory-limit 40GiB")),
    **dict.fromkeys(("--sequence-length", "--seq-length", "--seqlen"), ("--seq-len", "--seq-len")),
    **dict.fromkeys(("-o", "--output", "--save"), _OUT),
    "--learning-rate": ("--lr", "--lr"),
    "--model": ("", "the model itself, before the options: gpt-125m, or package.module:factory"),
}


class Verb(TyperCommand):
    """A verb that knows what other tools call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; one of another tool ends the process with what to type here."""
        refuse_other_names(ctx, args)
        return super().parse_args(ctx, list(_config_as_model(ctx, args)))


def refuse_other_names(ctx: typer.Context, args: Sequence[str]) -> None:
    """End the process if an option is called otherwise here, and say how."""
    own, takes_model = _own_names(ctx), _takes_model(ctx)
    for arg in args:
        # What follows belongs to another command.
        if arg == "--":
            return
        name = arg.split("=", 1)[0]
        here, instead = OTHER_NAMES.get(name, ("", ""))
        if instead and name not in own and (here in own if here else takes_model):
            ctx.fail(f"There is no option {name}. Type {instead}.")


def _config_as_model(ctx: typer.Context, args: Sequence[str]) -> Iterator[str]:
    """The arguments with `--config FILE` as what it is: the model itself."""
    if not _takes_model(ctx) or "--config" in _own_names(ctx):
        yield from args
        return
    for arg in args:
        if arg.startswith("--config="):
            yield arg.partition("=")[2]
        elif arg != "--config":
            yield arg


def _own_names(ctx: typer.Context) -> set[str]:
    return {name for p in ctx.command.params for name in (*p.opts, *p.secondary_opts)}


def _takes_model(ctx: typer.Context) -> bool:
    return any(p.name == "model" and p.param_type_name == "argument" for p in ctx.command.params)
