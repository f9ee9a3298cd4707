"""Can who does not know the secret of a run take part in it, end it, or hold it up?

Strangers of many kinds at the ports of two and four processes: before the processes meet or
connect, while they do, and afterwards. Each case is a meeting, or channels for arrays, in threads
of one process. Whole runs follow: processes that train a pipeline, with strangers of all kinds at
each of their ports from the first moment on, and then with each kind alone. The test
`tests/runtime/test_strangers.py` has the same tables.

    python benchmarks/strangers.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _results import Journal, Report, options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.stranger_cases import BAR_S, CASES, COUNTS, MOMENTS, PORTS, run_case, wrong
from runtime.stranger_runs import ALL, train_among

# Number of processes, strangers, and whether JAX's service is reached as from other machines.
_RUNS: list[tuple[int, list[str], bool]] = [
    (count, kinds, relayed)
    for count in COUNTS
    for kinds, relayed in (([], False), (ALL, False), ([], True), (ALL, True))
]


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more_options)
    report = Report(
        name="strangers",
        question="Strangers at the ports of runs",
        bar=f"none runs code; none ends a run or holds it up by more than {BAR_S} s",
        method=(
            "Cases: seconds are from the moment when all that a meeting needs is there to its end;"
            " afterwards, until all connections have carried a message and a late process was"
            " turned away; for arrays, until all processes have sent to all, the longest of three"
            " rounds. Each is the longest of both numbers of processes. Runs: seconds to join are"
            " from the last process's arrival, with JAX's own connections, which are tried again"
            " after a second where its service does not listen yet; a step of process 0 is"
            " from one to the next, the longest while a kind of stranger is at a port, and without"
            " any in 3 s of the same run. `service` is the port of JAX's coordination service, or,"
            " `relayed`, the one at which processes of other machines would reach it. All in"
            " connections of this machine to itself."
        ),
    )
    kinds = [kind for kind in ALL if chosen.only in kind][:: 10 if chosen.quick else 1]
    journal = Journal(chosen.journal)
    rows = [journal.row(kind, lambda kind=kind: _row(kind)) for kind in kinds]  # type: ignore[misc]
    runs = [
        journal.row(f"run {k}", lambda run=run: _run(*run))  # type: ignore[misc]
        for k, run in enumerate(_RUNS if not (chosen.quick or chosen.only) else ())
    ]
    report.tables = {"Cases, seconds": rows, "Runs": runs}
    among = [run for run in runs if run["strangers"]]
    report.summary = {
        "kinds": len(rows),
        "cases": len(rows) * len(CASES) // len(ALL),
        "cases in which code ran, a run ended, or waited too long": sum(
            bool(row["wrong"]) for row in rows
        ),
        "longest case, s": max(row[column] for row in rows for column in row if "," in column),
        "runs that did not end well": sum(bool(run["wrong"]) for run in runs),
    }
    bad = [row for row in [*rows, *runs] if row["wrong"]]
    if among:
        report.summary["longest step among strangers, s"] = max(
            run["longest step, s"] for run in among
        )
    return report.finish(chosen, met=not bad)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", help="only kinds whose name contains this; writes no result file"
    )
    parser.add_argument(
        "--journal", type=Path, help="a file that keeps finished rows, to go on from"
    )


def _row(kind: str) -> dict[str, Any]:
    """The cases of one kind."""
    row: dict[str, Any] = {"stranger": kind}
    problems, dropped = [], 0
    for port in PORTS:
        for moment in MOMENTS:
            longest = 0.0
            for count in COUNTS:
                with tempfile.TemporaryDirectory() as folder:
                    found = run_case(kind, port, moment, count, Path(folder) / "marker")
                longest = max(longest, found["seconds"])
                dropped += len(found["dropped"])
                if wrong(found):
                    problems.append(f"{port}, {moment}, {count} processes: {wrong(found)}")
            row[f"{port}, {moment}"] = round(longest, 3)
    return {**row, "named in the log": dropped, "wrong": "; ".join(problems)}


def _run(count: int, kinds: list[str], relayed: bool) -> dict[str, Any]:
    """A whole run."""
    with tempfile.TemporaryDirectory() as folder:
        found = train_among(kinds, count, Path(folder), relayed=relayed)
    steps = found["steps_s"]
    alone, longest = steps.pop("alone"), max(steps, key=steps.get, default="")
    problem = "" if found["codes"] == [0] * count else f"exit codes {found['codes']}"
    if found["code ran"]:
        problem = "code of a stranger ran"
    if longest and steps[longest] > alone + BAR_S:
        problem = f"a step of {steps[longest]:.1f} s"
    return {
        "processes": count,
        "relayed": "yes" if relayed else "no",
        "strangers": len(kinds) * 3,
        "seconds to join": round(found["join_s"], 2),
        "longest step alone, s": round(alone, 3),
        "longest step, s": round(steps[longest], 3) if longest else "",
        "among": longest,
        "named in the log": found["dropped"],
        "wrong": problem,
    }


if __name__ == "__main__":
    sys.exit(main())
