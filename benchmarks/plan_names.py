"""Does the line "parallelism" of a plan hold, word by word?

Steps of many kinds under methods of all kinds, and a second reading of their plans, which looks at
stored splits and at the sizes of collectives alone. The test `tests/planners/test_plan_names.py`
reads some of them.

    python benchmarks/plan_names.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, with_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from planners.plan_names import CASES, STEPS, untrue

import aliquot as aq
from aliquot.planners import method_by_name
from aliquot.plans import summary_rows


def main() -> int:
    """Plan, read, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="plan_names",
        question="The line that names a plan's parallelism, word by word",
        bar="0 untrue, of at least 60 plans",
        method=(
            "Each step under each method for eight H100, in shapes alone. A second program reads"
            " off stored splits and the sizes of collectives whether each word holds: what is"
            " sharded, by how many percent, whether weights are gathered, gradients scattered, and"
            " when, which dims of the batch are split, and whether all that stays whole is named."
            " Weights are the only arrays whose sizes 169 divides."
        ),
    )
    cases = [case for case in CASES if chosen.only in str(case)][:: 6 if chosen.quick else 1]
    journal = Journal(chosen.journal)
    rows = [journal.row(str(case), lambda case=case: _row(*case)) for case in cases]  # type: ignore[misc]
    report.tables = {"Plans": rows}
    report.summary = {
        "plans": len(rows),
        "steps": len({row["step"] for row in rows}),
        "methods": len({row["method"] for row in rows}),
        "untrue": sum(bool(row["untrue"]) for row in rows),
    }
    return report.finish(chosen, met=not report.summary["untrue"] and len(rows) >= 60)


def _row(name: str, method: str, count: int | None) -> dict[str, Any]:
    case = STEPS[name]()
    plan = aq.plan(
        case.step,
        *case.args,
        cluster=aq.Cluster.preset("2x4xH100" if method == "hsdp" else "8xH100"),
        method=method_by_name(method),
        num_micro_batches=count,
    )
    lines = [text for row, text in summary_rows(plan) if row == "parallelism"]
    return {
        "step": name,
        "method": method,
        "micro-batches": plan.num_micro_batches,
        "parallelism": "; ".join(lines),
        "untrue": "; ".join(untrue(case, plan)),
    }


if __name__ == "__main__":
    sys.exit(main())
