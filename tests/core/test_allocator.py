"""The C library's allocator: memory that is freed is given out again without the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

# A thread as JAX has, and more than the 64 MiB at which the arenas of threads end.
_PROGRAM = """
import resource, sys, threading
import numpy as np
from aliquot.core import reuse_freed_memory

if sys.argv[1] == "reuse":
    print(reuse_freed_memory())

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(96 << 20, np.uint8).fill(1)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
for _ in range(3):
    thread = threading.Thread(target=faults)
    thread.start()
    thread.join()
print(found[-1])
"""


def test_large_arrays_take_no_fresh_pages_once_memory_is_reused():
    def run(argument):
        command = [sys.executable, "-c", _PROGRAM, argument]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    # Huge pages would make few faults of many pages.
    (fresh,), (said, reused) = run("default"), run("reuse")
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert said == str(is_glibc)
    assert not is_glibc or (int(fresh) >= 40 and int(reused) <= int(fresh) / 20)


def test_another_operating_system_is_left_alone(monkeypatch):
    from aliquot.core import _allocator

    monkeypatch.setattr(_allocator.sys, "platform", "darwin")
    assert _allocator.reuse_freed_memory() is False
