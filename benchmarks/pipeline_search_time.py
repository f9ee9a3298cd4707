"""How long does it take from the command to the plan of a pipeline?

Runs `aliquot plan ... --method pipeshard --micro-batches auto --json` as a process of its own, start of Python and imports
included: stages, submeshes, splits, schedule, number of micro-batches and recomputation are searched.

    python benchmarks/pipeline_search_time.py [--quick] [--repetitions 3] [--only TEXT]
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
    limit_s: float
    more: tuple[str, ...] = ()
    global_batch: int = 1024

    @property
    def name(self) -> str:
        """What tables call it."""
        return " ".join(
            [self.model, *(m for m in self.more if m.startswith("num_") or m == "--scan"), "on", self.cluster]
        )

    @property
    def command(self) -> list[str]:
        """Arguments of `aliquot`."""
        shape = ["plan", self.model, "--cluster", self.cluster, "--global-batch", str(self.global_batch), *self.more]
        return [*shape, "--method", "pipeshard", "--micro-batches", "auto", "--json"]


# A 70B MoE in single precision with AdamW needs 17 GiB on each of 64 devices: it gets the larger V100.
CASES = (
    Case(model="gpt-39b", cluster="8x8xV100-16GB", limit_s=10.0),
    Case(model="moe-70b", cluster="8x8xV100-32GB", limit_s=15.0, more=("--layers", "params.layers[*]")),
    Case(model="gpt-125m", cluster="8xV100-32GB", limit_s=10.0, more=("--set", "num_layers=1024", "--scan")),
    Case(model="gpt-39b", cluster="8x8xV100-16GB", limit_s=10.0, more=("--scan",)),
    Case(model="gpt-2.6b", cluster="8xV100-16GB", limit_s=10.0),
)


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    report = Report(
        name="pipeline_search_time",
        question="Search time of pipelines, from the start of the command to the plan",
        bar="; ".join(f"{c.name}: {c.limit_s:g} s" for c in CASES),
        method=(
            "Wall time of a whole process, `aliquot plan MODEL --cluster C --global-batch 1024 --method pipeshard "
            "--micro-batches auto --json`: Python's start, imports, building and tracing the step, pricing layers on every "
            f"submesh, the search, the chosen stages solved as wholes. {chosen.repetitions} runs in turn over all cases; "
            "median, least and most. Within: trace and search as the plan's own provenance has them, in the median run."
        ),
    )
    cases = [c for c in CASES if chosen.only in c.name]
    if chosen.quick:
        cases = [c for c in cases if c.model == "gpt-2.6b"]
    runs: dict[str, list[tuple[float, dict[str, Any]]]] = {c.name: [] for c in cases}
    for _ in range(1 if chosen.quick else chosen.repetitions):
        for case in cases:
            seconds, plan = _run(case)
            runs[case.name].append((seconds, plan))
            say(f"{case.name}: {seconds:.1f} s")
    rows = [_row(case, runs[case.name]) for case in cases]
    report.tables = {"Commands": rows}
    report.summary = {row["case"]: f"{row['median s']} of {row['limit s']} s" for row in rows}
    return report.finish(chosen, met=all(row["median s"] <= row["limit s"] for row in rows))


def _more(parser: Any) -> None:
    parser.add_argument("--repetitions", type=int, default=3)
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
        "predicted step s": plan["step_time_s"],
        "gap": plan["gap"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
