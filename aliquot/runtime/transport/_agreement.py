"""Exchange of small values among all processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from ._messages import Value
from ._secret import digest, known_secret
from ._service import exchange_by, exchange_under
from ._watchdog import watched


def exchange(value: Value, kind: type[Value]) -> list[Value]:
    """The value that each process passes, in order of the processes. Waits until all have called it
    as often as this one: all processes must call it at the same points, with the same `kind`.

    For small values: numbers, names, digests. They touch no device, and carry no code. They go
    through the connections that `initialize` has made, or else through JAX's coordination service.

    Args:
        value: this process's; a `msgspec.Struct`, a dataclass, or builtin types.
        kind: its type, such as `dict[str, str]`, in which the values of the others are expected
            too. Declare a struct with `forbid_unknown_fields=True`.

    Raises:
        ConnectionError: what another process passed is no such value; names the process.
    """
    peers = watched()
    if peers is not None:
        return peers.exchange(value, kind)
    return exchange_by(_key(), value, kind)


def spans_processes(devices: Iterable[Any]) -> bool:
    """True if devices belong to several processes."""
    return len({device.process_index for device in devices}) > 1


class Rendezvous:
    """Exchanges among all processes that do not mix with those of `exchange` or of another
    `Rendezvous`, and so may happen in a thread of their own.

    Args:
        name: the same in all processes; no two objects of a run share one.
    """

    def __init__(self, name: str) -> None:
        self._name, self._numbers = name, itertools.count(1)

    def exchange(self, value: Value, kind: type[Value], timeout_s: float) -> list[Value]:
        """The value that each process passes, in order of the processes; see `exchange`.

        Raises:
            ConnectionError: a process does not come in time.
        """
        peers, name = watched(), f"{self._name}, {next(self._numbers)}"
        if peers is not None:
            return peers.exchange_under(name, value, kind, timeout_s)
        return exchange_under(_key(), name, value, kind, timeout_s)


def _key() -> bytes:
    """Of processes that `initialize` has not connected: they share the secret alone, if any."""
    return digest(known_secret() or b"", "exchange")
