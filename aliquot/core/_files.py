"""Reading of whole files that a user gives, and atomic writes of those that a user keeps."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ._errors import InputError
from ._units import format_bytes

_WAIT_S = 10.0


def read_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """All of a file. Pipes and devices can be read too, but never without end: neither what they
    hold nor the time until they say something.

    Args:
        most_bytes: the longest that such a file can sensibly be.

    Raises:
        InputError: what is wrong, such as "it is a folder", to be put into a sentence.
    """
    try:
        # Without waiting: a pipe into which nothing writes would never open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as stream:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise InputError("it is a folder")
            poll, data = select.poll(), bytearray()
            poll.register(descriptor, select.POLLIN)
            while len(data) <= most_bytes:
                if not poll.poll(_WAIT_S * 1000):
                    raise InputError(f"nothing came out of it for {_WAIT_S:g} s")
                # One byte more than allowed shows that a file is too long, without reading all.
                part = stream.read(min(most_bytes + 1 - len(data), 2**20))
                if part == b"":
                    return bytes(data)
                data += part or b""
    except OSError as error:
        raise InputError(error.strerror or str(error)) from error
    except ValueError as error:
        raise InputError("that is not the name of a file") from error
    raise InputError(f"it has more than {format_bytes(most_bytes)}")


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to `path` as `open_atomic` does.

    Raises:
        InputError: The folder is missing or not writable, or `path` is a folder.
    """
    with open_atomic(path) as stream:
        stream.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A stream to write a file with, so that a reader sees either the old content or all of the
    new.

    The bytes are written to a temporary file in the same folder and flushed to the disk, and the
    file is then renamed. If this is interrupted, by Ctrl-C for example, the old file stays as it
    was. A link is followed. A pipe or device such as `/dev/stdout` cannot be replaced by a rename
    and is written directly.

    Raises:
        InputError: The folder is missing or not writable, or `path` is a folder.
    """
    try:
        target = Path(os.path.realpath(path))
    except OSError as error:
        raise InputError(
            f"cannot write {os.fspath(path)!r}: the working folder is gone. Change to another, or"
            " give a full path."
        ) from error
    if target.is_dir():
        raise InputError(
            f"cannot write {os.fspath(path)!r}: it is a folder. Give the name of a file in it."
        )
    if not target.parent.is_dir():
        raise InputError(
            f"cannot write {os.fspath(path)!r}: there is no folder {str(target.parent)!r}. Create"
            " it first."
        )
    try:
        # By the name that was given: that of a pipe behind `/dev/stdout` is no path.
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as stream:
                yield stream
        else:
            with _replacing(target) as stream:
                yield stream
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"cannot write {os.fspath(path)!r}: {reason}. Choose another place or free this one."
        ) from error


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # Not `tempfile`: it creates files that only their owner may read, and the final name would
        # inherit that.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
