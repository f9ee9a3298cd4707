"""Detection of the cluster from JAX's devices. Only this file needs jax, and only when called."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import ClusterError, nearest, num_cores
from ._cluster import Cluster, Link
from ._device import DEVICES, Device
from ._presets import wire

# Patterns of the backends' names of devices, most specific first, and the catalogue's names.
_KINDS = (
    (r"^cpu$", "cpu"),
    (r"V100.*32GB", "V100-32GB"),
    (r"V100.*16GB", "V100-16GB"),
    (r"A100-PCI.*40GB", "A100-PCIe"),
    (r"A100.*40GB", "A100-40GB"),
    (r"A100.*80GB", "A100-80GB"),
    (r"H100 80GB HBM3", "H100"),
    (r"H200(?! NVL)", "H200"),
    (r"\bB200", "B200"),
    (r"\bB300", "B300"),
    (r"\bGB200", "GB200"),
    (r"\bGB300", "GB300"),
    (r"MI300X", "MI300X"),
    (r"A10G", "A10G"),
    (r"\bL4\b", "L4"),
    (r"RTX 4090(?! (D|Laptop))", "RTX-4090"),
    (r"^TPU v4$", "v4"),
    (r"^TPU v5 ?lite$|^TPU v5e$", "v5e"),
    (r"^TPU v5p?$", "v5p"),
    (r"^TPU v6 ?lite$|^TPU v6e$", "v6e"),
)

# The logger with which JAX reports, with a traceback, that a plugin cannot start.
_PLUGIN_LOGGER = "jax._src.xla_bridge"

# The attribute that devices of one machine have in common. GPUs are often given one process each,
# and then only this attribute tells which share a host; on every other platform a process is a
# host.
_HOST_ATTRIBUTES = {"gpu": "slice_index"}

# Fitted by benchmarks/calibrate_steps.py to whole steps on a 2-core machine that eight devices
# share: products 163 GFLOP/s, memory traffic 10.7 GB/s, rings 0.28 GB/s on each device. Divided by
# the shares of `_target.py`, these are the peaks. Alone, with arrays in caches and all devices in
# step, elementwise code and collectives are several times faster (benchmarks/calibrate_cpu.py); the
# steps that were fitted came nowhere near that. Machines of this kind differ by a factor of two
# from hour to hour: figures that were fitted in the same hour belong together.
_CORE_FLOPS_PER_S = 110e9
_HOST_BYTES_PER_S = 13.4e9
_RING_BYTES_PER_S = 4.5e9
_RING_LATENCY_S = 2e-6


def detect(devices: Sequence[Any] | None = None) -> Cluster:
    """Describe `devices`; `Cluster.detect` is the public way in.

    Raises:
        ClusterError: See there.
    """
    if devices is None:
        devices = visible_devices()
    seen = list(devices)
    if not seen:
        raise ClusterError("there are no devices", asked="the devices of this process")
    sizes = Counter(_host_key(device) for device in seen)
    kinds = Counter(str(device.device_kind) for device in seen)
    problems = []
    if len(kinds) > 1:
        listing = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        problems.append(
            f"they are of several kinds ({listing}), and a plan wants equal devices; pass one kind"
        )
    if len(set(sizes.values())) > 1:
        problems.append(
            f"their hosts have {sorted(sizes.values())} devices, and a plan wants equal hosts; pass"
            " equal shares"
        )
    if problems:
        raise ClusterError(problems, asked="the devices of this process")
    hosts, per_host = len(sizes), next(iter(sizes.values()))
    name = catalogue_name(str(seen[0].device_kind))
    label = f"{hosts}x{per_host}x{name}" if hosts > 1 else f"{per_host}x{name}"
    return _MAKERS.get(name, wire)(label, name, hosts, per_host)


def visible_devices() -> list[Any]:
    """The devices that JAX sees, which starts its backends.

    A plugin that cannot start, such as that for GPUs on a machine without one, is reported in one
    line.

    Raises:
        ClusterError: No backend starts that `JAX_PLATFORMS` allows.
    """
    import jax

    logger = logging.getLogger(_PLUGIN_LOGGER)
    logger.addFilter(_without_traceback)
    try:
        return list(jax.devices())
    except (RuntimeError, AssertionError, ValueError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        reason = (
            str(error).strip().partition("\n")[0].partition(" (set JAX_PLATFORMS")[0]
            or "it finds no device of them"
        )
        raise ClusterError(
            f"JAX cannot start: {reason}",
            asked="the devices of this process",
            advice=(
                f"JAX_PLATFORMS is {platforms!r}: unset it, or set it to cpu." if platforms else ""
            ),
        ) from error
    finally:
        logger.removeFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Reduce JAX's report that a plugin cannot start to one line."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        plugin = record.args[0] if isinstance(record.args, tuple) and record.args else "a plugin"
        first = str(error).strip().partition("\n")[0]
        record.msg = "%s cannot start (%s: %s), so JAX goes on without it"
        record.args = (plugin, type(error).__name__, first)
        record.exc_info = record.exc_text = None
    return True


def num_hosts(devices: Sequence[Any]) -> int:
    """How many hosts have some of these devices."""
    return len({_host_key(device) for device in devices})


def _host_key(device: Any) -> int:
    """A number that devices of the same host share."""
    shared = getattr(device, _HOST_ATTRIBUTES.get(device.platform, "process_index"), None)
    return int(device.process_index if shared is None else shared)


def catalogue_name(kind: str) -> str:
    """The catalogue's name for a kind of device, from JAX's name for it.

    Raises:
        ClusterError: it is not in the catalogue.
    """
    for pattern, name in _KINDS:
        if re.search(pattern, kind):
            return name
    raise ClusterError(
        f"{kind!r} is not in the catalogue, so its speed is not known: {nearest(kind, DEVICES)}",
        asked="the devices of this process",
        advice=(
            "Describe it in a TOML file with a [device] table and pass Cluster.load(path), or name"
            " a preset."
        ),
    )


def _share_this_host(label: str, name: str, hosts: int, per_host: int) -> Cluster:
    """A cluster of CPU devices that share the cores and the memory of this machine."""
    cores = num_cores()
    peak = cores * _CORE_FLOPS_PER_S / per_host
    sharing = "1 device" if per_host == 1 else f"{per_host} devices"
    device = Device(
        name=name,
        kind=DEVICES[name].kind,
        # Narrow floats are widened around every operation.
        peak_flops_per_s={
            "float32": peak,
            "bfloat16": peak / 2,
            "float16": peak / 2,
            "float64": peak / 2,
        },
        memory_bytes=max(1, _host_memory_bytes() // per_host),
        memory_bandwidth_bytes_per_s=_HOST_BYTES_PER_S / per_host,
        source=(
            f"detected: {cores} cores and this host's memory, shared by {sharing}; speeds assumed"
            " from a reference machine"
        ),
    )
    wiring = wire(label, name, hosts, per_host)
    intra = Link(latency_s=_RING_LATENCY_S, bandwidth_bytes_per_s=_RING_BYTES_PER_S / per_host)
    return Cluster(
        name=label,
        device=device,
        num_hosts=hosts,
        devices_per_host=per_host,
        intra=intra,
        inter=wiring.inter,
        topology=wiring.topology,
    )


# Kinds whose figures follow from this machine, not from the catalogue.
_MAKERS = {"cpu": _share_this_host}


def _host_memory_bytes() -> int:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return DEVICES["cpu"].memory_bytes
    # A container may be allowed less than the machine has.
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
