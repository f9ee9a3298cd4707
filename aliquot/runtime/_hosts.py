"""Many processes that run one step together, each on its own devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax

# The library's own limits leave a dead peer unnoticed for minutes.
_HEARTBEAT_S = 30
_SHUTDOWN_S = 30


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout_s: int = 300,
) -> None:
    """Join the processes that run a step together. Call it first, before anything touches a device.

    On a cluster that JAX knows (SLURM, Open MPI, Cloud TPU, Kubernetes) no argument is needed. Processes on CPUs
    communicate through gloo. Afterwards `jax.devices()` lists the devices of all processes, a plan for that many
    devices runs on them, and each process calls the step with its own part of the batch (`ParallelStep.local_part`).

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: which of this machine's devices it uses; all by default.
        initialization_timeout_s: how long to wait for the others.

    Raises:
        RuntimeError: from JAX, when devices were touched already or the others do not come.
    """
    # Only clients of CPU devices look at this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        initialization_timeout=initialization_timeout_s,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )


def shutdown() -> None:
    """Leave the other processes, after all have come this far."""
    jax.distributed.shutdown()
