"""How long does an answer take where memory is tight, whether a plan fits or not?

Sixty commands `aliquot plan ... --memory-limit L --no-remedies --json`, drawn by a seed from models
of the zoo, clusters, batches and methods. L is 0.9 to 1.1 times what the fastest plan takes without
a limit, or what the smallest one found needs. Five more are commands that used to take minutes,
with the memory of their devices.

    python benchmarks/tight_memory.py [--journal FILE] [--quick] [--only TEXT] [--count 60]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _results import Journal, Report, options

_SEED, _COUNT = 19, 60
# Models with clusters and sequences or images in a step; both layers written out and looped over
# are planned.
_MODELS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "gpt-1.3b": (("8xV100-16GB", "2x8xV100-16GB", "4xA100-80GB"), (32, 64, 128)),
    "gpt-2.6b": (("8xV100-16GB", "2x8xV100-16GB", "8xH100"), (32, 64, 128)),
    "gpt-6.7b": (("8xV100-16GB", "2x8xV100-16GB", "8xH100"), (32, 64, 128)),
    "gpt-15b": (("4x8xV100-16GB", "2x8xA100-80GB"), (64, 128)),
    "llama-7b": (("2x8xV100-16GB", "8xH100", "4x8xA100-80GB"), (32, 64)),
    "llama-13b": (("2x8xA100-80GB", "4x8xA100-80GB"), (32, 64)),
    "llama-70b": (("8x8xH100",), (128, 256)),
    "moe-2.4b": (("8xV100-16GB", "2x8xH100"), (64, 128)),
    "wide-resnet-1b": (("8xV100-16GB",), (128, 256)),
}
_METHODS = ("auto", "auto", "shard", "pipeshard")
_FACTORS = (0.9, 0.95, 1.0, 1.05, 1.1)
_KNOWN = (
    ("llama-70b", "8x8xH100", 256, False, "auto"),
    ("gpt-6.7b", "8xV100-16GB", 32, False, "auto"),
    ("gpt-6.7b", "2x8xV100-16GB", 128, True, "auto"),
    ("llama-7b", "2x8xV100-16GB", 32, False, "auto"),
    ("gpt-175b", "512x8xH100", 4096, True, "pipeshard"),
)
_MEDIAN_BAR_S, _WORST_BAR_S, _DEEP_BAR_S = 5.0, 30.0, 45.0
_DEEP_LAYERS = ("llama-70b",)
# What takes longer is counted as that.
_STOP_S = 300.0
_ENOUGH, _TOO_LITTLE = "100000GiB", "16MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and its memory as a factor of what a plan needs; no factor: the memory of the
    devices.
    """

    model: str
    cluster: str
    global_batch: int
    scan: bool
    method: str
    of: str = "device"
    factor: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        written = "scanned" if self.scan else "written out"
        memory = f", {self.factor:g} of the {self.of}" if self.factor else ""
        return (
            f"{self.model} {written} on {self.cluster}, batch {self.global_batch},"
            f" {self.method}{memory}"
        )

    @property
    def bar_s(self) -> float:
        """The seconds that it may take."""
        return _DEEP_BAR_S if self.model in _DEEP_LAYERS and not self.scan else _WORST_BAR_S

    @property
    def command(self) -> list[str]:
        """Arguments of `aliquot` but for the memory."""
        shape = [
            "plan",
            self.model,
            "--cluster",
            self.cluster,
            "--global-batch",
            str(self.global_batch),
        ]
        return [
            *shape,
            "--method",
            self.method,
            "--recompute",
            "block",
            "--no-remedies",
            "--json",
            *(["--scan"] if self.scan else []),
        ]


def drawn() -> list[Case]:
    """Sixty different cases."""
    rng = random.Random(_SEED)
    cases: dict[str, Case] = {}
    while len(cases) < _COUNT:
        model = rng.choice(list(_MODELS))
        clusters, batches = _MODELS[model]
        # Steps with BatchNorm have neither a loop over layers nor pipelines of the same numbers.
        convolves = model.startswith("wide-resnet")
        case = Case(
            model=model,
            cluster=rng.choice(clusters),
            global_batch=rng.choice(batches),
            scan=rng.random() < 0.5 and not convolves,
            method=rng.choice(_METHODS[:3] if convolves else _METHODS),
            of=rng.choice(("fastest", "least")),
            factor=rng.choice(_FACTORS),
        )
        cases[case.name] = case
    return list(cases.values())


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(
        __doc__,
        lambda parser: parser.add_argument(
            "--journal", type=Path, help="a file to go on from where a run was ended"
        ),
        lambda parser: parser.add_argument(
            "--only", default="", help="only cases whose name contains this"
        ),
        lambda parser: parser.add_argument(
            "--count", type=int, default=_COUNT, help="only the first so many cases"
        ),
    )
    journal = Journal(chosen.journal)
    cases = [
        case for case in drawn()[: 4 if chosen.quick else chosen.count] if chosen.only in case.name
    ]
    known = [
        Case(model=m, cluster=c, global_batch=b, scan=s, method=how) for m, c, b, s, how in _KNOWN
    ]
    known = [] if chosen.quick else [case for case in known if chosen.only in case.name]
    rows = [journal.row(case.name, lambda case=case: _row(case)) for case in cases]  # type: ignore[misc]
    others = [journal.row(case.name, lambda case=case: _row(case)) for case in known]  # type: ignore[misc]
    report = Report(
        name="tight_memory",
        question="Time to an answer where memory is tight, feasible or not",
        bar=(
            f"over {_COUNT} cases a median of {_MEDIAN_BAR_S:g} s and at most {_WORST_BAR_S:g} s, "
            f"{_DEEP_BAR_S:g} s for 80 layers written out"
        ),
        method=(
            "Wall time and processor time of a whole process, Python's start, imports and tracing"
            " included; its helper process counts towards processor time, so that on two cores this"
            " can be up to twice the wall time. Each command runs once, without remedies, which are"
            " further plans, and of the step that recomputes each block. `load` is the machine's"
            " when a command began: other work on it makes wall times longer than they would be on"
            " an idle machine. The fastest plan's memory is that without a limit; the least, what"
            " the message of an impossible limit calls the smallest found."
        ),
        tables={"Drawn": rows, "Used to take minutes": others},
    )
    answered = [row for row in rows if row["answer"] in ("plan", "none fits", "gave up")]
    walls, cpus = [row["wall s"] for row in rows], [row["cpu s"] for row in rows]
    late = [row["case"] for row in rows + others if row["wall s"] > row["bar s"]]
    late_cpu = [row["case"] for row in rows + others if row["cpu s"] > row["bar s"]]
    if rows:
        report.summary = {
            "cases": len(rows),
            "answered": len(answered),
            "plans": sum(row["answer"] == "plan" for row in rows),
            "none fits": sum(row["answer"] == "none fits" for row in rows),
            "gave up without a plan": sum(row["answer"] == "gave up" for row in rows),
            "median wall s": median(walls),
            "most wall s": max(walls),
            "median cpu s": median(cpus),
            "most cpu s": max(cpus),
            "above the bar by wall time": "; ".join(late) or "none",
            "above the bar by processor time": "; ".join(late_cpu) or "none",
        }
    met = (
        len(rows) == _COUNT
        and not late
        and len(answered) == len(rows)
        and median(walls) <= _MEDIAN_BAR_S
    )
    return report.finish(chosen, met=met)


def _row(case: Case) -> dict[str, Any]:
    memory, limit = [], None
    if case.factor is not None:
        known, _, _ = _run(
            [*case.command, "--memory-limit", _ENOUGH if case.of == "fastest" else _TOO_LITTLE]
        )
        limit = int(case.factor * known["peak_memory_bytes"])
        # A size is said in MiB.
        memory = ["--memory-limit", f"{limit // 2**20}MiB"]
    load = os.getloadavg()[0]
    answer, wall_s, cpu_s = _run([*case.command, *memory])
    said = str(answer.get("reason") or "")
    kind = (
        "plan"
        if answer.get("feasible")
        else "gave up"
        if "Within the limits" in said
        else "none fits"
    )
    return {
        "case": case.name,
        "limit GiB": "" if limit is None else round(limit / 2**30, 2),
        "answer": answer.get("ended", kind),
        "wall s": round(wall_s, 1),
        "cpu s": round(cpu_s, 1),
        "bar s": case.bar_s,
        "load": round(load, 1),
        "status": answer.get("status") or "",
        "step s": answer.get("step_time_s") or "",
        "gap": answer.get("gap") if answer.get("gap") is not None else "",
    }


def _run(arguments: list[str]) -> tuple[dict[str, Any], float, float]:
    """The answer of a command, its wall time and its processor time."""
    command = [sys.executable, "-c", "from aliquot.cli import main; main()", *arguments]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment["JAX_PLATFORMS"] = "cpu"
    before, started = os.times(), time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=_STOP_S
        )
    except subprocess.TimeoutExpired:
        answer: dict[str, Any] = {"ended": f"none after {_STOP_S:g} s"}
    else:
        lines = done.stdout.strip()
        if not lines:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
        answer = json.loads(lines)
    after = os.times()
    cpu_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return answer, time.perf_counter() - started, cpu_s


if __name__ == "__main__":
    raise SystemExit(main())
