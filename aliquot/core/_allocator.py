"""How this process's C library gives out memory."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt, from glibc's malloc.h, with values that mallopt(3) describes.
_SETTINGS = (
    (-4, 0),  # M_MMAP_MAX: no piece of memory comes from the kernel by itself
    (-1, -1),  # M_TRIM_THRESHOLD: nothing freed goes back to the kernel
    (-8, 1),  # M_ARENA_MAX: one arena for all threads; those of threads end at 64 MiB
)


def reuse_freed_memory() -> bool:
    """Let this process keep the memory that it frees, and give it out again.

    CPU devices allocate the temporary arrays of a program in every run. By default glibc takes
    pieces above a threshold of at most 32 MiB fresh from the kernel and gives them back when they
    are freed, so that every page of them costs a page fault in every run: a program that needs a
    little more than another can take twice as long. Threads that have begun keep their arenas, so
    call it early: before JAX starts.

    Returns:
        False where the C library is another than glibc; then nothing has changed.

    Reference: the manual page mallopt(3), M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    accepted = [mallopt(*setting) for setting in _SETTINGS]
    return all(accepted)
