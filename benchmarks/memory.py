r"""Is predicted memory what the compiler takes?

Plans a small GPT and Llama by every method, compiles each plan for eight virtual CPU devices, and
compares what the plan says each device holds with the compiler's own account: state and batch with
the sizes of the program's arguments, the rest with its temporaries.

    python benchmarks/memory.py [--quick] [--models gpt,llama] [--sizes "many tokens,wide"] \
        [--meshes 8,4x2,2x4]
"""

from __future__ import annotations

import sys
from typing import Any

from _results import Report, options, say, use_eight_devices

use_eight_devices()

from _workloads import SIZES, methods, plan_of, small, step_of  # noqa: E402

_ARGUMENTS = {"parameters", "optimizer state", "other state", "batch", "other inputs"}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    report = Report(
        name="memory",
        question="Predicted against compiled memory",
        bar="state and batch bytes exact",
        method=(
            "Bytes on each device. Arguments: state and batch, predicted by the plan and as the"
            " compiled program declares them. Reused: what of them its outputs overwrite in place."
            " Temporaries, in MiB: what the plan predicts at the worst moment besides arguments,"
            " and the compiler's pool; without a bar, as the CPU's compiler drops the barriers of"
            " recomputation. Compiling is deterministic: one run each."
        ),
    )
    meshes = [tuple(map(int, m.split("x"))) for m in chosen.meshes.split(",")]
    rows = []
    for size in chosen.sizes.split(","):
        for family in chosen.models.split(","):
            for scan in (False, True):
                work = small(family, size=size, scan=scan)
                for name, method in methods(family, scan=scan, meshes=meshes):
                    if (
                        chosen.only not in name
                        or chosen.quick
                        and name not in ("dp", "zero3", "shard 4x2")
                    ):
                        continue
                    rows.append(
                        {
                            "model": family,
                            "form": "scan" if scan else "unrolled",
                            "size": size,
                            "method": name,
                        }
                    )
                    rows[-1] |= _compare(work, method)
                    say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    differing = [r for r in rows if r["predicted arguments"] != r["compiled arguments"]]
    ratios = sorted(r["predicted MiB"] / r["compiled MiB"] for r in rows)
    report.summary = {
        "plans": len(rows),
        "plans whose state and batch differ": len(differing),
        "predicted over compiled temporaries, least, median, most": (
            ratios[0],
            ratios[len(ratios) // 2],
            ratios[-1],
        ),
    }
    report.tables = {"Plans": rows}
    return report.finish(chosen, met=not differing)


def _more(parser: Any) -> None:
    parser.add_argument("--models", default="gpt,llama")
    parser.add_argument(
        "--only", default="", help="only methods whose name contains this; writes no result file"
    )
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--meshes", default="8,4x2,2x4")


def _compare(work: Any, method: Any) -> dict[str, Any]:
    plan = plan_of(work, method)
    memory = step_of(work, plan).stats().memory
    parts = plan.prediction.memory_bytes
    temporary = sum(num_bytes for part, num_bytes in parts.items() if part not in _ARGUMENTS)
    return {
        "mesh": "x".join(map(str, plan.stages[0].mesh_shape)),
        "predicted arguments": round(sum(n for part, n in parts.items() if part in _ARGUMENTS)),
        "compiled arguments": memory.argument_bytes,
        "reused": memory.alias_bytes,
        "predicted MiB": temporary / 2**20,
        "compiled MiB": memory.temp_bytes / 2**20,
    }


if __name__ == "__main__":
    sys.exit(main())
