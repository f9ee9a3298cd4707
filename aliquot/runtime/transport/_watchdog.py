"""The other processes of a run: whether they are alive, and small messages among them.

Each process holds a connection to process 0, which the system closes when its process dies, however
that happens. A machine that vanishes is noticed by the system's probes. Neither needs a process to
answer, so one that compiles for minutes is not taken for dead. A stopped process is recognized by
its state on the same machine, and by its silence on others.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ._calls import Call, Calls
from ._channels import Channels
from ._exchanges import Exchanges, Passes
from ._line import MOST_VALUE_BYTES, Line, receive_exactly
from ._meeting import EXIT_CODE, Hello, Met, gather_in, give_up, join
from ._messages import MessageError, Value, decode, encode
from ._reception import listen

# A silent machine is given up after 5 + 3 x 3 s.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
# Characters of a message that says in what processes differ.
_LONGEST = 10_000
# For a message once its first bytes are there.
_MESSAGE_S = 10
_ROUND_S = 1
# Shorter stops are ignored, since a debugger also stops a process for a moment.
_STOPPED_S = 5
# Long, because a long call may keep a living process from sending.
_SILENCE_S = 300
# How long process 0, which the others need until they have ended, waits for them to end.
_LAST_S = 5


class Lives(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Nothing has happened."""


class Leaves(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The end of this connection will be no failure."""


class Exits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The sender has come to its end, and will end by itself whatever it hears."""


class Fails(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The sender is about to end."""

    why: str


class Lost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Another process has ended, or is about to."""

    process: int
    why: str
    has_died: bool


class Differ(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Processes do not make the same calls, and all end."""

    why: str


_Message = Lives | Leaves | Exits | Fails | Lost | Call | Differ | Passes


class Peers:
    """The processes of a run, this one included, watched from the creation of this object on.

    When one ends before all have called `leave`, this process prints that, with what it was doing,
    and ends too: it may wait for data that will never come, and nothing can interrupt that wait.
    """

    def __init__(self, met: Met) -> None:
        self.process, self.count, self._met = met.process, met.count, met
        #: That only processes of this run know.
        self.key = met.key
        #: "host" or "device": what carries arrays between processes; None if the kind of device
        #: decides.
        self.transfers: str | None = None
        self.describe: Callable[[int], str] | None = None
        #: From what the processes can go on when they are started again.
        self.kept = "the last checkpoint"
        self._channels: Channels | None = None
        self._calls = Calls(met.count)
        self._exchanges, self._numbers = Exchanges(met.count), itertools.count(1)
        self._left: set[int] = set()
        self._failed: set[int] = set()
        self._exiting: set[int] = set()
        self._gone = threading.Event()
        self._is_leaving = self._is_failing = self._is_about_to_end = False
        self._changing = threading.Lock()
        self._failure_code: int | None = None
        self._machine = Hello.own(met.process, met.count, "").machine
        self._heard = dict.fromkeys(met.lines, time.monotonic())
        self._stopped: dict[int, float] = {}
        addresses = [
            line.socket.getsockname()[0].removeprefix("::ffff:") for line in met.lines.values()
        ]
        #: This machine's address as others reach it.
        self.address = next((a for a in addresses if not a.startswith("127.")), addresses[0])
        for line in met.lines.values():
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PROBES.items():
                if hasattr(socket, name):
                    line.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _delay_aborts()
        self._watching = threading.Thread(target=self._watch, name="aliquot-watchdog", daemon=True)
        self._watching.start()

    @property
    def channels(self) -> Channels:
        """Connections for arrays. The first use must come at the same point in all processes."""
        if self._channels is None:
            self._channels = Channels(self)
        return self._channels

    def exchange(self, value: Value, kind: type[Value]) -> list[Value]:
        """The value that each process passes, in order of the processes."""
        # Numbered, as all processes call it in the same order.
        return self.exchange_under(f"exchange {next(self._numbers)}", value, kind, None)

    def exchange_under(
        self, name: str, value: Value, kind: type[Value], timeout_s: float | None
    ) -> list[Value]:
        """The value that each process passes under a name, which is used once. The values go
        through process 0.

        Raises:
            ConnectionError: one does not come in time, or is of another kind; says whose. A process
                that ends meanwhile is noticed by the watchdog.
        """
        own = Passes(name=name, process=self.process, data=encode(value, MOST_VALUE_BYTES))
        self._exchanges.note(own)
        if self.process != 0:
            self._say_to_all(own)
        passed = self._exchanges.take(name, timeout_s)
        if self.process == 0:
            # In this thread: the watchdog's must go on reading.
            for k, data in enumerate(passed):
                self._say_to_all(Passes(name=name, process=k, data=data), but=k)
        values = []
        for k, data in enumerate(passed):
            try:
                values.append(decode(data, kind))
            except MessageError as error:
                raise ConnectionError(
                    f"what process {k} passed as {name} is {error}: it runs something else"
                ) from None
        return values

    def report(self, call: Call) -> None:
        """Tell process 0 what this process does next, without waiting. If another process does
        something else, process 0 ends all.
        """
        if self.process == 0:
            self._compare(0, call)
        else:
            self._say_to_all(call)

    def _compare(self, k: int, call: Call) -> None:
        """In process 0: compare the next call of process `k` with those of the others."""
        why = self._calls.note(k, call)
        if why:
            self._end_all(why)

    def _end_all(self, why: str) -> None:
        """Say in what processes differ, and end this one. One that has come to its end waits for
        nobody any longer, and ends by itself.
        """
        # First of all: who hears of it may be gone at once, and that is no failure any more.
        with self._changing:
            if self._is_leaving:
                return
            self._is_leaving = True
        code = self._failure_code if self._is_failing else EXIT_CODE
        if code is not None:
            self._is_about_to_end = True
            _hold_errors()
        if self.process == 0:
            self._say_to_all(Differ(why[:_LONGEST]))
        ending = f"  Exit code {code}.\n" if code is not None else ""
        os.write(2, f"\naliquot: {why}\n{ending}".encode())
        if code is None:
            self._stop_waiting()
            return
        # Not for those who end at once: work of this process that waits for them fails meanwhile.
        if self.process == 0 and self._exiting:
            self._wait_for(self._exiting)
        end_at_once(code)

    def _stop_waiting(self) -> None:
        """Let `leave` return."""
        self._calls.stop_waiting()
        self._exchanges.lose(0)
        if self._channels is not None:
            self._channels.stop_waiting()

    def _wait_for(self, others: Collection[int]) -> None:
        """In process 0: wait until others have ended. JAX's service runs in this process, and
        without it those who end by themselves would be aborted.
        """
        if threading.current_thread() is not self._watching:
            self._gone.wait(_LAST_S)
            return
        deadline = time.monotonic() + _LAST_S
        for k in others:
            with suppress(OSError):
                receive_exactly(self._met.lines[k].socket, 2**62, deadline)

    def leave(self, timeout_s: float | None = None) -> bool:
        """Wait until all processes call this; from then on the end of a connection is no failure.
        False if they have not come in time. If processes differ, nobody waits: all end.
        """
        if self._is_leaving:
            return True
        if self._channels is not None:
            self._channels.flush(timeout_s)
        # The last calls of the others may not have arrived yet.
        if self.process == 0 and not self._calls.settle(timeout_s):
            return self._is_leaving
        try:
            self.exchange_under("the end of the run", None, type(None), timeout_s)
        except ConnectionError:
            return self._is_leaving
        self._is_leaving = True
        self._say_to_all(Leaves())
        return True

    def begin_to_fail(self, code: int | None = None) -> None:
        """From now on this process ends by itself: reports that others fail are ignored, but not
        reports that they died.

        Args:
            code: its exit code if it has failed, with which it ends at once if processes differ.
        """
        self._failure_code = code
        self._is_failing = True
        if code is None:
            self._say_to_all(Exits())

    def fail(self, reason: str) -> None:
        """End the connections with a reason, so that the others end as well."""
        self._is_leaving = True
        self._say_to_all(Fails(reason[:1000]))
        if self.process == 0:
            self.part()

    def part(self) -> None:
        """Send the last message to the others. Process 0, in which JAX's service for all runs,
        waits until they have gone.
        """
        for line in self._met.lines.values():
            # The other end reads to the end of the messages, and then sees that no more come.
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        if self.process == 0:
            self._gone.wait(_LAST_S)
        if self._met.reception is not None:
            self._met.reception.close()

    def _say_to_all(self, message: _Message, but: int | None = None) -> None:
        for k, line in self._met.lines.items():
            if k != but:
                with suppress(OSError):
                    line.send(message)

    def _watch(self) -> None:
        """Read the messages of the other processes, and tell them every round that this one
        lives.
        """
        selector = selectors.DefaultSelector()
        for k, line in self._met.lines.items():
            selector.register(line.socket, selectors.EVENT_READ, k)
        spoken = 0.0
        while selector.get_map():
            for event, _ in selector.select(_ROUND_S):
                if not self._hear(event.data, self._met.lines[event.data]):
                    selector.unregister(event.fileobj)
            if time.monotonic() > spoken + _ROUND_S and not self._is_leaving:
                spoken = time.monotonic()
                self._say_to_all(Lives())
                for k in self._met.lines:
                    self._look_at(k)
        self._gone.set()

    def _hear(self, k: int, line: Line) -> bool:
        """Read a message of process `k`; False when its connection is closed."""
        said: _Message | None
        try:
            said = line.receive(_Message, _MESSAGE_S)
        except OSError:
            said = None
        self._heard[k] = time.monotonic()
        # Where this process only waits for the others to end, nothing shall fail before it ends.
        if said is None and not self._is_about_to_end:
            self._exchanges.lose(k)
        match said:
            case Lost():
                if said.has_died or not self._is_failing:
                    self._end(said.process, said.why)
            case Fails():
                self._failed.add(k)
                if not self._is_failing:
                    self._lose(k, said.why, has_died=False)
            case Leaves():
                self._left.add(k)
            case Exits():
                self._exiting.add(k)
            case Call():
                self._compare(k, said)
            case Differ():
                self._end_all(said.why)
            case Passes():
                self._exchanges.note(said)
            case None if k not in self._left and k not in self._failed:
                self._lose(k, "has ended or cannot be reached")
        return said is not None

    def _look_at(self, k: int) -> None:
        """Check whether process `k` is stopped, or has been silent for too long."""
        now, hello = time.monotonic(), self._met.hellos.get(k)
        if hello is not None and hello.machine == self._machine and _is_stopped(hello.pid):
            since = self._stopped.setdefault(k, now)
            if now > since + _STOPPED_S:
                self._lose(k, f"is stopped (by SIGSTOP or a terminal; pid {hello.pid})")
        else:
            self._stopped.pop(k, None)
        if now > self._heard[k] + _SILENCE_S:
            self._lose(k, f"has said nothing for {_SILENCE_S} s")

    def _lose(self, dead: int, why: str, has_died: bool = True) -> None:
        """Report the loss of a process and end this one. Process 0 tells the others, which are not
        connected to each other.
        """
        if self._is_leaving:
            return
        _hold_errors()
        self._say_to_all(Lost(process=dead, why=why, has_died=has_died), but=dead)
        if not has_died and self.process == 0:
            self._wait_for(self._met.lines)
        self._end(dead, why)

    def _end(self, dead: int, why: str) -> None:
        """Print that a process is lost and what this one was doing, and end this one."""
        if self._is_leaving:
            return
        try:
            doing = (
                self.describe(dead)
                if self.describe
                else f"Process {self.process} had not run a step yet."
            )
        except Exception as error:
            doing = f"(What process {self.process} was doing cannot be told: {error!r}.)"
        role = ", which coordinates the others," if dead == 0 else ""
        text = (
            f"\naliquot: process {dead}{role} {why}. {doing} It cannot go on without process {dead}"
            f" and ends too (exit code {EXIT_CODE}). Look for an error of process {dead}, then"
            f" start all processes again from {self.kept}.\n"
        )
        # Directly: another thread may hold the lock of `sys.stderr`.
        os.write(2, text.encode())
        end_at_once(EXIT_CODE)


def _hold_errors() -> None:
    """An error that ends this process's program from now on is shown late: it mostly comes from
    another process that has gone, and this one, which says so itself, has then ended.
    """
    shown = sys.excepthook

    def show_late(*error: Any) -> None:
        time.sleep(_LAST_S + 1)
        shown(*error)

    sys.excepthook = show_late


def end_at_once(code: int) -> NoReturn:
    """End this process without the exit handlers of Python and XLA, whose threads may wait for
    ever.
    """

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()

    # Flushing may wait for a reader that is gone.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1)
    os._exit(code)


# Filled once: JAX connects processes only once in the life of a process.
_peers: list[Peers] = []


def meet(
    address: str,
    own_hello: Hello,
    secret: bytes,
    timeout_s: float,
    listen_address: str,
    service_port: Callable[[str], int],
) -> str:
    """Find the other processes at an address, and watch them from now on.

    Args:
        listen_address: of the interface at which process 0 awaits them.
        service_port: called in process 0, with the address of that interface, for the port of
            JAX's service.

    Returns:
        The address of JAX's service.
    """
    host, port = host_of(address), int(address.rpartition(":")[2])
    if own_hello.process == 0:
        try:
            listener = listen(listen_address, port)
        except OSError as error:
            give_up(
                f"process 0 cannot listen at {listen_address}:{port} ({error}). If another run uses"
                " this port, give this one another; if the address is not one of this machine's,"
                f" pass initialize(listen_address=...). It ends (exit code {EXIT_CODE})."
            )
        chosen_port = service_port(listener.getsockname()[0])
        met = gather_in(listener, own_hello, secret, timeout_s, chosen_port)
    else:
        met = join(host, port, own_hello, secret, timeout_s)
    _peers.append(Peers(met))
    return f"{address.rpartition(':')[0]}:{met.service_port}"


def host_of(address: str) -> str:
    """The host in `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def watched() -> Peers | None:
    """The other processes, if they are watched."""
    return _peers[0] if _peers else None


def stop_watching() -> None:
    """Forget the processes, after all have left."""
    _peers.clear()


def _delay_aborts() -> None:
    """Let a thread that aborts this process sleep for 6 seconds first.

    JAX aborts from a thread of its own as soon as it loses process 0, often before the watchdog has
    had its turn. The handler is the C function `sleep`, whose argument is then the number of the
    signal, 6. It needs nothing of an interpreter that may be shutting down; afterwards the abort
    goes on. (A signal from outside, which is no abort, then has no other effect.)
    """
    if os.name != "posix":
        return
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (
        (ctypes.c_int, ctypes.c_void_p),
        ctypes.c_void_p,
    )
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _is_stopped(pid: int) -> bool:
    """True if a process of this machine is; False where the system does not tell."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
