"""Does anybody who does not know the secret of a run run code in it, end, change or delay it?

Each kind of stranger comes to a run of two processes that train a pipeline: to the port where they
meet, to those for arrays, and to that of JAX's coordination service. And it comes to the meeting
and to the channels of two and four processes that are threads, at each port before, while and after
the processes meet or connect: the cases of the test `tests/runtime/test_strangers.py`.

    python benchmarks/strangers.py [--quick] [--only TEXT] [--journal FILE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, with_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.stranger_cases import BAR_S, CASES, run_case, wrong
from runtime.stranger_runs import ALL, train_among

_ALONE, _WIPED = "nobody", "deletes all values in JAX's coordination service"
#: How many losses of two runs are compared.
_STEPS = 10
#: On a busy machine JAX itself takes up to seconds to connect processes.
_JOIN_BAR_S = 3


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, with_rows)
    report = Report(
        name="strangers",
        question="Strangers at the ports of runs of two processes",
        bar=(
            "no code of a stranger runs, no case fails or is held up for more than"
            f" {BAR_S} s; in whole runs both processes end with exit code 0 and have the losses of"
            f" a run without strangers, no step takes {BAR_S} s more than without, and joining no"
            f" {_JOIN_BAR_S} s more"
        ),
        method=(
            "Cases: meetings and transfers of two and four processes, in threads, with one kind of"
            " stranger at one of two ports, before, during or after the processes meet or connect."
            " Whole runs: two processes on one machine train a pipeline, once for each kind. It"
            " comes to the port of the meeting once process 0 listens, before process 1 comes, and"
            " stays until both have joined; to both ports for arrays as soon as these listen, until"
            " both train; and to each port for half a second while they train. The longest steps"
            " are those within such a half second, and within three seconds without strangers in"
            f" the same run. The first {_STEPS} losses are compared. Strangers are dropped and"
            " logged; `log kB` is what a run writes in all on standard error."
        ),
    )
    kinds = [_WIPED, *ALL][:: 12 if chosen.quick else 1]
    kinds = [_ALONE, *(kind for kind in kinds if chosen.only in kind)]
    journal = Journal(chosen.journal)
    rows = [journal.row(kind, lambda kind=kind: _row(kind)) for kind in kinds]  # type: ignore[misc]
    for row in rows:
        row["wrong"] = _wrong(row, rows[0])
    cases = [journal.row(f"cases: {k}", lambda k=k: _cases(k)) for k in kinds if k in ALL]  # type: ignore[misc]
    report.tables = {
        "Cases": cases,
        "Whole runs": [{k: v for k, v in row.items() if k != "losses"} for row in rows],
    }
    num_wrong = sum(row["wrong"] for row in cases) + sum(bool(row["wrong"]) for row in rows)
    report.summary = {
        "kinds of strangers": len(cases),
        "cases (kinds x 2 ports x 3 moments x 2 numbers of processes)": sum(
            row["cases"] for row in cases
        ),
        "whole runs": len(rows),
        "wrong": num_wrong,
        "most seconds that a step of a whole run took more than without": max(
            round(row["longest step s"] - row["without s"], 2) for row in rows
        ),
    }
    return report.finish(chosen, met=not num_wrong)


def _cases(kind: str) -> dict[str, Any]:
    """All cases of one kind, one by one."""
    chosen = [case for case in CASES if case[0] == kind]
    with tempfile.TemporaryDirectory() as folder:
        found = [run_case(*case, Path(folder) / "marker") for case in chosen]
    return {
        "kind": kind,
        "cases": len(found),
        "most seconds": round(max(one["seconds"] for one in found), 2),
        "wrong": sum(bool(wrong(one)) for one in found),
    }


def _row(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        kinds = [kind] if kind in ALL else []
        found = train_among(kinds, 2, Path(folder), wiped=kind == _WIPED)
    without_s = found["steps_s"].pop("alone")
    return {
        "kind": kind,
        "exit codes": " ".join(map(str, found["codes"])),
        "code ran": found["code ran"],
        "joined within s": round(found["join_s"], 1),
        "without s": round(without_s, 2),
        "longest step s": round(max(found["steps_s"].values(), default=without_s), 2),
        "log kB": round(sum(map(len, found["errors"])) / 1000, 1),
        "losses": [losses[:_STEPS] for losses in found["losses"]],
    }


def _wrong(row: dict[str, Any], alone: dict[str, Any]) -> str:
    """What is wrong with a run, or nothing.

    Args:
        alone: one without strangers.
    """
    faults = {
        "code of a stranger ran": row["code ran"],
        "exit codes": row["exit codes"] != "0 0",
        "losses": row["losses"] != alone["losses"],
        "joined late": row["joined within s"] > alone["joined within s"] + _JOIN_BAR_S,
        "held up": row["longest step s"] > row["without s"] + BAR_S,
    }
    return ", ".join(what for what, is_so in faults.items() if is_so)


if __name__ == "__main__":
    sys.exit(main())
