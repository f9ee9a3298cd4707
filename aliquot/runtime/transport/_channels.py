"""Connections that carry bytes from each process to every other, in order.

A connection goes one way and is opened when its first message is sent; both ends prove then that
they are processes of this run. The bytes themselves travel as they are, with an HMAC by a key of
the connection, so that none arrives altered. Threads write and read while the process goes on: one
waits for arrays to be computed and sends them, another reads what arrives. Their queues hold a few
messages at most.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ._line import PROOF_BYTES, PROOFS_S, Line, open_line
from ._reception import Reception, listen

if TYPE_CHECKING:
    from ._watchdog import Peers

#: Makes the parts of a message, in the thread that writes them.
Parts = Callable[[], Sequence[np.ndarray[Any, Any]]]

# Number of the message, and its size in bytes. An HMAC of both follows, so that nobody waits for
# more than was sent; then the bytes, and an HMAC of all.
_HEADER = struct.Struct("!QQ")
# A sender waits while this many messages are unsent. One would suffice to prevent deadlock: the
# process that is furthest behind never waits, because the others have sent and received all earlier
# messages.
_UNSENT, _UNREAD = 8, 2
_PURPOSE = "arrays"
# To connect, while strangers may be in the way.
_CONNECT_S = 60
_ALIGNMENT_BYTES = 64


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process listens."""

    host: str
    port: int


class Sender(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who opens a connection, and to whom."""

    process: int
    to: int
    count: int


class Channels:
    """This process's connections to the others. All processes must make it at the same point.

    Args:
        peers: the processes.
    """

    def __init__(self, peers: Peers) -> None:
        self._own, self._count, self._key = peers.process, peers.count, peers.key
        listener = listen(peers.address)
        own_place = Place(host=peers.address, port=listener.getsockname()[1])
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes = {k: _Inbox(k) for k in range(peers.count) if k != self._own}
        self._reception = Reception(
            listener,
            key=self._key,
            purpose=_PURPOSE,
            kind=Sender,
            arrived=self._let_in,
            num_expected=peers.count,
        )
        self._places = peers.exchange(own_place, Place)

    def send(self, process: int, parts: Parts) -> None:
        """Queue a message, to be sent once its parts are computed. Returns at once unless the queue
        is full.

        Raises:
            ConnectionError: an earlier message could not be sent.
        """
        if process not in self._outboxes:
            hello = Sender(process=self._own, to=process, count=self._count)
            self._outboxes[process] = _Outbox(self._places[process], hello, self._key)
        self._outboxes[process].put(parts)

    def receive(self, process: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """The next message of a process, as bytes. Waits for it.

        Raises:
            ConnectionError: the process is gone, or its message has another number or size.
        """
        return self._inboxes[process].take(num_bytes)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued messages have been sent. False if that takes longer than the
        timeout.
        """
        return all(outbox.flush(timeout_s) for outbox in self._outboxes.values())

    def stop_waiting(self) -> None:
        """Let `flush` return: nobody will take what is not sent yet."""
        for outbox in self._outboxes.values():
            outbox.stop_waiting()

    def close(self) -> None:
        """End all connections."""
        ends: list[_Outbox | _Inbox | Reception[Sender]] = [
            *self._outboxes.values(),
            *self._inboxes.values(),
            self._reception,
        ]
        for end in ends:
            with suppress(OSError):
                end.close()

    def _let_in(self, hello: Sender, line: Line) -> None:
        """Hand a connection to the inbox of its process, which has only one."""
        inbox = self._inboxes.get(hello.process)
        fits = (hello.to, hello.count) == (self._own, self._count)
        if not fits or inbox is None or not inbox.begin(line):
            line.close()


class _Outbox:
    """Messages to one process, and the thread that writes them."""

    def __init__(self, place: Place, hello: Sender, key: bytes) -> None:
        self._process = hello.to
        self._waiting: queue.Queue[Parts | None] = queue.Queue(_UNSENT)
        self._error: BaseException | None = None
        self._unsent = 0
        self._change = threading.Condition()
        line = _connected(place, hello, key)
        self._socket, self._key = line.socket, line.sends
        self._socket.settimeout(None)
        _start(self._write)

    def put(self, parts: Parts) -> None:
        if self._error is not None:
            raise ConnectionError(
                f"nothing can be sent to process {self._process}"
            ) from self._error
        with self._change:
            self._unsent += 1
        self._waiting.put(parts)

    def flush(self, timeout_s: float | None) -> bool:
        with self._change:
            return self._change.wait_for(
                lambda: not self._unsent or self._error is not None, timeout_s
            )

    def stop_waiting(self) -> None:
        with self._change:
            self._error = self._error or ConnectionError("the processes end")
            self._change.notify_all()

    def close(self) -> None:
        self._socket.close()
        # The thread ends; one that is held up by a full queue meets the closed socket.
        with suppress(queue.Full):
            self._waiting.put_nowait(None)

    def _write(self) -> None:
        """Send the queued messages, in a thread of its own."""
        number = 0
        while True:
            parts = self._waiting.get()
            if parts is None:
                return
            # After an error messages are still taken from the queue, so that senders do not wait
            # for ever.
            if self._error is None:
                try:
                    arrays = [
                        np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts()
                    ]
                    head = _HEADER.pack(number, sum(array.nbytes for array in arrays))
                    proof = hmac.new(self._key, head, hashlib.sha256)
                    self._socket.sendall(head + proof.digest())
                    for array in arrays:
                        proof.update(array.data)
                        self._socket.sendall(array.data)
                    self._socket.sendall(proof.digest())
                # Also what JAX raises when the computation of an array has failed.
                except Exception as error:
                    self._error = error
                    self._socket.close()
            # References are dropped, so that arrays that were sent are not kept until the next
            # message.
            parts = arrays = array = None  # type: ignore[assignment]
            number += 1
            with self._change:
                self._unsent -= 1
                self._change.notify_all()


class _Inbox:
    """Messages of one process, and the thread that reads them."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._read: queue.Queue[tuple[int, np.ndarray[Any, Any]] | BaseException] = queue.Queue(
            _UNREAD
        )
        self._taken = 0
        self._socket: socket.socket | None = None

    def begin(self, line: Line) -> bool:
        """Read from a connection; False if there was one before."""
        if self._socket is not None:
            return False
        line.socket.settimeout(None)
        self._socket = line.socket
        _start(self._listen, line.socket, line.hears)
        return True

    def take(self, num_bytes: int) -> np.ndarray[Any, Any]:
        arrived = self._read.get()
        if isinstance(arrived, BaseException):
            # The error stays for whoever asks next.
            self._read.put(arrived)
            raise ConnectionError(
                f"nothing more comes from process {self._process}: {arrived}"
            ) from arrived
        number, data = arrived
        # Messages have no names: number and size tell that both ends are at the same point.
        if (number, data.nbytes) != (self._taken, num_bytes):
            raise ConnectionError(
                f"process {self._process} sent {data.nbytes} bytes as its message {number}, where"
                f" {num_bytes} bytes were to come as message {self._taken}: it runs something else"
            )
        self._taken += 1
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _listen(self, connection: socket.socket, key: bytes) -> None:
        """Read messages into the queue, in a thread of its own."""
        try:
            while True:
                head = bytearray(_HEADER.size)
                _fill(connection, memoryview(head))
                proof = hmac.new(key, head, hashlib.sha256)
                _require_proof(connection, proof.digest())
                number, size = _HEADER.unpack(head)
                # A buffer of `size` bytes, aligned so that XLA's CPU devices can use it without a
                # copy.
                room = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
                start = -room.ctypes.data % _ALIGNMENT_BYTES
                data = room[start : start + size]
                _fill(connection, memoryview(data.data))
                proof.update(data.data)
                _require_proof(connection, proof.digest())
                self._read.put((number, data))
                # The queue's reader alone holds the data now.
                del data
        # No array has some sizes.
        except (OSError, MemoryError, ValueError, OverflowError) as error:
            self._read.put(error)


def _connected(place: Place, hello: Sender, key: bytes) -> Line:
    """A connection to where a process listens.

    Raises:
        ConnectionError: nobody who knows the key answers there in time.
    """
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return open_line(
                place.host, place.port, key=key, purpose=_PURPOSE, hello=hello, timeout_s=PROOFS_S
            )
        except ConnectionRefusedError:
            raise
        except OSError as error:
            # Among too many strangers it may have been dropped as one of them.
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"process {hello.to} does not answer at {place.host}:{place.port}: {error}"
                ) from error
            time.sleep(0.1)


def _require_proof(connection: socket.socket, expected: bytes) -> None:
    """Read the HMAC of what came. Raises `OSError` if it is another one."""
    given = bytearray(PROOF_BYTES)
    _fill(connection, memoryview(given))
    if not hmac.compare_digest(given, expected):
        raise OSError("an array was altered on its way")


def _fill(connection: socket.socket, left: memoryview) -> None:
    """Read bytes until there is no room left. Raises `OSError` if the connection ends."""
    while left:
        got = connection.recv_into(left)
        if not got:
            raise OSError("the connection ended")
        left = left[got:]


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="aliquot-channel", daemon=True).start()
