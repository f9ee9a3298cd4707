"""A time limit for a search, which then ends as on Ctrl-C, with the best plan so far."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from .core import InputError, TimeLimitError, format_seconds
from .planners import (
    AbstractMethod,
    Auto,
    Decision,
    Interrupted,
    ShardParallel,
    Task,
    WholeProgram,
    least_compute_s,
    simple_plan,
)

_STATUS = "time limit reached"
_COMPUTE_ALONE = "all plans, by compute alone that all devices share evenly"
_IMPORTS = "<frozen importlib"
_WEAK_REFERENCES = (weakref.__file__, sys.modules[weakref.WeakSet.__module__].__file__)
# Some code must not be interrupted; after so long the signal looks again whether it is over.
_AGAIN_S = 0.02


class _OutOfTime(KeyboardInterrupt):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The seconds that a search may take, and the moment at which they are over, by
    `time.perf_counter`.

    In the main thread, a signal ends the search if the system has timers. Otherwise it ends when it
    next reports progress.
    """

    seconds: float
    until_s: float

    @classmethod
    def since(cls, started_s: float, seconds: float) -> TimeLimit:
        """A limit that counts from `started_s`.

        Raises:
            InputError: `seconds` is not positive.
        """
        if not seconds > 0:
            raise InputError(f"A time limit must be positive, got {seconds!r} seconds.")
        return cls(seconds=seconds, until_s=started_s + seconds)

    @property
    def is_over(self) -> bool:
        """True once no time is left."""
        return time.perf_counter() >= self.until_s

    def decide(self, method: AbstractMethod, task: Task) -> Decision:
        """As `method.decide`, but once the time is over, the best decision so far, with its bound.

        Searches that take any program begin with a simple plan, which takes little of the time, so
        that there is one to fall back on.

        Raises:
            TimeLimitError: no plan was complete by then.
            Interrupted: Ctrl-C.
        """

        def report(what: str, done: int, of: int) -> None:
            if task.progress:
                task.progress(what, done, of)
            if self.is_over:
                raise _OutOfTime

        best: Decision | None = None
        simple: Decision | None = None
        timed = replace(task, progress=report)
        try:
            with _alarm(self):
                if isinstance(method, Auto | WholeProgram | ShardParallel):
                    simple = simple_plan(timed)
                return method.decide(timed)
        except KeyboardInterrupt as stopped:
            if not self.is_over:
                raise
            best = stopped.decision if isinstance(stopped, Interrupted) else None
        if simple and (best is None or simple.step_time_s < best.step_time_s):
            best = simple
        if best is None:
            raise TimeLimitError(
                f"No plan was complete after {format_seconds(self.seconds)}, tracing the step"
                " included; whether one fits is not known. Allow more time, or choose a method"
                " that searches less, such as --method zero3."
            )
        if best.lower_bound_s is not None:
            return replace(best, status=_STATUS)
        least_s = least_compute_s(timed.problem(1))
        return replace(
            best, status=_STATUS, lower_bound_s=least_s, gap=None, bound_holds_for=_COMPUTE_ALONE
        )


@contextlib.contextmanager
def _alarm(limit: TimeLimit) -> Iterator[None]:
    """Raise `_OutOfTime` within the block once the time is over."""
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    armed = True

    def ring(number: int, frame: FrameType | None) -> None:
        if not armed:
            return
        if _must_end(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
            return
        raise _OutOfTime

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(limit.until_s - time.perf_counter(), _AGAIN_S))
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _must_end(frame: FrameType | None) -> bool:
    """True within code that must not be interrupted: C++ modules crash if their import is, and
    Python prints and drops what is raised while an object is deleted, or when garbage is collected,
    as JAX and Hypothesis ask to be told.
    """
    collecting = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if (
            code.co_filename.startswith(_IMPORTS)
            or code.co_filename in _WEAK_REFERENCES
            or code.co_name == "__del__"
            or code in collecting
        ):
            return True
        frame = frame.f_back
    return False
