"""Seconds to send activations from the devices of one stage to those of the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cluster import Link

Floats = NDArray[np.float64]


def transfer_seconds(
    num_bytes: ArrayLike,
    sender_devices: ArrayLike,
    receiver_devices: ArrayLike,
    crosses_hosts: ArrayLike,
    *,
    devices_per_host: int,
    intra: Link,
    inter: Link,
) -> Floats:
    """Seconds to send a micro-batch's values from one submesh to the next, in one direction.

    Every device of the smaller submesh sends or receives its part over its own link. Between hosts,
    the devices of a host share its network. Zero bytes take no time.

    Args:
        num_bytes: of the whole micro-batch.
        sender_devices, receiver_devices: sizes of the two submeshes.
        crosses_hosts: whether they lie in different hosts.
        intra, inter: links of a device inside its host, and of a whole host to the others.
    """
    smaller = np.minimum(sender_devices, receiver_devices)
    inside = smaller * intra.bandwidth_bytes_per_s
    hosts = np.maximum(smaller // devices_per_host, 1)
    # A host's devices together send no faster than its network, nor faster than their own links.
    between = np.minimum(inside, hosts * inter.bandwidth_bytes_per_s)
    latency = np.where(crosses_hosts, inter.latency_s, intra.latency_s)
    sizes = np.asarray(num_bytes, np.float64)
    return np.asarray(
        np.where(sizes > 0, sizes / np.where(crosses_hosts, between, inside) + latency, 0.0)
    )


def edge_seconds(
    boundary_bytes: Sequence[float],
    places: Sequence[tuple[int, int]],
    *,
    devices_per_host: int,
    intra: Link,
    inter: Link,
) -> Floats:
    """For each stage, seconds of the transfer over the edge in front of it, in one direction; zero
    for the first stage.

    Args:
        boundary_bytes: bytes that cross each edge, of the whole micro-batch.
        places: first device and number of devices of each stage, in order.
    """
    edges = np.zeros(len(places))
    for k, num_bytes in enumerate(boundary_bytes, start=1):
        before, behind = places[k - 1], places[k]
        if before == behind:
            continue  # Both stages are on the same devices: nothing is sent.
        hosts = {
            (start + d) // devices_per_host
            for start, size in (before, behind)
            for d in (0, size - 1)
        }
        edges[k] = transfer_seconds(
            num_bytes,
            before[1],
            behind[1],
            len(hosts) > 1,
            devices_per_host=devices_per_host,
            intra=intra,
            inter=inter,
        )
    return edges
