r"""Do pipelines in many processes train as in one, for hundreds of steps?

gpt-10m with a layer for each stage, in 2 processes of 2 and 4 CPU devices and in 4 processes of 2,
sequences of 16, 64 and 128, three schedules, alone on the machine and beside other programs that
keep all cores busy.

    python benchmarks/pipeline_processes.py [--quick] [--only TEXT] [--journal FILE] [--steps N] \
        [--finished]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, with_rows

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from runtime.processes import last_lines, started  # noqa: E402

WORKER = TESTS / "runtime" / "gpt_worker.py"
BAR = 1e-6
LIMIT_S = 3600
SIZES = ((2, 2), (2, 4), (4, 2))
LENGTHS = (16, 64, 128)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more_options)
    report = Report(
        name="pipeline_processes",
        question="Pipelines in many processes",
        bar=(
            f"all end with 0, and the losses of all {chosen.steps} steps equal those of one process"
            f" to {BAR:g}"
        ),
        method=(
            "Each case once: the same plan in one process with all devices, then in many. One layer"
            " for each stage, batch of 8 in 2 micro-batches (of 16 in 4 with four stages), AdamW,"
            " float32. Seconds per step are those after the first, read with its loss each time."
            " Beside other programs: as many endless loops as cores, during the run in many"
            " processes. The column `load` is the machine's load average before the case: where it"
            " is high, others used the machine as well, beside `-` too."
        ),
    )
    every = [
        {"processes": n, "devices": each, "seq_len": length, "schedule": schedule, "busy": busy}
        for length, schedule, (n, each), busy in itertools.product(
            LENGTHS, SCHEDULES, SIZES, (False, True)
        )
    ]
    cases = [case for case in every if chosen.only in _name(case)][:: 9 if chosen.quick else 1]
    journal = Journal(chosen.journal)
    if chosen.finished:
        cases = [case for case in cases if _name(case) in journal.rows]
    rows = [journal.row(_name(case), lambda case=case: _row(case, chosen.steps)) for case in cases]  # type: ignore[misc]
    report.tables = {"Cases": rows}
    report.summary = {
        "cases": len(rows) if len(rows) == len(every) else f"{len(rows)} of {len(every)}",
        "that ended well": sum(row["ended"] for row in rows),
        "largest difference of a loss": max(row["loss"] for row in rows),
        "median time of a step, of that in one process": sorted(row["ratio"] for row in rows)[
            len(rows) // 2
        ],
    }
    met = all(row["ended"] and row["loss"] <= BAR for row in rows)
    # Cases that have not run say nothing against the bar, and nothing for it.
    return report.finish(
        chosen, met=None if met and chosen.finished and len(rows) < len(every) else met
    )


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    with_rows(parser)
    parser.add_argument(
        "--finished", action="store_true", help="run nothing: only what the journal holds"
    )


def _name(case: dict[str, Any]) -> str:
    size = f"{case['processes']}x{case['devices']}"
    return f"{size} {case['schedule']} {case['seq_len']} {'busy' if case['busy'] else 'alone'}"


def _row(case: dict[str, Any], steps: int) -> dict[str, Any]:
    count, large = case["processes"], case["processes"] > 2
    told = {
        "devices": count * case["devices"],
        "layers": count,
        "stages": count,
        "batch": 16 if large else 8,
        "micro_batches": 4 if large else 2,
        "seq_len": case["seq_len"],
        "schedule": case["schedule"],
        "steps": steps,
        "limit_s": LIMIT_S,
    }
    load = round(os.getloadavg()[0], 1)
    wanted = _in_one_process(json.dumps(told))
    begin = time.perf_counter()
    found: list[dict[str, Any]] = []
    with _other_programs(case["busy"]), started(WORKER, count, json.dumps(told)) as together:
        # A process that fails or hangs is part of the answer.
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            found = last_lines(together, LIMIT_S)
    pairs = [pair for one in found for pair in zip(one["losses"], wanted["losses"], strict=True)]
    return {
        "processes x devices": f"{count}x{case['devices']}",
        "schedule": case["schedule"],
        "sequence": case["seq_len"],
        "beside": "busy programs" if case["busy"] else "-",
        "load": load,
        "ended": len(found) == count,
        "steps": steps,
        "loss": max((abs(a - b) / abs(b) for a, b in pairs), default=1.0),
        "step ms": round(max((one["step_s"] for one in found), default=0) * 1e3, 1),
        "in one process ms": round(wanted["step_s"] * 1e3, 1),
        "ratio": round(max((one["step_s"] for one in found), default=0) / wanted["step_s"], 2),
        "seconds": round(time.perf_counter() - begin),
    }


@functools.cache
def _in_one_process(told: str) -> dict[str, Any]:
    """Losses and time of a case in one process, alone on the machine."""
    with started(WORKER, 1, told) as alone:
        (answer,) = last_lines(alone, LIMIT_S)
    return answer  # type: ignore[no-any-return]


@contextlib.contextmanager
def _other_programs(wanted: bool) -> Iterator[None]:
    """Endless loops on all cores."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range((os.cpu_count() or 1) * wanted)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
