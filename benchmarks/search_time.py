"""How long does it take from the command to the plan?

Runs `aliquot plan ... --method shard --json` as a process of its own, start of Python and imports included, over all
two-dimensional logical meshes, and takes the time until it ends.

    python benchmarks/search_time.py [--quick] [--repetitions 5] [--only TEXT]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from _results import Report, options, say


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command and the seconds it may take."""

    model: str
    cluster: str
    global_batch: int
    scan: bool
    limit_s: float

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{self.model} {'scan' if self.scan else 'unrolled'} on {self.cluster}"

    @property
    def command(self) -> list[str]:
        """Arguments of `aliquot`."""
        shape = ["plan", self.model, "--cluster", self.cluster, "--global-batch", str(self.global_batch)]
        return [*shape, "--method", "shard", "--json", *(["--scan"] if self.scan else [])]


_PROBLEMS = (
    ("gpt-2.6b", "8xH100", 64, 10.0),
    ("llama-7b", "8x8xH100", 128, 15.0),
    ("gpt-175b", "64x8xH100", 512, 30.0),
)
CASES = tuple(
    Case(model=model, cluster=cluster, global_batch=batch, scan=scan, limit_s=6.0 if scan else limit_s)
    for scan in (False, True)
    for model, cluster, batch, limit_s in _PROBLEMS
)


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    report = Report(
        name="search_time",
        question="Search time, from the start of the command to the plan",
        bar="; ".join(f"{c.name}: {c.limit_s:g} s" for c in CASES),
        method=(
            f"Wall time of a whole process, `aliquot plan MODEL --cluster C --global-batch N --method shard --json`: Python's "
            f"start, imports, building and tracing the step, the search over all logical meshes of up to two axes, the plan. "
            f"One run to warm the disk, then {chosen.repetitions} in turn over all cases; median, least and most. Within: "
            "trace and search as the plan's own provenance has them, in the median run."
        ),
    )
    cases = [c for c in CASES if chosen.only in c.name]
    if chosen.quick:
        cases = [c for c in cases if c.model == "gpt-2.6b"]
    runs: dict[str, list[tuple[float, dict[str, Any]]]] = {c.name: [] for c in cases}
    for round_ in range(-1, 1 if chosen.quick else chosen.repetitions):
        for case in cases if round_ >= 0 else cases[:1]:
            seconds, plan = _run(case)
            if round_ >= 0:
                runs[case.name].append((seconds, plan))
                say(f"{case.name}: {seconds:.1f} s")
    rows = [_row(case, runs[case.name]) for case in cases]
    report.tables = {"Commands": rows}
    report.summary = {row["case"]: f"{row['median s']} of {row['limit s']} s" for row in rows}
    return report.finish(chosen, met=all(row["median s"] <= row["limit s"] for row in rows))


def _more(parser: Any) -> None:
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases whose name contains this; writes no result file")


def _run(case: Case) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-c", "from aliquot.cli import main; main()", *case.command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{' '.join(case.command)} ended with {done.returncode}:\n{done.stderr}")
    return seconds, json.loads(done.stdout)


def _row(case: Case, runs: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    seconds = [s for s, _ in runs]
    _, plan = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    return {
        "case": case.name,
        "limit s": case.limit_s,
        "median s": round(median(seconds), 2),
        "least s": round(min(seconds), 2),
        "most s": round(max(seconds), 2),
        "runs": len(runs),
        "trace s": round(plan["trace_s"], 2),
        "search s": round(plan["search_s"], 2),
        "mesh": plan["mesh"],
        "predicted step s": plan["step_time_s"],
        "gap": plan["gap"],
    }


if __name__ == "__main__":
    sys.exit(main())
