"""Processes of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..core import InputError, reserved_port, with_xla_flags
from ._child import Child
from ._engine import STOPPED, AbstractEngine, AbstractProcess, Ending, Job, News

_VIRTUAL = "--xla_force_host_platform_device_count"


class LocalEngine(AbstractEngine):
    """Processes of this machine, which share its devices out.

    Args:
        num_processes: how many.
        num_devices: of each; virtual ones where the machine has no GPU. By default the machine's
            GPUs are divided equally, and CPUs are as the environment says.

    Raises:
        InputError: the machine has too few GPUs.
    """

    def __init__(self, num_processes: int, num_devices: int | None = None) -> None:
        self._num_processes = num_processes
        self._gpus = visible_gpus()
        if self._gpus and num_devices is None:
            num_devices, left = divmod(len(self._gpus), num_processes)
            if left or not num_devices:
                raise InputError(
                    f"this machine has {len(self._gpus)} GPUs, which {num_processes} processes"
                    " cannot share equally. Say how many each takes: --num-devices-per-host 1."
                )
        self._num_devices = num_devices
        needed = num_processes * (num_devices or 0)
        if self._gpus and needed > len(self._gpus):
            raise InputError(
                f"{num_processes} processes with {num_devices} devices each need {needed} GPUs, and"
                f" this machine has {len(self._gpus)}. Ask for fewer, or set JAX_PLATFORMS=cpu for"
                " virtual CPU devices."
            )

    def start(self, job: Job) -> Sequence[AbstractProcess]:
        with reserved_port("127.0.0.1", 0, 1) as found:
            address = f"127.0.0.1:{found.getsockname()[1]}"
        started: list[AbstractProcess] = []
        for k in range(self._num_processes):
            settings = job.settings_of(k, self._num_processes, address)
            if self._gpus and self._num_devices:
                own = self._gpus[k * self._num_devices : (k + 1) * self._num_devices]
                settings["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            elif self._num_devices:
                settings |= virtual_devices(self._num_devices)
            try:
                started.append(_LocalProcess(Child(job.command, settings, job.folder)))
            except OSError as error:
                for process in started:
                    process.kill()
                raise InputError(f"process {k} cannot be started: {error}") from None
        return started

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class _LocalProcess(AbstractProcess):
    def __init__(self, child: Child) -> None:
        self._child = child
        self.place = f"on this machine (pid {child.pid})"

    def news(self) -> News:
        lines, code, is_stopped = self._child.news(1.0)
        ending = STOPPED if is_stopped else None if code is None else Ending.of(code)
        return News(lines=tuple(lines), ending=ending)

    def send(self, number: int) -> None:
        self._child.send(number)

    def kill(self) -> None:
        self._child.kill()


def virtual_devices(count: int) -> dict[str, str]:
    """Settings of a process whose CPU looks like so many devices."""
    flags = with_xla_flags(os.environ.get("XLA_FLAGS", ""), {_VIRTUAL: str(count)})
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this machine that processes may use, as `CUDA_VISIBLE_DEVICES` names them; none
    if JAX is told to use CPUs.
    """
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return ()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip() not in ("", "-1"))
    found = [p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia*")]
    return tuple(sorted((n for n in found if re.fullmatch(r"\d+", n)), key=int))
