"""Does every case of Alpa's benchmark suites have a row, without the hardware that it is for?

    make bench-alpa
    python benchmarks/alpa_suites.py bench-alpa

The folder is what `make bench-alpa` writes: for each suite the rows of
`aliquot bench alpa SUITE --predict`. A row has a predicted step time, also where the plan needs
more memory than its devices have, or says why there is none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _results import Report, options

from aliquot.suites import alpa_suites

# Suites of hundreds of cases that differ in one number: their rows are counted, not listed.
_MANY = 100


def _rows(folder: Path, suite: str) -> list[dict[str, Any]]:
    """The last row of each case of a suite."""
    path = folder / suite / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line)["row"] for line in lines]
    return list({row["case"]: row for row in rows}.values())


def _of_suite(suite: str, cases: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = Counter(row["outcome"] for row in rows)
    ratios = [row["predicted_to_published"] for row in rows if row["predicted_to_published"]]
    return {
        "suite": suite,
        "cases": cases,
        "rows": len(rows),
        "predicted": outcomes["predicted"],
        "does not fit": outcomes["does not fit"],
        "other": sum(outcomes.values()) - outcomes["predicted"] - outcomes["does not fit"],
        "predicted / published, median": statistics.median(ratios) if ratios else "",
        "published": len(ratios),
    }


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="what make bench-alpa wrote")

    chosen = options(__doc__, add)
    suites, listed, absent = [], [], []
    for suite in alpa_suites().values():
        if not (chosen.folder / suite.name).is_dir():
            absent.append(suite.name)
            continue
        rows = _rows(chosen.folder, suite.name)
        suites.append(_of_suite(suite.name, len(suite.cases), rows))
        if len(suite.cases) < _MANY:
            listed += [
                {
                    "case": row["case"],
                    "devices": row["num_devices"],
                    "plan": row["parallel"],
                    "outcome": row["outcome"],
                    "predicted (s)": row["predicted_s"],
                    "memory (GB)": row["predicted_gb"],
                    "published (s)": row["published_s"] or "",
                    "reason": row["reason"],
                }
                for row in rows
            ]
    cases, rows = sum(each["cases"] for each in suites), sum(each["rows"] for each in suites)
    report = Report(
        name="alpa_suites",
        question="Does every case of Alpa's benchmark suites have a row, without its hardware?",
        bar="a row for each case of the suites that were run",
        method=(
            "`aliquot bench alpa SUITE --predict`, once for each suite, with a time limit for each"
            " plan. Plans that were given are judged; the others are searched."
        ),
    )
    report.summary = {"cases": cases, "rows": rows, "suites that were not run": absent}
    report.tables = {"Suites": suites, "Cases of the smaller suites": listed}
    return report.finish(chosen, met=rows == cases)


if __name__ == "__main__":
    sys.exit(main())
