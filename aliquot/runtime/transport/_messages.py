"""Messages among processes as bytes: values of declared types in MessagePack, never code.

What arrives may come from anybody. It is decoded only up to a size, and only into the type that is
expected, which also limits how deep it nests.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...core import shortened

#: The longest message. Texts of plans of 10,000 layers have some megabytes.
MOST_BYTES = 64 * 2**20

Value = TypeVar("Value")


class MessageError(ValueError):
    """Bytes that are no message of the type that was expected; says what they are instead."""


def encode(value: Any, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a value: of a `msgspec.Struct`, a dataclass, or builtin types.

    Raises:
        MessageError: they are more than `most_bytes`.
    """
    data = msgspec.msgpack.encode(value)
    if len(data) > most_bytes:
        raise MessageError(f"a message of {len(data)} bytes, at most {most_bytes} can be sent")
    return data


def decode(data: bytes, kind: type[Value], most_bytes: int = MOST_BYTES) -> Value:
    """The value of type `kind` that bytes stand for.

    Raises:
        MessageError: they are too many, or stand for no such value.
    """
    if len(data) > most_bytes:
        raise MessageError(f"{len(data)} bytes, where a message has at most {most_bytes}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # It may repeat names of fields, which are the sender's.
        raise MessageError(
            f"no such message as was expected: {shortened(str(error), 200)}"
        ) from None
    # Only where a dataclass is expected: msgspec reads past its unknown fields.
    except RecursionError:
        raise MessageError("a message that nests too deeply") from None
