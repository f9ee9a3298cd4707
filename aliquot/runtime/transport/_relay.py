"""Ways to JAX's coordination service, which asks nobody for a secret and so listens at a loopback
address of process 0's machine only.

Processes of other machines reach it through connections that are proved like all others. Each has a
port of its own at a loopback address, where its JAX connects; the bytes are passed on from there.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import msgspec

from ._line import Line, open_line_in_time
from ._reception import Reception, listen

_PURPOSE = "service"
_LOOPBACK = "127.0.0.1"
_BYTES = 1 << 16


class Caller(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process whose JAX connects."""

    process: int
    count: int


def let_through(
    entrance: socket.socket, key: bytes, count: int, service: tuple[str, int]
) -> Reception[Caller]:
    """Pass on, in process 0, what comes from other processes of the run to JAX's service."""

    def pass_in(hello: Caller, line: Line) -> None:
        # Connecting may take a moment, in which nobody else should have to wait.
        if hello.count == count:
            threading.Thread(target=_join_to, args=(line.socket, service), daemon=True).start()
        else:
            line.close()

    return Reception(
        entrance, key=key, purpose=_PURPOSE, kind=Caller, arrived=pass_in, num_expected=2 * count
    )


def way_to(host: str, port: int, key: bytes, process: int, count: int) -> str:
    """An address on this machine from which all is passed on to JAX's service in process 0."""
    listener = listen(_LOOPBACK)

    def pass_out() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=connect, args=(connection,), daemon=True).start()

    def connect(connection: socket.socket) -> None:
        hello = Caller(process=process, count=count)
        try:
            line = open_line_in_time(host, port, key=key, purpose=_PURPOSE, hello=hello)
        except OSError:
            connection.close()
            return
        _pass_on_both(connection, line.socket)

    threading.Thread(target=pass_out, name="aliquot-relay", daemon=True).start()
    return f"{_LOOPBACK}:{listener.getsockname()[1]}"


def _join_to(connection: socket.socket, service: tuple[str, int]) -> None:
    try:
        other = socket.create_connection(service)
    except OSError:
        connection.close()
        return
    _pass_on_both(connection, other)


def _pass_on_both(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes on in both directions, until both ends have nothing more to say."""
    for end in (one, other):
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_pass_on, args=(other, one), daemon=True)
    back.start()
    _pass_on(one, other)
    back.join()
    one.close()
    other.close()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_BYTES):
            target.sendall(data)
    except OSError:
        # The other direction has no use any more either.
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
