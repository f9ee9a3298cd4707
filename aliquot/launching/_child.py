"""A process that is started, read and ended on one host.

Uses the standard library alone: Ray carries this file to hosts that may not have this package.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

# Shorter stops are ignored, since a debugger also stops a process for a moment.
_STOPPED_S = 5
_LONGEST_LINE = 65536
# Lines that wait to be fetched; beyond, the process waits as well.
_MOST_LINES = 20_000
# What a process leaves behind may hold its pipes open.
_LAST_LINES_S = 1

# Runs before the command, in its process: where the system can, it asks to be killed when the
# launcher dies, however that happens.
_BOUND = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"{sys.argv[2]!r} cannot be started: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


class Child:
    """A command that runs in a process and a session of its own.

    Args:
        command: `python` as its first word is the Python that runs here; a file of Python needs no
            such word.
        settings: variables of its environment, besides those of this process.
        folder: in which it runs.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, str], folder: str) -> None:
        words = list(command)
        if words[0] in ("python", "python3"):
            words[0] = sys.executable
        elif words[0].endswith(".py"):
            words.insert(0, sys.executable)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *words],
            # Lines come when they are printed, not when a buffer is full.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **settings},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lines: queue.Queue[tuple[bool, str] | None] = queue.Queue(_MOST_LINES)
        self._stopped_since: float | None = None
        readers = [
            threading.Thread(target=self._read, args=(is_error,), daemon=True)
            for is_error in (False, True)
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()

    def news(self, timeout_s: float) -> tuple[list[tuple[bool, str]], int | None, bool]:
        """What has happened since the last call; waits for something to happen, up to a time.

        Returns:
            Lines, each with whether it is of standard error; the exit code, or the negative number
            of the signal that ended the process, once all its lines are told; and whether it has
            been stopped for several seconds.
        """
        lines: list[tuple[bool, str]] = []
        with suppress(queue.Empty):
            item = self._lines.get(timeout=timeout_s)
            while item is not None:
                lines.append(item)
                item = self._lines.get_nowait()
            return lines, self._process.returncode, False
        return lines, None, self._is_stopped()

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End the process and all that it has started, and wait until it is gone."""
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_LINES_S)

    def _read(self, is_error: bool) -> None:
        stream = self._process.stderr if is_error else self._process.stdout
        assert stream is not None
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                self._lines.put((is_error, line.rstrip("\n")))

    def _wait(self, readers: Sequence[threading.Thread]) -> None:
        self._process.wait()
        until = time.monotonic() + _LAST_LINES_S
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        self._lines.put(None)

    def _is_stopped(self) -> bool:
        """True if the process has been stopped for some time, where the system tells."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        if state not in "Tt":
            self._stopped_since = None
            return False
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() > self._stopped_since + _STOPPED_S
