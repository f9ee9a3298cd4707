"""Plans of what people train today, as `aliquot plan` is asked for them, and what the compiler says
of each: long sequences over context-parallel devices, experts, interleaved pipelines, sequence
parallelism, 8-bit floats, state split over devices, and recomputed chunks.

`aliquot plan` and `aliquot verify` run as processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _memory_cases import draw
from _results import Journal

from aliquot.cluster import DEVICES
from aliquot.core import RECOMPUTE

# By name: whether errors of the plan were looked into while the model found its form, and the
# command's words.
PLANS: dict[str, tuple[str, str]] = {
    "ring attention": (
        "reported",
        "llama3-8b --cluster 8xH100 --global-batch 2 --seq-len 65536 --scan"
        " --method megatron:dp2,cp4,ring,fsdp",
    ),
    "latent attention, small experts": (
        "reported",
        "deepseek-v2-lite --cluster 8xH100 --global-batch 16 --scan --method megatron:ep8",
    ),
    "8-bit floats": (
        "seen",
        "llama3-8b --cluster 8xH100 --global-batch 16 --seq-len 8192 --dtype fp8"
        " --recompute save_qkv --scan --method megatron:dp4,tp2,sp,zero2 --micro-batches 2",
    ),
    "experts in a pipeline": (
        "reported",
        "qwen3-30b-a3b --cluster 2x8xH100 --global-batch 64 --scan --method megatron:ep8,pp2"
        " --micro-batches 8",
    ),
    "sequence parallelism, written out": (
        "seen",
        "qwen3-14b --cluster 8xH100 --global-batch 16 --method megatron:dp2,tp4,sp,zero1"
        " --micro-batches 2",
    ),
    "interleaved pipeline": (
        "seen",
        "llama-13b --cluster 8xH100 --global-batch 32 --seq-len 4096 --scan"
        " --method megatron:dp1,tp2,pp4,vpp2,sp --micro-batches 8",
    ),
    "ring attention in a pipeline": (
        "reported",
        "llama3-8b --cluster 8xA100-80GB --global-batch 4 --seq-len 32768 --scan"
        " --method megatron:cp4,pp2,ring,zero1 --micro-batches 4",
    ),
    "interleaved pipeline, recomputed chunks, written out": (
        "seen",
        "llama3-8b --cluster 8xA100-80GB --global-batch 32 --seq-len 4096 --recompute auto"
        " --method megatron:dp2,pp4,vpp2 --micro-batches 8 --memory-limit 64GiB",
    ),
    "large experts in a pipeline": (
        "reported",
        "mixtral-8x7b --cluster 4x8xA100-80GB --global-batch 64 --scan --method megatron:ep8,pp4"
        " --micro-batches 8",
    ),
    "Ulysses": (
        "seen",
        "qwen3-8b --cluster 8xA100-80GB --global-batch 2 --seq-len 32768 --scan"
        " --method megatron:dp2,cp4,ulysses,fsdp",
    ),
    "experts": (
        "seen",
        "gpt-oss-like-20b --cluster 8xA100-80GB --global-batch 16 --scan --method megatron:ep8",
    ),
    "tensor parallelism, split gradients": (
        "reported",
        "llama-2-13b --cluster 8xA100-80GB --global-batch 16 --scan"
        " --method megatron:dp2,tp4,zero2 --micro-batches 2",
    ),
}
# Unless the words say otherwise.
_DEFAULTS = {"--recompute": "block", "--micro-batches": "1"}
# What drawn plans are of, into which nobody looked: pipelines with sequence parallelism, and ways
# to recompute. `rows` are the sequences of a micro-batch on each data rank.
_PIPELINES: dict[str, tuple[Any, ...]] = {
    "model": ("gpt-1.3b", "llama-7b", "llama3-8b", "qwen3-8b"),
    "method": (
        "megatron:dp2,tp2,pp2,sp",
        "megatron:dp1,tp4,pp2,sp,zero1",
        "megatron:dp1,tp2,pp4,sp",
    ),
    "recompute": ("none", "minimal", "block"),
    "scan": (True, False),
    "rows": (1, 2, 4),
    "micro_batches": (4, 8),
    "gpu": ("H100", "A100-80GB"),
}
_WAYS = _PIPELINES | {
    "method": ("zero2", "fsdp", "megatron:dp2,tp4,sp,zero1"),
    "recompute": tuple(RECOMPUTE),
    "micro_batches": (1, 4),
}

_SEED = 56
# So that the compiler takes a minute and no more.
_LAYERS = 4


def drawn_plans(count: int) -> dict[str, tuple[str, str]]:
    """So many drawn plans, as `PLANS` has them: half of them pipelines."""
    plans = {}
    for kind, factors in (("sp pipeline", _PIPELINES), ("way to recompute", _WAYS)):
        for number, case in enumerate(draw(count // 2, factors, seed=_SEED), 1):
            ranks = re.search(r"dp(\d)", case["method"])
            rows = (int(ranks[1]) if ranks else 8) * case["rows"] * case["micro_batches"]
            words = (
                f"{case['model']} --cluster 8x{case['gpu']} --global-batch {rows} --seq-len 2048"
                f" --set num_layers={_LAYERS} --recompute {case['recompute']}"
                f" --method {case['method']} --micro-batches {case['micro_batches']}"
            )
            plans[f"{kind} {number}"] = (kind, words + " --scan" * case["scan"])
    return plans


def modern_row(
    name: str, half: str, words: str, journal: Journal, *, dumps: str, known: bool
) -> dict[str, Any]:
    """Predicted and compiled peaks of one plan, on the fullest devices and of each stage.

    Args:
        name, half, words: of `PLANS`, or of `drawn_plans`.
        journal: of what was compiled before: the same plan is not compiled again.
        dumps: folder in which the compiler's reports are kept; empty for none.
        known: whether to compile nothing that the journal does not hold.
    """
    row: dict[str, Any] = {"half": half, "plan": name, "command": f"aliquot plan {words}"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        _aliquot("plan", *_complete(words), "--no-remedies", "--out", str(path))
        plan = json.loads(path.read_text())
        key = f"{name} {_decisions(plan)}"
        if known and key not in journal.rows:
            return row
        found = journal.row(key, lambda: _compiled(path, dumps and str(Path(dumps, key))))
    step = plan["prediction"]
    predictions = [stage["prediction"] or step for stage in plan["stages"]]
    device = DEVICES[words.split()[2].rpartition("x")[2]]
    return row | {
        "share": step["peak_memory_bytes"] / device.memory_bytes,
        **_compared(step["peak_memory_bytes"], found["bytes"]),
        "compile s": found["seconds"],
        "stages": [
            _compared(predicted["peak_memory_bytes"], compiled["bytes"])
            | {"predicted parts, GiB": _gib(predicted["memory_bytes"])}
            | {"compiled parts, GiB": _gib(compiled["parts"])}
            for predicted, compiled in zip(predictions, found["stages"], strict=True)
        ],
    }


def _complete(words: str) -> list[str]:
    """The words of a command with what they leave out."""
    asked = words.split()
    return asked + [w for o, v in _DEFAULTS.items() if o not in asked for w in (o, v)]


def _compared(predicted_bytes: float, compiled_bytes: float) -> dict[str, float]:
    return {
        "predicted GiB": predicted_bytes / 2**30,
        "compiled GiB": compiled_bytes / 2**30,
        "error": predicted_bytes / compiled_bytes - 1,
    }


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(num_bytes / 2**30, 2) for name, num_bytes in parts.items()}


def _decisions(plan: dict[str, Any]) -> str:
    """A hash of what a plan decides, without what it predicts."""
    decided = [
        plan["graph_fingerprint"],
        plan["schedule"],
        [{k: v for k, v in stage.items() if k != "prediction"} for stage in plan["stages"]],
    ]
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def _compiled(plan: Path, dumps: str) -> dict[str, Any]:
    """What the compiler assigns to a plan on the fullest devices, and to each stage."""
    flags = os.environ.get("XLA_FLAGS", "")
    if dumps:
        flags = f"{flags} --xla_dump_to={dumps} --xla_dump_hlo_as_text"
    found = json.loads(_aliquot("verify", str(plan), "--json", flags=flags.strip()))
    refused = next((stage["refusal"] for stage in found["stages"] if stage["refusal"]), None)
    if refused:
        raise SystemExit(f"The compiler refuses the plan: {refused}")
    stages = found["stages"]
    return {
        "bytes": max([stage["compiled_bytes"] for stage in stages] + found["submesh_bytes"]),
        "stages": [
            {"bytes": stage["compiled_bytes"], "parts": stage["parts"]["compiled"]}
            for stage in stages
        ],
        "seconds": round(sum(stage["compile_s"] for stage in stages), 1),
    }


def _aliquot(*arguments: str, flags: str = "") -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", *arguments],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    # A plan that does not fit by the compiler's account ends with 1, and its figures are there.
    if not done.stdout or done.returncode > 1:
        raise SystemExit(f"aliquot {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout
