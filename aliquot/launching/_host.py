"""What runs on a host of a Ray cluster: an actor that starts one process and tells how it fares.

Uses the standard library alone: Ray carries this file to hosts that may not have this package.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping, Sequence

from ._child import Child

_COMPARED = ("jax", "jaxlib")


class Host:
    """One host of the cluster."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def versions(self) -> dict[str, str]:
        """Versions that must be the same on all hosts; empty where something is not installed."""
        found = {"python": ".".join(platform.python_version_tuple()[:2])}
        try:
            from aliquot.core import version_of

            found["aliquot"] = version_of("aliquot")
        # It is not there, or another package has its name.
        except ImportError:
            found["aliquot"] = ""
        for name in _COMPARED:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = ""
        return found

    def name(self) -> str:
        return socket.gethostname()

    def free_port(self, address: str) -> int:
        """A port at which the processes can meet here."""
        from aliquot.core import reserved_port

        with reserved_port(address, 0, 1) as found:
            port: int = found.getsockname()[1]
            return port

    def start(self, command: Sequence[str], settings: Mapping[str, str], folder: str) -> int:
        """Start the process; returns its number on this host, or 0 if there is no such folder."""
        if not os.path.isdir(folder):
            return 0
        # Ray gives each worker one thread of OpenMP, unless the user has chosen a number.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._child = Child(command, settings, folder)
        return self._child.pid

    def news(self, timeout_s: float) -> tuple[list[tuple[bool, str]], int | None, bool]:
        """What has happened since the last call; waits for something to happen, up to a time."""
        assert self._child is not None
        return self._child.news(timeout_s)

    def send(self, number: int) -> None:
        if self._child is not None:
            self._child.send(number)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
