"""Where a process awaits connections: who proves to know the secret is let in, all others are
dropped, counted and named.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic

from ._line import Guest, Line
from ._messages import Value

LOGGER = logging.getLogger("aliquot.network")

# Connections that have proved nothing yet. Among more the oldest is dropped: who knows the secret
# needs milliseconds.
_MOST_GUESTS = 64
# Of the first that many strangers each is named; then one in so many seconds.
_NAMED, _EVERY_S = 20, 10
_ROUND_S = 1


class Reception(Generic[Value]):
    """Lets in, in a thread of its own, as long as it is open. It waits for nobody, so that who says
    nothing keeps nobody waiting.

    Args:
        listener: a listening socket, closed with this object.
        key: that others must prove to know.
        purpose: what for, in a word; part of the proof.
        kind: of the message in which they say who they are.
        arrived: called for each.
        num_expected: how many may come at once.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        key: bytes,
        purpose: str,
        kind: type[Value],
        arrived: Callable[[Value, Line], Any],
        num_expected: int,
    ) -> None:
        self._listener, self._key, self._purpose = listener, key, purpose
        self._kind, self._arrived = kind, arrived
        self._most_guests = max(_MOST_GUESTS, 2 * num_expected)
        # In the order in which they came, which is that of their deadlines.
        self._guests: list[Guest] = []
        self._selector = selectors.DefaultSelector()
        self._is_closed = False
        #: How many were dropped, and what the last of them did.
        self.num_dropped, self.last_dropped = 0, ""
        self._named_at = 0.0
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="aliquot-reception", daemon=True).start()

    @property
    def strangers(self) -> str:
        """A sentence about those who were dropped; empty if there were none."""
        if not self.num_dropped:
            return ""
        return f" {self.num_dropped} strangers were dropped; the last: {self.last_dropped}."

    def close(self) -> None:
        """Let nobody in from now on."""
        self._is_closed = True
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closed:
            for event, _ in self._selector.select(self._wait_s()):
                if event.data is None:
                    self._accept()
                # It may have been dropped in this round.
                elif event.data in self._guests:
                    self._read(event.data)
            while self._guests and self._wait_s() == 0:
                self._drop(self._guests[0], "has not proved in time that it knows the secret")
        for guest in self._guests:
            guest.socket.close()
        self._selector.close()

    def _wait_s(self) -> float:
        if not self._guests:
            return _ROUND_S
        return min(max(self._guests[0].deadline - time.monotonic(), 0), _ROUND_S)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # The connection is gone already, or the process has too many open files.
            if not self._is_closed:
                time.sleep(0.01)
            return
        if len(self._guests) >= self._most_guests:
            self._drop(self._guests[0], f"was the oldest of {self._most_guests} that prove nothing")
        name = f"{address[0].removeprefix('::ffff:')}:{address[1]}"
        guest = Guest(connection, name, key=self._key, purpose=self._purpose)
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _read(self, guest: Guest) -> None:
        try:
            known = guest.read(self._kind)
        except BlockingIOError:
            return
        # Whatever it is: nothing that a stranger sends may end this thread.
        except Exception as error:
            self._drop(guest, str(error))
            return
        if known is not None:
            self._forget(guest)
            line, hello = known
            self._arrived(hello, line)

    def _drop(self, guest: Guest, why: str) -> None:
        self._forget(guest)
        with suppress(OSError):
            guest.socket.close()
        self.num_dropped += 1
        self.last_dropped = f"{guest.address} {why}"
        now = time.monotonic()
        if self.num_dropped <= _NAMED or now > self._named_at + _EVERY_S:
            self._named_at = now
            LOGGER.warning(
                "aliquot: dropped stranger %d at the port for the %s: %s",
                self.num_dropped,
                self._purpose,
                self.last_dropped,
            )

    def _forget(self, guest: Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.socket)


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at the interface of a host's name or address, by default at a port of
    the system's choice.

    Raises:
        OSError: it is not this machine's, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for k, (family, *_, place) in enumerate(found):
        try:
            return socket.create_server(place[:2], family=family, backlog=1024)
        except OSError:
            if k == len(found) - 1:
                raise
    raise OSError(f"{host} has no address")
