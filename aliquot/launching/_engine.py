"""What starts processes: an engine places one on each host, and the launcher reads all alike."""

from __future__ import annotations

import abc
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core import LaunchedProcess

_ADVICE = {
    # What this command line and many others end with.
    2: "Exit code 2 says that its input cannot be used, so it is not started again.",
    # As a shell ends.
    127: "Give a command that exists on all hosts.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its exit code, or the negative number of the signal that ended it; None if it is not
            known, or if the process still exists.
        why: in words, to stand after the process's name.
        advice: what to do, where to start again would not help.
    """

    code: int | None
    why: str
    advice: str = ""

    @staticmethod
    def of(code: int) -> Ending:
        """The ending of a process with an exit code as `subprocess` gives it."""
        if code >= 0:
            return Ending(
                code=code, why=f"ended with exit code {code}", advice=_ADVICE.get(code, "")
            )
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Ending(code=code, why=f"was killed by {name}")

    @property
    def exit_code(self) -> int:
        """What a shell would report for it: 128 and the signal's number, and 1 if it is not
        known.
        """
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code


STOPPED = Ending(code=None, why="is stopped (by SIGSTOP or a debugger)")


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a process has printed since the last news, each line with whether it is of standard
    error, and how it ended, if it has.
    """

    lines: tuple[tuple[bool, str], ...] = ()
    ending: Ending | None = None


class AbstractProcess(abc.ABC):
    """A started process."""

    #: Where it runs, such as "on 10.0.0.2".
    place: str

    @abc.abstractmethod
    def news(self) -> News:
        """What has happened since the last call; waits a second at most for something to happen."""

    @abc.abstractmethod
    def send(self, number: int) -> None:
        """Send it a signal."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it and all that it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine starts on each host.

    Attributes:
        command: as for `launch`.
        settings: variables that all processes get.
        folder: in which they run.
        run_id: a name that only the processes of this attempt share.
        attempt: which one this is, from 1.
    """

    command: tuple[str, ...]
    settings: Mapping[str, str]
    folder: str
    run_id: str
    attempt: int

    def settings_of(self, process: int, count: int, address: str) -> dict[str, str]:
        """All variables of one process."""
        place = LaunchedProcess(
            address=address,
            num_processes=count,
            process_id=process,
            run_id=self.run_id,
            attempt=self.attempt,
        )
        return {**self.settings, **place.environment()}


class AbstractEngine(abc.ABC):
    """A way to start processes, one on each host."""

    @abc.abstractmethod
    def start(self, job: Job) -> Sequence[AbstractProcess]:
        """Start the processes, in the order of their numbers.

        Raises:
            InputError: the hosts are not there, or differ; says what to type.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give back what the processes of the last start had; none of them runs any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing is started any more."""
