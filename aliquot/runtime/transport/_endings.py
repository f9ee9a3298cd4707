"""Exit of a process with its own exit code, announced to the other processes."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from functools import cache

import jax

from ...core import AliquotError
from ._calls import END, Call
from ._watchdog import Peers, end_at_once, stop_watching, watched

# How long a process that has ended without `shutdown` waits for the others to end as well.
_AT_EXIT_S = 4
# How long to wait, after a failure, for the news that another process has died and caused it.
_LAST_WORD_S = 2
# How long a process that has failed keeps its connections after it has told the others, which hear
# of it before their programs break off.
_HEARD_S = 1
# How long a process that failed or was interrupted waits for work that still runs.
_STUCK_S = 3
_INTERRUPTED, _FAILED = 130, 1


@cache
def end_in_order() -> None:
    """From now on the end of this process is announced to the others. It waits for running
    programs, at which XLA would fail otherwise.
    """
    atexit.register(_at_exit)


def finish_work() -> None:
    """Wait for all that this process still computes or receives: senders must not leave before."""
    for array in jax.live_arrays():
        # Arrays that were donated, or whose computation failed, need no wait.
        with suppress(RuntimeError, ValueError):
            array.block_until_ready()


def part(peers: Peers) -> None:
    """End this process's connections, once all processes have called `leave`. Process 0, in which
    JAX's service runs, goes last.
    """
    stop_watching()
    if peers.process:
        jax.distributed.shutdown()
    peers.part()
    jax.distributed.shutdown()


def _at_exit() -> None:
    """End a process that did not call `shutdown`: quietly if the others end too; otherwise they are
    told, and end as well.
    """
    peers, error = watched(), getattr(sys, "last_value", None)
    if peers is None:
        _finish_or_end(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else None)
        return
    if error is None:
        finished = threading.Thread(target=finish_work, daemon=True)
        finished.start()
        finished.join(_AT_EXIT_S)
        # If the others still run, this process has its own exit code nevertheless.
        peers.begin_to_fail()
        peers.report(Call(what=END))
        if not finished.is_alive() and peers.leave(_AT_EXIT_S):
            part(peers)
            return
        print(
            f"aliquot: process {peers.process} ends while others still run. Call"
            " aliquot.runtime.shutdown() at the end, which waits for them.",
            file=sys.stderr,
        )
        peers.fail("has ended without aliquot.runtime.shutdown()")
        return
    if isinstance(error, KeyboardInterrupt):
        peers.fail("was interrupted (Ctrl-C)")
        end_at_once(_INTERRUPTED)
    # If another process has died, or processes differ, the watchdog ends this one while it sleeps.
    peers.begin_to_fail(_FAILED)
    time.sleep(_LAST_WORD_S)
    text = f": {error}" if isinstance(error, AliquotError) else ""
    peers.fail(f"has failed with {type(error).__name__}{text}")
    time.sleep(_HEARD_S)
    _finish_or_end(_FAILED)


def _finish_or_end(code: int | None) -> None:
    """Wait for running work. With an exit code, wait `_STUCK_S` seconds at most, then end the
    process.
    """
    if code is None:
        finish_work()
        return
    finished = threading.Thread(target=finish_work, daemon=True)
    finished.start()
    finished.join(_STUCK_S)
    if finished.is_alive():
        end_at_once(code)
