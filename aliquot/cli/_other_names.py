"""Options by the names that other tools give them: what to type here instead."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from ._options_file import read_options, save_options

_NOT_NEEDED = "nothing in its place"

#: Names elsewhere, an option or argument of the verbs that are meant, and what to type there. The
#: first row that fits counts. `docs/coming-from.md` has each row.
OTHER_NAMES: Sequence[tuple[tuple[str, ...], str, str]] = (
    # Megatron-LM, DeepSpeed, torchrun.
    (
        ("--batch-size", "--batch", "--bs", "-b", "--global-batch-size"),
        "--global-batch",
        "--global-batch 64: sequences in a step, over all devices",
    ),
    (("--num-nodes",), "--nodes", "--nodes 2"),
    (("--num-gpus-per-node",), "--gpus-per-node", "--gpus-per-node 4"),
    (
        ("--gpus", "--num-gpus", "--ngpus", "--devices", "--num-devices", "--device-num")
        + ("--world-size", "--nproc-per-node", "--nnodes", "--num-nodes", "--num-gpus-per-node"),
        "--cluster",
        "--cluster 8xH100, or 4x8xH100 for four hosts",
    ),
    (("--device-num", "--num-devices", "--gpus"), "--devices", "--devices 4"),
    (("--micro-batch-size",), "--micro-batch-sizes", "--micro-batch-sizes 1,2,4,8"),
    (
        ("--gradient-accumulation-steps", "--grad-accum", "--accum", "--num-microbatches")
        + ("--microbatches", "--micro-batch-size", "--train-micro-batch-size"),
        "--micro-batches",
        "--micro-batches 4: parts of the batch, one after another",
    ),
    (
        ("-tp", "--tp", "--tensor-parallel-size", "--tensor-model-parallel-size")
        + ("--tensor-parallel",),
        "--method",
        "--method tp:2, or --method megatron:dp4,tp2 with data parallelism",
    ),
    (
        ("-pp", "--pp", "--pipeline-parallel-size", "--pipeline-model-parallel-size")
        + ("--pipeline-parallel",),
        "--stages",
        "--method pipeshard --stages 4",
    ),
    (("-dp", "--dp", "--ddp"), "--method", "--method dp"),
    (("--fsdp", "--zero3", "--full-shard"), "--method", "--method fsdp, which is ZeRO-3"),
    (("--zero", "--zero-stage"), "--method", "--method zero2 or zero3"),
    (
        ("--remat", "--checkpointing", "--activation-checkpointing", "--gradient-checkpointing")
        + ("--recompute-granularity",),
        "--recompute",
        "--recompute block: each block keeps its input alone",
    ),
    (
        ("--precision", "--bf16", "--fp16", "--mixed-precision", "--data-type"),
        "--dtype",
        "--dtype bf16, float16, float32 or float64",
    ),
    (("--memory", "--max-memory"), "--memory-limit", "--memory-limit 40GiB"),
    (("--memory-limit",), "--memory-limit-mb", "--memory-limit-mb 12000"),
    (("--sequence-length", "--seq-length", "--seqlen"), "--seq-len", "--seq-len"),
    (("-o", "--output", "--save", "--log-path", "--config-save-path"), "--out", "--out FILE"),
    (("--learning-rate",), "--lr", "--lr"),
    (("--model-name", "--prof-model-name"), "--model", "--model gpt"),
    (("--model-size", "--prof-model-size"), "--size", "--size 1_3B"),
    (
        ("--model", "--model-name", "--model-size", "--prof-model-name", "--prof-model-size"),
        "model",
        "the model itself, before the options: gpt-125m, or package.module:factory",
    ),
    (("--num-layer", "--num-layers"), "--set", "--set num_layers=4"),
    (("--d-model", "--hidden-size"), "--set", "--set hidden_size=4096"),
    (("--num-attention-heads",), "--set", "--set num_heads=32"),
    (("--train-iters",), "--steps", "--steps 5000"),
    (("--lr-decay-style",), "--decay", "--decay cosine"),
    (
        ("--lr-decay-iters",),
        "--decay",
        "--decay-steps 5000; by default a decay ends at the last step",
    ),
    (
        ("--lr-warmup-fraction", "--lr-warmup-iters"),
        "--warmup-steps",
        "--warmup-steps 0.01: a number of steps, or below 1 their share of all steps",
    ),
    (
        ("--lr", "--min-lr", "--warmup-steps", "--decay", "--decay-steps", "--steps")
        + ("--learning-rate", "--train-iters", "--lr-decay-style", "--lr-decay-iters")
        + ("--lr-warmup-fraction", "--lr-warmup-iters"),
        "--weight-decay",
        f"{_NOT_NEEDED}: a plan serves every learning rate and schedule; aliquot train takes them",
    ),
    (
        ("--data-path",),
        "--data",
        "--data PREFIX for its indexed files, --data 0.3:PREFIX for each of a mixture",
    ),
    (
        ("--data-impl",),
        "--data",
        f"{_NOT_NEEDED}: --data reads indexed files, written with mmap, and those of aliquot data",
    ),
    (
        ("--vocab-file", "--merge-file", "--tokenizer-type"),
        "--data",
        f"{_NOT_NEEDED}: what --data takes is tokenized, by aliquot data or by Megatron-LM's tools",
    ),
    (("--log-interval",), "--log-every", "--log-every 10"),
    (("--save-interval",), "--save-every", "--save-every 200"),
    (("--eval-interval",), "--eval-every", "--eval-every 200"),
    (("--eval-iters",), "--eval-steps", "--eval-steps 10"),
    (("--load",), "--resume", "--resume DIR; in its own folder a run goes on by itself"),
    (
        ("--node-rank", "--master-addr", "--master-port"),
        "--launch",
        "--launch ray, or --launch external where SLURM or MPI starts the processes",
    ),
    (
        ("--DDP-impl", "--distributed-backend"),
        "--launch",
        f"{_NOT_NEEDED}: XLA's collectives are used, which are NCCL's on GPUs",
    ),
    # Alpa.
    (("--suite",), "suite", "the suite itself: aliquot bench alpa gpt.perf_test_auto"),
    (
        ("--shard-only",),
        "suite",
        f"{_NOT_NEEDED}: a suite such as gpt.perf_test_fast_2d has cases without stages",
    ),
    (
        ("--local",),
        "suite",
        f"{_NOT_NEEDED}: without --launch one process has all devices of this machine",
    ),
    (("--exp-name",), "suite", "--out DIR: the folder of rows, plans and charts"),
    (
        ("--no-separate-process", "--disable-tqdm"),
        "suite",
        f"{_NOT_NEEDED}: each case that is run has a process, and a terminal alone shows progress",
    ),
    (
        ("--profile-stage-execution-time",),
        "suite",
        f"{_NOT_NEEDED}: aliquot explain PLAN --trace FILE writes the schedule of a plan in --out",
    ),
    (
        ("--max-comm-size-intra-node", "--max-data-size"),
        "--largest-in-host",
        "--largest-in-host 4GiB: bytes, and no exponent",
    ),
    (
        ("--max-comm-size-inter-node",),
        "--largest-between-hosts",
        "--largest-between-hosts 512MiB: bytes, and no exponent",
    ),
    (("--max-fail-retry",), "--retries", "--retries 5"),
    (
        ("--efa",),
        "--largest-between-hosts",
        f"{_NOT_NEEDED}: NCCL finds the network, and reads NCCL_SOCKET_IFNAME",
    ),
    (
        ("--filename", "--cache-filename", "--prof-path", "--prof-cache-file"),
        "--database",
        "--database FILE.sqlite, which also holds what a later run need not measure again",
    ),
    (
        ("--cluster-key",),
        "--database",
        f"{_NOT_NEEDED}: measurements are kept by kind and number of devices",
    ),
    # CFP.
    (
        ("--mode",),
        "--factors",
        "the verb: aliquot blocks analyze, aliquot blocks profile or aliquot blocks search",
    ),
    (
        ("--debug-dir",),
        "--factors",
        "--out of aliquot blocks analyze, or --database of aliquot blocks profile",
    ),
    (
        ("--parallel-block-opt",),
        "--factors",
        f"{_NOT_NEEDED}: these verbs always search ParallelBlocks",
    ),
    (
        ("--enum-and-bench", "--dump-comm-volume"),
        "--factors",
        "aliquot blocks enumerate: bytes moved by every combination, with --run 5 also seconds",
    ),
    # Aceso.
    (("--profiled-time-path",), "--database", "--database DIR"),
    (("--max-num-hops",), "--max-hops", "--max-hops 7"),
    (("--time-budget-total", "--time-budget-per-trial"), "--budget-s", "--budget-s 200"),
    (("--num-of-saved-configs",), "--top", "--top 3"),
    (("--config-suffix",), "--top", f"{_NOT_NEEDED}: --out names the file"),
    (
        ("--initial-point",),
        "--judge",
        f"{_NOT_NEEDED}: planners find where to start; aliquot aceso evaluate judges a file",
    ),
    (
        ("--max-num-trials", "--max-op-move-steps", "--start-num-stages", "--end-num-stages")
        + ("--finetune-after-trial", "--finetune-tp-dp-after-trial", "--sort-metric")
        + ("--op-group-size", "--init-dim", "--adaptive-hyper-parameters"),
        "--judge",
        f"{_NOT_NEEDED}: it is a setting of Aceso's search; see --planner",
    ),
    (
        ("--memory-pred-type", "--peak-mem-in-backward", "--predict-delta-time")
        + ("--support-comm-predict", "--consider-collective-memory", "--high-memory-rate"),
        "--judge",
        f"{_NOT_NEEDED}: it is a setting of Aceso's performance model; see --judge",
    ),
    (("--save-to-csv",), "configuration", "--json: time and memory of each stage"),
    (("--prof-repeat-times", "--prof-repeat-time"), "--repeats", "--repeats 40"),
    (("--prof-warmup-times", "--prof-warmup-time"), "--warm-up", "--warm-up 10"),
    (
        ("--prof-repeat-threshold", "--prof-warmup-threshold"),
        "--least-s",
        "--least-s 0.2: short programs are repeated until their runs took so long",
    ),
    (
        ("--prof-tp-size", "--prof-op-time-path", "--prof-mbs-list"),
        "--retries",
        f"{_NOT_NEEDED}: all sizes that splits of the model leave on a device are measured",
    ),
    (
        ("--flexpipe-config",),
        "--plan",
        "--plan plan.json, written by aliquot aceso import CONFIG --out plan.json",
    ),
)


class Verb(TyperCommand):
    """A verb that knows what other tools call its options, and lists its own in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; one of another tool ends the process with what to type here."""
        refuse_other_names(ctx, args)
        _refuse_without_dashes(ctx, args)
        if "--options" not in _own_names(ctx):
            return super().parse_args(ctx, list(_config_as_model(ctx, args)))
        own = _own_names(ctx)
        read_options(ctx, args, lambda key: _instead(f"--{key}", own))
        rest = super().parse_args(ctx, list(_config_as_model(ctx, args)))
        save_options(ctx)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the verb's own options, and those of each group under its title."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            title = getattr(parameter, "rich_help_panel", None) or "Options"
            is_argument = parameter.param_type_name == "argument"
            sections.setdefault("Arguments" if is_argument else title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def refuse_other_names(ctx: typer.Context, args: Sequence[str]) -> None:
    """End the process if options are called otherwise here, and say how."""
    own = _own_names(ctx)
    typed: dict[str, list[str]] = {}
    for arg in args:
        # What follows belongs to another command.
        if arg == "--":
            break
        name = arg.split("=", 1)[0]
        if name.startswith("-") and (instead := _instead(name, own)):
            typed.setdefault(instead, []).append(name)
    if typed:
        faults = [
            f"There is no option {' or '.join(dict.fromkeys(names))}. Type {instead}."
            for instead, names in typed.items()
        ]
        ctx.fail("\n  ".join(faults))


def _refuse_without_dashes(ctx: typer.Context, args: Sequence[str]) -> None:
    """End the process if a command that a verb starts has options, and `--` does not say where it
    begins.
    """
    own = _own_names(ctx)
    if "command" not in own or "--" in args:
        return
    # Places of words that are neither options of the verb nor their values.
    place, words = 0, list[int]()
    while place < len(args) and len(words) < 2:
        if args[place].startswith("-"):
            place += 1 if "=" in args[place] else 2
        else:
            words.append(place)
            place += 1
    if len(words) < 2:
        return
    before, command = args[: words[1]], args[words[1] :]
    if any(a.startswith("-") and a.partition("=")[0] not in own for a in command):
        typed = f"{ctx.command_path} {shlex.join(before)} -- {shlex.join(command)}"
        ctx.fail(f"Put -- before the command, which has options of its own. Type: {typed}")


def _instead(typed: str, own: set[str]) -> str:
    """What to type in place of an option of another tool or verb; nothing if it is none."""
    # Python scripts often have underscores where options here have hyphens.
    name = typed.replace("_", "-")
    if typed in own:
        return ""
    rows = (text for names, here, text in OTHER_NAMES if name in names and here in own)
    return next(rows, "")


def _config_as_model(ctx: typer.Context, args: Sequence[str]) -> Iterator[str]:
    """The arguments with `--config FILE` as what it is: the model itself."""
    own = _own_names(ctx)
    if "model" not in own or "--config" in own:
        yield from args
        return
    for arg in args:
        if arg.startswith("--config="):
            yield arg.partition("=")[2]
        elif arg != "--config":
            yield arg


def _own_names(ctx: typer.Context) -> set[str]:
    """The options of a verb, and the names of its arguments."""
    return set().union(*(p.opts + p.secondary_opts for p in ctx.command.params))
