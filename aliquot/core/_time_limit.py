"""A time limit for a search, which then ends as on Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ._errors import InputError

_IMPORTS = "<frozen importlib"
_WEAK_REFERENCES = (weakref.__file__, sys.modules[weakref.WeakSet.__module__].__file__)
# Some code must not be interrupted; after so long the signal looks again whether it is over.
_AGAIN_S = 0.02


class OutOfTime(KeyboardInterrupt):
    """The time of a search is over. Whatever ends well on Ctrl-C ends well on this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The seconds that a search may take, infinitely many without a limit, and the moment at which
    it began, by `time.perf_counter`.

    In the main thread, a signal ends the search if the system has timers. Otherwise it ends when it
    next reports progress.
    """

    seconds: float = math.inf
    began_s: float = field(default_factory=lambda: time.perf_counter())

    @classmethod
    def since(cls, started_s: float, seconds: float) -> TimeLimit:
        """A limit that counts from `started_s`.

        Raises:
            InputError: `seconds` is not positive.
        """
        if not seconds > 0:
            raise InputError(f"A time limit must be positive, got {seconds!r} seconds.")
        return cls(seconds=seconds, began_s=started_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.began_s

    @property
    def is_over(self) -> bool:
        """True once no time is left."""
        return self.elapsed_s >= self.seconds

    def check(self) -> None:
        """Raise `OutOfTime` once no time is left."""
        if self.is_over:
            raise OutOfTime

    @contextlib.contextmanager
    def ringing(self) -> Iterator[None]:
        """Raise `OutOfTime` within the block once the time is over."""
        if (
            math.isinf(self.seconds)
            or not hasattr(signal, "setitimer")
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
            raise OutOfTime

        before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, max(self.seconds - self.elapsed_s, _AGAIN_S))
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
