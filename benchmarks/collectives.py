r"""Are predicted collectives those of the compiled program?

Plans a small GPT and Llama, written out and as a loop over layers, by every method on meshes of
eight virtual CPU devices in float32, compiles each plan, and compares the bytes that collectives
leave on each device, in all and by kind. Collectives that no prediction explains are listed with
the operator that the compiler names.

    python benchmarks/collectives.py [--quick] [--models gpt,llama] [--sizes "many tokens,wide"] \
        [--meshes 8,4x2,2x4,2x2x2]
"""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median
from typing import Any

from _results import Report, options, say, use_eight_devices

use_eight_devices(fast_code=False)

from _hlo import KINDS, Collective, bytes_by_kind, collectives  # noqa: E402
from _workloads import SIZES, methods, plan_of, small, step_of  # noqa: E402


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    report = Report(
        name="collectives",
        question="Predicted against compiled collectives",
        bar="median relative error of bytes at most 5 % over models, methods and meshes",
        method=(
            "Bytes that the collectives of one step leave on each device, in MiB: predicted by the"
            " plan, and counted in the compiled program (loops by their trips). Compiling is"
            " deterministic: one run each. A collective is unplanned if no predicted one of its"
            " kind and size is left for it and its kind moves more than predicted."
        ),
    )
    meshes = [tuple(map(int, m.split("x"))) for m in chosen.meshes.split(",")]
    rows, unplanned = [], []
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
                    title = {
                        "model": family,
                        "form": "scan" if scan else "unrolled",
                        "size": size,
                        "method": name,
                    }
                    row, extra = _compare(work, method, title)
                    rows.append(row)
                    unplanned += extra
                    say(
                        f"{family} {title['form']} {size} {name}: {row['predicted']:.2f}"
                        f" {row['compiled']:.2f} {row['error']:.1%}"
                    )
    report.summary = _summary(rows)
    report.tables = {"Plans": [_shown(r) for r in rows], "Unplanned collectives": unplanned}
    return report.finish(chosen, met=report.summary["median error"] <= 0.05)


def _more(parser: Any) -> None:
    parser.add_argument("--models", default="gpt,llama")
    parser.add_argument(
        "--only", default="", help="only methods whose name contains this; writes no result file"
    )
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--meshes", default="8,4x2,2x4,2x2x2")


def _compare(
    work: Any, method: Any, title: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    plan = plan_of(work, method)
    step = step_of(work, plan)
    found = collectives(step.as_text())
    compiled = bytes_by_kind(found)
    predicted: Counter[str] = Counter()
    for use in plan.prediction.collectives:
        predicted[use.kind] += use.num_bytes
    mib = 2**20
    row = {
        **title,
        "mesh": "x".join(map(str, plan.stages[0].mesh_shape)),
        "predicted": sum(predicted.values()) / mib,
        "compiled": sum(compiled.values()) / mib,
        "error": _error(sum(predicted.values()), sum(compiled.values())),
        "by kind": {
            k: (predicted[k] / mib, compiled[k] / mib) for k in KINDS if predicted[k] or compiled[k]
        },
        "runtime's count": sum(c.num_bytes for c in step.stats().collectives) / mib,
    }
    # Predictions of one operator are added up, so sizes alone say nothing where the sum is right.
    over = {kind for kind in KINDS if compiled[kind] > predicted[kind] + 1}
    extras = _unplanned(plan.prediction.collectives, found)
    return row, [{**title, **extra} for extra in extras if extra["kind"] in over]


def _unplanned(predicted: Any, found: list[Collective]) -> list[dict[str, Any]]:
    """Compiled collectives for which no predicted one of the same kind and size is left."""
    left = Counter({(u.kind, round(u.num_bytes / u.count)): 0 for u in predicted})
    for u in predicted:
        left[u.kind, round(u.num_bytes / u.count)] += round(u.count)
    extra = []
    for c in sorted(found, key=lambda c: -c.num_bytes * c.count):
        known = min(left[c.kind, c.num_bytes], c.count)
        left[c.kind, c.num_bytes] -= known
        if c.count > known:
            size = (c.count - known) * c.num_bytes / 2**20
            extra.append({"kind": c.kind, "MiB": size, "dtype": c.dtype, "operator": c.op_name})
    return extra


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_kind = {
        kind: median(_error(*r["by kind"][kind]) for r in rows if kind in r["by kind"])
        for kind in KINDS
        if any(kind in r["by kind"] for r in rows)
    }
    return {
        "plans": len(rows),
        "median error": median(r["error"] for r in rows),
        "mean error": sum(r["error"] for r in rows) / len(rows),
        "largest error": max(r["error"] for r in rows),
        "plans within 5 %": sum(r["error"] <= 0.05 for r in rows),
        "median error by kind": by_kind,
        "largest difference between the two readers of compiled text": max(
            _error(r["runtime's count"], r["compiled"]) for r in rows
        ),
    }


def _error(predicted: float, compiled: float) -> float:
    return abs(predicted - compiled) / compiled if compiled else float(predicted > 0)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    kinds = {k: f"{p:.2f} / {c:.2f}" for k, (p, c) in row["by kind"].items()}
    return {**row, "error": f"{row['error']:.2%}", "by kind": kinds}


if __name__ == "__main__":
    sys.exit(main())
