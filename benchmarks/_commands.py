"""Commands of `aliquot`, each run as a process of its own and timed from its start to its end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

from _results import Report, say

_QUICK = "gpt-2.6b"


class Case(Protocol):
    """A command and the seconds it may take (None: any): what tables call it, the model, the
    arguments of `aliquot`.
    """

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def limit_s(self) -> float | None: ...
    @property
    def command(self) -> list[str]: ...


def more_options(*, repetitions: int) -> Callable[[argparse.ArgumentParser], None]:
    """Options of a table of commands, beside those of every benchmark."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--repetitions", type=int, default=repetitions)
        parser.add_argument(
            "--only", default="", help="only cases whose name contains this; writes no result file"
        )

    return add


def time_commands(
    report: Report,
    chosen: argparse.Namespace,
    every: Sequence[Case],
    *,
    growth: Mapping[str, Sequence[Case]] = {},
    warm_up: bool = False,
    columns: Sequence[str] = (),
    from_step: bool = False,
) -> int:
    """Run the commands in turn, as often as was asked for, and write or print the answer. Returns
    an exit code.

    Args:
        growth: tables of more commands without limits, each run once; left out with `--quick`.
        warm_up: run the first once before, untimed.
        columns: what else of the plans' answers tables show.
        from_step: limits are for the time from the step to the plan, not for that of the whole
            command.
    """
    cases = [c for c in every if chosen.only in c.name and (c.model == _QUICK or not chosen.quick)]
    for case in cases[: int(warm_up)]:
        _run(case)
    runs: dict[str, list[tuple[float, dict[str, Any]]]] = {c.name: [] for c in cases}
    for _ in range(1 if chosen.quick else chosen.repetitions):
        for case in cases:
            runs[case.name].append(_timed(case))
    rows = [_row(case, runs[case.name], columns) for case in cases]
    report.tables = {"Commands": rows}
    for title, more in growth.items() if not chosen.quick else ():
        report.tables[title] = [
            _row(c, [_timed(c)], columns) for c in more if chosen.only in c.name
        ]
    limited = "from the step s" if from_step else "median s"
    report.summary = {row["case"]: f"{row[limited]} of {row['limit s']} s" for row in rows}
    return report.finish(chosen, met=all(row[limited] <= row["limit s"] for row in rows))


def _timed(case: Case) -> tuple[float, dict[str, Any]]:
    seconds, plan = _run(case)
    say(f"{case.name}: {seconds:.1f} s")
    return seconds, plan


def _run(case: Case) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-c", "from aliquot.cli import main; main()", *case.command]
    # Installed packages are compiled; a checkout keeps what Python compiles, too, unless it is told
    # not to.
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment["JAX_PLATFORMS"] = "cpu"
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(case.command)} ended with {done.returncode}:\n{done.stderr}")
    return seconds, json.loads(done.stdout)


def _row(
    case: Case, runs: Sequence[tuple[float, dict[str, Any]]], columns: Sequence[str]
) -> dict[str, Any]:
    seconds = [s for s, _ in runs]
    _, plan = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    return {
        "case": case.name,
        **({} if case.limit_s is None else {"limit s": case.limit_s}),
        "median s": round(median(seconds), 2),
        "least s": round(min(seconds), 2),
        "most s": round(max(seconds), 2),
        "runs": len(runs),
        "from the step s": round(median(plan["plan_s"] for _, plan in runs), 2),
        "trace s": round(plan["trace_s"], 2),
        "search s": round(plan["search_s"], 2),
        **{name: plan[name] for name in columns},
        "predicted step s": plan["step_time_s"],
        "gap": plan["gap"],
    }
