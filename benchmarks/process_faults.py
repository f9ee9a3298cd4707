"""How do many processes end when something happens to one of them?

Exceptions, exits, early returns, signals, stops, Ctrl-C, other plans, models, shapes, versions and
numbers, processes that do not come or die while the processes meet, and second runs on the same
port, in pipelines and in single programs, each on one process of two or three. The test
`tests/runtime/test_process_faults.py` has the same table.

    python benchmarks/process_faults.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, with_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.fault_cases import BAR_S, CASES, name_of, run_case, wrong


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="process_faults",
        question="Faults in runs of many processes",
        bar=(
            f"no process hangs; each has the exit code that it should have, at most {BAR_S} s after"
            " the fault"
        ),
        method=(
            "Each case once, on CPU devices of processes on one machine, which train until the"
            " fault comes. Seconds are from the fault to the end of the last process that has to"
            " end, without the time that was given for others to come; where processes differ, from"
            " the last one's arrival. `-` is a process that does not end by itself: it is stopped,"
            " sleeps, or belongs to the run that goes on."
        ),
    )
    cases = [case for case in CASES if chosen.only in name_of(case)][:: 8 if chosen.quick else 1]
    journal = Journal(chosen.journal)
    rows = [journal.row(name_of(case), lambda case=case: _row(case)) for case in cases]  # type: ignore[misc]
    report.tables = {"Cases": rows}
    bad = [row for row in rows if row["wrong"] or row["seconds"] > BAR_S]
    report.summary = {
        "cases": len(rows),
        "wrong exit codes or no message": sum(bool(row["wrong"]) for row in rows),
        "most seconds": max(row["seconds"] for row in rows),
    }
    return report.finish(chosen, met=not bad)


def _row(case: dict[str, Any]) -> dict[str, Any]:
    found = run_case(case)
    return {
        "case": name_of(case),
        "exit codes": " ".join("-" if code is None else str(code) for code in found["codes"]),
        "seconds": round(found["seconds"], 1),
        "wrong": wrong(found),
    }


if __name__ == "__main__":
    sys.exit(main())
