"""How long does it take to verify a plan, with the compiler for GPUs that are not there?

Runs `aliquot verify PLAN --json` as a process of its own, with an empty cache each time, and takes
the time until it ends. Needs the wheels of `jax-cuda12-plugin`, `jax-cuda12-pjrt` and
`nvidia-cuda-nvcc-cu12` on `PYTHONPATH`.

    python benchmarks/verify_deviceless.py [--quick] [--repetitions 3]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _results import Report, options, say

LIMIT_S = 15.0
# The first two are the question, the third is shown beside them.
CASES = {
    "gpt-1.3b unrolled on 8xH100": ("gpt-1.3b", "--cluster", "8xH100", "--global-batch", "8"),
    "llama-7b scan on 8x8xH100": (
        "llama-7b",
        "--scan",
        "--cluster",
        "8x8xH100",
        "--global-batch",
        "64",
    ),
    "gpt-1.3b scan on 8xH100": ("gpt-1.3b", "--scan", "--cluster", "8xH100", "--global-batch", "8"),
}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(
        __doc__, lambda parser: parser.add_argument("--repetitions", type=int, default=3)
    )
    repetitions = 1 if chosen.quick else chosen.repetitions
    report = Report(
        name="verify_deviceless",
        question=(
            "Time of one verification without GPUs, from the start of the command to its report"
        ),
        bar=f"{', '.join(list(CASES)[:2])}: {LIMIT_S:g} s each",
        method=(
            "Wall time of a whole process, `aliquot verify PLAN --json`, with an empty cache:"
            " Python's start, tracing and writing down the program, the compiler, the report."
            f" {repetitions} runs, in turn over all cases; median, least and most. Within: the"
            " compiler's own seconds, in the median run."
        ),
    )
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        plans = {name: Path(folder, f"{number}.json") for number, name in enumerate(CASES)}
        for name, model in CASES.items():
            _aliquot(folder, "plan", *model, "--out", str(plans[name]), "--json")
        for number in range(repetitions):
            for name, plan in plans.items():
                started_s = time.perf_counter()
                found = json.loads(
                    _aliquot(str(Path(folder, f"cache{number}")), "verify", str(plan), "--json")
                )
                taken_s = time.perf_counter() - started_s
                seconds[name].append((taken_s, found["stages"][0]["compile_s"]))
                say(f"{name}: {taken_s:.1f} s")
    rows = []
    for name, runs in seconds.items():
        taken, compiling = zip(*sorted(runs), strict=True)
        rows.append(
            {
                "case": name,
                "median s": median(taken),
                "least s": taken[0],
                "most s": taken[-1],
                "compiler s": compiling[len(compiling) // 2],
            }
        )
    report.tables = {"Verifications": rows}
    report.summary = {row["case"]: f"{row['median s']:.1f} s" for row in rows}
    return report.finish(chosen, met=all(row["median s"] <= LIMIT_S for row in rows[:2]))


def _aliquot(cache: str, *arguments: str) -> str:
    """What a command prints, where nothing was verified before."""
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    return subprocess.run(
        [sys.executable, "-m", "aliquot", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    raise SystemExit(main())
