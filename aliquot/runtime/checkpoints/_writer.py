"""One run at a time writes into a folder of checkpoints.

The operating system locks a file for the run's process 0, and frees it when that process ends,
however it ends. What is in the file only tells others who writes. Where a file system has no locks,
nothing is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ...core import InputError

NAME = ".writer"
# How long a run that has just locked the file may take to say who it is.
_WAIT_S = 1.0


class BusyError(InputError):
    """Another run writes into the folder."""


class _Writer(msgspec.Struct, frozen=True, kw_only=True):
    process_id: int
    host: str
    since: str
    token: str


def lock_folder(folder: Path, wait_s: float = 0.0) -> int | None:
    """A descriptor by which this process alone writes into a folder, for `unlock_folder`. None
    where this process has one already, or the file system has no locks.

    Args:
        wait_s: how long to wait for another run. A file server may take a minute or two to notice
            that a machine is gone.

    Raises:
        BusyError: another run writes there; it names its process and host.
        OSError: the folder cannot be written.
    """
    path, deadline = folder / NAME, time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            writer = _said(path)
            is_this = writer is not None and (writer.token, writer.process_id) == (
                _token(),
                os.getpid(),
            )
            if writer is not None and (is_this or _has_ended(writer)):
                return None
            if time.monotonic() < deadline:
                time.sleep(1)
                continue
            who = (
                f"process {writer.process_id} on {writer.host}, since {writer.since}"
                if writer is not None
                else "another process"
            )
            raise BusyError(
                f"another run writes checkpoints into {str(folder)!r}: {who}. Two runs would"
                " replace each other's. Name another folder for this one, or end that one first; if"
                f" its machine is gone, remove {str(path)!r}."
            ) from None
        except OSError:
            os.close(descriptor)
            return None
        # Whoever held the lock before may have removed the file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    writer = _Writer(
        process_id=os.getpid(),
        host=platform.node(),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        token=_token(),
    )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, msgspec.json.encode(writer))
    return descriptor


def unlock_folder(folder: Path, descriptor: int) -> None:
    """Let others write into a folder."""
    with contextlib.suppress(OSError):
        os.unlink(folder / NAME)
    os.close(descriptor)


def _said(path: Path) -> _Writer | None:
    """Who wrote the file, if it says so."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=_Writer)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _has_ended(writer: _Writer) -> bool:
    """Whether a process of this host is gone, and one that it forked still has its descriptor."""
    if writer.host != platform.node() or writer.process_id < 1:
        return False
    try:
        os.kill(writer.process_id, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


@functools.cache
def _token() -> str:
    """What this process and those that it forks call themselves."""
    return secrets.token_hex(8)
