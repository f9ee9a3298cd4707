"""Logical meshes: a cluster as a grid with named axes, and the links of a collective along some of
them.

This is the only place that knows which devices form a group and which of those share a host; costs
above only read an `AxisLink`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..core import ClusterError, InputError, nearest
from ._cluster import Cluster
from ._wires import all_to_all_bandwidth, ring_bandwidth

AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """Latency and bandwidth of each device of a group when all groups along the same axes
    communicate at once.

    Args:
        size: Devices in a group.
        latency_s: One step of a ring over the group, averaged over its hops in and between hosts.
        bandwidth_bytes_per_s: What each device sends (and receives) in a ring over the group.
        all_to_all_bandwidth_bytes_per_s: What each device sends when every member sends to every
            other: less than the ring's when the group leaves the host, for then most of the data
            crosses the network and not just one edge per host.
        crosses_hosts: Whether any group has members in two hosts.
    """

    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    all_to_all_bandwidth_bytes_per_s: float
    crosses_hosts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Named axes over all devices of a cluster, row-major: neighbours along the last axis are
    neighbours in a host.

    Args:
        shape: Devices along each axis; the product is the cluster's number of devices.
        axis_names: One per axis; `x y z w` by default.
        cluster: What it lies on.

    Raises:
        ClusterError: The shape does not cover the cluster exactly, or names are missing or
            repeated.

    >>> mesh = LogicalMesh(shape=(4, 8), cluster=Cluster.preset("4x8xA100-80GB"))
    >>> mesh.link(("y",)).crosses_hosts, mesh.link(("x",)).crosses_hosts
    (False, True)
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()
    cluster: Cluster

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        names = tuple(self.axis_names) or AXIS_NAMES[: len(self.shape)]
        object.__setattr__(self, "axis_names", names)
        problems = []
        if (
            not self.shape
            or any(size < 1 for size in self.shape)
            or math.prod(self.shape) != self.cluster.num_devices
        ):
            problems.append(f"its product is not the cluster's {self.cluster.num_devices} devices")
        if len(names) != len(self.shape):
            problems.append(f"it has {len(self.shape)} axes but the names are {names}")
        if len(set(names)) != len(names):
            problems.append(f"the names {names} repeat")
        if problems:
            raise ClusterError(problems, asked=f"mesh shape {self!s} on {self.cluster.name!r}")

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    def names_of(self, axes: Iterable[int]) -> tuple[str, ...]:
        """Names of some axes by position, in the order of the axes."""
        return tuple(self.axis_names[axis] for axis in sorted(axes))

    @property
    def num_devices(self) -> int:
        """Devices of the mesh, which are all of the cluster's."""
        return self.cluster.num_devices

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size by axis name, in axis order."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def size(self, axes: Iterable[str]) -> int:
        """Devices in one group along `axes` (1 for none).

        Raises:
            InputError: A name that is no axis of this mesh.
        """
        sizes = self.axis_sizes
        return math.prod(sizes[axis] for axis in self._known(axes))

    @property
    def axes_between_hosts(self) -> tuple[int, ...]:
        """The axes, by position, along which neighbours lie in different hosts."""
        return tuple(
            k for k, name in enumerate(self.axis_names) if self.link((name,)).crosses_hosts
        )

    def link(self, axes: tuple[str, ...]) -> AxisLink:
        """The link of a collective along `axes` together, in any order.

        For a ring over the members of a group, visited host by host, each host it touches has one
        edge going out. With `k` of a host's `d` devices in each group, `d / k` such rings leave the
        host at once and share its network, so a device gets

            min(intra, inter / (d / k))

        and a step takes on average `((h - 1) * inter_latency + (n - h) * intra_latency) / (n - 1)`
        for `n` members in `h` hosts. When every member sends to every other, `(n - k) / (n - 1)` of
        what a device sends leaves the host, and all `d` devices share the network: `min(intra,
        inter / d * (n - 1) / (n - k))`. Where groups lie unevenly over hosts, the slowest counts.
        Where a host's devices are wired pair by pair (`Cluster.wires`), `intra` is what the members
        in one host can form among themselves (`_wires.py`); groups share no links, as each link
        joins two devices of one group.

        Reference: ring bandwidth and the split of its hops as in NCCL's tuning model (NVIDIA,
            `src/graph/tuning.cc`); rings as bandwidth-optimal all-reduce in P. Patarasuk and X.
            Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009,
            section 3.

        Raises:
            InputError: A name that is no axis of this mesh.
        """
        known = self._known(axes)
        return _link(
            self.cluster,
            self.shape,
            tuple(i for i, name in enumerate(self.axis_names) if name in known),
        )

    def _known(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = tuple(axes)
        for axis in wanted:
            if axis not in self.axis_names:
                raise InputError(
                    f"mesh {self!s} has no axis {axis!r}: {nearest(axis, self.axis_names)}"
                )
        if len(set(wanted)) != len(wanted):
            raise InputError(f"the axes {wanted} name one twice.")
        return wanted


def logical_mesh_shapes(num_devices: int, max_axes: int = 2) -> list[tuple[int, ...]]:
    """All ways to write `num_devices` as an ordered product of at most `max_axes` factors above 1,
    fewest axes first.

    Both orders are kept: the last axis lies inside a host, so (4, 2) and (2, 4) differ as soon as
    there are two hosts.

    Raises:
        InputError: Fewer than one device or axis.

    >>> logical_mesh_shapes(8)
    [(8,), (4, 2), (2, 4)]
    """
    if num_devices < 1 or max_axes < 1:
        raise InputError(
            f"a mesh needs at least one device and one axis, got {num_devices} and {max_axes}."
        )
    if num_devices == 1:
        return [(1,)]
    shapes: list[tuple[int, ...]] = []
    for count in range(1, max_axes + 1):
        shapes += _factorizations(num_devices, count)
    return sorted(shapes, key=lambda shape: (len(shape), tuple(-size for size in shape)))


def _factorizations(number: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(number,)] if number > 1 else []
    small = [d for d in range(2, math.isqrt(number) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    found = []
    for first in sorted(divisors):
        found += [(first, *rest) for rest in _factorizations(number // first, count - 1)]
    return found


@lru_cache(maxsize=4096)
def _link(cluster: Cluster, shape: tuple[int, ...], positions: tuple[int, ...]) -> AxisLink:
    """The link of axes; `positions` are theirs in the mesh."""
    groups = _groups(cluster, shape, positions)
    n = math.prod(shape[position] for position in positions)
    intra, inter = cluster.intra, cluster.inter
    in_ring = in_all_to_all = intra.bandwidth_bytes_per_s
    if cluster.wires:
        hosts_members = set(map(tuple, itertools.chain(*(group.values() for group in groups))))
        in_ring = min(ring_bandwidth(cluster.wires, members) for members in hosts_members)
        in_all_to_all = min(
            all_to_all_bandwidth(cluster.wires, members) for members in hosts_members
        )
    crossing = [group for group in groups if len(group) > 1]
    if not crossing:
        return AxisLink(
            size=n,
            latency_s=intra.latency_s if n > 1 else 0.0,
            bandwidth_bytes_per_s=in_ring,
            all_to_all_bandwidth_bytes_per_s=in_all_to_all,
            crosses_hosts=False,
        )
    rings: Counter[int] = Counter()  # rings that leave a host
    leaving: Counter[int] = Counter()  # of every member's n - 1 messages, those that leave its host
    for group in crossing:
        rings.update(group.keys())
        leaving.update({host: len(own) * (n - len(own)) for host, own in group.items()})
    hosts = max(len(group) for group in crossing)
    return AxisLink(
        size=n,
        latency_s=((hosts - 1) * inter.latency_s + (n - hosts) * intra.latency_s) / (n - 1),
        bandwidth_bytes_per_s=min(in_ring, inter.bandwidth_bytes_per_s / max(rings.values())),
        all_to_all_bandwidth_bytes_per_s=min(
            in_all_to_all, inter.bandwidth_bytes_per_s * (n - 1) / max(leaving.values())
        ),
        crosses_hosts=True,
    )


def _groups(
    cluster: Cluster, shape: tuple[int, ...], positions: tuple[int, ...]
) -> list[dict[int, list[int]]]:
    """For each group its members in each host, by their place in the host."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    inner = _offsets(shape, strides, positions)
    outer = _offsets(shape, strides, tuple(i for i in range(len(shape)) if i not in positions))
    groups: list[dict[int, list[int]]] = [{} for _ in outer]
    for group, base in zip(groups, outer, strict=True):
        for offset in inner:
            host, place = divmod(base + offset, cluster.devices_per_host)
            group.setdefault(host, []).append(place)
    return groups


def _offsets(shape: tuple[int, ...], strides: list[int], positions: tuple[int, ...]) -> list[int]:
    ranges = [range(0, shape[p] * strides[p], strides[p]) for p in positions]
    return [sum(parts) for parts in itertools.product(*ranges)]
