"""A part of a cluster as a cluster of its own: where a stage of a pipeline runs."""

from __future__ import annotations

from dataclasses import replace

from ._cluster import Cluster


def subcluster(cluster: Cluster, submesh: tuple[int, int]) -> Cluster:
    """The cluster of a submesh: its number of hosts, and of devices in each. Several hosts come
    with all of their devices.
    """
    hosts, per_host = submesh
    if submesh == (cluster.num_hosts, cluster.devices_per_host):
        return cluster
    wires = tuple(row[:per_host] for row in cluster.wires[:per_host])
    name = f"{hosts}x{per_host} of {cluster.name}" if hosts > 1 else f"{per_host} of {cluster.name}"
    return replace(cluster, name=name, num_hosts=hosts, devices_per_host=per_host, wires=wires)
