"""Less frequent garbage collection while many lasting objects are created."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Traces and plans consist of a million long-lived objects. Python searches them for cycles again
# and again, which takes a tenth of the time of planning, though a search makes hardly any cycles.
_THRESHOLDS = (1_000_000, 50, 100)


def collect_seldom() -> None:
    """Collect garbage a thousand times less often from now on, in processes that this package
    starts.
    """
    gc.set_threshold(*_THRESHOLDS)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect garbage a thousand times less often within a block, in all threads. If the caller's
    settings collect even less often, they are kept.
    """
    before = gc.get_threshold()
    changes = 0 < before[0] < _THRESHOLDS[0]
    if changes:
        collect_seldom()
    try:
        yield
    finally:
        if changes:
            gc.set_threshold(*before)
