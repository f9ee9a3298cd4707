"""Hosts of a Ray cluster, and the cluster that plans are made for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core import ClusterError, InputError, counted

if TYPE_CHECKING:
    from ..cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """A host of a Ray cluster, with what Ray may place there.

    `kind` is Ray's name of its accelerators, such as "H100"; empty if it has none, or if Ray does
    not know.
    """

    node: str
    ip: str
    num_cpus: int
    num_gpus: int
    num_tpus: int
    memory_bytes: int
    kind: str

    def __str__(self) -> str:
        devices = [
            counted(count, self.kind or name)
            for count, name in ((self.num_gpus, "GPU"), (self.num_tpus, "TPU core"))
            if count
        ]
        return " and ".join([*devices, counted(self.num_cpus, "CPU")])


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHosts:
    """The hosts of the Ray cluster whose head has an address."""

    address: str
    hosts: tuple[RayHost, ...]


def cluster_of(found: RayHosts, num_devices_per_host: int | None = None) -> Cluster:
    """The cluster of these hosts, which `aliquot launch ray` would use.

    Args:
        num_devices_per_host: by default all GPUs, or one CPU device where no host has GPUs.

    Raises:
        ClusterError: hosts differ, or have other devices than the catalogue knows.
    """
    from ..cluster import Cluster

    gpu_hosts = [host for host in found.hosts if host.num_gpus]
    if any(host.num_tpus for host in found.hosts):
        raise ClusterError(
            "its hosts have TPUs, whose number in a slice Ray does not tell",
            asked=f"the Ray cluster at {found.address}",
            advice="Name the slice: --cluster v5e-16, for example.",
        )
    usable = gpu_hosts or [host for host in found.hosts if host.num_cpus]
    kinds = Counter(host.kind for host in gpu_hosts)
    counts = Counter(num_devices_per_host or host.num_gpus for host in gpu_hosts)
    problems = []
    if not usable:
        problems.append("no host has a GPU or a CPU for processes")
    if len(kinds) > 1 or len(counts) > 1:
        hosts = "; ".join(f"{host.ip} has {host}" for host in gpu_hosts)
        problems.append(f"its hosts differ, and a plan wants equal ones ({hosts})")
    if num_devices_per_host and gpu_hosts:
        problems += [
            f"{host.ip} has {host}, and {num_devices_per_host} devices of each host were asked for"
            for host in gpu_hosts
            if host.num_gpus < num_devices_per_host
        ]
    if problems:
        raise ClusterError(problems, asked=f"the Ray cluster at {found.address}")
    if not gpu_hosts:
        return Cluster.preset(f"{len(usable)}x{num_devices_per_host or 1}xcpu")
    (kind,), (count,) = kinds, counts
    try:
        return Cluster.preset(f"{len(usable)}x{count}x{kind}")
    except (ClusterError, InputError) as error:
        raise ClusterError(
            f"Ray calls its devices {kind or 'nothing'!r}: {error}",
            asked=f"the Ray cluster at {found.address}",
            advice=f"Name it yourself, such as --cluster {len(usable)}x{count}xA100-80GB.",
        ) from None
