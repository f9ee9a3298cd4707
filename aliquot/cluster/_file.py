"""Readers of cluster descriptions: TOML files, which people write, and plain dictionaries in plan
files. The structs say what each may hold. All mistakes are reported together.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..core import (
    ClusterError,
    InputError,
    faults_of,
    nearest,
    parse_bytes,
    parse_flops_per_s,
    parse_rate,
    parse_seconds,
    read_file,
    shortened,
)
from ._cluster import MOST_DEVICES, Cluster, Host, Link
from ._device import DEVICES, Device
from ._presets import WIRINGS

_MOST_BYTES = 1_000_000
_OTHERWISE = (
    "Without a file, write hosts x devices x kind, such as '4x8xA100-80GB'. docs/clusters.md shows"
    " what a file holds."
)

# Far beyond all that is built, and close enough that no price overflows or is lost in rounding.
Count = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
Bytes = Annotated[int, Meta(ge=2**20, le=2**60)]
Rate = Annotated[float, Meta(ge=1.0, le=1e18)]
WireRate = Annotated[float, Meta(ge=0.0, le=1e18)]
Speed = Annotated[float, Meta(ge=1e3, le=1e24)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e3)]
Figure = Annotated[float, Meta(ge=0.0, le=1e12)]
Kind = Literal["gpu", "tpu", "neuron", "cpu"]


class _Size(int):
    """Bytes with or without a unit; the others alike."""


class _Bandwidth(float):
    pass


class _Wire(float):
    pass


class _Peak(float):
    pass


class _Latency(float):
    pass


class _KnownDevice(str):
    pass


_READERS: dict[type, tuple[Any, Any]] = {
    _Size: (parse_bytes, Bytes),
    _Bandwidth: (parse_rate, Rate),
    _Wire: (parse_rate, WireRate),
    _Peak: (parse_flops_per_s, Speed),
    _Latency: (parse_seconds, Seconds),
}
_EXAMPLES: dict[type, str] = {
    _Size: "48GB",
    _Bandwidth: "864GB/s",
    _Wire: "25GB/s",
    _Peak: "91TFLOP/s",
    _Latency: "6us",
}


def _read(kind: type, value: Any) -> Any:
    """A quantity with its unit, within its bounds, or the name of a device; for msgspec."""
    if kind is _KnownDevice:
        if not isinstance(value, str):
            raise ValueError(f"expected `str`, got {shortened(repr(value), 40)}")
        if value not in DEVICES:
            raise ValueError(f"there is no device {value!r}: {nearest(value, DEVICES)}")
        return _KnownDevice(value)
    parse, bounds = _READERS[kind]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a number or a text with a unit, got {value!r}")
    try:
        return kind(msgspec.convert(parse(value), bounds))
    except (InputError, OverflowError) as error:
        raise ValueError(str(error)) from None
    except msgspec.ValidationError as error:
        plain = not isinstance(value, str) or not re.search("[a-zA-Z]", value)
        unit = f": write its unit, such as {_EXAMPLES[kind]}" if plain else ""
        raise ValueError(f"{error}, got {shortened(repr(value), 40)}{unit}") from None


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table in which every name must be known."""


class _Main(_Table, frozen=True):
    devices_per_host: Count
    device: _KnownDevice | None = None
    hosts: Count = 1
    name: str = ""
    topology: str | None = None


class _Peaks(_Table, frozen=True):
    float32: _Peak
    tf32: _Peak | None = None
    bfloat16: _Peak | None = None
    float16: _Peak | None = None
    float64: _Peak | None = None
    float8: _Peak | None = None
    float8_fnuz: _Peak | None = None


class _PlainPeaks(_Table, frozen=True):
    float32: Speed
    tf32: Speed | None = None
    bfloat16: Speed | None = None
    float16: Speed | None = None
    float64: Speed | None = None
    float8: Speed | None = None
    float8_fnuz: Speed | None = None


class _Calibration(_Table, frozen=True):
    matmul_efficiency: Figure | None = None
    float32_product_share: Figure | None = None
    sustained_share: Figure | None = None
    product_tile: Figure | None = None
    product_depth: Figure | None = None
    product_traffic: Figure | None = None
    bandwidth_efficiency: Figure | None = None
    collective_efficiency: Figure | None = None
    all_to_all_efficiency: Figure | None = None
    scatter_gather_share: Figure | None = None
    collective_overhead_s: Figure | None = None
    kernel_overhead_s: Figure | None = None
    overlap_fraction: Figure | None = None
    gradient_overlap_between_hosts: Figure | None = None
    activation_overlap: Figure | None = None
    attention_share: Figure | None = None


class _OwnDevice(_Table, frozen=True):
    name: str
    kind: Kind
    memory: _Size
    memory_bandwidth: _Bandwidth
    peak: _Peaks
    source: str = "the cluster file"


class _Network(_Table, frozen=True):
    latency: _Latency
    bandwidth: _Bandwidth


class _Inside(_Network, frozen=True):
    wires: tuple[tuple[_Wire, ...], ...] = ()


class _OwnHost(_Table, frozen=True):
    memory: _Size | None = None
    bandwidth: _Bandwidth | None = None


class _File(_Table, frozen=True):
    """What a TOML file holds."""

    cluster: _Main
    device: _OwnDevice | None = None
    intra: _Inside | None = None
    inter: _Network | None = None
    host: _OwnHost | None = None
    calibration: _Calibration | None = None


class _PlainDevice(_Table, frozen=True):
    name: str
    kind: Kind
    peak_flops_per_s: _PlainPeaks
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: Rate
    source: str
    calibration: _Calibration | None = None


class _PlainLink(_Table, frozen=True):
    latency_s: Seconds
    bandwidth_bytes_per_s: Rate


class _PlainHost(_Table, frozen=True):
    memory_bytes: Bytes | None = None
    copy_bytes_per_s: Rate = Host().copy_bytes_per_s


class _PlainCluster(_Table, frozen=True):
    """What `Cluster.to_dict` gives."""

    name: str
    device: _PlainDevice
    num_hosts: Count
    devices_per_host: Count
    intra: _PlainLink
    inter: _PlainLink
    host: _PlainHost | None = None
    topology: str = ""
    wires: tuple[tuple[WireRate, ...], ...] = ()


def load(path: str | os.PathLike[str]) -> Cluster:
    """Read a TOML file; `Cluster.load` is the public way in.

    Raises:
        ClusterError: See there.
    """
    asked = f"cluster file {shortened(os.fspath(path))!r}"
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except InputError as error:
        problem = f"it cannot be read ({error})"
        raise ClusterError(problem, asked=asked, advice=_OTHERWISE) from error
    except UnicodeDecodeError as error:
        raise ClusterError("it is not text in UTF-8", asked=asked) from error
    return parse_toml(text, asked=asked)


def parse_toml(text: str, *, asked: str = "cluster description") -> Cluster:
    """A cluster from TOML text.

    Sizes and rates carry units. `device` is a name from the catalogue, or left out in favour of a
    `[device]` table. `[intra]` and `[inter]` default to the usual links of a catalogue device; with
    a device of one's own `[intra]` is required, and `[inter]` too as soon as there are two hosts.
    Where devices of a host are wired pair by pair, `[intra]` may say so: `wires` has a row for each
    device with what it can send to each other one directly, as in `Cluster.wires`. An `[intra]`
    without `wires` takes away those of the catalogue.
    `[host]` may say what its memory holds and how fast each device copies there and back.

    >>> cluster = parse_toml('''
    ... [cluster]
    ... name = "lab"
    ... device = "A100-80GB"
    ... hosts = 2
    ... devices_per_host = 4
    ... [inter]
    ... latency = "20us"
    ... bandwidth = "100Gbps"
    ... ''')
    >>> cluster.num_devices, cluster.inter.bandwidth_bytes_per_s
    (8, 12500000000.0)

    A device of one's own:

    >>> cluster = parse_toml('''
    ... [cluster]
    ... name = "box"
    ... hosts = 1
    ... devices_per_host = 2
    ... [device]
    ... name = "card"
    ... kind = "gpu"
    ... memory = "48GB"
    ... memory_bandwidth = "864GB/s"
    ... peak = { float32 = "91TFLOP/s", bfloat16 = "181TFLOP/s", float16 = "181TFLOP/s" }
    ... [intra]
    ... latency = "6us"
    ... bandwidth = "32GB/s"
    ... ''')
    >>> cluster.device.peak("bfloat16")
    181000000000000.0

    Four GPUs in two bridged pairs, which reach each other through the host alone:

    >>> cluster = parse_toml('''
    ... [cluster]
    ... device = "A100-40GB"
    ... devices_per_host = 4
    ... [intra]
    ... latency = "2us"
    ... bandwidth = "300GB/s"
    ... wires = [
    ...     [0, "300GB/s", 0, 0],
    ...     ["300GB/s", 0, 0, 0],
    ...     [0, 0, 0, "300GB/s"],
    ...     [0, 0, "300GB/s", 0],
    ... ]
    ... ''')
    >>> cluster.wires[0]
    (0.0, 300000000000.0, 0.0, 0.0)

    Raises:
        ClusterError: Everything that is wrong with it.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"it is not TOML ({error})", asked=asked) from error
    except (RecursionError, ValueError) as error:
        # Raised for lists nested without end, and numbers of thousands of digits.
        raise ClusterError("it is TOML that no description needs", asked=asked) from error
    # A file without this table lacks what the table must hold.
    data.setdefault("cluster", {})
    problems = list(faults_of(data, _File, "", _read)) + _unlinked(data)
    if problems:
        raise ClusterError(problems, asked=asked)
    return _built(msgspec.convert(data, _File, dec_hook=_read), asked)


def _unlinked(data: Mapping[str, Any]) -> list[str]:
    """Tables that a TOML file needs beside the others, or must not have beside them."""
    main = data["cluster"] if isinstance(data["cluster"], Mapping) else {}
    if "device" in main and "device" in data:
        return ["both [cluster] device and a [device] table are given; keep one"]
    if "device" in main:
        return []
    if "device" not in data:
        return ["[cluster] has no 'device' and there is no [device] table"]
    problems = []
    if "intra" not in data:
        problems.append("a device of your own needs an [intra] table with latency and bandwidth")
    hosts = main.get("hosts", 1)
    if "inter" not in data and isinstance(hosts, int) and hosts > 1:
        problems.append(
            f"a device of your own in {hosts} hosts needs an [inter] table with latency and"
            " bandwidth"
        )
    return problems


def _built(file: _File, asked: str) -> Cluster:
    """The cluster of a TOML file. Links that it leaves out are the usual ones of a catalogue
    device.
    """
    main, own, usual = file.cluster, file.device, None
    if own is None:
        assert main.device is not None
        device, usual = DEVICES[main.device], WIRINGS.get(main.device)
    else:
        device = Device(
            name=own.name,
            kind=own.kind,
            peak_flops_per_s=_given(own.peak),
            memory_bytes=int(own.memory),
            memory_bandwidth_bytes_per_s=float(own.memory_bandwidth),
            source=own.source,
        )
    if file.calibration is not None:
        device = replace(device, calibration=_given(file.calibration))
    intra = _link(file.intra) if file.intra else usual.intra if usual else None
    # A single host never uses its network, so any link will do.
    inter = usual.inter_of(main.devices_per_host) if usual else intra
    inter = _link(file.inter) if file.inter else inter
    if intra is None or inter is None:
        raise ClusterError("it describes no links", asked=asked)
    # The catalogue's note describes links that the file may have replaced.
    note = usual.note if usual and not (file.intra or file.inter) else ""
    wires = usual.wires_of(main.devices_per_host) if usual else ()
    if file.intra:
        wires = tuple(tuple(map(float, row)) for row in file.intra.wires)
    host = usual.host_of(main.devices_per_host) if usual else Host()
    if file.host and file.host.memory is not None:
        host = replace(host, memory_bytes=int(file.host.memory))
    if file.host and file.host.bandwidth is not None:
        host = replace(host, copy_bytes_per_s=float(file.host.bandwidth))
    try:
        return Cluster(
            name=main.name or device.name,
            device=device,
            num_hosts=main.hosts,
            devices_per_host=main.devices_per_host,
            intra=intra,
            inter=inter,
            host=host,
            topology=note if main.topology is None else main.topology,
            wires=wires,
        )
    except ClusterError as error:
        raise ClusterError(error.violations, asked=asked) from error


def _link(table: _Network) -> Link:
    return Link(latency_s=float(table.latency), bandwidth_bytes_per_s=float(table.bandwidth))


def _given(table: _Peaks | _PlainPeaks | _Calibration) -> dict[str, float]:
    """The figures that a table gives, by name."""
    figures = msgspec.structs.asdict(table)
    return {name: float(figure) for name, figure in figures.items() if figure is not None}


def from_dict(data: Mapping[str, Any]) -> Cluster:
    """Rebuild what `Cluster.to_dict` gave; `Cluster.from_dict` is the public way in.

    Raises:
        ClusterError: See there.
    """
    if problems := list(faults_of(data, _PlainCluster, "")):
        raise ClusterError(problems)
    plain = msgspec.convert(data, _PlainCluster)
    device = plain.device
    return Cluster(
        name=plain.name,
        device=Device(
            name=device.name,
            kind=device.kind,
            source=device.source,
            peak_flops_per_s=_given(device.peak_flops_per_s),
            memory_bytes=device.memory_bytes,
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            calibration=_given(device.calibration) if device.calibration else {},
        ),
        num_hosts=plain.num_hosts,
        devices_per_host=plain.devices_per_host,
        intra=Link(**msgspec.structs.asdict(plain.intra)),
        inter=Link(**msgspec.structs.asdict(plain.inter)),
        host=Host(**msgspec.structs.asdict(plain.host)) if plain.host else Host(),
        topology=plain.topology,
        wires=plain.wires,
    )
