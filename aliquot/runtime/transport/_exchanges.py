"""Values that the processes of a run pass to each other, by the exchange to which they belong."""

from __future__ import annotations

import threading

import msgspec


class Passes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What one process passes to all others in an exchange.

    Attributes:
        name: of the exchange, in which each process passes one value.
        process: whose value it is: process 0 hands on those of the others.
        data: the value, encoded.
    """

    name: str
    process: int
    data: bytes


class Exchanges:
    """Values that have come, until this process takes them. Safe to use from several threads."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._came: dict[str, dict[int, bytes]] = {}
        self._changed = threading.Condition()
        self._ended: int | None = None

    def note(self, passed: Passes) -> None:
        """Keep a value."""
        with self._changed:
            self._came.setdefault(passed.name, {})[passed.process] = passed.data
            self._changed.notify_all()

    def lose(self, process: int) -> None:
        """From now on nothing comes through the connection to a process: nobody waits any longer
        for what has not come.
        """
        with self._changed:
            self._ended = process
            self._changed.notify_all()

    def take(self, name: str, timeout_s: float | None) -> list[bytes]:
        """The values of an exchange, in order of the processes, once all have come.

        Raises:
            ConnectionError: some do not come in time, or a process has ended; says whose.
        """
        with self._changed:
            came = self._came.setdefault(name, {})
            self._changed.wait_for(
                lambda: len(came) == self._count or self._ended is not None, timeout_s
            )
            missing = ", ".join(str(k) for k in range(self._count) if k not in came)
            if missing and self._ended is not None:
                raise ConnectionError(
                    f"nothing came as {name} from process {missing}: process {self._ended} has"
                    " ended"
                )
            if missing:
                raise ConnectionError(
                    f"nothing came as {name} from process {missing} within {timeout_s} s"
                )
            del self._came[name]
            return [came[k] for k in range(self._count)]
