"""Do questions as they stand in issue threads of other tools get an answer in a few seconds?

python benchmarks/asked_questions.py [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _results import Report, options, say

LIMIT_S = 20.0


def main() -> int:
    """Ask, and write or print the answer."""
    chosen = options(__doc__)
    report = Report(
        name="asked_questions",
        question="Questions from issue threads, each asked by one command",
        bar=f"an answer to each, in at most {LIMIT_S:g} s of processor time",
        method=(
            "Each command is a process of its own; processor time is its own and that of its"
            " helper, from Python's start to the end. One run each. The answer is read from the"
            " command's JSON. The last two read the plan of the third."
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder, "plan.json"))
        rows = [_row(*each) for each in _questions(plan)[: 1 if chosen.quick else None]]
    report.summary = {
        "answered in time": f"{sum(row['in time'] for row in rows)} of {len(rows)}",
        "slowest, s": max(row["cpu s"] for row in rows),
    }
    report.tables = {"Questions": rows}
    return report.finish(chosen, met=all(row["in time"] for row in rows))


Answer = Callable[[dict[str, Any]], str]


def _questions(plan: str) -> list[tuple[str, str, Answer]]:
    return [
        (
            "What is the largest batch of a 70B model on 64 A100-40GB?",
            "plan llama-70b --scan --cluster 8x8xA100-40GB --max-batch --method fsdp",
            lambda found: f"{found['largest_batch']} sequences",
        ),
        (
            "Do I need tensor parallelism for 7B at 32k tokens?",
            (
                "compare llama-7b --scan --seq-len 32768 --cluster 8xH100 --global-batch 8"
                " --methods fsdp,tp:2,tp:8"
            ),
            lambda found: "; ".join(
                f"{row['method']} {row['step_time_s']:.3g} s"
                if row["feasible"]
                else f"{row['method']} does not fit"
                for row in found["candidates"]
            ),
        ),
        (
            "Does 7B fit on v5e-16?",
            f"plan llama-7b --scan --cluster v5e-16 --global-batch 64 --method fsdp --out {plan}",
            lambda found: (
                f"yes: {found['peak_memory_bytes'] / 2**30:.1f} GiB of"
                f" {found['memory_limit_bytes'] / 2**30:.1f} on each device"
            ),
        ),
        (
            "Where does the memory go?",
            f"explain {plan} --no-alternatives",
            lambda found: ", ".join(
                f"{part} {num_bytes / 2**30:.1f} GiB"
                for part, num_bytes in list(found["predicted"]["memory_bytes"].items())[:3]
            ),
        ),
        (
            "Why is there this all-gather?",
            f"explain {plan} --no-alternatives",
            lambda found: next(
                f"{use['kind']} over {', '.join(use['axes'])} of {use['label']}"
                for use in sorted(
                    found["predicted"]["collectives"], key=lambda use: -use["seconds"]
                )
                if use["kind"] == "all-gather"
            ),
        ),
    ]


def _row(question: str, command: str, read: Answer) -> dict[str, Any]:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "aliquot", *command.split(), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    after = os.times()
    cpu_s = sum(
        getattr(after, name) - getattr(before, name)
        for name in ("children_user", "children_system")
    )
    answer = read(json.loads(done.stdout)) if done.returncode == 0 else done.stderr.strip()[-200:]
    words = [Path(word).name if word.startswith(os.sep) else word for word in command.split()]
    row = {
        "question": question,
        "command": f"`aliquot {' '.join(words)}`",
        "answer": answer,
        "cpu s": cpu_s,
        "in time": done.returncode == 0 and cpu_s <= LIMIT_S,
    }
    say(f"{question} {answer} ({cpu_s:.1f} s)")
    return row


if __name__ == "__main__":
    raise SystemExit(main())
