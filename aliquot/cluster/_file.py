"""Readers of cluster descriptions: TOML files, which people write, and plain dictionaries in plan
files. All mistakes are reported together.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..core import (
    ClusterError,
    InputError,
    nearest,
    parse_bytes,
    parse_flops_per_s,
    parse_rate,
    parse_seconds,
    shortened,
)
from ._cluster import Cluster, Host, Link
from ._device import CALIBRATED, DEVICES, DTYPES, Device
from ._presets import WIRINGS, Wiring
from ._wires import Wires

T = TypeVar("T")

_CLUSTER_KEYS = ("name", "device", "hosts", "devices_per_host", "topology")
_LINK_KEYS = ("latency", "bandwidth")
_INTRA_KEYS = (*_LINK_KEYS, "wires")
_DEVICE_KEYS = ("name", "kind", "memory", "memory_bandwidth", "source", "peak")
_REQUIRED = object()
_MOST_CHARACTERS = 1_000_000
_OTHERWISE = (
    "Without a file, write hosts x devices x kind, such as '4x8xA100-80GB'. docs/clusters.md shows"
    " what a file holds."
)


class _Table:
    """A table of a file, read key by key. Notes all problems, also unknown keys."""

    def __init__(self, where: str, data: Any, known: tuple[str, ...], problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        self.data: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
        if not isinstance(data, Mapping):
            problems.append(f"{where} must be a table, got {data!r}")
        for key in self.data:
            if key not in known:
                problems.append(f"{where} has an unknown key {key!r}: {nearest(str(key), known)}")

    def take(self, key: str, read: Callable[[Any], T], default: Any = _REQUIRED) -> T | None:
        """The value of `key` through `read`, or None with a problem noted."""
        if key not in self.data:
            if default is _REQUIRED:
                self.problems.append(f"{self.where} has no {key!r}")
                return None
            return default  # type: ignore[no-any-return]
        try:
            return read(self.data[key])
        except InputError as error:
            self.problems.append(f"{self.where}.{key}: {error}")
            return None


def load(path: str | os.PathLike[str]) -> Cluster:
    """Read a TOML file; `Cluster.load` is the public way in.

    Raises:
        ClusterError: See there.
    """
    asked = f"cluster file {shortened(os.fspath(path))!r}"
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        problem = f"it cannot be read ({error.strerror or error})"
        raise ClusterError(problem, asked=asked, advice=_OTHERWISE) from error
    except UnicodeDecodeError as error:
        raise ClusterError("it is not text in UTF-8", asked=asked) from error
    except ValueError as error:
        raise ClusterError("that is not the name of a file", asked=asked) from error
    if len(text) > _MOST_CHARACTERS:
        raise ClusterError(
            f"it has more than {_MOST_CHARACTERS} characters, which no description needs",
            asked=asked,
        )
    return parse_toml(text, asked=asked)


def parse_toml(text: str, *, asked: str = "cluster description") -> Cluster:
    """A cluster from TOML text.

    Sizes and rates carry units. `device` is a name from the catalogue, or left out in favour of a
    `[device]` table. `[intra]` and `[inter]` default to the usual links of a catalogue device; with
    a device of one's own `[intra]` is required, and `[inter]` too as soon as there are two hosts.
    `[host]` may say what its memory holds and how fast each device copies there and back.
    Where devices of a host are wired pair by pair, `[intra]` may say so: `wires` has a row for each
    device with what it can send to each other one directly, as in `Cluster.wires`. An `[intra]`
    without `wires` takes away those of the catalogue.

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
    return _read_cluster(_read_toml(text, asked), asked)


def _read_toml(text: str, asked: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"it is not TOML ({error})", asked=asked) from error
    except (RecursionError, ValueError) as error:
        # Raised for lists nested without end, and numbers of thousands of digits.
        raise ClusterError("it is TOML that no description needs", asked=asked) from error


def _read_cluster(data: Mapping[str, Any], asked: str) -> Cluster:
    """A cluster from the tables of a TOML file."""
    problems: list[str] = []
    tables = ("cluster", "device", "intra", "inter", "host", "calibration")
    _Table("the file", data, tables, problems)
    calibration = _read_calibration("[calibration]", data.get("calibration", {}), problems)
    main = _Table("[cluster]", data.get("cluster", {}), _CLUSTER_KEYS, problems)
    device = _read_device(main, data, problems)
    hosts = main.take("hosts", _whole, 1)
    devices_per_host = main.take("devices_per_host", _whole)
    wiring = WIRINGS.get(device.name) if device is not None and "device" in main.data else None
    intra, inter = _read_links(data, wiring, hosts or 1, devices_per_host or 1, problems)
    # The catalogue's note describes links that the file may have replaced.
    note = wiring.note if wiring and not {"intra", "inter"} & data.keys() else ""
    wires = (
        wiring.wires_of(devices_per_host or 1)
        if wiring and "intra" not in data
        else _read_wires(data, problems)
    )
    usual = wiring.host_of(devices_per_host or 1) if wiring else Host()
    reads = _quantity(parse_bytes), _quantity(parse_rate)
    keys = "memory", "bandwidth"
    host = _read_host("[host]", data.get("host", {}), keys, reads, usual, problems)
    topology = main.take("topology", _text, note)
    name = main.take("name", _text, device.name if device else "")
    if (
        problems
        or device is None
        or hosts is None
        or devices_per_host is None
        or intra is None
        or inter is None
    ):
        raise ClusterError(problems or "it describes no links", asked=asked)
    try:
        return Cluster(
            name=name or device.name,
            device=replace(device, calibration=calibration) if calibration else device,
            num_hosts=hosts,
            devices_per_host=devices_per_host,
            intra=intra,
            inter=inter,
            host=host,
            topology=topology or "",
            wires=wires,
        )
    except ClusterError as error:
        raise ClusterError(error.violations, asked=asked) from error


def from_dict(data: Mapping[str, Any]) -> Cluster:
    """Rebuild what `Cluster.to_dict` gave; `Cluster.from_dict` is the public way in.

    Raises:
        ClusterError: See there.
    """
    problems: list[str] = []
    keys = (
        "name",
        "device",
        "num_hosts",
        "devices_per_host",
        "intra",
        "inter",
        "host",
        "topology",
        "wires",
    )
    table = _Table("cluster", data, keys, problems)
    device = table.take("device", lambda value: _plain_device(value, problems))
    name = table.take("name", _text)
    hosts = table.take("num_hosts", _whole)
    devices_per_host = table.take("devices_per_host", _whole)
    intra = table.take("intra", lambda value: _plain_link("intra", value, problems))
    inter = table.take("inter", lambda value: _plain_link("inter", value, problems))
    of_host, reads = ("memory_bytes", "copy_bytes_per_s"), (_whole, _number)
    host = _read_host("host", table.data.get("host", {}), of_host, reads, Host(), problems)
    topology = table.take("topology", _text, "")
    wires = table.take("wires", _rows(_number), ())
    if (
        problems
        or name is None
        or device is None
        or hosts is None
        or devices_per_host is None
        or not (intra and inter)
    ):
        raise ClusterError(problems)
    return Cluster(
        name=name,
        device=device,
        num_hosts=hosts,
        devices_per_host=devices_per_host,
        intra=intra,
        inter=inter,
        host=host,
        topology=topology or "",
        wires=wires or (),
    )


def _read_device(main: _Table, data: Mapping[str, Any], problems: list[str]) -> Device | None:
    """The device of a TOML file: one of the catalogue, or that of a `[device]` table."""
    if "device" in main.data and "device" in data:
        problems.append("both [cluster] device and a [device] table are given; keep one")
        return None
    if "device" in main.data:
        return main.take("device", _catalogue_device)
    if "device" not in data:
        problems.append("[cluster] has no 'device' and there is no [device] table")
        return None
    table = _Table("[device]", data["device"], _DEVICE_KEYS, problems)
    before = len(problems)
    name = table.take("name", _text)
    kind = table.take("kind", _text)
    memory = table.take("memory", _quantity(parse_bytes))
    bandwidth = table.take("memory_bandwidth", _quantity(parse_rate))
    source = table.take("source", _text, "the cluster file")
    peaks = _read_peaks("[device.peak]", table.data.get("peak", {}), problems)
    if (
        len(problems) > before
        or name is None
        or kind is None
        or memory is None
        or bandwidth is None
    ):
        return None
    return _collect(
        problems,
        lambda: Device(
            name=name,
            kind=kind,
            peak_flops_per_s=peaks,
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=bandwidth,
            source=source or "",
        ),
    )


def _read_peaks(where: str, data: Any, problems: list[str]) -> dict[str, float]:
    table = _Table(where, data, DTYPES, problems)
    read = {
        dtype: table.take(dtype, _quantity(parse_flops_per_s))
        for dtype in DTYPES
        if dtype in table.data
    }
    return {dtype: peak for dtype, peak in read.items() if peak is not None}


def _read_calibration(where: str, data: Any, problems: list[str]) -> dict[str, float]:
    """Figures of a target by name; see `Device.calibration`."""
    table = _Table(where, data, CALIBRATED, problems)
    read = {name: table.take(name, _number) for name in CALIBRATED if name in table.data}
    return {name: value for name, value in read.items() if value is not None}


def _read_link(key: str, data: Mapping[str, Any], problems: list[str]) -> Link | None:
    if key not in data:
        return None
    table = _Table(f"[{key}]", data[key], _INTRA_KEYS if key == "intra" else _LINK_KEYS, problems)
    latency = table.take("latency", _quantity(parse_seconds))
    bandwidth = table.take("bandwidth", _quantity(parse_rate))
    if latency is None or bandwidth is None:
        return None
    return _collect(
        problems,
        lambda: Link(latency_s=latency, bandwidth_bytes_per_s=bandwidth),
        prefix=f"[{key}] ",
    )


def _read_links(
    data: Mapping[str, Any],
    wiring: Wiring | None,
    hosts: int,
    devices_per_host: int,
    problems: list[str],
) -> tuple[Link | None, Link | None]:
    """The links of a TOML file; those that it leaves out are the usual ones of a catalogue
    device.
    """
    intra, inter = _read_link("intra", data, problems), _read_link("inter", data, problems)
    if wiring is not None:
        intra = wiring.intra if "intra" not in data else intra
        inter = wiring.inter_of(devices_per_host) if "inter" not in data else inter
    if "device" in data and "intra" not in data:
        problems.append("a device of your own needs an [intra] table with latency and bandwidth")
    if "device" in data and "inter" not in data:
        if hosts > 1:
            problems.append(
                f"a device of your own in {hosts} hosts needs an [inter] table with latency and"
                " bandwidth"
            )
        # A single host never uses its network, so any link will do.
        inter = intra
    return intra, inter


def _read_host(
    where: str, data: Any, keys: tuple[str, str], reads: Any, usual: Host, problems: list[str]
) -> Host:
    """Memory of a host and the rate of copies, under two keys; what is left out is as usual."""
    table = _Table(where, data, keys, problems)
    memory = table.take(keys[0], reads[0], usual.memory_bytes)
    rate = table.take(keys[1], reads[1], usual.copy_bytes_per_s) or usual.copy_bytes_per_s
    made = _collect(problems, lambda: Host(memory_bytes=memory, copy_bytes_per_s=rate), f"{where} ")
    return made or usual


def _read_wires(data: Mapping[str, Any], problems: list[str]) -> Wires:
    intra = data.get("intra")
    if not isinstance(intra, Mapping):
        return ()
    # The other keys were read, and reported, with the link.
    wires = _Table("[intra]", intra, tuple(intra), problems).take(
        "wires", _rows(_quantity(parse_rate)), ()
    )
    return wires or ()


def _plain_device(data: Any, problems: list[str]) -> Device | None:
    """A device from a plan file's dictionary."""
    keys = (
        "name",
        "kind",
        "peak_flops_per_s",
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "source",
        "calibration",
    )
    before = len(problems)
    table = _Table("device", data, keys, problems)
    values = {key: table.take(key, _text) for key in ("name", "kind", "source")}
    peaks = _read_peaks("device.peak_flops_per_s", table.data.get("peak_flops_per_s", {}), problems)
    calibration = _read_calibration(
        "device.calibration", table.data.get("calibration", {}), problems
    )
    memory = table.take("memory_bytes", _whole)
    bandwidth = table.take("memory_bandwidth_bytes_per_s", _number)
    if len(problems) > before or memory is None or bandwidth is None:
        return None
    return _collect(
        problems,
        lambda: Device(
            name=values["name"] or "",
            kind=values["kind"] or "",
            source=values["source"] or "",
            peak_flops_per_s=peaks,
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=bandwidth,
            calibration=calibration,
        ),
    )


def _plain_link(key: str, data: Any, problems: list[str]) -> Link | None:
    """A link from a plan file's dictionary."""
    table = _Table(key, data, ("latency_s", "bandwidth_bytes_per_s"), problems)
    latency = table.take("latency_s", _number)
    bandwidth = table.take("bandwidth_bytes_per_s", _number)
    if latency is None or bandwidth is None:
        return None
    return _collect(
        problems,
        lambda: Link(latency_s=latency, bandwidth_bytes_per_s=bandwidth),
        prefix=f"{key}: ",
    )


def _collect(problems: list[str], build: Callable[[], T], prefix: str = "") -> T | None:
    try:
        return build()
    except ClusterError as error:
        problems.extend(prefix + violation for violation in error.violations)
        return None


def _catalogue_device(value: Any) -> Device:
    name = _text(value)
    if name not in DEVICES:
        raise InputError(f"there is no device {name!r}: {nearest(name, DEVICES)}")
    return DEVICES[name]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"expected text, got {value!r}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"expected a whole number, got {value!r}")
    if value < 1:
        raise InputError(f"must be at least 1, got {value}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"expected a number, got {value!r}")
    return float(value)


def _rows(read: Callable[[Any], float]) -> Callable[[Any], Wires]:
    def read_rows(value: Any) -> Wires:
        if not isinstance(value, list | tuple) or not all(
            isinstance(row, list | tuple) for row in value
        ):
            raise InputError(f"expected rows of numbers, got {value!r}")
        return tuple(tuple(read(entry) for entry in row) for row in value)

    return read_rows


def _quantity(parse: Callable[[str | float], T]) -> Callable[[Any], T]:
    def read(value: Any) -> T:
        return parse(value if isinstance(value, str) else _number(value))

    return read
