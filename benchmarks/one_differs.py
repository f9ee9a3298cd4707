"""What happens where one of several processes differs from the others?

Other settings, functions, keys, constants, plans, batches, states and orders of calls, in process 1
of two, for one program and for a pipeline; and what may differ. The test
`tests/runtime/test_one_differs.py` has the same table.

    python benchmarks/one_differs.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, with_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.differ_cases import CASES, HARMLESS, late_steps, losses, message_of, run_case, wrong

_RUNTIMES = ("program", "pipeline")
_COST_STEPS = 2000


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="one_differs",
        question="One of two processes differs from the other",
        bar=(
            "every difference that changes numbers is named by both processes, with the process"
            " and both values, before two more steps end, and ends both; no other difference ends a"
            " run; the comparison of a"
            " demo's call takes less than 1 ms of the processor"
        ),
        method=(
            "Each kind once, with two processes of one CPU device each that train 12 steps; process"
            " 1 differs from the start or in the sixth step. A message counts if both processes"
            " show it, name process 1 and say all words of the kind's row in the test's table."
            " Steps after the fault are those that a process still ends. The cost is the processor"
            " time and the time of one comparison, in a loop, with batches of 16 x 512 tokens and"
            " their targets beside a state of 100 arrays, reports sent over a connection."
        ),
    )
    cases = [(r, k) for r, k in CASES if chosen.only in f"{r} {k}"][:: 8 if chosen.quick else 1]
    harmless = [(r, k) for r in _RUNTIMES for k in HARMLESS if chosen.only in f"{r} {k}"]
    journal = Journal(chosen.journal)
    rows = [journal.row(f"{r} {k}", lambda r=r, k=k: _row(r, k)) for r, k in cases]  # type: ignore[misc]
    same = [
        journal.row(f"harmless {r} {k}", lambda r=r, k=k: _harmless_row(r, k))  # type: ignore[misc]
        for r, k in harmless[:: 4 if chosen.quick else 1]
    ]
    cost = journal.row("cost", _cost)
    report.tables = {"Differences": rows, "What may differ": same, "Cost of a comparison": [cost]}
    named = sum(not row["wrong"] for row in rows)
    report.summary = {
        "kinds": len({row["kind"] for row in rows}),
        "cases": len(rows),
        "named by both": named,
        "silent": sum(row["exit codes"] == "0 0" for row in rows),
        "most steps after the fault": max((row["steps after it"] for row in rows), default=0),
        "harmless differences": len(same),
        "ended by one": sum(row["exit codes"] != "0 0" or not row["equal losses"] for row in same),
        "milliseconds of the processor for a comparison": cost["milliseconds of the processor"],
    }
    met = (
        named == len(rows)
        and not report.summary["ended by one"]
        and report.summary["most steps after the fault"] <= 1
        and cost["milliseconds of the processor"] < 1
    )
    return report.finish(chosen, met=met)


def _row(runtime: str, kind: str) -> dict[str, Any]:
    found = run_case(runtime, kind)
    said = message_of(found, 0)
    headline = re.search(r"must all run the same(?: \([^)]*\))?(?:, \d+ problems)?: (.*)", said)
    return {
        "kind": kind,
        "runtime": runtime,
        "exit codes": " ".join(map(str, found["codes"])),
        "steps after it": late_steps(found),
        "wrong": wrong(kind, found),
        "process 0 says": (headline[1] if headline else said)[:160],
    }


def _harmless_row(runtime: str, kind: str) -> dict[str, Any]:
    found = run_case(runtime, kind)
    one, other = (losses(out) for out in found["printed"])
    return {
        "kind": kind,
        "runtime": runtime,
        "exit codes": " ".join(map(str, found["codes"])),
        "equal losses": bool(one) and one == other,
    }


def _cost() -> dict[str, Any]:
    """Cost of describing and reporting one call, in a process that sends its reports."""
    from runtime.call_cost import call_cost

    cpu_s, seconds = call_cost(_COST_STEPS)
    return {
        "calls": _COST_STEPS,
        "milliseconds": round(seconds * 1e3, 3),
        "milliseconds of the processor": round(cpu_s * 1e3, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
