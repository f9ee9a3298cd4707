"""Agreement of the processes that measure together. Each goes through the same programs, runs its
part of each, and decides by what all have seen; process 0 alone reads and writes the database.

In one process nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax

from ..core import AliquotError, InputError
from ..runtime import Rendezvous, watched
from ._database import failed

Value = TypeVar("Value")

_DAY_S = 24 * 3600.0
# How long a process in which a program has failed waits for the others, which may wait for it.
_PATIENCE_S = 60.0
_meeting = Rendezvous("measuring")


def from_all(value: Value, kind: type[Value], timeout_s: float = _DAY_S) -> list[Value]:
    """What each process passes, in order. All must call it at the same points."""
    if jax.process_count() == 1:
        return [value]
    return _meeting.exchange(value, kind, timeout_s)


def from_first(value: Value, kind: type[Value]) -> Value:
    """What process 0 passes, in all processes."""
    return from_all(value, kind)[0]


def leads() -> bool:
    """Whether this is process 0."""
    return int(jax.process_index()) == 0


@contextmanager
def raised_in_all() -> Iterator[None]:
    """Within, all processes do something of which an error in one is raised in all."""
    mine: AliquotError | None = None
    try:
        yield
    except AliquotError as error:
        mine = error
    faults = from_all("" if mine is None else str(mine), str)
    if mine is not None:
        raise mine
    for process, fault in enumerate(faults):
        if fault:
            raise InputError(f"process {process}: {fault}")


class NotRun(Exception):
    """A program that did not run; `outcome` is that of its `Measurement`."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def slowest(act: Callable[[], list[float]], label: str) -> list[float]:
    """Do something in all processes, and return for each of its seconds those of the slowest one.

    Args:
        act: raises `NotRun` if it cannot be done.
        label: names the program.

    Raises:
        NotRun: it failed in one of them.
        AliquotError: it failed here, and the others wait for this process within the program.
    """
    seconds, outcome = list[float](), ""
    try:
        seconds = act()
    except NotRun as error:
        outcome = error.outcome
    try:
        found = from_all(
            (outcome, seconds), tuple[str, list[float]], _PATIENCE_S if outcome else _DAY_S
        )
    except ConnectionError:
        if not outcome:
            raise
        raise AliquotError(
            f"process {jax.process_index()} could not run {label} ({outcome}), and others wait for"
            " it. What was measured before is kept: run the same command again, and if this"
            " happens again, with smaller --largest-in-host and --largest-between-hosts."
        ) from None
    several = len(found) > 1
    for process, (one, _) in enumerate(found):
        if one:
            where = f"process {process}: " if several else ""
            told = one.removeprefix("failed: ")
            raise NotRun(one if told == one else failed(f"{where}{told}"))
    return list(map(max, zip(*(times for _, times in found), strict=True)))


def say_if_lost(label: str) -> None:
    """From now on this process says that it was measuring this when another one is lost."""
    peers = watched()
    if peers is not None:
        peers.kept = "what they have measured"
        peers.describe = lambda dead: f"Process {peers.process} was measuring {label}."
