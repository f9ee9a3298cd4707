"""Processes on the hosts of a Ray cluster: one actor on each, in a placement group. The only file
that knows Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core import InputError, MissingExtraError, counted, listing, num_cores
from . import _child, _host
from ._engine import STOPPED, AbstractEngine, AbstractProcess, Ending, Job, News
from ._hosts import RayHost, RayHosts
from ._local import virtual_devices

# How long hosts that are missing have to appear, at the start and after a failure.
_FIRST_WAIT_S, _LATER_WAIT_S = 10, 30
_PLACEMENT_S = 60
# A host answers each second; one that is silent for so long is given up.
_SILENCE_S = 30
# Ray itself ends this process after 60 s without the head.
_HEAD_SILENCE_S = 30
_END_S = 5
_TRIES = 3
# Variables of this process that the others get as well.
_PASSED_ON = ("ALIQUOT_", "JAX_", "LIBTPU_", "NCCL_", "XLA_")
_ACCELERATOR_TYPE = "accelerator_type:"


class RayEngine(AbstractEngine):
    """One process on each of some hosts of a Ray cluster.

    Args:
        num_hosts: all by default.
        num_devices: of each process; by default all GPUs or TPU cores of a host, or 1 CPU device.
        min_hosts: the fewest to start again on when others are gone; by default all.
        address: of the head.
        note: gets remarks.
    """

    def __init__(
        self,
        *,
        num_hosts: int | None,
        num_devices: int | None,
        min_hosts: int | None,
        address: str | None,
        note: Callable[[str], None],
    ) -> None:
        self._num_hosts, self._num_devices, self._min_hosts = num_hosts, num_devices, min_hosts
        self._note = note
        self._cluster = RayCluster(address, note)
        self._group: Any = None
        self._actors: list[Any] = []

    def start(self, job: Job) -> Sequence[AbstractProcess]:
        for left in reversed(range(_TRIES)):
            count, resources = self._find_hosts(is_first=job.attempt == 1)
            try:
                return self._start(job, count, resources)
            except self._cluster.errors as error:
                # A host that has just gone may have been counted.
                self.release()
                if not left:
                    raise InputError(
                        f"no process could be placed on {counted(count, 'host')} with"
                        f" {_described(resources)} each of the Ray cluster at"
                        f" {self._cluster.address}: {_first_line(error)}. See who uses them: ray"
                        " status"
                    ) from None
        raise AssertionError

    def _start(self, job: Job, count: int, resources: Mapping[str, float]) -> list[AbstractProcess]:
        ray = self._cluster.ray
        self._group = ray.util.placement_group(
            [dict(resources)] * count, strategy="STRICT_SPREAD" if count > 1 else "STRICT_PACK"
        )
        if not self._group.wait(_PLACEMENT_S):
            raise TimeoutError(f"they have not been free for {_PLACEMENT_S} s")
        strategies = ray.util.scheduling_strategies
        others = {k: n for k, n in resources.items() if k not in ("CPU", "GPU")}
        self._actors = [
            _actor_class(ray)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                resources=others,
                max_restarts=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=k
                ),
            )
            .remote()
            for k in range(count)
        ]
        versions = self._get([actor.versions.remote() for actor in self._actors])
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        hosts = {host.node: host for host in self._cluster.hosts()}
        found = [(hosts[nodes[k]], versions[k], self._actors[k]) for k in range(count)]
        # Neighbouring numbers are neighbouring addresses, and the same in each attempt.
        found.sort(key=lambda one: (ipaddress.ip_address(one[0].ip), one[0].node))
        _require_equal_versions([(host.ip, version) for host, version, _ in found])
        first, ip = found[0][2], found[0][0].ip
        address = f"{ip}:{self._get(first.free_port.remote(ip))}"
        passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        if not {"GPU", "TPU"} & set(resources):
            passed |= virtual_devices(self._num_devices or 1)
        pids = self._get(
            [
                actor.start.remote(
                    job.command, passed | job.settings_of(k, count, address), job.folder
                )
                for k, (_, _, actor) in enumerate(found)
            ]
        )
        absent = [host.ip for (host, _, _), pid in zip(found, pids) if not pid]
        if absent:
            raise InputError(
                f"there is no folder {job.folder!r} on {', '.join(absent)}, where the command"
                " should run. Start in a folder that all hosts share, or copy it to the same place"
                " on each of them."
            )
        self._note(
            f"Ray: {counted(count, 'process')} with"
            f" {_described(resources, self._num_devices or 1)} each, on"
            f" {', '.join(host.ip for host, _, _ in found)}"
        )
        return [
            _RayProcess(self._cluster, actor, f"on {host.ip} (pid {pid})")
            for (host, _, actor), pid in zip(found, pids)
        ]

    def _get(self, refs: Any) -> Any:
        return self._cluster.ray.get(refs, timeout=_PLACEMENT_S)

    def _find_hosts(self, *, is_first: bool) -> tuple[int, dict[str, float]]:
        """How many hosts take part, and what each must have free.

        Raises:
            InputError: there are too few; says what is there and what to type.
        """
        until = time.monotonic() + (_FIRST_WAIT_S if is_first else _LATER_WAIT_S)
        while True:
            hosts = self._cluster.hosts()
            kind = _kind(hosts)
            usable, resources = hosts, {"CPU": 1.0}
            if kind != "CPU":
                most = max(_count(host, kind) for host in hosts)
                resources = {"CPU": 1.0, kind: float(self._num_devices or most)}
            usable = []
            for host in hosts:
                if all(_count(host, name) >= need for name, need in resources.items()):
                    usable.append(host)
            wanted = self._num_hosts or (len(usable) if is_first else 0)
            if usable and len(usable) >= wanted:
                # Later attempts wait for as many.
                self._num_hosts = wanted
                return wanted, resources
            if time.monotonic() > until:
                break
            time.sleep(1)
        if not is_first and self._min_hosts and len(usable) >= self._min_hosts:
            self._note(
                f"{wanted - len(usable)} of {counted(wanted, 'host')} are gone: going on with"
                f" {len(usable)}"
            )
            self._num_hosts = len(usable)
            return len(usable), resources
        there = "".join(f"\n  - {host.ip} has {host}" for host in hosts)
        less = "--num-hosts" if is_first else "--min-hosts"
        raise InputError(
            f"{counted(max(wanted, 1), 'host')} with {_described(resources)} each were asked for,"
            f" and the Ray cluster at {self._cluster.address} has {len(usable)} of them:{there}\n "
            f" On each missing host type: ray start --address={self._cluster.address}"
            + (f"; or ask for less: {less} {len(usable)}" if usable else "")
        )

    def release(self) -> None:
        if self._cluster.head_is_lost():
            return
        ray = self._cluster.ray
        actors, group = self._actors, self._group
        self._actors, self._group = [], None
        with contextlib.suppress(Exception):
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                ray.util.remove_placement_group(group)

    def close(self) -> None:
        self._cluster.leave()


class RayCluster:
    """A connection to a Ray cluster: one that this process has joined already, one at an address,
    one that runs on this machine, or else one that is started here.

    Args:
        note: is told that a cluster is started; without it, none is.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: there is no cluster at that address, or it has other versions.
    """

    def __init__(self, address: str | None, note: Callable[[str], None] | None) -> None:
        try:
            import ray
            import ray.cloudpickle
            import ray.util.scheduling_strategies
        except ImportError as error:
            raise MissingExtraError("ray", error.name or "ray") from None
        self.ray: Any = ray
        #: What Ray raises when a host or an actor is gone.
        self.errors = (ray.exceptions.RayError, TimeoutError, ValueError, KeyError)
        self._joined_here = not ray.is_initialized()
        if self._joined_here:
            self._join(address or os.environ.get("RAY_ADDRESS"), note)
        self.address: str = ray.get_runtime_context().gcs_address
        self._looked = self._answered = time.monotonic()

    def _join(self, address: str | None, note: Callable[[str], None] | None) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        host, _, port = (address or "").rpartition(":")
        try:
            if host and port.isdecimal() and "://" not in host:
                # Ray itself would try for minutes, and then end this process.
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            self.ray.init(address=address or "auto", **options)
        except (OSError, OverflowError) as error:
            if address is not None or note is None:
                where = f"answers at {address}: {_first_line(error)}" if address else "runs here"
                raise InputError(
                    f"no Ray cluster {where}. Start one with: ray start --head --port=6379, and on"
                    " each other host: ray start --address="
                    + (address or "ADDRESS:6379, or say where it is with --address")
                ) from None
            note("no Ray cluster runs here: starting one on this machine")
            self.ray.init(
                address="local", num_cpus=max(1, num_cores()), include_dashboard=False, **options
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"the Ray cluster at {address or 'this machine'} cannot be joined: {error}"
            ) from None

    def hosts(self) -> list[RayHost]:
        """The hosts that are alive, by address."""
        found = []
        for node in self.ray.nodes():
            if not node["Alive"]:
                continue
            has: Mapping[str, float] = node["Resources"]
            kinds = [name for name in has if name.startswith(_ACCELERATOR_TYPE)]
            found.append(
                RayHost(
                    node=node["NodeID"],
                    ip=node["NodeManagerAddress"],
                    num_cpus=int(has.get("CPU", 0)),
                    num_gpus=int(has.get("GPU", 0)),
                    num_tpus=int(has.get("TPU", 0)),
                    memory_bytes=int(has.get("memory", 0)),
                    kind=kinds[0].removeprefix(_ACCELERATOR_TYPE) if kinds else "",
                )
            )
        return sorted(found, key=lambda host: (ipaddress.ip_address(host.ip), host.node))

    def head_is_lost(self) -> bool:
        """True once the head has not answered for some time. Looks at most each other second."""
        if time.monotonic() > self._looked + 2:
            host, _, port = self.address.rpartition(":")
            with contextlib.suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
                self._answered = time.monotonic()
            self._looked = time.monotonic()
        return self._looked > self._answered + _HEAD_SILENCE_S

    def lost_head(self) -> Ending:
        """The end of all processes, once the head is lost."""
        return Ending(
            code=None,
            why=(
                f"has lost the head of the Ray cluster ({self.address}, silent for"
                f" {_HEAD_SILENCE_S} s)"
            ),
            advice=(
                "Start the head again (ray start --head), join the other hosts again (ray stop;"
                " ray start --address=...), and type the same command: it goes on from its last"
                " checkpoint."
            ),
        )

    def leave(self) -> None:
        """End the connection, if this object has made it."""
        if self.head_is_lost():
            # It would wait for the head.
            atexit.unregister(self.ray.shutdown)
        elif self._joined_here:
            self.ray.shutdown()


def find_hosts(address: str | None = None) -> RayHosts:
    """The hosts of the Ray cluster at an address; by default that of `RAY_ADDRESS`, or one that
    runs on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: there is no cluster.
    """
    cluster = RayCluster(address, None)
    try:
        return RayHosts(address=cluster.address, hosts=tuple(cluster.hosts()))
    finally:
        cluster.leave()


class _RayProcess(AbstractProcess):
    def __init__(self, cluster: RayCluster, actor: Any, place: str) -> None:
        self._cluster, self._actor, self.place = cluster, actor, place

    def news(self) -> News:
        ray = self._cluster.ray
        asked = self._actor.news.remote(1.0)
        until = time.monotonic() + _SILENCE_S
        while True:
            try:
                if self._cluster.head_is_lost():
                    return News(ending=self._cluster.lost_head())
                lines, code, is_stopped = ray.get(asked, timeout=3)
                break
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() > until:
                    why = f"is lost: its host has said nothing for {_SILENCE_S} s"
                    return News(ending=Ending(code=None, why=why))
            except ray.exceptions.RayError as error:
                why = f"is lost with its Ray worker or its host ({type(error).__name__})"
                return News(ending=Ending(code=None, why=why))
        ending = STOPPED if is_stopped else None if code is None else Ending.of(code)
        return News(lines=tuple(lines), ending=ending)

    def send(self, number: int) -> None:
        self._actor.send.remote(number)

    def kill(self) -> None:
        # An actor that is gone has taken its process along.
        with contextlib.suppress(Exception):
            self._cluster.ray.get(self._actor.kill.remote(), timeout=_END_S)


def _actor_class(ray: Any) -> Any:
    # By value, since other hosts may have another version of these files, or none.
    for module in (_child, _host):
        ray.cloudpickle.register_pickle_by_value(module)
    return ray.remote(_host.Host)


def _require_equal_versions(found: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raises `InputError` if hosts have other versions than this process."""
    own = _host.Host().versions()
    problems = []
    for ip, has in found:
        for name in own:
            if has[name] != own[name]:
                problems.append(
                    f"{ip} has {name} {has[name]}, this machine {own[name]}"
                    if has[name]
                    else f"{ip} has no {name}"
                )
    if problems:
        raise InputError(
            listing(
                "hosts of the Ray cluster have other versions than this machine, and programs made"
                " by different versions cannot run together",
                problems,
                f"On each of them, for the Python that runs `ray start`, type: pip install"
                f" jax=={own['jax']} jaxlib=={own['jaxlib']}, and in the folder of aliquot"
                f" {own['aliquot']}: pip install .",
            )
        )


def _kind(hosts: Sequence[RayHost]) -> str:
    """The name of Ray's resource that processes take."""
    if os.environ.get("JAX_PLATFORMS", "") != "cpu":
        for name in ("GPU", "TPU"):
            if any(_count(host, name) for host in hosts):
                return name
    return "CPU"


def _count(host: RayHost, resource: str) -> int:
    return {"CPU": host.num_cpus, "GPU": host.num_gpus, "TPU": host.num_tpus}[resource]


def _described(resources: Mapping[str, float], num_virtual: int | None = None) -> str:
    devices = [counted(int(n), name) for name, n in resources.items() if name != "CPU"]
    if devices:
        return " and ".join(devices)
    if num_virtual:
        return counted(num_virtual, "virtual CPU device")
    return counted(int(resources.get("CPU", 0)), "CPU")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
