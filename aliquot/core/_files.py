"""Atomic writes of files that a user keeps."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ._errors import InputError


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to `path` so that a reader sees either the old content or all of
    the new.

    The bytes are written to a temporary file in the same folder and flushed to the disk, and the
    file is then renamed. If this is interrupted, by Ctrl-C for example, the old file stays as it
    was. A link is followed. A pipe or device such as `/dev/stdout` cannot be replaced by a rename
    and is written directly.

    Raises:
        InputError: The folder is missing or not writable, or `path` is a folder.
    """
    target = Path(os.path.realpath(path))
    payload = data.encode("utf-8") if isinstance(data, str) else data
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
        if target.exists() and not target.is_file():
            target.write_bytes(payload)
        else:
            _replace(target, payload)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"cannot write {os.fspath(path)!r}: {reason}. Choose another place or free this one."
        ) from error


def _replace(target: Path, payload: bytes) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # Not `tempfile`: it creates files that only their owner may read, and the final name would
        # inherit that.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def _flush_folder(folder: Path) -> None:
    # This makes the rename itself survive a power cut. Not every file system can do it, and the
    # file is complete either way.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
