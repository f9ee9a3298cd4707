"""A connection between two processes that have proved to each other that they know the secret.

Whoever opens it sends a random word, the other end another one. Each then proves, by an HMAC over
both words and over what is said, that it knows the secret. Recorded words are of no use to others.
Later messages, and arrays, carry an HMAC by a key of this connection.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from typing import Any

import msgspec

from ._messages import MessageError, Value, decode, encode
from ._secret import digest

#: Of the protocol. A change of any message or proof needs another one.
VERSION = 3
#: The longest message while a line is made, by who may be anybody, and on one.
MOST_BYTES, MOST_LINE_BYTES = 64 * 1024, 16 * 2**20
#: The longest value within one.
MOST_VALUE_BYTES = MOST_LINE_BYTES - 4096
#: Of an HMAC.
PROOF_BYTES = 32
#: Time for the proofs of both ends, all in all.
PROOFS_S = 10

# How long a message waits for room at the other end.
_SEND_S = 10
_WORD_BYTES = 32
_MAGIC = b"aliquot" + bytes([VERSION])
HEAD_BYTES = len(_MAGIC) + 4


class Greeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first message of who opens a line, and the answer to it: a random word each."""

    word: bytes


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who opens a line, as a message of its own, and the proof."""

    hello: bytes
    proof: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The other end's proof."""

    proof: bytes


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What the proofs of a line cover: its purpose, both words, and who opens it."""

    key: bytes
    purpose: str
    opener: bytes
    host: bytes
    hello: bytes

    def proof(self, what: str) -> bytes:
        """By one who knows the key."""
        said = (VERSION, self.purpose, self.opener, self.host, self.hello)
        return digest(self.key, what, *said)


class Line:
    """One end of a proved connection, with typed messages in both directions.

    Each is its size, its bytes, and an HMAC of them and of its number.

    Attributes:
        socket: the connection.
        sends, hears: keys of what this end sends and hears.
    """

    def __init__(self, connection: socket.socket, talk: Talk, *, opened: bool) -> None:
        self.socket = connection
        keys = talk.proof("messages of the opener"), talk.proof("messages of the host")
        self.sends, self.hears = keys if opened else keys[::-1]
        self._sent = self._heard = 0
        self._lock = threading.Lock()
        connection.settimeout(_SEND_S)

    def send(self, value: Any) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended, or takes nothing.
        """
        data = encode(value, MOST_LINE_BYTES)
        with self._lock:
            proof = digest(self.sends, self._sent, data)
            self._sent += 1
            self.socket.sendall(len(data).to_bytes(4, "big") + data + proof)

    def receive(self, kind: Any, timeout_s: float) -> Any:
        """The next message, all of which must come in time.

        Args:
            kind: its type, or a union of types.

        Raises:
            OSError: it does not, or is not of the other end, or of another type.
        """
        deadline = time.monotonic() + timeout_s
        try:
            size = int.from_bytes(receive_exactly(self.socket, 4, deadline), "big")
            if size > MOST_LINE_BYTES:
                raise ConnectionError(f"a message of {size} bytes")
            data = receive_exactly(self.socket, size, deadline)
            proof = receive_exactly(self.socket, PROOF_BYTES, deadline)
        finally:
            self.socket.settimeout(_SEND_S)
        if not hmac.compare_digest(proof, digest(self.hears, self._heard, data)):
            raise ConnectionError("a message that the other process did not send")
        self._heard += 1
        try:
            return decode(data, kind, MOST_LINE_BYTES)
        except MessageError as error:
            raise ConnectionError(str(error)) from None

    def has_ended(self) -> bool:
        """True if the other end is closed."""
        self.socket.settimeout(0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(_SEND_S)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def open_line(
    host: str, port: int, *, key: bytes, purpose: str, hello: Any, timeout_s: float = PROOFS_S
) -> Line:
    """A line to who listens at an address for this purpose and knows the key.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: who listens does not prove in time that it knows the key, or does not want to hear
            this process; says which.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own_word, said = secrets.token_bytes(_WORD_BYTES), encode(hello, MOST_BYTES)
        connection.sendall(framed(Greeting(word=own_word)))
        greeting = _hear(connection, Greeting, deadline)
        talk = Talk(key=key, purpose=purpose, opener=own_word, host=greeting.word, hello=said)
        connection.sendall(framed(Claim(hello=said, proof=talk.proof("opens"))))
        try:
            answer = _hear(connection, Answer, deadline)
        except OSError as error:
            raise ConnectionError(
                f"it did not accept this process's proof of the secret: {error}"
            ) from None
        if not hmac.compare_digest(answer.proof, talk.proof("answers")):
            raise ConnectionError("it does not know the secret")
        return Line(connection, talk, opened=True)
    except BaseException:
        connection.close()
        raise


class Guest:
    """A connection that has proved nothing yet, at the end that listens. Reads only what is there,
    and never waits.

    Attributes:
        address: the other end's.
        deadline: when it must have proved that it knows the key.
    """

    def __init__(self, connection: socket.socket, address: str, *, key: bytes, purpose: str):
        self.socket, self.address, self.deadline = connection, address, time.monotonic() + PROOFS_S
        self._key, self._purpose = key, purpose
        self._word, self._greeting = secrets.token_bytes(_WORD_BYTES), b""
        self._read = b""
        connection.setblocking(False)

    def read(self, kind: type[Value]) -> tuple[Line, Value] | None:
        """Go on with what has arrived: None if more must come.

        Args:
            kind: of the message by which who opens a line says who it is.

        Raises:
            OSError: it is none who knows the key; says what it did.
        """
        more = self.socket.recv(HEAD_BYTES + MOST_BYTES + 1 - len(self._read))
        if not more:
            raise ConnectionError(f"left after {len(self._read)} bytes of a message")
        self._read += more
        data = unframed(self._read)
        if data is None:
            return None
        self._read = b""
        if not self._greeting:
            self._greeting = _understood(data, Greeting).word
            if len(self._greeting) != _WORD_BYTES:
                raise ConnectionError(f"sent a random word of {len(self._greeting)} bytes")
            # A new connection takes so little at once.
            self.socket.send(framed(Greeting(word=self._word)))
            return None
        claim = _understood(data, Claim)
        talk = Talk(
            key=self._key,
            purpose=self._purpose,
            opener=self._greeting,
            host=self._word,
            hello=claim.hello,
        )
        if not hmac.compare_digest(claim.proof, talk.proof("opens")):
            raise ConnectionError("does not know the secret of this run, or has another one")
        hello = _understood(claim.hello, kind)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.send(framed(Answer(proof=talk.proof("answers"))))
        return Line(self.socket, talk, opened=False), hello


def framed(message: Any) -> bytes:
    """A message of the proofs as it is sent."""
    data = encode(message, MOST_BYTES)
    return _MAGIC + len(data).to_bytes(4, "big") + data


def unframed(read: bytes) -> bytes | None:
    """The bytes of one message, of which `read` has arrived; None if more must come.

    Raises:
        ConnectionError: it is none, or there is more than one.
    """
    if read[: len(_MAGIC)] != _MAGIC[: len(read)]:
        if read.startswith(_MAGIC[:-1]):
            raise ConnectionError(
                f"speaks version {read[len(_MAGIC) - 1]} of the protocol, where this is version"
                f" {VERSION}: it has another release of aliquot"
            )
        raise ConnectionError(f"does not speak aliquot's protocol: it began with {read[:16]!r}")
    size = int.from_bytes(read[len(_MAGIC) : HEAD_BYTES], "big")
    if len(read) < HEAD_BYTES:
        return None
    if size > MOST_BYTES:
        raise ConnectionError(f"announced a message of {size} bytes")
    if len(read) > HEAD_BYTES + size:
        raise ConnectionError("sent more than was asked")
    return read[HEAD_BYTES:] if len(read) == HEAD_BYTES + size else None


def receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """The next `size` bytes of a connection, all of which must come before a time.

    Raises:
        OSError: they do not, or the connection ended.
    """
    data = bytearray()
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it is too slow")
        connection.settimeout(left_s)
        more = connection.recv(min(size - len(data), MOST_BYTES))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return bytes(data)


def _hear(connection: socket.socket, kind: type[Value], deadline: float) -> Value:
    head = receive_exactly(connection, HEAD_BYTES, deadline)
    size = int.from_bytes(head[-4:], "big")
    unframed(head)
    return _understood(receive_exactly(connection, size, deadline), kind)


def _understood(data: bytes, kind: type[Value]) -> Value:
    try:
        return decode(data, kind, MOST_BYTES)
    except MessageError as error:
        raise ConnectionError(f"sent {error}") from None
