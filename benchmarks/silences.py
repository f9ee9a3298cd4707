"""How long do commands keep silent, off a terminal?

Thirty commands of the README and the pages run one after the other, on small models and with their
output in a pipe. Each piece of output is timed as it arrives. A command may work 2 seconds before
its first word and, after that, 10 seconds between two.

    python benchmarks/silences.py [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _results import Report, options

from aliquot.core import with_xla_flags

_FIRST_S, _BETWEEN_S = 2.0, 10.0
# The clock of the line ticks four times a second.
_TICK_S = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SMALL = "--set num_layers=2 --set vocab_size=8192"
_MEGATRON = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512"
    " --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16"
    " --tensor-model-parallel-size 2 --vocab-size 8192 --bf16"
)
_COMMANDS = (
    "--version",
    "--help",
    "models",
    "clusters",
    "cluster 4x8xA100-80GB",
    f"plan gpt-10m {_SMALL} --cluster 8xH100 --global-batch 16 --out plan.json",
    f"plan gpt-10m {_SMALL} --cluster 8xH100 --global-batch 16 --method fsdp --out fsdp.json",
    f"plan gpt-10m {_SMALL} --cluster 8xH100 --global-batch 16 --method megatron:tp2,pp2",
    "plan gpt-2.6b --cluster 8xH100 --global-batch 64 --out large.json",
    "plan llama3-8b --scan --cluster 8xH100 --global-batch 64",
    f"plan gpt-10m {_SMALL} --cluster 8xH100 --max-batch",
    "plan gpt-10m --cluster 8xH1000 --global-batch 16",
    "explain plan.json",
    "explain plan.json --alternatives",
    "explain large.json --html page.html",
    "diff plan.json fsdp.json",
    "diff plan.json fsdp.json --markdown",
    f"compare gpt-10m {_SMALL} --cluster 8xH100 --global-batch 16",
    f"compare gpt-10m {_SMALL} --cluster 8xH100 --global-batch 16 --html compare.html",
    "size llama-7b --device H100 --tokens 2T --by 30d --global-batch 512 --scan",
    "read run.sh --world 8 --device H100",
    "export fsdp.json --to megatron",
    "report --plan plan.json",
    "data texts --out tokens.bin",
    f"plan gpt-10m {_SMALL} --cluster 8xcpu --global-batch 8 --out small.json",
    "verify small.json",
    f"train gpt-10m {_SMALL} --plan small.json --devices 8 --data tokens.bin --steps 4 --out run",
    f"train gpt-10m {_SMALL} --plan small.json --devices 8 --data tokens.bin --steps 6 --out run",
    "generate gpt-10m --checkpoint run --prompt def --max-tokens 4",
    "demo --steps 4",
)


def _worked_s(group: int) -> float:
    """Seconds of CPU that all processes of a group have worked."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def _timed(command: str, folder: Path) -> dict[str, Any]:
    """A row of the table: the command, and the longest silences of its process."""
    cache = {"PYTHONPYCACHEPREFIX": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    flags = {"XLA_FLAGS": with_xla_flags("", {"--xla_force_host_platform_device_count": "8"})}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "aliquot", *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={**environment, **cache, **flags},
        start_new_session=True,
    )
    assert process.stdout is not None
    heard = [(started_s, 0.0)]
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        worked_s = 0.0
        while True:
            if not selector.select(timeout=0.1):
                worked_s = _worked_s(process.pid) or worked_s
                continue
            worked_s = _worked_s(process.pid) or worked_s
            if not os.read(process.stdout.fileno(), 1 << 16):
                break
            heard.append((time.monotonic(), worked_s))
    process.wait()
    heard.append((time.monotonic(), worked_s))
    gaps = [(b - a, y - x) for (a, x), (b, y) in zip(heard, heard[1:], strict=False)]
    first, rest = gaps[0], gaps[1:]
    between = max(rest, key=min, default=(0.0, 0.0))
    return {
        "command": command.replace(f" {_SMALL}", " ..."),
        "exit": process.returncode,
        "wall s": round(heard[-1][0] - started_s, 1),
        "CPU s": round(worked_s, 1),
        "first word, wall s": round(first[0], 1),
        "first word, CPU s": round(first[1], 1),
        "longest silence after it, wall s": round(between[0], 1),
        "longest silence after it, CPU s": round(between[1], 1),
        # Other work on the machine makes seconds of the clock longer, and threads those of the CPU.
        "silent": min(first) > _FIRST_S + _TICK_S or min(between) > _BETWEEN_S + _TICK_S,
    }


def main() -> int:
    """Run, and write or print the answer."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help="commands that contain this text")

    chosen = options(__doc__, more)
    commands = [command for command in _COMMANDS if chosen.only in command]
    report = Report(
        name="silences",
        question="How long do commands keep silent, off a terminal?",
        bar=(
            f"of {len(_COMMANDS)} commands none works more than {_FIRST_S:g} s before its first"
            f" word, or {_BETWEEN_S:g} s between two"
        ),
        method=(
            "`aliquot COMMAND` with both streams in one pipe, each piece of output timed as it"
            " arrives; one command first, which fills the cache of compiled modules. A silence has"
            " seconds of the clock and seconds of CPU of all processes of the command; the smaller"
            " counts, because other work on the machine lengthens the one and threads the other. A"
            f" line may be {_TICK_S:g} s late."
        ),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for path in sorted(Path(argparse.__file__).parent.glob("*.py"))[:40]:
            (folder / "texts" / path.name).write_bytes(path.read_bytes())
        (folder / "run.sh").write_text(f"torchrun pretrain_gpt.py {_MEGATRON}\n")
        if chosen.only:
            commands = [c for c in _COMMANDS if " --out " in c and c not in commands] + commands
        _timed(_COMMANDS[5], folder)
        rows = []
        for command in commands:
            rows.append(_timed(command, folder))
            print(rows[-1], file=sys.stderr, flush=True)
    silent = [row for row in rows if row.pop("silent")]
    report.tables["Commands"] = rows
    report.summary = {
        "commands": len(rows),
        "with a silence": len(silent),
        "longest before the first word, CPU s": max(r["first word, CPU s"] for r in rows),
        "longest after it, wall s": max(r["longest silence after it, wall s"] for r in rows),
    }
    return report.finish(chosen, met=not silent)


if __name__ == "__main__":
    raise SystemExit(main())
