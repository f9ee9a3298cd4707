"""Processor cores of this process."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Number of cores that this process may use: those of its affinity mask, if the system has
    one.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
