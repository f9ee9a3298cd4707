"""Less frequent garbage collection while many lasting objects are created."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# Traces and plans are a million objects that stay. Python looks through them for cycles again and
# again, which takes a tenth of the time of planning; a search makes hardly any.
_THRESHOLDS = (1_000_000, 50, 100)


def collect_seldom() -> None:
    """Look for garbage a thousand times less often from now on: for processes that are this
    package's own.
    """
    gc.set_threshold(*_THRESHOLDS)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """The same within a block. Other threads notice it, too; who looks as seldom already, or never,
    goes on so.
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
