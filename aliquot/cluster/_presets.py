"""Clusters by short name, and the links that usually join each kind of device.

A device does not determine its network, so each default is that of one named machine;
`Cluster.with_network` gives another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core import ClusterError, nearest, shortened
from ._cluster import MOST_DEVICES, Cluster, Host, Link
from ._device import DEVICES
from ._wires import Wires


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The default links of one kind of device, with their origin.

    `inter` is None where the links between devices reach across hosts, so that a host can send as
    much as all its devices together. With `own_network` it is that of one device, each of which has
    a network card of its own. `host` is a device's share of a host. `wires` is as in
    `Cluster`, for the largest host of that kind that is wired pair by pair.
    """

    intra: Link
    inter: Link | None
    host: Host
    note: str
    wires: Wires = ()
    own_network: bool = False

    def wires_of(self, devices_per_host: int) -> Wires:
        """Wires of the first devices of a host; none for hosts of more devices, which are other
        machines.
        """
        if not 1 < devices_per_host <= len(self.wires):
            return ()
        return tuple(row[:devices_per_host] for row in self.wires[:devices_per_host])

    def host_of(self, devices_per_host: int) -> Host:
        """The host of `devices_per_host` devices."""
        share = self.host.memory_bytes
        return replace(self.host, memory_bytes=share and share * devices_per_host)

    def inter_of(self, devices_per_host: int) -> Link:
        """Link from a host of `devices_per_host` devices to the other hosts."""
        if self.inter is not None and not self.own_network:
            return self.inter
        each = self.inter or self.intra
        return Link(
            latency_s=each.latency_s,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * devices_per_host,
        )


# Per-hop latencies are those of NCCL's own tuning table for its ring: 1.9 us over NVLink (LL128),
# 5.7 us over PCIe and 14 us over a network (Simple). On TPU about a microsecond per ICI hop, from
# "How to Scale Your Model" (Google DeepMind, 2025).
_NVLINK_S, _PCIE_S, _NETWORK_S, _ICI_S = 1.9e-6, 5.7e-6, 14e-6, 1e-6


def _host(copy_gb_per_s: float, share_gib: int | None) -> Host:
    return Host(memory_bytes=share_gib and share_gib * 2**30, copy_bytes_per_s=copy_gb_per_s * 1e9)


# What a device copies to its host's memory, nominal and one way, and its share of that memory in
# GiB. PCIe x16: 16 GB/s in version 3, 32 in 4, 64 in 5. Pairs of GPUs share a switch and its port
# in hosts of V100 and A100 (NVIDIA, DGX-1 and DGX A100 system architecture); from Hopper on each
# has a port of its own (NVIDIA, DGX H100 user guide). Memory: AWS instance types p3, p4, p5, p6,
# g5, g6, p6-b300, u-p6e-gb200x72 and u-p6e-gb300x72, trn1 and trn2, Azure ND MI300X v5. Two GPUs
# share the 450 GB/s each way between a Grace and its superchip (NVIDIA, GB200 NVL72 data sheet).
# Trainium: assumed. TPUs: PCIe rates from "How to Scale Your Model" (Google DeepMind, 2025), memory
# of the machine types ct4p, ct5lp, ct5p and ct6e (Google Cloud TPU documentation).
_HOSTS = {
    "V100-16GB": _host(8, 61),
    "V100-32GB": _host(8, 96),
    "A100-40GB": _host(16, 144),
    "A100-80GB": _host(16, 144),
    "A100-PCIe": _host(32, None),
    "H100": _host(64, 256),
    "H100-96GB": _host(64, 256),
    "H200": _host(64, 256),
    "B200": _host(64, 256),
    "B300": _host(64, 512),
    "GB200": _host(225, 240),
    "GB300": _host(225, 240),
    "MI300X": _host(64, 231),
    "trn1": _host(16, 32),
    "trn2": _host(32, 128),
    "A10G": _host(32, 96),
    "L4": _host(32, 96),
    "RTX-4090": _host(32, None),
    "v4": _host(16, 101),
    "v5e": _host(16, 48),
    "v5p": _host(16, 112),
    "v6e": _host(32, 180),
    # Devices of a CPU share its memory: a copy is as fast as any other.
    "cpu": _host(4, None),
}


def _wired(
    device: str,
    intra_s: float,
    intra_gb_per_s: float,
    network_gbps: float,
    note: str,
    wires: Wires = (),
    own_network: bool = False,
) -> Wiring:
    return Wiring(
        host=_HOSTS[device],
        intra=Link(latency_s=intra_s, bandwidth_bytes_per_s=intra_gb_per_s * 1e9),
        inter=Link(latency_s=_NETWORK_S, bandwidth_bytes_per_s=network_gbps * 1e9 / 8),
        note=note,
        wires=wires,
        own_network=own_network,
    )


def _torus(device: str, ici_gb_per_s: float, links: int) -> Wiring:
    # Neighbours on the torus are equally near in the same host or the next.
    return Wiring(
        host=_HOSTS[device],
        intra=Link(latency_s=_ICI_S, bandwidth_bytes_per_s=ici_gb_per_s * 1e9),
        inter=None,
        note=(
            "ICI torus in and between hosts: a ring along one torus dimension uses 2 of a chip's"
            f' {links} links (one-way rates from "How to Scale Your Model", Google DeepMind, 2025)'
        ),
    )


_PCIE4 = (
    "PCIe 4.0 x16 in the host (nominal; through host memory where peers cannot reach each other)"
)

# Links of 25 GB/s each way between the eight GPUs of a hybrid cube mesh, as `nvidia-smi topo -m`
# lists them on a DGX-1 and a p3.16xlarge: two fully joined groups of four, and one edge from each
# GPU to its twin (NVIDIA, "DGX-1 With Tesla V100 System Architecture", 2017, figure 4).
_CUBE_MESH = tuple(
    tuple(25e9 * int(links) for links in row)
    for row in (
        "01122000",
        "10210200",
        "12020010",
        "21200001",
        "20000112",
        "02001021",
        "00101202",
        "00012120",
    )
)

# Each two of eight MI300X are joined by one link of 64 GB/s each way (AMD, MI300X platform data
# sheet).
_FULL_MESH = tuple(tuple(64e9 * (i != j) for j in range(8)) for i in range(8))
_DOMAIN = (
    "NVLink 5 among up to 72 GPUs (NVL72): a host here is such a domain, of trays of four; {} Gbps"
    " network for each GPU (AWS {})"
)
_NEURON_LINK = (
    "NeuronLink, a 4 x 4 torus: a ring along one dimension uses 2 of a chip's 4 links (AWS Neuron"
    " documentation); {} Gbps network (AWS {})"
)

WIRINGS: dict[str, Wiring] = {
    "V100-16GB": _wired(
        "V100-16GB",
        _NVLINK_S,
        150,
        25,
        "NVLink 2 hybrid cube mesh, 6 links; 25 Gbps network (AWS p3.16xlarge)",
        _CUBE_MESH,
    ),
    "V100-32GB": _wired(
        "V100-32GB",
        _NVLINK_S,
        150,
        100,
        "NVLink 2 hybrid cube mesh, 6 links; 100 Gbps network (AWS p3dn.24xlarge)",
        _CUBE_MESH,
    ),
    "A100-40GB": _wired(
        "A100-40GB",
        _NVLINK_S,
        300,
        400,
        "NVLink 3 through NVSwitch; 400 Gbps network (AWS p4d.24xlarge)",
    ),
    "A100-80GB": _wired(
        "A100-80GB",
        _NVLINK_S,
        300,
        400,
        "NVLink 3 through NVSwitch; 400 Gbps network (AWS p4de.24xlarge)",
    ),
    "A100-PCIe": _wired(
        "A100-PCIe", _PCIE_S, 32, 100, _PCIE4 + "; 100 Gbps network (an assumption)"
    ),
    "H100": _wired(
        "H100",
        _NVLINK_S,
        450,
        3200,
        "NVLink 4 through NVSwitch; 3200 Gbps network (AWS p5.48xlarge)",
    ),
    "H100-96GB": _wired(
        "H100-96GB",
        _NVLINK_S,
        450,
        3200,
        "NVLink 4 through NVSwitch; 3200 Gbps network (Meta Grand Teton)",
    ),
    "H200": _wired(
        "H200",
        _NVLINK_S,
        450,
        3200,
        "NVLink 4 through NVSwitch; 3200 Gbps network (AWS p5en.48xlarge)",
    ),
    "B200": _wired(
        "B200",
        _NVLINK_S,
        900,
        3200,
        "NVLink 5 through NVSwitch; 3200 Gbps network (AWS p6-b200.48xlarge)",
    ),
    "B300": _wired(
        "B300",
        _NVLINK_S,
        900,
        6400,
        "NVLink 5 through NVSwitch; 6400 Gbps network (AWS p6-b300.48xlarge)",
    ),
    "GB200": _wired(
        "GB200",
        _NVLINK_S,
        900,
        400,
        _DOMAIN.format(400, "u-p6e-gb200x72"),
        own_network=True,
    ),
    "GB300": _wired(
        "GB300",
        _NVLINK_S,
        900,
        800,
        _DOMAIN.format(800, "u-p6e-gb300x72"),
        own_network=True,
    ),
    "MI300X": _wired(
        "MI300X",
        _NVLINK_S,
        448,
        3200,
        "Infinity Fabric, a link between each two GPUs (latency assumed to be NVLink's); 3200 Gbps"
        " network (Azure ND MI300X v5)",
        _FULL_MESH,
    ),
    "trn1": _wired("trn1", _ICI_S, 96, 800, _NEURON_LINK.format(800, "trn1.32xlarge")),
    "trn2": _wired("trn2", _ICI_S, 320, 3200, _NEURON_LINK.format(3200, "trn2.48xlarge")),
    "A10G": _wired("A10G", _PCIE_S, 32, 100, _PCIE4 + "; 100 Gbps network (AWS g5.48xlarge)"),
    "L4": _wired("L4", _PCIE_S, 32, 100, _PCIE4 + "; 100 Gbps network (AWS g6.48xlarge)"),
    "RTX-4090": _wired("RTX-4090", _PCIE_S, 32, 10, _PCIE4 + "; 10 Gbps Ethernet (an assumption)"),
    "v4": _torus("v4", 90, 6),
    "v5e": _torus("v5e", 90, 4),
    "v5p": _torus("v5p", 180, 6),
    "v6e": _torus("v6e", 180, 4),
    "cpu": _wired(
        "cpu", 20e-6, 1, 10, "copies in shared memory; 10 Gbps Ethernet between hosts (assumptions)"
    ),
}

_GRID_RE = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?([a-z][\w.-]*)", re.IGNORECASE)
_SLICE_RE = re.compile(r"(v\d+[a-z]?)-(\d+)", re.IGNORECASE)
# The largest hosts that are sold: 16 V100 or A100-40GB share NVLink, as do 72 GB200 or GB300, 16
# Trainium chips NeuronLink, and hosts have 8 of the others.
_MOST_IN_HOST = {
    **dict.fromkeys(("V100-16GB", "V100-32GB", "A100-40GB", "trn1", "trn2"), 16),
    **dict.fromkeys(("A100-80GB", "A100-PCIe", "H100", "H100-96GB", "H200", "B200", "B300"), 8),
    **dict.fromkeys(("MI300X", "A10G", "L4", "RTX-4090"), 8),
    **dict.fromkeys(("GB200", "GB300"), 72),
}
# Domains of NVLink are built of trays.
_IN_TRAY = {"GB200": 4, "GB300": 4}
_IN_TPU_HOST = (1, 2, 4, 8)
_TENSOR_CORES_PER_CHIP = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
_DIGITS = 12
_FORMS = (
    "Write hosts x devices x kind, such as '4x8xA100-80GB' or '8xH100', or a TPU slice such as"
    " 'v5e-16'; 72xGB200 is one NVL72. A device that is not in the list, or other links, are"
    " described in a TOML file: docs/clusters.md."
)


def preset(spec: str) -> Cluster:
    """Parse a short name; `Cluster.preset` is the public way in.

    Raises:
        ClusterError: See there.
    """
    asked = f"cluster {shortened(spec, 60)!r}"
    text = spec.strip()
    if any(len(number) > _DIGITS for number in re.findall(r"\d+", text)):
        raise ClusterError(
            f"a cluster has at most {MOST_DEVICES} devices", asked=asked, advice=_FORMS
        )
    sliced = _SLICE_RE.fullmatch(text)
    if sliced is not None and sliced[1].lower() in _TENSOR_CORES_PER_CHIP:
        return _slice_preset(text, sliced[1].lower(), int(sliced[2]), asked)
    grid = _GRID_RE.fullmatch(text)
    if grid is None:
        raise ClusterError("this is no preset", asked=asked, advice=_FORMS)
    by_folded = {name.casefold(): name for name in DEVICES}
    device = by_folded.get(grid[3].casefold())
    close = nearest(grid[3], DEVICES, listed_by="aliquot cluster")
    problems = [] if device else [f"there is no device {grid[3]!r}: {close}"]
    hosts, devices = int(grid[1] or 1), int(grid[2] or 1)
    most = _MOST_IN_HOST.get(device or "", MOST_DEVICES)
    if grid[1] is None and MOST_DEVICES >= devices > most:
        # Nobody builds such a host: the number is that of all devices.
        most = _domain(devices, most, _IN_TRAY.get(device or "", most))
        hosts, left = divmod(devices, most)
        if left:
            raise ClusterError(
                f"a host has at most {most} {device}, and {devices} do not fill hosts of {most}",
                asked=asked,
                advice=f"Write hosts x devices x kind, such as '{hosts}x{most}x{device}'.",
            )
        devices, text = most, f"{hosts}x{most}x{device}"
    problems += [
        f"{what} must be at least 1, got 0"
        for what, n in (("hosts", hosts), ("devices", devices))
        if n < 1
    ]
    if problems or device is None:
        raise ClusterError(problems, asked=asked, advice=_FORMS)
    return wire(text, device, hosts, devices)


def _domain(devices: int, most: int, tray: int) -> int:
    """Devices of the largest domain of at most `most`, of whole trays, of which `devices` are equal
    ones; `most` if there is none.

    >>> _domain(144, 72, 4), _domain(256, 72, 4)
    (72, 64)
    """
    sizes = [size for size in range(most, 0, -tray) if devices % size == 0]
    return sizes[0] if sizes else most


def wire(name: str, device_name: str, num_hosts: int, devices_per_host: int) -> Cluster:
    """A cluster of catalogue devices with their default links."""
    wiring = WIRINGS[device_name]
    return Cluster(
        name=name,
        device=DEVICES[device_name],
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        intra=wiring.intra,
        inter=wiring.inter_of(devices_per_host),
        host=wiring.host_of(devices_per_host),
        topology=wiring.note,
        wires=wiring.wires_of(devices_per_host),
    )


def _slice_preset(text: str, generation: str, cores: int, asked: str) -> Cluster:
    chips, left = divmod(cores, _TENSOR_CORES_PER_CHIP[generation])
    if chips < 1 or left:
        problem = (
            f"{generation} slices count TensorCores, two to a chip, so the number must be even"
            if left
            else "it is empty"
        )
        raise ClusterError(problem, asked=asked, advice=_FORMS)
    # Machines with up to 8 v5e or v6e chips are one host; larger slices are built of 4-chip hosts
    # (Google Cloud TPU documentation).
    is_one_host = generation in ("v5e", "v6e") and chips <= 8
    if is_one_host and chips not in _IN_TPU_HOST:
        fewer = max(n for n in _IN_TPU_HOST if n < chips)
        more = min(n for n in _IN_TPU_HOST if n > chips)
        raise ClusterError(
            f"no slice of one host has {chips} chips",
            asked=asked,
            advice=f"Write {generation}-{fewer} or {generation}-{more}; other machines are"
            " described in a TOML file: docs/clusters.md.",
        )
    per_host = chips if is_one_host else min(4, chips)
    if chips % per_host:
        raise ClusterError(
            f"{chips} chips do not fill hosts of {per_host}", asked=asked, advice=_FORMS
        )
    return wire(text, generation, chips // per_host, per_host)
