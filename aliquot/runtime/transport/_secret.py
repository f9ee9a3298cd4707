"""The secret that all processes of a run share, and what is derived from it.

Who knows it may join. It is never sent: each end of a connection proves that it knows it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from pathlib import Path

from ...core import SECRET, SECRET_FILE, InputError

_FEWEST_CHARACTERS, _FEWEST_DIFFERENT = 16, 8
_MOST_BYTES = 4096
_HOW = (
    f"Set {SECRET} to the same text in all processes, or {SECRET_FILE} to a file that holds it and"
    " that only you can read. To make one: python -c 'from aliquot.runtime import make_secret;"
    " print(make_secret())'"
)


def known_secret() -> bytes | None:
    """The secret of this process's environment, or None.

    Raises:
        InputError: it is blank or easily guessed, or its file is missing or open to others.
    """
    text, file = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    source = SECRET
    if text is None:
        if file is None:
            return None
        if not file.strip():
            raise InputError(f"{SECRET_FILE} is set, and names no file. {_HOW}")
        source, text = file, _read(Path(file))
    text = text.strip()
    if not text:
        raise InputError(
            f"the secret in {source} is blank: the command that was to make it may have failed."
            f" {_HOW}"
        )
    for number, fewest, what in (
        (len(text), _FEWEST_CHARACTERS, "characters"),
        (len({*text}), _FEWEST_DIFFERENT, "different characters"),
    ):
        if number < fewest:
            raise InputError(
                f"the secret in {source} has {number} {what}: whoever guesses it can join this run,"
                f" so it needs {fewest}. {_HOW}"
            )
    return text.encode()


def require_secret(*addresses: str) -> bytes:
    """The secret of a run whose processes meet at these addresses. Empty if there is none and only
    processes of this machine can reach them.

    Raises:
        InputError: there is no secret, and others can reach them.
    """
    secret = known_secret()
    if secret is not None:
        return secret
    for address in addresses:
        if not (address and _is_loopback(address)):
            raise InputError(
                f"processes were asked to meet at {address or 'all interfaces'}, which other"
                f" machines can reach, and have no secret: anybody who connects there could take"
                f" the place of one. {_HOW}"
            )
    return b""


def digest(key: bytes, *parts: bytes | int | str) -> bytes:
    """HMAC-SHA256 of a list: other parts give another digest, wherever they are cut."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()


def _read(path: Path) -> str:
    """The text of a file that other users cannot read or change."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            # Groups may read: Kubernetes gives secrets to a container's group.
            if os.name == "posix" and mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise InputError(
                    f"{SECRET_FILE} names {path}, which other users can read or change (mode"
                    f" {mode & 0o777:o}), so that it is no secret. Type: chmod 600 {path}"
                )
            return file.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{SECRET_FILE} names {path}, which cannot be read as text: {error}. {_HOW}"
        ) from None


def _is_loopback(address: str) -> bool:
    """True if only this machine can reach an address or name."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one).is_loopback for one in found)
