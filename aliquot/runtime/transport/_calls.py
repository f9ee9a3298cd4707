"""The calls of all processes, compared one by one as they are reported: all must make the same
calls in the same order, with the same arrays.

Nobody waits for the comparison. It is made in process 0, where the reports arrive.
"""

from __future__ import annotations

import threading
from collections import Counter

import msgspec

from ...core import PlanMismatchError
from ._given import Given, differences

#: The last call of a process.
END = "the end of its run"


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """One call that all processes must make alike.

    Attributes:
        what: what is called, such as `call 3 of train_step`.
        given: what this process passes, by path; see `describe`.
    """

    what: str
    given: dict[str, Given] = {}


class Calls:
    """The calls of all processes of a run, as far as not all have made them. Safe to use from
    several threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: Counter[int] = Counter()
        self._open: dict[int, dict[int, Call]] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def note(self, process: int, call: Call) -> str:
        """Add the next call of a process.

        Returns:
            The message for all if it differs from those of others; otherwise nothing.
        """
        with self._changed:
            number = self._made[process]
            self._made[process] += 1
            calls = self._open.setdefault(number, {})
            calls[process] = call
            made = dict(sorted(calls.items()))
            if len(calls) == self._count:
                del self._open[number]
            self._changed.notify_all()
        return compare_calls(made)

    def settle(self, timeout_s: float | None) -> bool:
        """Wait until all processes have reported as many calls as the one that has made most. False
        if they have not in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._is_over, timeout_s)
            return not self._open

    def stop_waiting(self) -> None:
        """Let `settle` return: other calls will not come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def compare_calls(calls: dict[int, Call]) -> str:
    """The message for all processes if some make another call than the others; otherwise nothing.

    Args:
        calls: of some or all processes.
    """
    (first, reference), *others = calls.items()
    problems = []
    for k, call in others:
        if call.what != reference.what:
            problems.append(
                f"process {k} goes on with {call.what}, process {first} with {reference.what}"
            )
    if not problems:
        problems = differences({k: call.given for k, call in calls.items()})
    return str(mismatch(problems, f" ({reference.what})")) if problems else ""


def mismatch(problems: list[str], where: str = "") -> PlanMismatchError:
    """The error that says in what processes differ.

    Args:
        where: what they did, for the message.
    """
    return PlanMismatchError(
        problems,
        asked=f"processes that run a step together must all run the same{where}",
        advice=(
            "Give all processes the same step, plan, settings, versions, state and batches (or each"
            " its own rows: step.local_part), in the same order, and start all again."
        ),
    )
