"""Do checkpoints survive kills, and what do they cost?

Runs that save after every step are killed with SIGKILL at random moments and resumed, half of the
time under another plan; GPT-10M is saved and restored by one and two processes.

    python benchmarks/checkpoints.py [--quick] [--journal FILE [--finished]]
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _results import Journal, Report, options, use_eight_devices

use_eight_devices(fast_code=False)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax  # noqa: E402
from _checkpoint_run import model  # noqa: E402
from runtime import processes  # noqa: E402
from runtime.ports import coordinator_port  # noqa: E402

RUN, GPT = (Path(__file__).parent / name for name in ("_checkpoint_run.py", "_checkpoint_gpt.py"))
LIMIT_S = 300
PROGRAM = [{"method": "Zero3Parallel"}, {"method": "DataParallel"}]
WRITTEN = [{"sizes": (4, 4)}, {"sizes": (4, 4), "backwards": True}]
SCANNED = [{"bounds": (0, 2, 6), "sizes": (4, 4)}, {"bounds": (0, 5, 6), "sizes": (4, 4)}]
CASES = [
    (name, count, [*plans, *more])
    for count in (1, 2)
    for name, plans, more in (
        ("program", PROGRAM, WRITTEN[:1]),
        ("scanned", SCANNED, PROGRAM[:1]),
        ("written", WRITTEN, PROGRAM[:1]),
    )
]
# Which plan a run has after each kill; the last one runs to its end.
ORDER = (0, 0, 1, 1, 2, 0)
# As `bar` says: relative difference, steps, seconds, files, bytes over bytes.
BARS = (1e-9, 2, 0.4, 34, 1.2)
ZERO3 = {"method": "Zero3Parallel"}
STAGES = {
    "method": "PipeshardParallel",
    "options": {"num_stages": 2, "num_micro_batches": 2, "schedule": "1f1b"},
}


def main() -> int:
    """Run, and write what came out; 1 if a bar was missed."""
    chosen = options(__doc__, _more_options)
    report = Report(
        name="checkpoints",
        question="Do checkpoints survive kills, and what do they cost?",
        bar=(
            "losses equal the uninterrupted run's (float64, 1e-9), no checkpoint unreadable, at"
            " most two steps lost; a save of 130 MB takes 0.4 CPU s of the step; at most 34 files;"
            " a process reads at most 1.2 times the bytes that it owns"
        ),
        method=(
            "Kills: small models in float64 on eight virtual CPU devices, saved after every step;"
            " SIGKILL to one process up to 0.5 s after two to four steps, seeded; then the"
            " next run resumes by itself, under the plan in the table. GPT-10M: float32 with AdamW;"
            " medians of five saves that wait for nothing, on a machine that others use as well."
        ),
    )
    journal = Journal(chosen.journal)
    sizes = [] if chosen.quick else journal.row("GPT-10M", _gpt)["rows"]
    kills = []
    for name, count, plans in CASES[:: 4 if chosen.quick else 1]:
        key = f"{name}, {count} processes"
        if chosen.finished and key not in journal.rows:
            continue
        kills += journal.row(key, lambda n=name, c=count, p=plans: _killed(n, c, p))["rows"]  # type: ignore[misc]
    report.tables = {"Kills": kills, "GPT-10M": sizes}
    killed = [row for row in kills if row["killed"]]
    worst = {
        "largest relative difference of a loss": max(row["difference"] for row in kills),
        "most steps lost": max(row["lost"] for row in kills),
        "most CPU s that a save takes of a step": max(
            (row["blocking thread CPU s"] for row in sizes), default=0.0
        ),
        "most files": max((row["files"] for row in sizes), default=0),
        "most bytes read / owned": max((row["read / owned"] for row in sizes), default=0.0),
    }
    report.summary = {
        "kills": len(killed),
        "resumed under another plan": sum(row["other plan"] for row in killed),
        **worst,
    }
    met = all(found <= bar for found, bar in zip(worst.values(), BARS, strict=True))
    return report.finish(chosen, met=None if chosen.quick else met)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal", type=Path, help="a file that keeps finished parts, to go on from"
    )
    parser.add_argument(
        "--finished", action="store_true", help="report what the journal holds, and run no more"
    )


def _killed(name: str, count: int, plans: list[dict[str, Any]]) -> dict[str, Any]:
    """One run, killed five times: a row for each start."""
    moments, rows = random.Random(f"{name} {count}"), []
    said: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        last, before = -1, 0
        for turn, position in enumerate(ORDER):
            is_last = turn == len(ORDER) - 1
            case = {
                "model": name,
                "plan": plans[position],
                "stop": last + 4 if is_last else 10**6,
            }
            # In the first step's save Orbax is imported, so there is a second one before a kill.
            after = 2 + moments.randrange(3)
            after_s = math.inf if is_last else moments.uniform(0, 0.5)
            lines = _start(count, folder, case, after, after_s, moments.randrange(count))
            first = lines[0]["first"]
            losses = {line["step"]: line["loss"] for line in lines if "step" in line}
            # What was trained twice must agree as well.
            again = [_gap(said[k], loss) for k, loss in losses.items() if k in said]
            rows.append(
                {
                    "model": name,
                    "processes": count,
                    "plan": json.dumps(plans[position]).replace('"', ""),
                    "other plan": turn > 0 and position != before,
                    "killed": not is_last,
                    "resumed at": first,
                    "lost": last + 1 - first,
                    "steps": len(losses),
                    "skipped": len(lines[0]["skipped"]),
                    "difference": max(again, default=0.0),
                }
            )
            said |= losses
            last, before = max(said, default=-1), position
    wanted = _uninterrupted(name, last + 1)
    rows[-1]["difference"] = max(_gap(wanted[k], loss) for k, loss in said.items())
    assert sorted(said) == list(range(last + 1))
    return {"rows": rows}


def _gap(wanted: float, found: float) -> float:
    return abs(found - wanted) / abs(wanted)


def _uninterrupted(name: str, stop: int) -> list[float]:
    with jax.enable_x64(True):
        init, train_step, batch_of = model(name)
        state, step, losses = init(jax.random.key(0)), jax.jit(train_step), []
        for number in range(stop):
            state, metrics = step(state, batch_of(number))
            losses.append(float(metrics["loss"]))
    return losses


def _start(
    count: int, folder: str, case: dict[str, Any], after: int, after_s: float, victim: int
) -> list[dict[str, Any]]:
    """What process 0 says until it has ended, or one process was killed `after_s` after so many
    steps.
    """
    lines: queue.Queue[str] = queue.Queue()
    found: list[dict[str, Any]] = []

    def read(stream: Any) -> None:
        for line in stream:
            lines.put(line)

    with processes.started(RUN, count, folder, json.dumps(case), port=coordinator_port()) as runs:
        readers = [
            threading.Thread(target=read, args=(run.stdout,), daemon=True) for run in runs[:1]
        ]
        # Pipes that nobody reads would stop those who write.
        readers += [
            threading.Thread(target=stream.read, daemon=True)
            for run in runs
            for stream in (run.stderr, *((run.stdout,) if run is not runs[0] else ()))
        ]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + LIMIT_S
        while len(found) < 1 + after:
            found += _object(lines.get(timeout=deadline - time.monotonic()))
        if after_s < math.inf:
            time.sleep(after_s)
            runs[victim].kill()
        for run in runs:
            run.wait(timeout=LIMIT_S)
        readers[0].join(10)
        while not lines.empty():
            found += _object(lines.get())
    if after_s == math.inf:
        assert found[-1] == {"ended": True}, found[-1]
    return found


def _object(line: str) -> list[dict[str, Any]]:
    """What a line says; nothing if it was cut short, or is what JAX's libraries print."""
    whole = line.startswith("{") and line.endswith("}\n")
    return [json.loads(line)] if whole else []


def _gpt() -> dict[str, Any]:
    """GPT-10M saved under one plan, and restored and saved under another, by one or two
    processes.
    """
    rows = []
    for count in (1, 2):
        for saved, restored in ((ZERO3, STAGES), (STAGES, ZERO3))[count - 1 :]:
            folder = tempfile.mkdtemp()
            try:
                first = _gpt_run(count, folder, saved | {"saves": 5})
                files = sum(path.is_file() for path in Path(folder, "4").rglob("*"))
                size = sum(p.stat().st_size for p in Path(folder, "4").rglob("*") if p.is_file())
                second = _gpt_run(count, folder, restored | {"saves": 0})
            finally:
                shutil.rmtree(folder)
            saves = [save for said in first for save in said["saves"]]
            times = {name: statistics.median(save[name] for save in saves) for name in saves[0]}
            rows.append(
                {
                    "processes": count,
                    "saved by": saved["method"],
                    "MB": round(sum(said["owned"] for said in first) / 1e6),
                    "MB on disk": round(size / 1e6),
                    "files": files,
                    **{name: round(seconds, 3) for name, seconds in times.items()},
                    "restored by": restored["method"],
                    "read / owned": round(max(x["read"] / x["owned"] for x in second), 3),
                }
            )
    return {"rows": rows}


def _gpt_run(count: int, folder: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    with processes.started(GPT, count, folder, json.dumps(case)) as running:
        found: list[dict[str, Any]] = processes.last_lines(running, 2 * LIMIT_S)
    return found


if __name__ == "__main__":
    sys.exit(main())
