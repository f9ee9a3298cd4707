"""Many processes that run one step together, each on its own devices."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence

import jax

from ...core import InputError, LaunchedProcess, num_cores, reserved_port
from ...graph import detect_processes
from ._calls import END, Call
from ._endings import end_in_order, finish_work, part
from ._meeting import Hello, default_run_id
from ._secret import require_secret
from ._watchdog import host_of, meet, watched

# JAX's own check for dead processes aborts; its timeout is long, so that the watchdog acts first.
_HEARTBEAT_S = 600
_SHUTDOWN_S = 10


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    initialization_timeout_s: int = 300,
    cpu_collectives: str | None = "gloo",
    transfers: str | None = None,
    run_id: str | None = None,
    listen_address: str | None = None,
) -> None:
    """Join the processes that run a step together. Call it first, before anything touches a device.

    Started by `aliquot launch`, or on a cluster that JAX knows (SLURM, Open MPI, Cloud TPU,
    Kubernetes), it needs no argument. Afterwards `jax.devices()` lists the devices of all
    processes, a plan for that many devices runs on them, and each process calls the step: with its
    own part of the batch (`Step.local_part`) or with the whole. When a process dies, the others say
    what they were doing and end with exit code 3. At the end all call `shutdown`.

    Processes on several machines need a secret: `ALIQUOT_SECRET` in the environment of each, or
    `ALIQUOT_SECRET_FILE` with the name of a file that holds it; see `make_secret`.

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: which of this machine's devices it uses; all by default.
        initialization_timeout_s: how long to wait for the other processes.
        cpu_collectives: how CPUs of several processes work together within a program. With None
            they cannot. A pipeline does not need it where every stage has one process; collectives
            within a process then do not go through the network, which on CPUs takes 40 times as
            long.
        transfers: what carries arrays between the stages of a pipeline in different processes:
            "device" leaves it to JAX, "host" sends them through the memory and the network of the
            hosts. By default "host" for CPUs, whose transfers in JAX lose data, and "device"
            elsewhere.
        run_id: a name that only the processes of this run share: a process of another run that
            comes to the same address is turned away. By default the launcher's name or number of
            the job, if there is one.
        listen_address: of the interface at which process 0 awaits the others, "0.0.0.0" for all; by
            default that of `coordinator_address`.

    Raises:
        SystemExit: with code 3 and a message, when the others do not come, have other versions, or
            die meanwhile.
        InputError: The arguments do not say which of how many processes this is, or are out of
            range; or other machines could join, and there is no secret.
        RuntimeError: from JAX, when devices were touched already.
    """
    _spare_threads()
    # Only CPU backends read this option.
    jax.config.update("jax_cpu_collectives_implementation", cpu_collectives)
    launched = LaunchedProcess.of()
    if launched and (coordinator_address, num_processes, process_id) == (None, None, None):
        coordinator_address, num_processes = launched.address, launched.num_processes
        process_id, run_id = launched.process_id, run_id or launched.run_id
    address, count, process, devices = _known_processes(
        coordinator_address, num_processes, process_id, local_device_ids, initialization_timeout_s
    )
    if jax.distributed.is_initialized() or watched() is not None:
        raise RuntimeError("initialize() was called before: processes join once.")
    host = host_of(address)
    listens_at = host if listen_address is None else listen_address
    reserved: list[socket.socket] = []

    def service_port(interface: str) -> int:
        reserved.append(reserved_port(interface, 0, 1))
        port: int = reserved[0].getsockname()[1]
        return port

    service = address
    if count > 1:
        secret = require_secret(host, listens_at)
        # Without it JAX aborts all processes when one dies, before a message can be printed. The
        # watchdog ends them instead.
        jax.config.update("jax_enable_recoverability", True)
        hello = Hello.own(process, count, default_run_id() if run_id is None else run_id)
        service = meet(address, hello, secret, initialization_timeout_s, listens_at, service_port)
        end_in_order()
    jax.distributed.initialize(
        service,
        count,
        process,
        local_device_ids=devices,
        initialization_timeout=initialization_timeout_s,
        heartbeat_timeout_seconds=_HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
        # Only process 0 runs the service.
        coordinator_bind_address=_service_address(listens_at, service, reserved),
    )
    # JAX listens at the port by now, so it need not be reserved any longer.
    for port_socket in reserved:
        port_socket.close()
    peers = watched()
    if peers is not None:
        peers.transfers = transfers


def _service_address(host: str, service: str, reserved: Sequence[socket.socket]) -> str:
    """Where JAX's service listens, if it runs in this process: at the interface of process 0, and
    not at all interfaces, as JAX would choose.
    """
    if reserved:
        host = reserved[0].getsockname()[0]
    return f"{f'[{host}]' if ':' in host else host}:{service.rpartition(':')[2]}"


def _known_processes(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
    timeout_s: int,
) -> tuple[str, int, int, Sequence[int] | None]:
    """The arguments of `initialize`, completed by the launcher's. Raises `InputError`."""
    address, count, process, devices = detect_processes(
        coordinator_address, num_processes, process_id, local_device_ids, timeout_s
    )
    if address is None or count is None or process is None:
        raise InputError(
            f"initialize() does not know the processes: coordinator_address={address!r},"
            f" num_processes={count!r}, process_id={process!r}, and no launcher that JAX knows"
            " tells the rest. Pass all three."
        )
    port = address.rpartition(":")[2]
    if not (port.isdecimal() and int(port) < 65536) or not 0 <= process < count:
        raise InputError(
            f"initialize() was given the address {address!r} and process_id={process} of"
            f" num_processes={count}: it needs host:port, and numbers from 0 to num_processes - 1."
        )
    return address, count, process, devices


def shutdown() -> None:
    """Leave the run, once this process's work is done and all processes have called this."""
    peers = watched()
    if peers is None:
        jax.distributed.shutdown()
        return
    peers.report(Call(what=END))
    finish_work()
    peers.leave()
    part(peers)


def _spare_threads() -> None:
    """Leave CPU devices a thread for transfers while programs wait for other processes.

    XLA runs all work of CPU devices on as many threads as there are cores or devices, and a
    collective blocks one for each device until the other processes take part. If no thread is left,
    the data that they wait for is never sent. A device can wait in two programs at once: one of all
    devices here, and one of its own.
    """
    flags = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    asked = jax.config.values["jax_num_cpu_devices"]
    num_devices = asked if asked > 0 else int(flags[-1]) if flags else 1
    needed, wanted = 2 * num_devices + 2, os.environ.get("PJRT_NPROC", "")
    if needed > (int(wanted) if wanted.isdecimal() else num_cores()):
        os.environ["PJRT_NPROC"] = str(needed)
