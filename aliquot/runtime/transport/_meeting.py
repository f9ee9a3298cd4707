"""Meeting of the processes of a run, before JAX connects them.

Process 0 listens at the address that all were given. The others connect, prove that they know the
secret, and say which process of which run they are; the connections stay for `_watchdog`. So a
process that dies, joins twice, or belongs to another run is noticed at once and named.
"""

from __future__ import annotations

import os
import platform
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from ...core import version_of
from ._line import PROOFS_S, Line, open_line
from ._reception import LOGGER, Reception
from ._secret import digest

EXIT_CODE = 3

_VERSIONS = ("aliquot", "jax", "jaxlib")
#: Variables in which launchers tell a job's number.
_JOB_NUMBERS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID")
_PURPOSE = "meeting"
_WORD_BYTES = 32


class Hello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message with which a process joins.

    Attributes:
        process, count: its number, and how many it expects.
        run: a name that all processes of its run share, and no others.
        machine: a text that is the same in processes that can see each other's states.
        pid: its process id on that machine.
        versions: of the packages that must be the same in all processes.
    """

    process: int
    count: int
    run: str
    machine: str
    pid: int
    versions: dict[str, str]

    @staticmethod
    def own(process: int, count: int, run: str) -> Hello:
        versions = {name: version_of(name) for name in _VERSIONS}
        # A machine, its last start, and the set of processes that this one can see: the boot id
        # distinguishes machines of the same name; the PID namespace, containers.
        parts = [platform.node().split()[0] if platform.node().split() else "unknown"]
        with suppress(OSError):
            parts += [
                Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                os.readlink("/proc/self/ns/pid"),
            ]
        return Hello(
            process=process,
            count=count,
            run=run,
            machine=" ".join(parts),
            pid=os.getpid(),
            versions=versions,
        )

    def __str__(self) -> str:
        return (
            f"process {self.process} of {self.count} (pid {self.pid} on {self.machine.split()[0]})"
        )


class Refused(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Answer to a process that cannot join."""

    text: str


class Joined(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Answer to all processes once they have come.

    Attributes:
        hello: process 0's.
        word: random; makes the key of this run from the secret.
        service_port: of JAX's service.
    """

    hello: Hello
    word: bytes
    service_port: int


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """Connections to other processes, and the messages with which they joined: process 0 has those
    of all others, and each of these only that of process 0.

    Attributes:
        key: that only processes of this run know.
        service_port: of JAX's service.
        reception: in process 0, where those who come later are turned away.
    """

    process: int
    count: int
    lines: Mapping[int, Line]
    hellos: Mapping[int, Hello]
    key: bytes
    service_port: int
    reception: Reception[Hello] | None = None

    def close(self) -> None:
        """End all connections."""
        for end in (*self.lines.values(), self.reception):
            if end is not None:
                end.close()


def default_run_id() -> str:
    """The launcher's number of this job, or nothing."""
    return next((os.environ[name] for name in _JOB_NUMBERS if os.environ.get(name)), "")


def give_up(text: str) -> NoReturn:
    """End this process with a message and exit code 3."""
    print(f"\naliquot: {text}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)


def gather_in(
    listener: socket.socket, own_hello: Hello, secret: bytes, timeout_s: float, service_port: int
) -> Met:
    """Accept the connections of all other processes, in process 0, and tell them that they have
    joined. If one of them dies or does not fit, all that have come are told to end, and this
    process ends too.

    Processes that come later are turned away as long as this one lives.
    """
    joined: dict[int, tuple[Hello, Line]] = {}
    arrivals: queue.Queue[tuple[Hello, Line]] = queue.Queue()
    reception = Reception(
        listener,
        key=secret,
        purpose=_PURPOSE,
        kind=Hello,
        arrived=lambda hello, line: arrivals.put((hello, line)),
        num_expected=own_hello.count,
    )
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        stack.callback(reception.close)
        while len(joined) < own_hello.count - 1:
            for k, (hello, line) in joined.items():
                if line.has_ended():
                    _turn_all_away(
                        joined,
                        f"{hello} has ended while the processes met. Look for its error.",
                        but=k,
                    )
            if time.monotonic() > deadline:
                missing = ", ".join(str(k) for k in range(1, own_hello.count) if k not in joined)
                _turn_all_away(
                    joined,
                    f"of {own_hello.count} processes {missing} did not come within"
                    f" {timeout_s:.0f} s to {listener.getsockname()[0]}, where process 0 awaited"
                    f" them.{reception.strangers}",
                )
            try:
                # Short waits, so that a process that has ended meanwhile is noticed.
                came, line = arrivals.get(timeout=0.2)
            except queue.Empty:
                continue
            if came.run != own_hello.run:
                _turn_away(line, _other_run(own_hello, came))
            elif problem := _misfit(own_hello, came, {k: h for k, (h, _) in joined.items()}):
                # The process that does not fit is told as well.
                joined[-1] = came, line
                _turn_all_away(joined, problem)
            else:
                joined[came.process] = came, line
        stack.pop_all()
    threading.Thread(
        target=_turn_away_all_later, args=(arrivals, own_hello), name="aliquot-meeting", daemon=True
    ).start()
    word = secrets.token_bytes(_WORD_BYTES)
    for _, line in joined.values():
        with suppress(OSError):
            line.send(Joined(hello=own_hello, word=word, service_port=service_port))
    return Met(
        process=0,
        count=own_hello.count,
        lines={k: line for k, (_, line) in joined.items()},
        hellos={k: hello for k, (hello, _) in joined.items()},
        key=digest(secret, "run", word),
        service_port=service_port,
        reception=reception,
    )


def _misfit(own_hello: Hello, hello: Hello, joined: Mapping[int, Hello]) -> str:
    """Reason why a process of this run cannot join; empty if it can."""
    if hello.count != own_hello.count:
        return (
            f"{hello} expects {hello.count} processes, process 0 expects {own_hello.count}. Give"
            " all the same num_processes."
        )
    if hello.process in joined or not 0 < hello.process < own_hello.count:
        other = joined.get(hello.process, own_hello)
        return (
            f"two processes have the number {hello.process}: {other} and {hello}. Give each its own"
            " process_id; where two runs use one address, give each a port or a run_id of its own."
        )
    different = []
    for name, version in own_hello.versions.items():
        other_version = hello.versions.get(name)
        if other_version != version:
            different.append(
                f"{name} {other_version} in process {hello.process}, {version} in process 0"
            )
    if different:
        return (
            f"the processes have different versions: {'; '.join(different)}. Install the same in"
            " all."
        )
    return ""


def _other_run(own_hello: Hello, hello: Hello) -> str:
    return (
        f"at this address process 0 of another run is waiting or running: run {own_hello.run!r}"
        f" (pid {own_hello.pid} on {own_hello.machine.split()[0]}), and this is {hello} of run"
        f" {hello.run!r}. Give each run a port of its own."
    )


def _turn_away_all_later(arrivals: queue.Queue[tuple[Hello, Line]], own_hello: Hello) -> None:
    """Turn away every process that comes after all have joined; runs in a thread."""
    while True:
        hello, line = arrivals.get()
        if hello.run != own_hello.run:
            _turn_away(line, _other_run(own_hello, hello))
        else:
            _turn_away(
                line,
                f"all {own_hello.count} processes of the run at this address had come before"
                f" {hello}. Give each run a port or a run_id of its own.",
            )


def _turn_all_away(
    joined: Mapping[int, tuple[Hello, Line]], text: str, but: int | None = None
) -> NoReturn:
    for k, (_, line) in joined.items():
        if k != but:
            _turn_away(line, text)
    give_up(text)


def _turn_away(line: Line, text: str) -> None:
    with suppress(OSError):
        line.send(Refused(text=text))
    line.close()


def join(host: str, port: int, own_hello: Hello, secret: bytes, timeout_s: float) -> Met:
    """A connection to process 0, which may start later than this process, and what it tells when
    all have joined.
    """
    deadline = time.monotonic() + timeout_s
    said, quiet_until = "", 0.0
    while True:
        try:
            limit_s = min(PROOFS_S, max(deadline - time.monotonic(), 1))
            line = open_line(
                host, port, key=secret, purpose=_PURPOSE, hello=own_hello, timeout_s=limit_s
            )
            break
        except OSError as error:
            problem = "" if isinstance(error, ConnectionRefusedError) else str(error)
            if time.monotonic() > deadline:
                give_up(
                    f"process {own_hello.process} found nobody of its run at {host}:{port} within"
                    f" {timeout_s:.0f} s ({error})."
                )
        # It may be a stranger, and process 0 come later.
        if problem not in ("", said) and time.monotonic() > quiet_until:
            said, quiet_until = problem, time.monotonic() + PROOFS_S
            LOGGER.warning(
                "aliquot: at %s:%d process %d tries to join, but %s. Processes of a run must have"
                " the same ALIQUOT_SECRET; it tries again for %.0f s.",
                host,
                port,
                own_hello.process,
                problem,
                deadline - time.monotonic(),
            )
        time.sleep(0.1)
    try:
        # Process 0 enforces the time limit; this one is for a process 0 that does not answer at
        # all.
        left_s = max(deadline - time.monotonic(), 1)
        answer = line.receive(Joined | Refused, left_s + 2 * PROOFS_S)
    except OSError as error:
        line.close()
        give_up(
            f"process 0 at {host}:{port} has ended or cannot be reached ({error}). Look for its"
            " error."
        )
    if isinstance(answer, Refused):
        line.close()
        give_up(f"{answer.text} Process {own_hello.process} ends (exit code {EXIT_CODE}).")
    return Met(
        process=own_hello.process,
        count=own_hello.count,
        lines={0: line},
        hellos={0: answer.hello},
        key=digest(secret, "run", answer.word),
        service_port=answer.service_port,
    )
