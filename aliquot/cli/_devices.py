"""Which devices JAX shall see: the only place that sets its environment, before it is first imported."""

from __future__ import annotations

import os

from ..core import InputError

_COUNT = "--xla_force_host_platform_device_count"


def use_virtual_devices(count: int) -> None:
    """Make this process's CPU look like `count` devices.

    Raises:
        InputError: `count` is below 1, or JAX has started with fewer.
    """
    if count < 1:
        raise InputError(f"--devices must be at least 1, got {count}.")
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] != _COUNT]
    os.environ["XLA_FLAGS"] = " ".join([*kept, f"{_COUNT}={count}"])
    use_host_only()
    import jax

    found = len(jax.devices())
    if found < count:
        raise InputError(f"JAX has started with {found} devices, {count} were asked for. Start a new process.")


def use_host_only() -> None:
    """Leave accelerators alone: planning needs none. What the user has set stays."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def use_precision(dtype: str) -> None:
    """Let JAX keep 64 bits where a model asks for them."""
    if dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)
