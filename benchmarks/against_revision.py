"""Are plans as good as those of another revision, and are they found as fast?

The commands of `search_time.py` and `pipeline_search_time.py`, and a table of methods by models and
clusters, are run by turns with this checkout and with another revision, each command in a process
of its own.

    python benchmarks/against_revision.py REVISION [--quick] [--repetitions 5] [--only TEXT]
        [--searches-only]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pipeline_search_time
import search_time
from _commands import Case, more_options
from _results import Report, options, say

_HERE = Path(__file__).resolve().parents[1]
_MOST_RATIO = 1.10
# Both revisions search to this gap.
_GAP = 0.002
_MODELS = (("gpt-1.3b", 64), ("llama-7b", 64), ("moe-2.4b", 128), ("wide-resnet-1b", 128))
_CLUSTERS = ("8xA100-80GB", "2x8xH100")
_METHODS: tuple[tuple[str, ...], ...] = (
    ("--method", "dp"),
    ("--method", "zero2"),
    ("--method", "zero3"),
    ("--method", "shard"),
    ("--method", "grid", "--micro-batches", "8"),
    ("--method", "pipeshard", "--micro-batches", "8", "--stages", "2", "--schedule", "1f1b"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A plan to compare; its seconds may be any."""

    model: str
    command: list[str]
    limit_s: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        cluster, more = self.command[3], self.command[6:-1]
        return f"{self.model} on {cluster}: {' '.join(word.removeprefix('--') for word in more)}"


def _plan_cases() -> Iterator[PlanCase]:
    for (model, batch), cluster, method, scan in itertools.product(
        _MODELS, _CLUSTERS, _METHODS, (False, True)
    ):
        # Convolutions are written out; batch statistics cannot be cut into micro-batches.
        if model.startswith("wide-resnet") and (scan or "--micro-batches" in method):
            continue
        shape = ["plan", model, "--cluster", cluster, "--global-batch", str(batch)]
        shape += ["--recompute", "block"]
        yield PlanCase(
            model=model, command=[*shape, *method, *(["--scan"] if scan else []), "--json"]
        )


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _arguments)
    report = Report(
        name="against_revision",
        question=f"Plans and search times beside those of revision {chosen.revision}",
        bar=(
            f"search time at most {_MOST_RATIO:g} of the other's; step times within {_GAP:g} or"
            " better"
        ),
        method=(
            "Wall time of whole processes, this checkout and the other revision by turns. After"
            f" one run of each to warm the disk, commands of search times run {chosen.repetitions}"
            " times each, and the ratio is that of the least seconds; plans of the table run once."
        ),
    )
    every: tuple[Case, ...] = (*search_time.CASES, *pipeline_search_time.CASES)
    wanted = [c for c in every if chosen.only in c.name]
    plans = [c for c in _plan_cases() if chosen.only in c.name and not chosen.searches_only]
    if chosen.quick:
        wanted, plans = wanted[:1], plans[:4]
    with _checkout(chosen.revision) as other:
        folders = {"here": _HERE, "other": other}
        for folder in folders.values():
            _run(search_time.CASES[0], folder)
        rows = [
            _timed_row(case, folders, 1 if chosen.quick else chosen.repetitions) for case in wanted
        ]
        plan_rows = [_plan_row(case, folders) for case in plans]
    report.tables = {"Search times": rows, "Plans": plan_rows}
    slower = [row["case"] for row in rows if row["ratio"] > _MOST_RATIO]
    worse = [row["case"] for row in (*rows, *plan_rows) if row["step time ratio"] > 1 + _GAP]
    report.summary = {
        "search times compared": len(rows),
        "median ratio": median(row["ratio"] for row in rows) if rows else None,
        "above the bar": slower,
        "plans compared": len(rows) + len(plan_rows),
        "equal within the gap": sum(
            abs(row["step time ratio"] - 1) <= _GAP for row in (*rows, *plan_rows)
        ),
        "worse": worse,
    }
    return report.finish(chosen, met=not slower and not worse)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("revision", help="a commit of this repository")
    parser.add_argument(
        "--searches-only", action="store_true", help="leave out the table of methods by models"
    )
    more_options(repetitions=5)(parser)


@contextmanager
def _checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=_HERE, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def _run(case: Case, folder: Path) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-c", "from aliquot.cli import main; main()", *case.command]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
    started = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode == 1:
        # No plan fits.
        return seconds, {"step_time_s": float("inf")}
    if done.returncode:
        raise SystemExit(f"{' '.join(case.command)} ended with {done.returncode}:\n{done.stderr}")
    return seconds, json.loads(done.stdout)


def _timed_row(case: Case, folders: dict[str, Path], repetitions: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in folders}
    plans: dict[str, dict[str, Any]] = {}
    for _ in range(repetitions):
        for name, folder in folders.items():
            run_s, plans[name] = _run(case, folder)
            seconds[name].append(run_s)
    say(f"{case.name}: {seconds}")
    return {
        "case": case.name,
        "least s": round(min(seconds["here"]), 2),
        "other least s": round(min(seconds["other"]), 2),
        "ratio": round(min(seconds["here"]) / min(seconds["other"]), 3),
        **_step_times(plans),
    }


def _plan_row(case: Case, folders: dict[str, Path]) -> dict[str, Any]:
    plans = {name: _run(case, folder)[1] for name, folder in folders.items()}
    say(f"{case.name}: {_step_times(plans)}")
    return {"case": case.name, **_step_times(plans)}


def _step_times(plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    here, other = plans["here"]["step_time_s"], plans["other"]["step_time_s"]
    return {
        "step s": here,
        "other step s": other,
        "step time ratio": 1.0 if here == other else here / other,
    }


if __name__ == "__main__":
    raise SystemExit(main())
