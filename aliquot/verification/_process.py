"""The process in which a target's compiler runs, one program after another: if the compiler
crashes, only this process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from ..core import AliquotError, InputError, format_bytes, format_seconds
from ._program import PortableProgram
from ._targets import CompileTarget

Progress: TypeAlias = Callable[[str], None]
"""Called with a line about what is going on."""

_POLL_S = 0.05
_OUT_OF_MEMORY = re.compile(
    r"(?:(?:Used|total hbm usage >=|requires?|allocat\w+) +|total memory required for HLO"
    r" temporaries \()"
    r"([\d.]+)([KMGT])(?:i?B)?(?: of|\) exceeds)",
    re.IGNORECASE,
)


class CompileError(AliquotError):
    """A program that its compiler refuses, or that needs more memory to compile than there is."""

    exit_code = 1


class CompilerProcess:
    """A process that compiles for one target. It starts with the first program, or before it;
    `close` ends it.
    """

    def __init__(
        self, target: CompileTarget, environment: Mapping[str, str], progress: Progress
    ) -> None:
        self._target, self._environment, self._progress = target, dict(environment), progress
        self._process: subprocess.Popen[bytes] | None = None
        self._place: Path | None = None
        self._count = 0

    def start(self) -> None:
        """Start the process now, while the first program is still made."""
        # Errors are reported with the first program.
        with contextlib.suppress(OSError):
            self._started()

    def close(self) -> None:
        """End the process, which keeps nothing of its own, and remove its files."""
        if self._process is not None:
            self._process.kill()
            # Reaped, and its pipes closed.
            self._process.communicate()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def compile(
        self, program: PortableProgram, request: Mapping[str, Any], *, what: str, report: Path
    ) -> dict[str, Any]:
        """The compiler's answer about a program.

        Args:
            request: settings, as `_worker` reads them.
            what: what the progress line calls the program.
            report: file for everything that the compiler says if it fails.

        Raises:
            CompileError: it refuses the program, or was stopped because memory ran out.
            InputError: there is no room for the program on disk, or the target's description is of
                another release.
        """
        process, folder = self._send(program, request)
        started, most = time.monotonic(), 0
        while (answer := _read(folder)) is None and process.poll() is None:
            most = max(most, _memory_bytes(process.pid))
            self._progress(f"{what} ({format_seconds(time.monotonic() - started)})")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        # It may have answered and ended between the two checks.
        answer = answer or _read(folder)
        words = self._words()
        shutil.rmtree(folder, ignore_errors=True)
        if answer is None:
            raise _died(process.returncode, most, words, program, self._target, report)
        if "error" in answer:
            return _refused(
                str(answer["error"]), str(answer["message"]), words, self._target, report
            )
        return answer

    def _started(self) -> tuple[subprocess.Popen[bytes], Path]:
        """The process, and the folder of its files."""
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="aliquot-verify-"))
        if self._process is None:
            with (self._place / "log.txt").open("wb") as stream:
                # With the same path as this process: `-m` alone would put the current folder first,
                # and whatever lies there with the name of a module would run.
                command = [sys.executable, "-P", "-m", f"{__package__}._worker"]
                path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
                environment = {**self._environment, "PYTHONPATH": path}
                self._process = subprocess.Popen(
                    command, env=environment, stdout=stream, stderr=stream, stdin=subprocess.PIPE
                )
        return self._process, self._place

    def _send(
        self, program: PortableProgram, request: Mapping[str, Any]
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Give the process a program. Returns the process and the folder for its answer."""
        try:
            process, place = self._started()
            folder = place / str(self._count)
            folder.mkdir()
            (folder / "request.json").write_text(json.dumps(request))
            (folder / "module.bin").write_bytes(program.module)
        except OSError as error:
            raise InputError(
                f"the program ({format_bytes(len(program.module))}) cannot be written to"
                f" {tempfile.gettempdir()!r} for its compiler: {error.strerror or error}. Free some"
                " space, or set TMPDIR to another folder."
            ) from None
        self._count += 1
        assert process.stdin is not None
        # A process that has died is noticed by its missing answer.
        with contextlib.suppress(OSError):
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
        return process, folder

    def _words(self) -> str:
        assert self._place is not None
        return (self._place / "log.txt").read_text(errors="replace")


def _read(folder: Path) -> dict[str, Any] | None:
    """The answer, or None until it is there in whole."""
    try:
        answer: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return answer


def _died(
    code: int, most: int, words: str, program: PortableProgram, target: CompileTarget, report: Path
) -> CompileError:
    """The error for a process that has ended without an answer."""
    size = f"a program of {format_bytes(len(program.module))}"
    # The system kills what takes too much memory by signal 9.
    if code == -9 or "bad_alloc" in words or "MemoryError" in words:
        return CompileError(
            f"compiling {size} for {target.name} was stopped when it had taken {format_bytes(most)}"
            " of memory, most likely because there was no more.\n  Free memory, or plan the model"
            " with --scan: loops compile smaller."
        )
    lines = [line for line in words.splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    return CompileError(
        f"the compiler for {target.name} ended with code {code} on {size}: {last:.200}\n "
        f" {_filed(report, words)}"
    )


def _refused(
    error: str, message: str, words: str, target: CompileTarget, report: Path
) -> dict[str, Any]:
    """The answer if the program is too big for the device; otherwise an error."""
    match = _OUT_OF_MEMORY.search(message)
    if "RESOURCE_EXHAUSTED" in message and match:
        scale = 1024 ** ("KMGT".index(match.group(2).upper()) + 1)
        return {
            "refusal": message.strip().partition("\n")[0][:300],
            "needed_bytes": float(match.group(1)) * scale,
        }
    first = message.strip().partition("\n")[0]
    if target.description and (
        "target_config" in message or "TextFormat" in words or "GpuTargetConfig" in message
    ):
        raise InputError(
            f"the description of {target.name} is not understood by the compiler of JAX"
            f" {version('jax')}: {first:.200}\n  It may be of another release; take the file that"
            " this release of OpenXLA has."
        )
    everything = f"{message}\n\n{words}"
    raise CompileError(
        f"the program does not compile for {target.name}: {error}: {first:.300}\n "
        f" {_filed(report, everything)}"
    )


def _filed(report: Path, text: str) -> str:
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(text)
    except OSError as error:
        return f"All that it said could not be written to {report}: {error.strerror}."
    return f"All that it said is in {report}"


def _memory_bytes(pid: int) -> int:
    """Most memory that a process has held so far; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match.group(1)) * 1024 if match else 0
