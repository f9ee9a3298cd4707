"""`aliquot cluster`: a cluster description in full, or the devices that can be named."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core import InputError, counted, format_bytes, format_bytes_per_s, format_flops_per_s
from ._groups import argument, option
from ._options import Json, NetworkGbps, read_cluster, with_network
from ._session import Session, session

_EIGHT = 8

if TYPE_CHECKING:
    from ..cluster import Cluster, ReportedSteps, Target
    from ..launching import RayHosts


def cluster(
    spec: str | None = argument(
        "A preset such as 8xH100 or 4x8xA100-80GB, a TOML file, detect, or ray. Without one, all"
        " devices are listed.",
        None,
    ),
    network_gbps: NetworkGbps = None,
    address: str | None = option(
        "ray: host:port of the head; by default RAY_ADDRESS, or the one that runs here."
    ),
    num_devices_per_host: int | None = option(
        "ray: by default all GPUs, or one CPU device.", min=1
    ),
    every: bool = option(
        "List all reported steps that predictions were held to.", False, names="--all"
    ),
    as_json: Json = False,
) -> None:
    """Show a cluster's devices, its links, and the sources of their figures; or list all devices
    that clusters are named after.
    """
    with session(as_json) as say:
        if spec is None:
            if (network_gbps, address, num_devices_per_host) != (None, None, None):
                raise InputError(
                    "these options describe a cluster, and none is named: type"
                    " aliquot cluster 8xH100, or aliquot cluster for the list of devices."
                )
            _list_devices(say)
            return
        hosts: RayHosts | None = None
        if spec == "ray":
            from ..launching import cluster_of, find_ray_hosts

            hosts = find_ray_hosts(address)
            described = with_network(cluster_of(hosts, num_devices_per_host), network_gbps)
        elif address is not None or num_devices_per_host is not None:
            raise InputError(
                f"--address and --num-devices-per-host are for a Ray cluster, and {spec!r} is none."
                " Type: aliquot cluster ray"
            )
        else:
            described = read_cluster(spec, network_gbps)
        from ..cluster import (
            is_calibrated,
            logical_mesh_shapes,
            reported_steps,
            said_of_data_sheet,
            target_for,
        )
        from ..report import Facts

        target = target_for(described.device)
        usable_bytes = target.usable_memory_fraction * described.device.memory_bytes
        meshes = ["x".join(map(str, shape)) for shape in logical_mesh_shapes(described.num_devices)]
        usable = (
            f"{format_bytes(usable_bytes)} on each device, {target.usable_memory_fraction:.0%} of"
            " its memory; the rest is left to its runtime and to fragmentation"
        )
        if target.memory_advice:
            usable += f" ({target.memory_advice})"
        facts = [*described.facts(), ("limit of a plan", usable), ("meshes", ", ".join(meshes))]
        facts += [("assumed", _reaches(target))]
        known = () if described.device.calibration else reported_steps(described.device.name)
        facts += _errors(known, spec, every)
        device = described.device
        if device.kind != "cpu" and not (device.calibration or is_calibrated(device.name)):
            facts.append(("expected error", f"of step times: {said_of_data_sheet()}"))
        if hosts is not None:
            facts += [(f"host {host.ip}", str(host)) for host in hosts.hosts]
        say.show(described.headline())
        say.show(Facts(facts))
        answer = _data(described, target, known, usable_bytes, meshes)
        if hosts is not None:
            answer["ray"] = dataclasses.asdict(hosts)
        say.finish(answer)


def _list_devices(say: Session) -> None:
    """List the devices that clusters are named after, with their sizes and usual links."""
    from ..cluster import DEVICES, Cluster
    from ..report import Column, table

    entries = []
    for name, device in DEVICES.items():
        cluster = Cluster.preset(f"2x{_EIGHT}x{name}")
        entries.append(
            {
                "device": name,
                "kind": device.kind,
                "example": "v5e-16" if name == "v5e" else f"2x{_EIGHT}x{name}",
                "memory_bytes": device.memory_bytes,
                "peak_flops_per_s": max(device.peak("bfloat16"), device.peak("float16")),
                "intra_bytes_per_s": cluster.intra.bandwidth_bytes_per_s,
                "inter_bytes_per_s": cluster.inter.bandwidth_bytes_per_s,
                "source": device.source,
            }
        )
    say.show(
        table(
            "Devices; a cluster is HOSTSxDEVICESxNAME",
            entries,
            Column("device", "device"),
            Column("such as", "example"),
            Column("memory", "memory_bytes", format_bytes, number=True),
            Column("peak", "peak_flops_per_s", format_flops_per_s, number=True),
            Column("in a host", "intra_bytes_per_s", format_bytes_per_s, number=True),
            Column("between hosts", "inter_bytes_per_s", format_bytes_per_s, number=True),
            narrow=True,
        )
    )
    say.show("peak: the fastest dtype for training, dense; links: one way, of each device in")
    say.show("a host, of a host of 8 between hosts. Sources: aliquot cluster NAME. Others:")
    say.show("a TOML file, or detect.")
    say.finish({"devices": entries})


def _errors(known: Sequence[ReportedSteps], spec: str, every: bool) -> Iterator[tuple[str, str]]:
    """How far predictions were from reported steps: each kind of step of JAX programs, and one line
    for those of all other frameworks unless `every` is asked for.
    """
    others = [steps for steps in known if not (every or steps.is_jax)]
    for steps in known:
        if steps not in others:
            kind, *rest = steps.kind.split(", ")
            which = ", ".join([f"{kind.removesuffix('s')} parallelism", *rest])
            yield "expected error", f"{which}: {steps}"
    if others:
        errors = sorted(itertools.chain(*(steps.errors for steps in others)))
        low, high = (1 / (1 + error) for error in (errors[-1], errors[0]))
        yield (
            "other frameworks",
            f"{counted(len(errors), 'step')} of"
            f" {counted(len({steps.framework for steps in others}), 'framework')} took"
            f" {low:.2f} to {high:.2f} times as long as predicted, in the median"
            f" {1 / (1 + statistics.median(errors)):.2f}: aliquot cluster {spec} --all",
        )


def _reaches(target: Target) -> str:
    """The shares of its peaks that the cost model assumes a device to reach."""
    matmuls = f"large matmuls reach {target.matmul_efficiency:.0%} of the peak"
    if target.sustained_share < 1:
        share = target.matmul_efficiency * target.sustained_share
        matmuls += f" alone and {share:.0%} within a step"
    overlap = (
        f"overlap with compute: {target.overlap_fraction:.0%} of the collectives of gradients and"
        f" parameters ({target.gradient_overlap(True):.0%} of sums of gradients between hosts),"
        f" {target.activation_overlap:.0%} of those of activations"
    )
    return (
        f"{matmuls}; elementwise operators {target.bandwidth_efficiency:.0%} of the memory"
        f" bandwidth; collectives {target.collective_efficiency:.0%} of the links' bandwidth;"
        f" {overlap}"
    )


def _data(
    cluster: Cluster,
    target: Target,
    known: Sequence[ReportedSteps],
    usable_bytes: float,
    meshes: list[str],
) -> dict[str, Any]:
    from ..cluster import CALIBRATED

    return {
        "calibration": {name: target.figure(name) for name in CALIBRATED},
        "reported_steps": [dataclasses.asdict(steps) for steps in known],
        **cluster.to_dict(),
        "num_devices": cluster.num_devices,
        "memory_limit_bytes": usable_bytes,
        "mesh_shapes": meshes,
    }
