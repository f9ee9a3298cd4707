"""Do sequences that are too long for a device have a plan that splits them, and is it faster than
tensor parallelism alone?

Llama-3-8B with cuDNN's attention and recomputation by block on 64 H100, predicted: nothing is run.

    python benchmarks/context_parallel.py [--quick]
"""

from __future__ import annotations

import time
from typing import Any

from _results import Report, options, say

import aliquot as aq
from aliquot import zoo
from aliquot.core import InfeasibleError, InputError
from aliquot.planners import method_by_name

CLUSTER = "8x8xH100"
CASES = ((131_072, 8), (131_072, 1), (1_048_576, 1))
TENSOR = ("tp:8", "megatron:dp8,tp8,fsdp")
CONTEXT = (
    "megatron:dp8,cp8,ring,fsdp",
    "megatron:dp8,cp8,ulysses,fsdp",
    "megatron:cp64,ring,fsdp",
    "megatron:cp16,tp4,ring,fsdp",
    "megatron:cp8,tp8,ring,fsdp",
    "shard",
)


def planned(length: int, batch: int, method: str) -> dict[str, Any]:
    """What is predicted of a method's plan, or why there is none."""
    cluster = aq.Cluster.preset(CLUSTER)
    work = zoo.build(
        "llama3-8b",
        batch,
        overrides={"seq_len": length},
        recompute="block",
        scan=True,
        device=cluster.device,
    )
    row: dict[str, Any] = {"tokens": length, "sequences": batch, "method": method}
    started_s = time.process_time()
    try:
        plan = aq.plan(
            work.train_step,
            work.state,
            work.batch,
            cluster=cluster,
            method=method_by_name(method),
            num_micro_batches=1,
        )
    except (InfeasibleError, InputError) as error:
        said = "does not fit" if isinstance(error, InfeasibleError) else "cannot be split"
        row |= {"step s": said, "GiB": "", "context": ""}
    else:
        found = plan.prediction
        row["step s"] = round(found.step_time_s, 3)
        row["GiB"] = round(found.peak_memory_bytes / 2**30, 1)
        row["context"] = "context parallel" in " ".join(str(plan).split())
    row["CPU s"] = round(time.process_time() - started_s, 1)
    say(str(row))
    return row


def main() -> int:
    """Run the benchmark."""
    chosen = options(__doc__)
    report = Report(
        name="context_parallel",
        question="Is Llama-3-8B with long sequences faster if these are split?",
        bar="for every length a plan that fits and splits the sequence, faster than those with"
        " tensor parallelism alone",
        method=f"Predicted step time and memory on {CLUSTER}, one micro-batch, bfloat16 with"
        " float32 state, recomputation by block; CPU s is for tracing and planning.",
    )
    rows, met = [], True
    for length, batch in CASES[1:2] if chosen.quick else CASES:
        # One sequence is not split over data ranks.
        names = [n for n in (*TENSOR, *CONTEXT) if batch > 1 or "dp8" not in n]
        case = [planned(length, batch, name) for name in names]
        seconds = {r["method"]: r["step s"] for r in case if isinstance(r["step s"], float)}
        tensor = min((seconds[name] for name in TENSOR if name in seconds), default=None)
        name = min((n for n in CONTEXT if n in seconds), key=seconds.__getitem__, default=None)
        title = f"{length} tokens, {batch} at once"
        if name is None:
            met = False
            continue
        report.summary[title] = (
            f"{seconds[name]:.2f} s ({name});"
            f" tensor parallelism alone {f'{tensor:.2f} s' if tensor else 'does not fit'}"
        )
        met &= tensor is None or seconds[name] < tensor
        rows += case
    report.tables = {"Plans": rows}
    return report.finish(chosen, met=met)


if __name__ == "__main__":
    raise SystemExit(main())
