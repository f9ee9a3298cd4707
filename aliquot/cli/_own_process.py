"""One case of a benchmark in a process of its own: this command again, for that case alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from ..core import shortened
from ._groups import option

RunsHere = Annotated[str, option("", hidden=True)]
"""Which plan of the only case this process itself runs; empty in the command that was typed."""


def row_of_own_process(
    number: int, plan_of: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """The row of a case that this command makes in another process, which gives it as
    `{"row": ...}`; of one that fails, why, with what it said last.

    Args:
        environment: of that process, where this one has changed its own.
    """
    kept: list[str] = []
    given = iter(sys.argv[1:])
    for argument in given:
        if argument == "--case":
            next(given, None)
        elif argument != "--json" and not argument.startswith("--case="):
            kept.append(argument)
    command = [sys.executable, "-m", "aliquot", *kept]
    command += ["--case", str(number), "--runs-here", plan_of, "--json"]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        said: list[str] = []
        for line in process.stderr:
            said = [*said[-4:], line.strip()]
            print(line, end="", file=sys.stderr, flush=True)
        answer = process.stdout.read()
    if process.returncode == 0 and answer:
        row: dict[str, Any] = json.loads(answer)["row"]
        return row
    last = shortened(" / ".join(said), 400)
    return f"its process ended with exit code {process.returncode}: {last}"
