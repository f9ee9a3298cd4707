"""Settings of JAX and XLA that change numbers or programs, as lines that processes compare."""

from __future__ import annotations

import os

import jax

# Parts of names of settings that change neither: what is logged, checked, cached and waited for,
# and which devices each process has.
_NEUTRAL = (
    "array_garbage",
    "async_dispatch",
    "cache",
    "captured_constants",
    "check",
    "cpu_get",
    "cross_host",
    "debug",
    "default_device",
    "disallow",
    "dump",
    "export",
    "include",
    "jax_platform",
    "leaked",
    "legacy_prng_key",
    "log",
    "mock",
    "mtls",
    "no_tracing",
    "num_cpu_devices",
    "pgle",
    "pjrt_client_create",
    "pprint",
    "preemption",
    "profile",
    "raise_on",
    "rank_promotion",
    "recoverability",
    "secure_credentials",
    "serialization",
    "source_",
    "thread_guard",
    "timeout",
    "traceback",
    "transfer",
    "verbose",
    "visible_devices",
)
# Variables that XLA and the libraries below it read.
_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")
_NEUTRAL_FLAGS = ("cache", "dump", "host_platform_device_count", "log", "parallelism", "profile")


def settings_lines() -> list[str]:
    """One line for each setting with its value in this thread: `jax_enable_x64 = False`."""
    # Within `with jax.default_matmul_precision(...)` only the attribute tells the value.
    lines = []
    for name, value in sorted(jax.config.values.items()):
        if not any(part in name for part in _NEUTRAL):
            lines.append(f"{name} = {getattr(jax.config, name, value)}")
    for variable in _VARIABLES:
        # Of an option that is given twice, the last one counts.
        given = dict(word.partition("=")[::2] for word in os.environ.get(variable, "").split())
        for name, value in sorted(given.items()):
            if not any(part in name for part in _NEUTRAL_FLAGS):
                lines.append(f"{name} = {value or 'set'} (in {variable})")
    return lines
