"""The other processes of a run: whether they live, and small messages among them.

Each process holds a connection to process 0, which the system closes when its process dies, however that happens. A
machine that vanishes is noticed by the system's probes. Neither needs a process to answer, so one that compiles for
minutes is not taken for dead.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ..graph import coordination_client
from ._channels import Channels, listener, receive_exactly

EXIT_CODE = 3

# A silent machine is given up after 5 + 3 x 3 s.
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
_LEAVES, _DIED = b"L", b"D"
_DAY_MS = 24 * 3600 * 1000


class Peers:
    """The processes that this one runs with, itself included. Watches them from its making on.

    When one ends before all have called `leave`, this process says so, with what it was doing, and ends too: whatever it
    waits for cannot come any more, and nothing can interrupt that wait.

    Args:
        client, address: the service of `jax.distributed`, which connects processes first.
        process, count: this process, and how many there are.
        timeout_s: how long to wait for the others' connections.
    """

    def __init__(self, client: Any, address: str, process: int, count: int, timeout_s: float = 300) -> None:
        self._client, self.process, self.count = client, process, count
        #: "host" or "device": what carries arrays between processes; None where the kind of device decides.
        self.transfers: str | None = None
        self.describe: Callable[[int], str] | None = None
        self._channels: Channels | None = None
        self._exchanges = 0
        self._left: set[int] = set()
        self._is_leaving = False
        self._all_left = threading.Event()
        host = address.rsplit(":", 1)[0]
        self._sockets = self._gather_in(timeout_s) if process == 0 else {0: self._report(host, timeout_s)}
        own = [_plain(s.getsockname()[0]) for s in self._sockets.values()]
        #: This machine's address as others reach it.
        self.address = next((a for a in own if not a.startswith("127.")), own[0])
        for peer in self._sockets.values():
            _probe(peer)
        _delay_aborts()
        threading.Thread(target=self._watch, name="aliquot-watchdog", daemon=True).start()

    @property
    def channels(self) -> Channels:
        """Connections for arrays. All processes must ask for them at the same point at first."""
        if self._channels is None:
            self._channels = Channels(self)
        return self._channels

    def exchange(self, data: bytes) -> list[bytes]:
        """What every process passes, in order of the processes. Waits until all have called it as often as this one."""
        self._exchanges += 1
        name = f"aliquot/exchange/{self._exchanges}"
        self._client.key_value_set_bytes(f"{name}/{self.process}", data)
        return [self._client.blocking_key_value_get_bytes(f"{name}/{k}", _DAY_MS) for k in range(self.count)]

    def leave(self, timeout_s: float | None = None) -> bool:
        """Wait until all processes call this, then stop watching. False if they have not come in time."""
        if self._is_leaving:
            return True
        if self._channels is not None:
            self._channels.flush(timeout_s)
        try:
            self._client.wait_at_barrier("aliquot/leave", _DAY_MS if timeout_s is None else int(timeout_s * 1000))
        except RuntimeError:
            return False
        self._is_leaving = True
        for peer in self._sockets.values():
            with suppress(OSError):
                peer.sendall(_LEAVES)
                peer.shutdown(socket.SHUT_WR)
        if self.process == 0:
            # The service lives in process 0: it goes last.
            self._all_left.wait(10)
        return True

    def abandon(self) -> None:
        """End the connections without a word, so that the others end as well."""
        self._is_leaving = True
        for peer in self._sockets.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    # ---- meeting -----------------------------------------------------------------------------------------------------

    def _gather_in(self, timeout_s: float) -> dict[int, socket.socket]:
        """Process 0: take the connections of all others, known by a word that only they can look up."""
        word = secrets.token_bytes(16)
        found: dict[int, socket.socket] = {}
        with listener() as meeting:
            meeting.settimeout(timeout_s)
            self._client.key_value_set_bytes("aliquot/watchdog", word + str(meeting.getsockname()[1]).encode())
            while len(found) < self.count - 1:
                peer, _ = meeting.accept()
                peer.settimeout(10)
                with suppress(OSError):
                    hello = receive_exactly(peer, len(word) + 4)
                    if secrets.compare_digest(hello[: len(word)], word):
                        found[int.from_bytes(hello[len(word) :], "big")] = peer
        return found

    def _report(self, host: str, timeout_s: float) -> socket.socket:
        """Another process: connect to process 0."""
        said = self._client.blocking_key_value_get_bytes("aliquot/watchdog", int(timeout_s * 1000))
        word, port = said[:16], int(said[16:])
        peer = socket.create_connection((host.strip("[]"), port), timeout=timeout_s)
        peer.sendall(word + self.process.to_bytes(4, "big"))
        return peer

    # ---- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for k, peer in self._sockets.items():
            peer.settimeout(None)
            selector.register(peer, selectors.EVENT_READ, k)
        while selector.get_map():
            for event, _ in selector.select():
                if not self._hear(event.data, self._sockets[event.data]):
                    selector.unregister(event.fileobj)

    def _hear(self, k: int, peer: socket.socket) -> bool:
        """Take in what process `k` says; False when it says no more."""
        try:
            said = peer.recv(1)
            if said == _DIED:
                self._end(int.from_bytes(receive_exactly(peer, 4), "big"))
        except OSError:
            said = b""
        if said == _LEAVES:
            self._left.add(k)
        if said:
            return True
        if k not in self._left and not self._is_leaving:
            self._tell(k)
            self._end(k)
        if len(self._left) >= len(self._sockets):
            self._all_left.set()
        return False

    def _tell(self, dead: int) -> None:
        """Process 0 passes it on: the others are not connected to each other."""
        for k, peer in self._sockets.items():
            if k != dead:
                with suppress(OSError):
                    peer.sendall(_DIED + dead.to_bytes(4, "big"))

    def _end(self, dead: int) -> NoReturn:
        try:
            doing = self.describe(dead) if self.describe else f"Process {self.process} had not run a step yet."
        except Exception as error:
            doing = f"(What process {self.process} was doing cannot be told: {error!r}.)"
        role = ", which coordinates the others," if dead == 0 else ""
        text = (
            f"\naliquot: process {dead}{role} has ended or cannot be reached. {doing} It cannot go on without process "
            f"{dead} and ends too (exit code {EXIT_CODE}). Look for an error of process {dead}, then start all "
            "processes again from the last checkpoint.\n"
        )
        os.write(2, text.encode())
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1)
        os._exit(EXIT_CODE)


# JAX joins processes once in the life of a process, and so is this.
_peers: list[Peers] = []


def watch(timeout_s: float = 300) -> Peers | None:
    """The other processes, watched from the first call on; None where `jax.distributed` has connected none."""
    if not _peers:
        joined = coordination_client()
        if joined is None or joined[-1] == 1:
            return None
        _peers.append(Peers(*joined, timeout_s))
    return _peers[0]


def watched() -> Peers | None:
    """The other processes, if they are watched."""
    return _peers[0] if _peers else None


def stop_watching() -> None:
    """Forget the processes, after all have left."""
    _peers.clear()


def _delay_aborts() -> None:
    """Let a thread that aborts this process sleep for 6 seconds first.

    JAX aborts from a thread of its own as soon as it loses process 0, often before the watch has had its turn. With the
    number of the signal as its argument, `sleep` is a handler for it, which needs nothing of an interpreter that may be
    about to fall; afterwards the abort goes on. (A signal from outside, which is no abort, then has no other effect.)
    """
    if os.name != "posix":
        return
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")


def _probe(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
