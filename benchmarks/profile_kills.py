"""Does a profile run that is killed at any moment keep what it measured, and go on?

`aliquot blocks profile` is killed with SIGKILL at random moments and started again, until all
programs are measured or 50 runs have been killed. After each, the database must open and hold every
measurement that was there before.

    python benchmarks/profile_kills.py [--quick]
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _results import Report, options, say

from aliquot.profiling import ProfileDatabase

_COMMAND = (
    "-m aliquot blocks profile gpt-10m --global-batch 8 --set num_layers=2 --set hidden_size=32"
    " --set num_heads=4 --seq-len 16 --dtype float32 --recompute none --devices 4 --repeats 1"
    " --database"
)


def main() -> int:
    """Run, and write what came out; 1 if anything was lost."""
    chosen = options(__doc__)
    report = Report(
        name="profile_kills",
        question=(
            "Does a profile run that is killed at any moment keep what it measured, and go on?"
        ),
        bar="the database opens, holds every finished measurement, and the run resumes",
        method=(
            "SIGKILL after a random time of 2 to 10 s; the moments are seeded. At last a run ends"
            " by itself."
        ),
    )
    moments, rows, num_kills = random.Random(0), [], 3 if chosen.quick else 50
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.sqlite"
        held: dict[Any, Any] = {}
        for kill in range(num_kills):
            after_s = moments.uniform(2, 10)
            rows.append({"kill": kill, "after s": after_s, **_killed(path, after_s, held)})
            say(str(rows[-1]))
        command = [sys.executable, *_COMMAND.split(), str(path), "--json"]
        done = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    lost = sum(row["lost"] for row in rows)
    report.tables["Kills"] = rows
    report.summary = {
        "kills": len(rows),
        "measurements lost or changed": lost,
        "known to the last run": done["known"],
        "missing after it": done["missing"],
    }
    met = lost == 0 and done["missing"] == 0 and done["known"] == rows[-1]["held"]
    return report.finish(chosen, met=None if chosen.quick else met)


def _killed(path: Path, after_s: float, held: dict[Any, Any]) -> dict[str, int]:
    command = [sys.executable, *_COMMAND.split(), str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        time.sleep(after_s)
        was_running = run.poll() is None
        if was_running:
            os.kill(run.pid, signal.SIGKILL)
    now: dict[Any, Any] = {}
    if path.exists():
        with ProfileDatabase(path) as database:
            now = dict(database.rows())
    lost = sum(now.get(key) != value for key, value in held.items())
    held.update(now)
    return {"held": len(now), "lost": lost, "was running": int(was_running)}


if __name__ == "__main__":
    raise SystemExit(main())
