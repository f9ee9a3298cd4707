"""Settings of the C library's memory allocator in this process."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt, from glibc's malloc.h, with values that mallopt(3) describes.
_SETTINGS = (
    (-4, 0),  # M_MMAP_MAX: large blocks get no mapping of their own
    (-1, -1),  # M_TRIM_THRESHOLD: freed memory never goes back to the kernel
    (-8, 1),  # M_ARENA_MAX: one arena for all threads; arenas of threads end at 64 MiB
)


def reuse_freed_memory() -> bool:
    """Let this process keep the memory that it frees, and reuse it.

    CPU devices allocate the temporary arrays of a program in every run. By default glibc maps
    blocks above a threshold, which is at most 32 MiB, anew from the kernel and unmaps them when
    they are freed, so every page of them costs a page fault in every run: a program that needs a
    little more memory than another can take twice as long. Threads that already run keep their
    arenas, so call this early: before JAX starts.

    Returns:
        False if the C library is not glibc; then nothing has changed.

    Reference: the manual page mallopt(3), M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(*setting) for setting in _SETTINGS]
    return all(accepted)
