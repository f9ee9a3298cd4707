"""Many processes that run one step together, each on its own devices."""

from __future__ import annotations

import atexit
import os
import random
import re
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import jax

from ._watchdog import stop_watching, watch, watched

# The library's own limits leave a dead peer unnoticed for minutes. What watches processes here is quicker still.
_HEARTBEAT_S = 30
_SHUTDOWN_S = 10
# Who ends without `shutdown` may be waited for in vain.
_AT_EXIT_S = 20
_LAST_WORD_S = 6


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout_s: int = 300,
    cpu_collectives: str | None = "gloo",
    transfers: str | None = None,
) -> None:
    """Join the processes that run a step together. Call it first, before anything touches a device.

    On a cluster that JAX knows (SLURM, Open MPI, Cloud TPU, Kubernetes) no argument is needed. Afterwards
    `jax.devices()` lists the devices of all processes, a plan for that many devices runs on them, and each process calls
    the step: with its own part of the batch (`ParallelStep.local_part`) or with the whole. When a process dies, the
    others say what they were doing and end with exit code 3. At the end all call `shutdown`.

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: which of this machine's devices it uses; all by default.
        initialization_timeout_s: how long to wait for the others.
        cpu_collectives: how CPUs of several processes work together within a program. With None they cannot, as a
            pipeline does not need where every stage has one process: then collectives within a process do not go through
            the network, which on CPUs takes 40 times as long.
        transfers: what carries arrays between the stages of a pipeline in different processes: "device" leaves it to JAX,
            "host" sends them through the memory and the network of the hosts. By default hosts do so for CPUs, whose
            transfers in JAX lose data, and devices for themselves elsewhere.

    Raises:
        RuntimeError: from JAX, when devices were touched already or the others do not come.
        OSError: this machine has no port left for transfers.
    """
    _spare_threads()
    # Only clients of CPU devices look at this.
    jax.config.update("jax_cpu_collectives_implementation", cpu_collectives)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        initialization_timeout=initialization_timeout_s,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )
    peers = watch(initialization_timeout_s)
    if peers is not None:
        peers.transfers = transfers
        atexit.register(_at_exit)


def shutdown() -> None:
    """Leave the other processes, after this one's work is done and all have come this far."""
    peers = watched()
    if peers is not None:
        _finish_work()
        peers.leave()
        stop_watching()
    jax.distributed.shutdown()


def _spare_threads() -> None:
    """Leave CPU devices a thread for transfers while programs wait for other processes.

    XLA gives all that CPU devices do as many threads as there are cores or devices, and a collective keeps one for each
    device until the others come. Where none is left, what the others wait for is never sent. A device can wait in two
    programs at once: one of all devices here, and one of its own.
    """
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked = jax.config.values["jax_num_cpu_devices"]
    num_devices = asked if asked > 0 else int(flags[-1]) if flags else 1
    needed, own = 2 * num_devices + 2, os.environ.get("PJRT_NPROC", "")
    if needed > (int(own) if own.isdecimal() else _num_cores()):
        os.environ["PJRT_NPROC"] = str(needed)


def _num_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserved_port(address: str, process: int, count: int) -> socket.socket:
    """A socket at a port that nobody else here takes while it is open, but who asks the system to share it, as XLA does.

    Two that share a port would get each other's connections. Systems hand out those from 32768 on by themselves, and no
    two processes of a run look at the same.
    """
    ports = list(range(16384 + process, 32768, count))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        found = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            found.bind((address, port))
        except OSError:
            found.close()
            continue
        # Only from now on: at a port that is shared already it would have found room.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return found
    raise OSError(f"no port from 16384 to 32767 is free at {address}")


def _finish_work() -> None:
    """Wait for all that this process still computes or receives: senders must not leave before."""
    for array in jax.live_arrays():
        # What was donated or has failed is waited for by nobody.
        with suppress(RuntimeError, ValueError):
            array.block_until_ready()


def _at_exit() -> None:
    """A process that ends without `shutdown`: in peace if the others come too, else it takes them with it."""
    peers = watched()
    if peers is None:
        return
    failed = getattr(sys, "last_value", None) is not None
    if not failed:
        _finish_work()
        if peers.leave(_AT_EXIT_S):
            stop_watching()
            return
        print(
            f"aliquot: process {peers.process} ends while others still run. Call aliquot.runtime.shutdown() at the end, "
            "which waits for them.",
            file=sys.stderr,
        )
    else:
        # What failed may have failed because another process died: then the watch has the last word.
        time.sleep(_LAST_WORD_S)
    peers.abandon()
