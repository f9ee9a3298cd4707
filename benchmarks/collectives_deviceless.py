"""Are the collectives that a plan expects those that the compiler leaves, for GPUs that are not
there?

Reads the plans and the compiled programs that `memory_deviceless.py --plans FOLDER --dumps FOLDER`
kept, so that one compilation answers both questions. Bytes are compared for each kind along each
set of mesh axes; what no predicted collective explains is listed with the operator that causes it.

    python benchmarks/collectives_deviceless.py PLANS DUMPS [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from _results import Report, options, say
from memory_deviceless import predicted_now

from aliquot.verification import compare_collectives, compiled_collectives, unintended_collectives


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    report = Report(
        name="collectives_deviceless",
        question="Predicted against compiled collectives on GPUs",
        bar=(
            "bytes per kind and axes: median error at most 3 %; unintended collectives at most 1 %"
            " of the bytes moved"
        ),
        method=(
            "Programs as compiled for 8 GPUs, loops counted by their trips; bytes are those of"
            " results on each device. A row is one kind along one set of axes of one plan, where"
            " either side moves at least 1 % of the plan's bytes."
        ),
    )
    cases = sorted(Path(chosen.dumps).glob("*/case.json"))
    rows, unplanned, shares = [], [], []
    for path in cases[: 5 if chosen.quick else None]:
        case = json.loads(path.read_text())
        factors = [case[k] for k in _FACTORS]
        plan_path = Path(chosen.plans, "-".join(map(str, factors)) + ".json")
        text = next((p for p in path.parent.iterdir() if p.name == "txt"), None)
        if text is None or not plan_path.exists():
            continue
        name = " ".join(map(str, factors))
        _, _, plan = predicted_now({k: case[k] for k in _FACTORS}, chosen.plans)
        (stage,) = plan.stages
        compiled = compiled_collectives(text.read_text(), stage.axis_names, stage.mesh_shape)
        predicted = plan.prediction.collectives
        compared = compare_collectives(predicted, compiled)
        total = sum(max(c.predicted_bytes, c.compiled_bytes) for c in compared) or 1.0
        for c in compared:
            if max(c.predicted_bytes, c.compiled_bytes) >= 0.01 * total:
                rows.append(_row(name, case["gpu"], c))
        paths = [each.path for each in plan.inputs]
        sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
        strangers = unintended_collectives(predicted, compiled, paths, sizes)
        shares.append(sum(u.num_bytes for u in strangers) / total)
        unplanned += [
            {"plan": name, "share of its bytes": u.num_bytes / total, "what": str(u)}
            for u in strangers
        ]
        say(f"{name}: {shares[-1]:.2%} unintended")
    errors = [abs(row["error"]) for row in rows]
    report.summary = {
        "programs": len(shares),
        "rows": len(rows),
        "median error": statistics.median(errors),
        "rows within 3 %": sum(e <= 0.03 for e in errors),
        "plans without unintended collectives": sum(share == 0 for share in shares),
        "unintended, median share of bytes": statistics.median(shares),
        "unintended, mean share of bytes": statistics.fmean(shares),
        "unintended, most": max(shares),
    }
    report.tables = {
        "Rows that differ by more than 3 %": sorted(
            (r for r in rows if abs(r["error"]) > 0.03), key=lambda r: -abs(r["error"])
        ),
        "Unintended collectives": unplanned,
    }
    met = report.summary["median error"] <= 0.03 and max(shares) <= 0.01
    return report.finish(chosen, met=met)


_FACTORS = (
    "family",
    "scan",
    "method",
    "mesh",
    "recompute",
    "micro_batches",
    "dtype",
    "size",
    "gpu",
)


def _more(parser: Any) -> None:
    parser.add_argument("plans", help="folder of plans")
    parser.add_argument("dumps", help="folder of compiled programs")


def _row(name: str, gpu: str, c: Any) -> dict[str, Any]:
    scale = max(c.predicted_bytes, c.compiled_bytes)
    return {
        "plan": name,
        "kind": c.kind,
        "axes": ",".join(c.axes),
        "predicted MiB": c.predicted_bytes / 2**20,
        "compiled MiB": c.compiled_bytes / 2**20,
        "error": (c.predicted_bytes - c.compiled_bytes) / scale,
    }


if __name__ == "__main__":
    sys.exit(main())
