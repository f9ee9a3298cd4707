"""Clusters: hosts, the devices in them, and the links between.

The values are here; the ways to get one lie beside it: `_presets.py` (short names), `_file.py`
(TOML and the plan file) and `_detect.py` (the devices of this process).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core import (
    ClusterError,
    counted,
    format_bytes,
    format_bytes_per_s,
    format_flops_per_s,
    format_seconds,
)
from ._device import Device
from ._measured import AbstractMeasured
from ._wires import Wires

# Figures beyond these are mistakes, such as bytes for bits.
_FEWEST_GBPS, _MOST_GBPS = 0.001, 1e6

MOST_DEVICES = 1_000_000
"""The most devices that a cluster may have: several times those of the largest in existence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A channel: a message of `n` bytes takes `latency_s + n / bandwidth_bytes_per_s` one way.

    Raises:
        ClusterError: A latency below zero or a bandwidth that is not positive.

    >>> Link(latency_s=10e-6, bandwidth_bytes_per_s=50e9).bandwidth_bytes_per_s
    50000000000.0
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            problems.append(f"latency must not be negative, got {self.latency_s} s")
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0):
            problems.append(f"bandwidth must be positive, got {self.bandwidth_bytes_per_s} bytes/s")
        if problems:
            raise ClusterError(problems, asked="link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Memory of a host, and the way there.

    Args:
        memory_bytes: What programs may keep there; None if unknown, and then never checked.
        copy_bytes_per_s: What each device can copy there, and as much back at the same time, while
            all devices of the host do. Devices behind one root port share it. By default that of
            PCIe 3.0 x16, the slowest that accelerators for training have.

    Raises:
        ClusterError: A memory or a rate that is not positive.

    >>> Host(memory_bytes=2 * 2**40, copy_bytes_per_s=64e9).copy_bytes_per_s
    64000000000.0
    """

    memory_bytes: int | None = None
    copy_bytes_per_s: float = 16e9

    def __post_init__(self) -> None:
        problems = []
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            problems.append(f"memory must be positive, got {self.memory_bytes} bytes")
        if not (math.isfinite(self.copy_bytes_per_s) and self.copy_bytes_per_s > 0):
            problems.append(f"bandwidth must be positive, got {self.copy_bytes_per_s} bytes/s")
        if problems:
            raise ClusterError(problems, asked="host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts of equal devices. Device `i` sits in host `i // devices_per_host`.

    Args:
        name: What to call it, usually the preset it came from.
        device: One device; all are alike.
        num_hosts: Machines (processes, as a multi-controller program sees them).
        devices_per_host: Devices in each.
        intra: What one device can send to the others of its host while receiving as much.
        inter: What one *host* can send to the others while receiving as much: its devices share it.
        host: Memory of a host, and how fast devices copy there and back.
        topology: Where the links come from, as a note for readers.
        wires: Where a host's devices are wired pair by pair: what each can send to each other, in
            bytes/s, one row per device. Empty where all reach each other equally well.
        measured: Measurements of the devices; files of clusters and plans do not hold them.

    Raises:
        ClusterError: All values that cannot be right.

    >>> cluster = Cluster.preset("4x8xA100-80GB")
    >>> cluster.num_devices, cluster.inter.bandwidth_bytes_per_s
    (32, 50000000000.0)
    """

    name: str
    device: Device
    num_hosts: int
    devices_per_host: int
    intra: Link
    inter: Link
    host: Host = Host()
    topology: str = ""
    wires: Wires = ()
    measured: AbstractMeasured | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        problems = []
        for name in ("num_hosts", "devices_per_host"):
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_devices > MOST_DEVICES and not problems:
            problems.append(
                f"{self.num_hosts} x {self.devices_per_host} devices are more than the"
                f" {MOST_DEVICES} that a cluster may have"
            )
        problems += _wiring_problems(self.wires, self.devices_per_host) if self.wires else []
        if problems:
            raise ClusterError(problems, asked=f"cluster {self.name!r}")

    @property
    def num_devices(self) -> int:
        """All devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    @property
    def transfer_links(self) -> tuple[Link, Link]:
        """Links of a device in its host and of a host to the others, as transfers between stages
        use them: the measured ones, if there are any.
        """
        if self.measured is None:
            return self.intra, self.inter
        return (
            self.measured.transfer_link(False) or self.intra,
            self.measured.transfer_link(True) or self.inter,
        )

    @staticmethod
    def preset(spec: str) -> Cluster:
        """A cluster from a short name: `"8xH100"`, `"4x8xA100-80GB"` (hosts x devices x kind), or a
        TPU slice.

        Slices follow Google's names: `v5e-16` and `v6e-16` have 16 chips, while `v4-16` and
        `v5p-16` count TensorCores, two to a chip, and have 8. One chip is one device.

        Raises:
            ClusterError: Not such a name, an unknown device (with the nearest known), or a size of
                zero.

        >>> Cluster.preset("v5p-64").num_devices
        32
        """
        from ._presets import preset

        return preset(spec)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """A cluster from a TOML file; see `aliquot.cluster.parse_toml` for what one looks like.

        Raises:
            ClusterError: The file is missing or is no TOML; otherwise lists everything that is
                wrong in it.
        """
        from ._file import load

        return load(path)

    def with_network(self, gbps: float) -> Cluster:
        """The cluster with another network between its hosts, which has the same latency.

        Args:
            gbps: What one host sends to the others, in Gbit/s, while it receives as much; its
                devices share it.

        Raises:
            ClusterError: No such bandwidth can be, or the hosts are joined by their devices' own
                links.

        >>> Cluster.preset("4x8xA100-80GB").with_network(1600).inter.bandwidth_bytes_per_s
        200000000000.0
        """
        problems, advice = [], ""
        if not _FEWEST_GBPS <= gbps <= _MOST_GBPS:
            problems.append(
                f"a host sends between {_FEWEST_GBPS:g} and {_MOST_GBPS:,.0f} Gbit/s, not {gbps}"
            )
            advice = "Give the sum of a host's network cards, such as 1600 for eight of 200 Gbit/s."
        if self.device.kind == "tpu":
            problems.append(
                f"hosts of {self.device.name} are joined by the links of their chips (ICI), which"
                " are not a network that they share"
            )
            advice = "Describe a network between slices in the table [inter] of a TOML file."
        if problems:
            raise ClusterError(problems, asked=f"network of {self.name!r}", advice=advice)
        link = Link(latency_s=self.inter.latency_s, bandwidth_bytes_per_s=gbps * 1e9 / 8)
        return replace(self, inter=link, topology=f"network of {gbps:g} Gbps per host, as given")

    @staticmethod
    def detect(devices: Sequence[Any] | None = None) -> Cluster:
        """The cluster made of `devices`, by default those of `jax.devices()`, which starts the
        backend.

        Links come from the catalogue, not from measurement. On CPU the figures are cautious guesses
        from cores and memory.

        Raises:
            ClusterError: A kind of device that is not in the catalogue, devices of several kinds,
                or hosts of several sizes.
        """
        from ._detect import detect

        return detect(devices)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a plan file keeps them. `from_dict` inverts it exactly."""
        return {
            "name": self.name,
            "device": {
                "name": self.device.name,
                "kind": self.device.kind,
                "peak_flops_per_s": dict(self.device.peak_flops_per_s),
                "memory_bytes": self.device.memory_bytes,
                "memory_bandwidth_bytes_per_s": self.device.memory_bandwidth_bytes_per_s,
                "source": self.device.source,
                **(
                    {"calibration": dict(self.device.calibration)}
                    if self.device.calibration
                    else {}
                ),
            },
            "num_hosts": self.num_hosts,
            "devices_per_host": self.devices_per_host,
            "intra": _link_dict(self.intra),
            "inter": _link_dict(self.inter),
            **({"host": _host_dict(self.host)} if self.host != Host() else {}),
            "topology": self.topology,
            **({"wires": [list(row) for row in self.wires]} if self.wires else {}),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """Rebuild what `to_dict` gave.

        Raises:
            ClusterError: Everything that is missing, unknown, of the wrong type or impossible.
        """
        from ._file import from_dict

        return from_dict(data)

    def describe(self) -> str:
        """Several lines for readers: size, device with the source of its figures, links.

        >>> print(Cluster.preset("8xH100").describe().splitlines()[0])
        8xH100: 1 host x 8 devices = 8 x H100
        """
        return "\n".join(
            [self.headline(), *(f"  {name:<13}  {value}" for name, value in self.facts())]
        )

    def headline(self) -> str:
        """Its name and its size.

        >>> Cluster.preset("8xH100").headline()
        '8xH100: 1 host x 8 devices = 8 x H100'
        """
        hosts, each = counted(self.num_hosts, "host"), counted(self.devices_per_host, "device")
        return f"{self.name}: {hosts} x {each} = {self.num_devices} x {self.device.name}"

    def facts(self) -> list[tuple[str, str]]:
        """Names and values for readers: the device with the source of its figures, the links."""
        peaks = ", ".join(
            f"{d} {format_flops_per_s(p)}" for d, p in self.device.peak_flops_per_s.items()
        )
        bandwidth = format_bytes_per_s(self.device.memory_bandwidth_bytes_per_s)
        facts = [
            ("device memory", f"{format_bytes(self.device.memory_bytes)}, {bandwidth}"),
            ("peak compute", peaks),
            ("source", self.device.source),
            ("within a host", _describe_link(self.intra, "per device")),
        ]
        if self.num_hosts > 1:
            described = _describe_link(self.inter, "per host, shared by its devices")
            facts.append(("between hosts", described))
        memory, copies = self.host.memory_bytes, format_bytes_per_s(self.host.copy_bytes_per_s)
        size = format_bytes(memory) if memory else "size unknown"
        facts.append(("host memory", f"{size}; copies to or from a device {copies} each way"))
        if self.topology:
            facts.append(("wiring", self.topology))
        return facts


def _wiring_problems(wires: Wires, size: int) -> list[str]:
    if len(wires) != size or any(len(row) != size for row in wires):
        return [f"wires must have {size} rows of {size}, one for each device of a host"]
    for i, j in itertools.product(range(size), repeat=2):
        there, back = wires[i][j], wires[j][i]
        if there != back or there < 0 or (there and i == j):
            return ["wires must be the same both ways, not negative, and 0 from a device to itself"]
    return [] if any(map(any, wires)) or size == 1 else ["wires join no two devices"]


def _link_dict(link: Link) -> dict[str, float]:
    return {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}


def _host_dict(host: Host) -> dict[str, float]:
    memory = {} if host.memory_bytes is None else {"memory_bytes": host.memory_bytes}
    return {**memory, "copy_bytes_per_s": host.copy_bytes_per_s}


def _describe_link(link: Link, whose: str) -> str:
    return (
        f"{format_bytes_per_s(link.bandwidth_bytes_per_s)} each way {whose},"
        f" {format_seconds(link.latency_s)} latency"
    )
