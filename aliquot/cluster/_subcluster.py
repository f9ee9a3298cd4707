"""A part of a cluster as a cluster of its own: where a stage of a pipeline runs."""

from __future__ import annotations

from dataclasses import replace

from ._cluster import Cluster


def subcluster(cluster: Cluster, submesh: tuple[int, int]) -> Cluster:
    """So many hosts, and so many devices of each; several hosts with all of theirs."""
    hosts, per_host = submesh
    if submesh == (cluster.num_hosts, cluster.devices_per_host):
        return cluster
    wires = tuple(row[:per_host] for row in cluster.wires[:per_host])
    name = f"{hosts}x{per_host} of {cluster.name}" if hosts > 1 else f"{per_host} of {cluster.name}"
    return replace(cluster, name=name, num_hosts=hosts, devices_per_host=per_host, wires=wires)
