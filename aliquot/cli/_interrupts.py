"""Handling of Ctrl-C in the process of the command line, whenever it comes.

While modules are imported and options read, nothing is under way that could be lost: the process
ends at once. Else, within a verb, Ctrl-C is a `KeyboardInterrupt`. Python raises that between two
of its own instructions, which a compiler or a solver may put off for long, so a thread acknowledges
it meanwhile, and a second Ctrl-C ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143
# Most of what Ctrl-C stops has ended by then, and says so itself.
_PATIENCE_S = 0.3
_IMPORTS = "<frozen importlib"


def leave_at_interrupts() -> None:
    """From now on Ctrl-C ends the process at once. Does nothing in other threads than the first,
    which get no signals.
    """
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, _leave)


def raise_at_interrupts() -> None:
    """From now on Ctrl-C is a `KeyboardInterrupt`, if `leave_at_interrupts` is in force: others'
    handlers stay theirs.
    """
    if signal.getsignal(signal.SIGINT) is not _leave:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_acknowledge, args=(reading,), daemon=True).start()
    signal.signal(signal.SIGINT, _raise)


class Ending:
    """By what a loop is to end before its time: "Ctrl-C" or "SIGTERM"; empty if it is not."""

    def __init__(self) -> None:
        self.reason = ""

    def asked(self, number: int) -> bool:
        """Whether to end after step `number`, in all processes alike."""
        import jax

        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            # JAX takes SIGTERM, and lets all processes stop at one step.
            if multihost_utils.reached_preemption_sync_point(number):
                self.reason = "SIGTERM"
        return bool(self.reason)


@contextlib.contextmanager
def ending_between_steps() -> Iterator[Ending]:
    """Within, Ctrl-C and SIGTERM are noted, so that a loop can end when no step is under way. A
    second Ctrl-C ends the process.
    """
    import jax

    ending, before = Ending(), {}

    def note(number: int, frame: FrameType | None) -> None:
        ending.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"

    # Other threads than the first get no signals. Several processes must end at the same step,
    # which JAX finds for SIGTERM.
    if jax.process_count() == 1:
        with contextlib.suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, note)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def interrupting_at_sigterm() -> Iterator[Ending]:
    """Within, SIGTERM is a `KeyboardInterrupt` as Ctrl-C is, for searches that then answer with the
    best so far. Does nothing in other threads than the first, which get no signals.
    """
    ending = Ending()

    def interrupt(number: int, frame: FrameType | None) -> None:
        ending.reason = "SIGTERM"
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        yield ending
        return
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Within, SIGTERM ends the process as an error does, so that no half-written file is left. Does
    nothing in other threads than the first, which get no signals.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def end_at_interrupts() -> None:
    """From now on Ctrl-C ends the process without a message, as all output has been printed."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted; nothing was written.\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith(_IMPORTS):
            # Modules in C++ that are interrupted while they set themselves up crash.
            _leave(number, frame)
        caller = caller.f_back
    signal.default_int_handler(number, frame)


_ENDING = b"interrupted: ending what is under way. Press Ctrl-C again to end at once.\n"


def _acknowledge(reading: int) -> None:
    """Wait for signals, which the interpreter writes down as they come, whatever its first thread
    is doing.
    """
    count = 0
    while number := os.read(reading, 1):
        if number[0] != signal.SIGINT:
            continue
        count += 1
        if count > 1:
            os._exit(INTERRUPTED)
        timer = threading.Timer(_PATIENCE_S, os.write, (2, _ENDING))
        timer.daemon = True
        timer.start()
