"""What all benchmark scripts share: their options, eight virtual devices, and dated result files,
which `pytest --report` writes, too.

A script's answer goes into `results/<question>_<hardware>_<yyyy-mm>.json` with the machine, the
versions and the command, and into a `.md` of the same name for readers. A quick run prints and
writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aliquot import core

RESULTS = Path(__file__).parent / "results"
#: How result files name this machine, where it is not said.
HARDWARE = f"cpu-{os.cpu_count()}core"
_PACKAGES = ("aliquot", "jax", "jaxlib", "flax", "optax", "highspy", "numpy")
_DEVICE_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Eight devices share few cores: kernels with threads of their own would only get in each
    # other's way.
    "--xla_cpu_multi_thread_eigen": "false",
}
# Where programs are looked at or run a few times: what XLA makes of them is the same, and compiled
# in half of the time.
_PLAIN_CODE_FLAGS = {
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_use_fusion_emitters": "false",
}


def use_eight_devices(*, fast_code: bool = True) -> None:
    """Make this process's CPU look like eight devices. Call it before JAX is imported.

    Args:
        fast_code: whether to spend time on machine code that runs fast.
    """
    flags = _DEVICE_FLAGS if fast_code else _DEVICE_FLAGS | _PLAIN_CODE_FLAGS
    os.environ["XLA_FLAGS"] = core.with_xla_flags(os.environ.get("XLA_FLAGS", ""), flags)
    os.environ["JAX_PLATFORMS"] = "cpu"


def options(
    description: str | None,
    *more: Callable[[argparse.ArgumentParser], object],
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Command-line options: `--quick`, `--hardware`, and what `more` adds to the parser."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small subset; prints, and writes no result file"
    )
    parser.add_argument("--hardware", default=HARDWARE, help="how result files name this machine")
    for add in more:
        add(parser)
    return parser.parse_args(arguments)


def with_rows(parser: argparse.ArgumentParser) -> None:
    """Options of a script that makes rows by name: `--only` and `--journal`."""
    parser.add_argument(
        "--only", default="", help="only rows whose name contains this; writes no result file"
    )
    parser.add_argument("--journal", type=Path, help="a file to go on from where a run was ended")


@dataclass(slots=True, kw_only=True)
class Report:
    """The answer to one question, built up by a script.

    Attributes:
        name: of the files, as the script's.
        question: what is measured, in words.
        bar: what the answer should be.
        method: how it is measured: warm-up, repetitions, what a figure means.
        summary: the few figures that answer the question.
        tables: by title, rows as mappings from column to value.
    """

    name: str
    question: str
    bar: str
    method: str
    summary: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    started_s: float = field(default_factory=time.perf_counter)

    def finish(self, chosen: argparse.Namespace, *, met: bool | None) -> int:
        """Print the answer and, unless the run was quick, write it. Returns an exit code: 1 if the
        bar was missed.
        """
        facts = self.facts(
            met=met,
            command=["python", f"benchmarks/{self.name}.py", *sys.argv[1:]],
            seconds=time.perf_counter() - self.started_s,
        )
        print(self._text(facts))
        if not chosen.quick and not getattr(chosen, "only", ""):
            path = self.write(facts, RESULTS, chosen.hardware)
            print(f"Written: {path.relative_to(RESULTS.parents[1])} and .md", file=sys.stderr)
        return int(met is False)

    def facts(self, *, met: bool | None, command: Sequence[str], seconds: float) -> dict[str, Any]:
        """What a result file says beside its tables.

        Args:
            met: whether the answer is as it should be; None where there is no bar.
            command: the words that gave the answer.
            seconds: how long it took.
        """
        return {
            "question": self.question,
            "bar": self.bar,
            "met": met,
            "date": datetime.date.today().isoformat(),
            "hardware": f"{cpu_name()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB",
            "load_average": [round(x, 2) for x in os.getloadavg()],
            "versions": versions(),
            "command": shlex.join(map(_relative, command)),
            "seconds": round(seconds, 1),
            "method": self.method,
            "summary": self.summary,
        }

    def write(self, facts: Mapping[str, Any], folder: Path, hardware: str) -> Path:
        """Write both files into a folder. Returns the path of the `.json`."""
        path = folder / f"{self.name}_{hardware}_{facts['date'][:7]}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**facts, "tables": self.tables}, indent=1) + "\n")
        path.with_suffix(".md").write_text(self._text(facts))
        return path

    def _text(self, facts: Mapping[str, Any]) -> str:
        verdict = {True: "met", False: "MISSED", None: "no bar"}[facts["met"]]
        parts = [f"# {self.question}", f"Bar: {self.bar}. **{verdict}**", self.method]
        parts.append("\n".join(f"* {key}: {_shown(value)}" for key, value in self.summary.items()))
        parts += [f"## {title}\n\n{table(rows)}" for title, rows in self.tables.items() if rows]
        listed = ", ".join(f"{key} {value}" for key, value in facts["versions"].items())
        parts.append(
            f"{facts['hardware']}; load {facts['load_average']}; {listed}; `{facts['command']}`,"
            f" {facts['seconds']} s, {facts['date']}"
        )
        return "\n\n".join(parts) + "\n"


def _relative(argument: str) -> str:
    """An argument without the folders of the machine that it was measured on."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; its columns are those of the first row."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_shown(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)


class Journal(core.Journal):
    """Rows by key, each written to a file, and shown, at once."""

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row that is known, or is made now."""
        known, started = key in self.rows, time.perf_counter()
        row = super().row(key, make)
        if not known:
            say(f"{key} ({time.perf_counter() - started:.0f} s): {json.dumps(row)}")
        return row


def versions() -> dict[str, str]:
    """Of Python and the packages that matter."""
    return {
        "python": platform.python_version(),
        **{name: core.version_of(name) for name in _PACKAGES},
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def memory_gib() -> float:
    """Main memory in GiB; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
