"""Processes that tests start, as many as train together."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.ports import coordinator_port


@contextlib.contextmanager
def started(
    worker: Path, count: int, *arguments: object, port: int = 0
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes `worker PROCESS COUNT PORT ARGUMENTS...`.

    Whoever still runs at the end is killed: hung processes listen to nothing gentler.
    """
    tests = Path(__file__).parents[1]
    port = port or coordinator_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), *map(str, (k, count, port, *arguments))],
            env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for k in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()


def last_texts(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """What processes that all end well print."""
    printed = [process.communicate(timeout=timeout_s) for process in processes]
    errors = "".join(f"{k}: {said[-2000:]}" for k, (_, said) in enumerate(printed))
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return [out for out, _ in printed]


def last_lines(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[dict]:
    """The last line that each of them prints, as JSON."""
    return [json.loads(out.splitlines()[-1]) for out in last_texts(processes, timeout_s)]
