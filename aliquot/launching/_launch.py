"""Start processes that run one command together, and start them again when one fails."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import SECRET, AliquotError, InputError, make_secret
from ._attempt import Failure, follow
from ._engine import AbstractEngine, Job
from ._engines import make_engine

# Hosts that failed may need a moment until others know.
_PAUSE_S = 1


class LaunchError(AliquotError):
    """A run whose processes have failed more often than they may be started again.

    `exit_code` is that of the process that failed first, 128 + n if signal n ended it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.message, self.exit_code = message, exit_code

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A run that has ended well.

    Attributes:
        num_processes: of its last attempt.
        failures: what ended each attempt before it.
    """

    num_processes: int
    failures: tuple[Failure, ...]


def launch(
    command: Sequence[str],
    engine: str,
    *,
    max_restarts: int = 0,
    num_hosts: int | None = None,
    num_devices_per_host: int | None = None,
    min_hosts: int | None = None,
    address: str | None = None,
    logs: str | Path | None = None,
    interrupt: int = signal.SIGINT,
    kept: str = "their last checkpoint",
    note: Callable[[str], None] | None = None,
    show: Callable[[int, bool, str], None] | None = None,
) -> Launched:
    """Start processes that run a command together, pass on what they print, and wait until all have
    ended. When one fails, the others are ended and, if restarts are left, all are started again.

    In the command, `aliquot.runtime.initialize()` needs no arguments: the processes find each other
    and share a secret that nobody else knows. A restarted command runs from its beginning, so it
    should first look for a checkpoint. Exit code 2 means that the command cannot use what it was
    given: then it is not started again.

    Args:
        command: words. `python` is the Python that runs this; a file of Python needs no such word.
        engine: `local:4` for 4 processes of this machine, or `ray` for one on each host of a
            Ray cluster.
        max_restarts: how often all may be started again.
        num_hosts: of the Ray cluster; by default all.
        num_devices_per_host: of each process: GPUs, or virtual devices of CPUs.
        min_hosts: with how few hosts a new attempt may start when others are gone; by default all.
        address: of the Ray cluster's head; by default that of `RAY_ADDRESS`, else of a cluster that
            runs on this machine, which is started if there is none.
        logs: a folder for `attempt-1/process-0.log` and so on.
        interrupt: the signal as which Ctrl-C is passed on. After SIGTERM, JAX can let all processes
            of a command stop at one step.
        kept: what the command goes on from when it is started again, for messages.
        note: gets remarks; by default they go to standard error.
        show: gets each line: the process, whether it is of standard error, and the text; by default
            lines are printed with the process's number.

    Raises:
        LaunchError: a process has failed, and no restarts are left.
        InputError: what was asked for cannot be started; names everything that is wrong.
    """
    if isinstance(command, str) or not command:
        raise InputError(
            f"the command to launch must be a list of words, got {command!r}. Write for example"
            " aliquot launch local:2 -- python my_script.py, or launch(['my_script.py'],"
            " 'local:2')."
        )
    words = tuple(str(word) for word in command)
    if max_restarts < 0:
        raise InputError(f"--max-restarts must not be negative, got {max_restarts}.")
    chosen = make_engine(
        engine,
        num_hosts=num_hosts,
        num_devices_per_host=num_devices_per_host,
        min_hosts=min_hosts,
        address=address,
        note=note or _note,
    )
    folder = None if logs is None else Path(logs)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"logs cannot be written to {str(folder)!r}: {error.strerror}."
            ) from None
    try:
        watch = functools.partial(follow, show=show or _show, interrupt=interrupt)
        return _run(chosen, words, max_restarts, folder, kept, note or _note, watch)
    finally:
        chosen.release()
        chosen.close()


def _run(
    engine: AbstractEngine,
    command: tuple[str, ...],
    max_restarts: int,
    logs: Path | None,
    kept: str,
    note: Callable[[str], None],
    watch: Callable[..., Failure | None],
) -> Launched:
    """The loop of attempts."""
    settings = {SECRET: os.environ.get(SECRET) or make_secret()}
    name, failures = make_secret()[:8], list[Failure]()
    while True:
        attempt = len(failures) + 1
        job = Job(
            command=command,
            settings=settings,
            folder=os.getcwd(),
            run_id=f"{name} attempt {attempt}",
            attempt=attempt,
        )
        processes = engine.start(job)
        folder = logs / f"attempt-{attempt}" if logs else None
        with _signals() as signals:
            failure = watch(processes, logs=folder, signals=signals)
        engine.release()
        if signals:
            ended = "interrupted" if signals[0] == signal.SIGINT else "asked to end (SIGTERM)"
            raise LaunchError(f"{ended}; all processes have ended.", 128 + signals[0])
        if failure is None:
            return Launched(num_processes=len(processes), failures=tuple(failures))
        failures.append(failure)
        left = max_restarts - len(failures) + 1
        if left and not failure.ending.advice:
            note(
                f"{failure}\n  All are started again from {kept} (attempt {attempt + 1} of"
                f" {max_restarts + 1})."
            )
            time.sleep(_PAUSE_S)
            continue
        advice = failure.ending.advice
        if not advice and max_restarts:
            advice = f"It has been started {attempt} times (--max-restarts {max_restarts})."
        advice = advice or f"To start again from {kept}: --max-restarts 3."
        raise LaunchError(f"{failure}\n  {advice}", failure.ending.exit_code)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """A list of the requests to end that this process gets from now on. In other threads than the
    first, which get no signals, it stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(text: str) -> None:
    print(f"aliquot launch: {text}", file=sys.stderr, flush=True)


def _show(process: int, is_error: bool, line: str) -> None:
    stream = sys.stderr if is_error else sys.stdout
    encoding = stream.encoding or "utf-8"
    text = line.encode(encoding, "backslashreplace").decode(encoding)
    print(f"[{process}] {text}", file=stream, flush=True)
