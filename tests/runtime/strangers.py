"""Who may connect to the ports of a run without knowing its secret, and what they do there."""

import contextlib
import json
import pickle
import random
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from aliquot.runtime.transport._line import (
    HEAD_BYTES,
    Answer,
    Claim,
    Greeting,
    Talk,
    framed,
    receive_exactly,
)

_WORD = b"w" * 32


@dataclass(frozen=True, kw_only=True)
class Target:
    """A port of a run.

    Attributes:
        address: where it is.
        purpose, hello: what a process of the run would say there.
        key: of the run, for words that were recorded when a process said them.
        marker: a file that exists once code of a stranger has run.
        stop: set when strangers are to leave.
        drip_s: seconds between the bytes of a slow one.
    """

    address: tuple[str, int]
    purpose: str
    hello: Any
    key: bytes
    marker: Path
    stop: threading.Event
    drip_s: float = 0.2

    def connect(self) -> socket.socket:
        """A connection, as soon as somebody listens."""
        while True:
            try:
                return socket.create_connection(self.address, timeout=5)
            except OSError:
                if self.stop.wait(0.02):
                    raise

    def hold(self, *said: bytes) -> None:
        """Say something, and stay."""
        with self.connect() as connection:
            for data in said:
                connection.sendall(data)
            self.stop.wait()

    def greet(self, connection: socket.socket, word: bytes = _WORD) -> bytes:
        """Greet, and hear the other end's word."""
        connection.sendall(framed(Greeting(word=word)))
        head = receive_exactly(connection, HEAD_BYTES, time.monotonic() + 5)
        size = int.from_bytes(head[-4:], "big")
        data = receive_exactly(connection, size, time.monotonic() + 5)
        return msgspec.msgpack.decode(data, type=Greeting).word

    def talk(self, hello: Any, host: bytes, key: bytes, word: bytes = _WORD) -> Talk:
        """What a proof covers."""
        said = hello if isinstance(hello, bytes) else msgspec.msgpack.encode(hello)
        return Talk(key=key, purpose=self.purpose, opener=word, host=host, hello=said)

    def claim(self, hello: Any, *, key: bytes = b"guessed", then_leave: bool = False) -> None:
        """Say who one is, with a proof by another key."""
        with self.connect() as connection:
            talk = self.talk(hello, self.greet(connection), key)
            connection.sendall(framed(Claim(hello=talk.hello, proof=talk.proof("opens"))))
            if not then_leave:
                self.stop.wait()


class _Bomb:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _drip(target: Target) -> None:
    with target.connect() as connection:
        for byte in framed(Greeting(word=_WORD)):
            connection.sendall(bytes([byte]))
            if target.stop.wait(target.drip_s):
                return
        target.stop.wait()


def _several_silent(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(target.connect())
        target.stop.wait()


def _flood(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(target.connect())
        target.stop.wait()


def _scan(target: Target) -> None:
    for banner in (b"", b"SSH-2.0-scan\r\n", b"\x00", b"EHLO x\r\n", b"*1\r\n$4\r\nPING\r\n") * 10:
        with target.connect() as connection:
            connection.sendall(banner)


def _leave(target: Target) -> None:
    for _ in range(20):
        target.connect().close()


def _reset(target: Target) -> None:
    for _ in range(20):
        connection = target.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"aliq")
        connection.close()


def _close_half(target: Target) -> None:
    with target.connect() as connection:
        connection.sendall(framed(Greeting(word=_WORD))[:20])
        connection.shutdown(socket.SHUT_WR)
        target.stop.wait()


def _shake_tls(target: Target) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with target.connect() as connection:
        context.wrap_socket(connection)


def _old_hello(said: Any) -> bytes:
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    return b"aliquot" + len(data).to_bytes(4, "big") + data


def _frame(data: bytes, size: int | None = None) -> bytes:
    head = framed(None)[: HEAD_BYTES - 4]
    return head + (len(data) if size is None else size).to_bytes(4, "big") + data


def unknown_field(name: str) -> bytes:
    """A greeting with a field that nobody knows."""
    return _frame(msgspec.msgpack.encode({name: 0}))


def _cut_proof(target: Target) -> None:
    with target.connect() as connection:
        talk = target.talk(target.hello, target.greet(connection), target.key)
        # The right one, but for its last byte.
        connection.sendall(framed(Claim(hello=talk.hello, proof=talk.proof("opens")[:-1])))
        target.stop.wait()


def _answer_as_host(target: Target) -> None:
    with target.connect() as connection:
        # The proof of the end that listens, said by the one that opens.
        talk = target.talk(target.hello, target.greet(connection), target.key)
        connection.sendall(framed(Claim(hello=talk.hello, proof=talk.proof("answers"))))
        target.stop.wait()


def _replay(target: Target) -> None:
    with target.connect() as connection:
        target.greet(connection)
        # Said to another end, which had another word.
        talk = target.talk(target.hello, b"h" * 32, target.key)
        connection.sendall(framed(Claim(hello=talk.hello, proof=talk.proof("opens"))))
        target.stop.wait()


def _reflect(target: Target) -> None:
    with target.connect() as connection, target.connect() as other:
        word = target.greet(connection)
        target.greet(other, word)
        other.sendall(framed(Answer(proof=word)))
        target.stop.wait()


def _change_hello(target: Target) -> None:
    with target.connect() as connection:
        # The proof of a process that says that it is another one.
        talk = target.talk(target.hello, target.greet(connection), target.key)
        changed = msgspec.structs.replace(target.hello, process=target.hello.process + 1)
        hello = msgspec.msgpack.encode(changed)
        connection.sendall(framed(Claim(hello=hello, proof=talk.proof("opens"))))
        target.stop.wait()


def _claim_oddly(target: Target) -> None:
    target.claim(b"\x91" * 50_000)


def _pour(target: Target) -> None:
    with target.connect() as connection:
        data = random.Random(0).randbytes(1 << 16)
        for _ in range(160):
            connection.sendall(data)


def _other_purpose(target: Target) -> None:
    with target.connect() as connection:
        host = target.greet(connection)
        said = msgspec.msgpack.encode(target.hello)
        talk = Talk(key=target.key, purpose="other", opener=_WORD, host=host, hello=said)
        connection.sendall(framed(Claim(hello=said, proof=talk.proof("opens"))))
        target.stop.wait()


#: What strangers do, by name.
KINDS: dict[str, Callable[[Target], None]] = {
    "says nothing": lambda target: target.hold(),
    "three say nothing": _several_silent,
    "one byte after the other": _drip,
    "leaves at once": _leave,
    "resets": _reset,
    "closes one direction": _close_half,
    "HTTP": lambda target: target.hold(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "TLS": _shake_tls,
    "scans": _scan,
    "60 kB of [": lambda target: target.hold(b"[" * 60_000),
    "odd JSON": lambda target: target.hold(_old_hello({"hello": {"process": [], "run": 1e400}})),
    "60 kB of [ as a hello": lambda target: target.hold(_old_hello(b"[" * 60_000)),
    "nested MessagePack": lambda target: target.hold(_frame(b"\x91" * 60_000)),
    "MessagePack of another type": lambda target: target.hold(_frame(b"\x82\xa1a\x01\xa1b\xc0")),
    "announces 4 GiB": lambda target: target.hold(_frame(b"x", 2**32 - 1)),
    "says more than asked": lambda target: target.hold(framed(Greeting(word=_WORD)) * 3),
    "a short random word": lambda target: target.hold(framed(Greeting(word=b""))),
    "another version": lambda target: target.hold(b"aliquot\x63" + bytes(4)),
    "a pickled object": lambda target: target.hold(
        _frame(pickle.dumps(_Bomb(target.marker))), pickle.dumps(_Bomb(target.marker))
    ),
    "says that it is process 1": lambda target: target.claim(target.hello),
    "says that it is process 1, and leaves": lambda t: t.claim(t.hello, then_leave=True),
    "another number of processes": lambda target: target.claim(
        msgspec.structs.replace(target.hello, process=7, count=8)
    ),
    "a long name with escape sequences": lambda target: target.hold(
        unknown_field("\n\x1b[2J\r" * 10_000)
    ),
    "half a greeting": lambda target: target.hold(framed(Greeting(word=_WORD))[:25]),
    "a cut proof": _cut_proof,
    "the proof of the other end": _answer_as_host,
    "an empty secret": lambda target: target.claim(target.hello, key=b""),
    "an odd hello": _claim_oddly,
    "repeats a recorded hello": _replay,
    "repeats the other end's word": _reflect,
    "changes a recorded hello": _change_hello,
    "a hello for another purpose": _other_purpose,
    "pours out 10 MB": _pour,
    "opens 300 connections": _flood,
}


@contextlib.contextmanager
def strangers(names: list[str], target: Target):
    """Strangers of some kinds at a port, each in a thread, until the end of the block."""

    def attack(kind: Callable[[Target], None]) -> None:
        # They are dropped in the midst of it.
        with contextlib.suppress(OSError):
            kind(target)

    threads = [threading.Thread(target=attack, args=(KINDS[name],), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        target.stop.set()
        for thread in threads:
            thread.join(10)


def new_secret() -> bytes:
    """For one run."""
    return secrets.token_bytes(32)
