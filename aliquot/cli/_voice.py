"""A line on standard error whenever a command is silent for a while: what it is doing, and for how
long.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

FIRST_S = 1.5
EVERY_S = 10.0
_TICK_S = 0.25


class Voice:
    """Says what is being done, `FIRST_S` after something began or was last heard, then every
    `EVERY_S`.

    Attributes:
        doing: what is being done, in words; setting it begins the time anew if it is something
            else.
    """

    def __init__(self) -> None:
        self._doing = "loading libraries"
        self._began = self._heard = time.monotonic()
        self._quiet = 0
        self._wait_s = FIRST_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        # A count within the same work is no new work.
        if what.partition(" (")[0] != self._doing.partition(" (")[0]:
            self._began = time.monotonic()
        self._doing = what

    def heard(self) -> None:
        """Something else was just printed."""
        self._heard, self._wait_s = time.monotonic(), FIRST_S

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Say nothing within: a bar or a changing line shows what is going on."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
            self.heard()

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Speak within."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _speak(self) -> None:
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            if self._quiet or now - max(self._heard, self._began) < FIRST_S:
                continue
            if now - self._heard < self._wait_s:
                continue
            line = f"{self._doing} ... {now - self._began:.0f} s"
            # The stream may be gone, as when a test has ended.
            with contextlib.suppress(ValueError, OSError):
                print(line, file=sys.stderr, flush=True)
            self._heard, self._wait_s = now, EVERY_S
