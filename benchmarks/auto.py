"""Does `Auto`, with everything left to it, answer in time, and is it the fastest of all methods?

Each command `aliquot plan` runs as a process of its own, without any option but the model, its size
and the cluster. Beside the answer of method auto stand those of all other methods.

    python benchmarks/auto.py [--quick] [--only NAME] [--journal FILE]
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from _results import Journal, Report, options, with_rows

_GAP = 0.002
_STOP_S = 600
_OTHERS = ("dp", "zero2", "zero3", "hsdp", "program", "pipeshard", "grid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster.

    Attributes:
        limit_s: wall time that the command of method auto may take.
        more: further arguments that shape the model.
    """

    model: str
    cluster: str
    global_batch: int
    limit_s: float = 30.0
    more: tuple[str, ...] = ("--scan",)

    @property
    def name(self) -> str:
        """What tables call it."""
        more = " ".join(word for word in self.more if word != "--scan").replace("--set ", "")
        scanned = ", scanned" if "--scan" in self.more else ""
        return (
            f"{self.model}{f' {more}' if more else ''} on {self.cluster}, batch"
            f" {self.global_batch}{scanned}"
        )

    def command(self, method: str) -> list[str]:
        """The arguments of `aliquot` for a method; for auto its default."""
        asked = ["--cluster", self.cluster, "--global-batch", str(self.global_batch), *self.more]
        others = ["--method", method, "--recompute", "block"] if method != "auto" else []
        return ["plan", self.model, *asked, *others]


CASES = (
    Case(model="llama-70b", cluster="8x8xH100", global_batch=256),
    Case(model="gpt-175b", cluster="64x8xH100", global_batch=1536),
    Case(model="moe-70b", cluster="8x8xH100", global_batch=256),
    Case(model="wide-resnet-13b", cluster="4x8xV100-16GB", global_batch=1536, more=()),
    Case(
        model="gpt-125m",
        cluster="8xV100-32GB",
        global_batch=64,
        more=("--scan", "--set", "num_layers=1024"),
    ),
    Case(model="gpt-175b", cluster="2048x8xH100", global_batch=16384, limit_s=20.0),
)
QUICK = Case(model="gpt-2.6b", cluster="8xV100-16GB", global_batch=256)


def answered(case: Case, method: str) -> dict[str, Any]:
    """The figures of a method's answer, and the seconds of its command."""
    arguments = [*case.command(method), "--no-remedies", "--json"]
    command = [sys.executable, "-c", "from aliquot.cli import main; main()", *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=_STOP_S
        )
        plan = json.loads(done.stdout) if done.stdout else {}
    except subprocess.TimeoutExpired:
        plan = {"reason": f"no answer after {_STOP_S} s"}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "load": os.getloadavg()[0],
        **{
            key: plan.get(key)
            for key in ("step_time_s", "gap", "num_stages", "num_micro_batches", "schedule")
        },
        "reason": str(plan.get("reason", "")).partition("\n")[0],
    }


def row_of(case: Case, journal: Journal, others: tuple[str, ...]) -> dict[str, Any]:
    """The answer of method auto beside the best of the others."""
    rows = {
        method: journal.row(f"{case.name}, {method}", functools.partial(answered, case, method))
        for method in ("auto", *others)
    }
    own = rows["auto"]
    seconds = {
        method: rows[method]["step_time_s"] for method in others if rows[method]["step_time_s"]
    }
    best = min(seconds, key=lambda method: seconds[method], default="")
    never_above = not best or bool(
        own["step_time_s"] and own["step_time_s"] <= seconds[best] * (1 + _GAP)
    )
    return {
        "case": case.name,
        "wall s": own["wall_s"],
        "limit s": case.limit_s,
        "cpu s": own["cpu_s"],
        "load": own["load"],
        "step s": own["step_time_s"] or own["reason"],
        "gap": own["gap"],
        "stages": own["num_stages"],
        "micro-batches": own["num_micro_batches"],
        "best other": best,
        "its step s": seconds.get(best),
        "never above": never_above,
        "in time": own["wall_s"] <= case.limit_s,
    }


def main() -> int:
    """Run the commands, and write or print the answer."""

    chosen = options(__doc__, with_rows)
    report = Report(
        name="auto",
        question="Method auto with everything left to it",
        bar="every command within its limit, and no other method faster by more than 0.2 %",
        method=(
            "Each command runs once, as a process of its own, from its start to its end, without"
            " remedies. Processor time is that of the command and its helper process. Other"
            f" methods: {', '.join(_OTHERS)}."
        ),
    )
    journal = Journal(chosen.journal)
    cases = [QUICK] if chosen.quick else [case for case in CASES if chosen.only in case.name]
    rows = [row_of(case, journal, _OTHERS[:4] if chosen.quick else _OTHERS) for case in cases]
    report.tables = {"Commands": rows}
    report.summary = {
        "commands within their limit": f"{sum(row['in time'] for row in rows)} of {len(rows)}",
        "never above the best other method": (
            f"{sum(row['never above'] for row in rows)} of {len(rows)}"
        ),
    }
    return report.finish(chosen, met=all(row["in time"] and row["never above"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
