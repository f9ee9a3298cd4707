"""Connections that carry bytes from each process to every other, in order.

A connection goes one way and is opened when its first message is sent. Threads write and read while
the process goes on: one waits for arrays to be computed and sends them, another reads what arrives.
Their queues hold a few messages at most.
"""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ._agreement import exchange

if TYPE_CHECKING:
    from ._watchdog import Peers

#: Makes the parts of a message, in the thread that writes them.
Parts = Callable[[], Sequence[np.ndarray[Any, Any]]]

# Number of the message, and its size in bytes.
_HEADER = struct.Struct("!QQ")
# A sender waits while this many messages are unsent. One would suffice to prevent deadlock: the
# process that is furthest behind never waits, because the others have sent and received all earlier
# messages.
_UNSENT, _UNREAD = 8, 2
_WORD_BYTES = 16
_ALIGNMENT_BYTES = 64


class End(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a process listens, and the word that it wants to hear."""

    host: str
    port: int
    word: bytes


class Channels:
    """This process's connections to the others. All processes must make it at the same point.

    Args:
        peers: the processes.
    """

    def __init__(self, peers: Peers) -> None:
        self._own = peers.process
        word = secrets.token_bytes(_WORD_BYTES)
        self._listener = listener()
        # Only processes of this run know the word, so that no stranger can connect.
        own_end = End(host=peers.address, port=self._listener.getsockname()[1], word=word)
        self._ends = exchange(own_end, End)
        self._word = word
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes = {k: _Inbox(k) for k in range(peers.count) if k != self._own}
        _start(self._accept)

    def send(self, process: int, parts: Parts) -> None:
        """Queue a message, to be sent once its parts are computed. Returns at once unless the queue
        is full.

        Raises:
            ConnectionError: an earlier message could not be sent.
        """
        if process not in self._outboxes:
            end = self._ends[process]
            self._outboxes[process] = _Outbox(
                process, end.host, end.port, end.word + self._own.to_bytes(4, "big")
            )
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

    def close(self) -> None:
        """End all connections."""
        ends: list[_Outbox | _Inbox | socket.socket] = [
            *self._outboxes.values(),
            *self._inboxes.values(),
            self._listener,
        ]
        for end in ends:
            with suppress(OSError):
                end.close()

    def _accept(self) -> None:
        """Accept connections, and hand each to the inbox of its process."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            try:
                # A stranger that connects and says nothing must not keep others waiting.
                hello = receive_exactly(connection, _WORD_BYTES + 4)
            except OSError:
                hello = b""
            source = int.from_bytes(hello[_WORD_BYTES:], "big")
            if secrets.compare_digest(hello[:_WORD_BYTES], self._word) and source in self._inboxes:
                connection.settimeout(None)
                self._inboxes[source].begin(connection)
            else:
                connection.close()


class _Outbox:
    """Messages to one process, and the thread that writes them."""

    def __init__(self, process: int, host: str, port: int, hello: bytes) -> None:
        self._process = process
        self._waiting: queue.Queue[Parts] = queue.Queue(_UNSENT)
        self._error: BaseException | None = None
        self._unsent = 0
        self._change = threading.Condition()
        self._socket = socket.create_connection((host, port), timeout=60)
        self._socket.settimeout(None)
        # Small messages must not wait for others to fill a packet.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(hello)
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

    def close(self) -> None:
        self._socket.close()

    def _write(self) -> None:
        """Send the queued messages, in a thread of its own."""
        number = 0
        while True:
            parts = self._waiting.get()
            # After an error messages are still taken from the queue, so that senders do not wait
            # for ever.
            if self._error is None:
                try:
                    arrays = [
                        np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts()
                    ]
                    self._socket.sendall(
                        _HEADER.pack(number, sum(array.nbytes for array in arrays))
                    )
                    for array in arrays:
                        self._socket.sendall(array.data)
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

    def begin(self, connection: socket.socket) -> None:
        self._socket = connection
        _start(self._listen, connection)

    def take(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """See `Channels.receive`."""
        arrived = self._read.get()
        if isinstance(arrived, BaseException):
            # The error stays for whoever asks next.
            self._read.put(arrived)
            raise ConnectionError(
                f"the connection to process {self._process} has ended"
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

    def _listen(self, connection: socket.socket) -> None:
        """Read messages into the queue, in a thread of its own."""
        try:
            while True:
                number, size = _HEADER.unpack(receive_exactly(connection, _HEADER.size))
                data = _aligned(size)
                left = memoryview(data.data)
                while left:
                    got = connection.recv_into(left)
                    if not got:
                        raise OSError("the connection ended")
                    left = left[got:]
                self._read.put((number, data))
                # The queue's reader alone holds the data now.
                del data, left
        except (OSError, MemoryError) as error:
            self._read.put(error)


def listener(port: int = 0) -> socket.socket:
    """A listening socket at a port, by default of the system's choice."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes of a connection.

    Raises:
        OSError: the connection ended before.
    """
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise OSError("the connection ended")
        data += more
    return data


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """A buffer of `size` bytes, aligned so that XLA's CPU devices can use it without a copy."""
    room = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_BYTES
    return room[start : start + size]


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="aliquot-channel", daemon=True).start()
