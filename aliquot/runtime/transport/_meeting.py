"""Meeting of the processes of a run, before JAX connects them.

Process 0 listens at the address that all were given. The others connect and say which process of
which run they are; the connections stay for `_watchdog`. So a process that dies, joins twice, or
belongs to another run is noticed at once and named.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ._channels import receive_exactly

EXIT_CODE = 3

_VERSIONS = ("aliquot", "jax", "jaxlib")
#: Variables in which launchers tell a job's number.
_JOB_NUMBERS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "PBS_JOBID", "LSB_JOBID")
_HELLO_S = 20
_LONGEST_HELLO_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
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
    versions: Mapping[str, str]

    @staticmethod
    def own(process: int, count: int, run: str) -> Hello:
        versions = {name: importlib.metadata.version(name) for name in _VERSIONS}
        return Hello(
            process=process,
            count=count,
            run=run,
            machine=_machine(),
            pid=os.getpid(),
            versions=versions,
        )

    def __str__(self) -> str:
        return (
            f"process {self.process} of {self.count} (pid {self.pid} on {self.machine.split()[0]})"
        )


@dataclass(frozen=True, slots=True)
class Met:
    """Connections to other processes, and the messages with which they joined: process 0 has those
    of all others, and each of these only that of process 0.
    """

    process: int
    count: int
    sockets: Mapping[int, socket.socket]
    hellos: Mapping[int, Hello]


def default_run_id() -> str:
    """The launcher's number of this job, or nothing."""
    return next((os.environ[name] for name in _JOB_NUMBERS if os.environ.get(name)), "")


def give_up(text: str) -> NoReturn:
    """End this process with a message and exit code 3."""
    print(f"\naliquot: {text}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)


def gather_in(listener: socket.socket, own_hello: Hello, timeout_s: float) -> Met:
    """Accept the connections of all other processes, in process 0. If one of them dies or does not
    fit, all that have come are told to end, and this process ends too.

    Processes that come later are turned away as long as this one lives.
    """
    joined: dict[int, tuple[Hello, socket.socket]] = {}
    deadline = time.monotonic() + timeout_s
    # Short waits, so that a process that has ended meanwhile is noticed.
    listener.settimeout(0.2)
    while len(joined) < own_hello.count - 1:
        for k, (hello, peer) in joined.items():
            if _has_ended(peer):
                _turn_all_away(
                    joined, f"{hello} has ended while the processes met. Look for its error.", but=k
                )
        if time.monotonic() > deadline:
            missing = ", ".join(str(k) for k in range(1, own_hello.count) if k not in joined)
            _turn_all_away(
                joined,
                f"of {own_hello.count} processes {missing} did not come within {timeout_s:.0f} s.",
            )
        try:
            peer, _ = listener.accept()
        except OSError:
            continue
        came = _hear_hello(peer)
        if came is None:
            peer.close()
        elif came.run != own_hello.run:
            _turn_away(peer, _other_run(own_hello, came))
        elif problem := _misfit(own_hello, came, {k: h for k, (h, _) in joined.items()}):
            # The process that does not fit is told as well.
            joined[-1] = came, peer
            _turn_all_away(joined, problem)
        else:
            joined[came.process] = came, peer
    threading.Thread(
        target=_turn_away_all_later, args=(listener, own_hello), name="aliquot-meeting", daemon=True
    ).start()
    return Met(
        0,
        own_hello.count,
        {k: s for k, (_, s) in joined.items()},
        {k: h for k, (h, _) in joined.items()},
    )


def let_in(met: Met, told: Mapping[str, Any]) -> None:
    """Tell all processes that they have joined, and the facts that they need."""
    for peer in met.sockets.values():
        with suppress(OSError):
            _say(peer, {"told": dict(told)})


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
    different = [
        f"{name} {hello.versions.get(name)} in process {hello.process}, {version} in process 0"
        for name, version in own_hello.versions.items()
        if hello.versions.get(name) != version
    ]
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


def _turn_away_all_later(listener: socket.socket, own_hello: Hello) -> None:
    """Turn away every process that comes after all have joined; runs in a thread."""
    listener.settimeout(None)
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        hello = _hear_hello(peer)
        if hello is None:
            peer.close()
        elif hello.run != own_hello.run:
            _turn_away(peer, _other_run(own_hello, hello))
        else:
            _turn_away(
                peer,
                f"all {own_hello.count} processes of the run at this address had come before"
                f" {hello}. Give each run a port or a run_id of its own.",
            )


def _turn_all_away(
    joined: Mapping[int, tuple[Hello, socket.socket]], text: str, but: int | None = None
) -> NoReturn:
    for k, (_, peer) in joined.items():
        if k != but:
            _turn_away(peer, text)
    give_up(text)


def _turn_away(peer: socket.socket, text: str) -> None:
    with suppress(OSError):
        _say(peer, {"refused": text})
        peer.close()


def _has_ended(peer: socket.socket) -> bool:
    """True if the other end is closed. An open connection is silent until its process has
    joined.
    """
    peer.setblocking(False)
    try:
        return not peer.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.setblocking(True)


def _hear_hello(peer: socket.socket) -> Hello | None:
    peer.settimeout(_HELLO_S)
    try:
        said = _hear(peer)
        peer.settimeout(None)
        return Hello(**said["hello"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def join(host: str, port: int, own_hello: Hello, timeout_s: float) -> tuple[Met, dict[str, Any]]:
    """A connection to process 0, which may start later than this process, and the facts that it
    sends when all have joined.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            peer = socket.create_connection((host, port), timeout=min(10, timeout_s))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                give_up(
                    f"process {own_hello.process} found nobody at {host}:{port} within"
                    f" {timeout_s:.0f} s ({error})."
                )
            time.sleep(0.1)
    try:
        peer.settimeout(None)
        _say(peer, {"hello": {name: getattr(own_hello, name) for name in Hello.__slots__}})
        # Process 0 enforces the time limit; this one is for a process 0 that does not answer at
        # all.
        peer.settimeout(max(deadline - time.monotonic(), 1) + _HELLO_S)
        said = _hear(peer)
        peer.settimeout(None)
    except (OSError, ValueError) as error:
        give_up(
            f"process 0 at {host}:{port} has ended or cannot be reached ({error}). Look for its"
            " error."
        )
    if "refused" in said:
        give_up(f"{said['refused']} Process {own_hello.process} ends (exit code {EXIT_CODE}).")
    told = dict(said["told"])
    first = Hello(**told.pop("hello"))
    return Met(own_hello.process, own_hello.count, {0: peer}, {0: first}), told


def _say(peer: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    # The first bytes show that the sender is a process of aliquot, not a program at a wrong
    # address.
    peer.sendall(b"aliquot" + len(data).to_bytes(4, "big") + data)


def _hear(peer: socket.socket) -> dict[str, Any]:
    head = receive_exactly(peer, 11)
    size = int.from_bytes(head[7:], "big")
    if head[:7] != b"aliquot" or size > _LONGEST_HELLO_BYTES:
        raise ValueError("something else than aliquot answers there")
    message = json.loads(receive_exactly(peer, size))
    if not isinstance(message, dict):
        raise ValueError("something else than aliquot answers there")
    return message


def _machine() -> str:
    """Text that identifies this machine, its last start, and the set of processes that this one can
    see.
    """
    # The boot id distinguishes machines of the same name; the PID namespace, containers that cannot
    # see each other's processes.
    parts = [platform.node().split()[0] if platform.node().split() else "unknown"]
    with suppress(OSError):
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)
