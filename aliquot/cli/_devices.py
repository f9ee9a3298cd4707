"""Choice of the devices that JAX sees: the only place that sets its environment, before it is first
imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from ..core import InputError, reuse_freed_memory

MOST_VIRTUAL = 1024
_COUNT = "--xla_force_host_platform_device_count"
_REMARK = re.compile(rb"Could not find cuda drivers|before absl::InitializeLog\(\)")


def use_devices(virtual: int | None) -> list[Any]:
    """So many virtual CPU devices, or all that JAX sees if none are asked for, to run programs."""
    reuse_freed_memory()
    return use_seen_devices() if virtual is None else use_virtual_devices(virtual)


def virtual_flag(count: int) -> str:
    """The XLA flag for so many virtual CPU devices."""
    return f"{_COUNT}={count}"


def use_virtual_devices(count: int) -> list[Any]:
    """Make this process's CPU look like `count` devices that run programs, and return them.

    Raises:
        InputError: `count` is below 1 or above what a CPU can be taken for, or JAX has started with
            fewer.
    """
    if not 1 <= count <= MOST_VIRTUAL:
        raise InputError(f"--devices must be at least 1 and at most {MOST_VIRTUAL}, got {count}.")
    reuse_freed_memory()
    kept = [
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] != _COUNT
    ]
    os.environ["XLA_FLAGS"] = " ".join([*kept, virtual_flag(count)])
    use_host_only()
    seen = use_seen_devices()
    if len(seen) < count:
        raise InputError(
            f"JAX has started with {len(seen)} devices, {count} were asked for. Start a new"
            " process."
        )
    return seen[:count]


def use_host_only() -> None:
    """Leave accelerators alone: planning needs none. What the user has set stays."""
    if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu" and importlib.util.find_spec(
        "jax_plugins"
    ):
        # JAX loads every plugin, and the one for GPUs then says that there are none.
        use_seen_devices()


def use_seen_devices() -> list[Any]:
    """Start JAX with the devices that it sees, and return them.

    Raises:
        ClusterError: No backend starts that `JAX_PLATFORMS` allows.
    """
    from ..cluster import visible_devices

    with (
        _without_remarks_on_gpus()
        if importlib.util.find_spec("jax_plugins")
        else contextlib.nullcontext()
    ):
        return visible_devices()


@contextlib.contextmanager
def _without_remarks_on_gpus() -> Iterator[None]:
    """Filter remarks about missing GPUs out of the standard error stream, also those from below
    Python.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not _REMARK.search(line):
                    os.write(2, line)


def use_precision(dtype: str) -> None:
    """Let JAX keep 64 bits where a model asks for them."""
    if dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
