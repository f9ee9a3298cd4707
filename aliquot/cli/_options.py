"""Values of options that several verbs read, from text to what they mean."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..core import InputError, parse_seconds, shortened
from ._devices import use_seen_devices
from ._groups import argument, option

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..plans import Plan

Json = Annotated[
    bool, option("Print one JSON object on standard output and nothing else.", names="--json")
]
PlanFile = Annotated[Path, argument("A plan file.", metavar="PLAN")]
ModelName = Annotated[
    str,
    argument(
        "A name from the zoo, package.module:factory, or a config.json of Hugging Face (GPT-2,"
        " Llama, Mistral, Mixtral, Qwen 2 or 3; --config FILE is the same)."
    ),
]
ZooName = Annotated[
    str,
    argument("A name from the zoo, or a config.json of Hugging Face (--config FILE is the same)."),
]
DescribedCluster = Annotated[str, option("A preset such as 8xH100, or a TOML file.")]
NetworkGbps = Annotated[
    str | None,
    option(
        "What each host sends to the others in Gbit/s, all its devices together, such as 1600;"
        " by default what the cluster says.",
        metavar="N",
    ),
]
Devices = Annotated[
    int | None, option("Virtual CPU devices; by default all devices that JAX sees.")
]
VirtualDevices = Annotated[int | None, option("Run on this many virtual CPU devices.")]
PlannedCluster = Annotated[
    str, option("What to plan for: detect, a preset such as 8xH100, or a TOML file.")
]
ProfilesOfAny = Annotated[bool, option("Also use measurements of other devices or of another JAX.")]
ModelOfPlan = Annotated[
    str | None,
    option(
        "The model that the plan is for, where the plan file must not or cannot say:"
        " package.module:factory.",
        metavar="NAME",
    ),
]
TrustPlan = Annotated[bool, option("Call the function that the plan file names to make its step.")]


def read_cluster(spec: str, network_gbps: str | None = None) -> Cluster:
    """A cluster from a preset's name, the path of a TOML file, `detect`, or `ray`; with another
    network between its hosts if that is given.

    Raises:
        ClusterError: Everything that is wrong with it.
        InputError: The network is no number.
    """
    from ..cluster import Cluster

    if spec == "detect":
        cluster = Cluster.detect(use_seen_devices())
    elif spec == "ray":
        from ..launching import cluster_of, find_ray_hosts

        cluster = cluster_of(find_ray_hosts())
    elif spec.endswith(".toml") or os.sep in spec or os.path.isfile(spec):
        cluster = Cluster.load(spec)
    else:
        cluster = Cluster.preset(spec)
        if cluster.name != spec.strip():
            print(
                f"{spec} is taken as {cluster.name}: no host has so many {cluster.device.name}.",
                file=sys.stderr,
            )
    return with_network(cluster, network_gbps)


def with_network(cluster: Cluster, network_gbps: str | None) -> Cluster:
    """The cluster, with another network between its hosts if that is given.

    Raises:
        InputError: The network is no number.
    """
    if network_gbps is None:
        return cluster
    try:
        gbps = float(network_gbps)
    except ValueError:
        raise InputError(
            f"--network-gbps {shortened(network_gbps, 60)!r} is no number: write what a host sends"
            " to the others in Gbit/s, such as --network-gbps 1600."
        ) from None
    return cluster.with_network(gbps)


def read_plan(path: Path) -> Plan:
    """The plan in a file.

    Raises:
        PlanFileError: It cannot be read, or everything that is wrong with it.
    """
    from ..plans import Plan

    return Plan.load(path)


def read_mesh(text: str | None, where: Cluster | None = None) -> tuple[int, ...] | None:
    """The shape of a mesh from text such as `4x2`.

    Raises:
        InputError: Anything else, or a mesh of more or fewer devices than the cluster has.
    """
    if text is None:
        return None
    sizes = [_number(size) for size in text.lower().split("x")]
    if not all(size is not None and size >= 1 for size in sizes):
        raise InputError(
            f"--mesh {shortened(text, 60)!r} is no mesh: write the devices along each axis, such as"
            " 8, 4x2 or 2x2x2."
        )
    shape = tuple(size for size in sizes if size is not None)
    if where is not None and math.prod(shape) != where.num_devices:
        raise InputError(
            f"--mesh {text} has {math.prod(shape)} devices, {where.name} has {where.num_devices}."
        )
    return shape


def read_micro_batches(text: str | None) -> int | None:
    """A number of micro-batches; None if it is `auto` or not given.

    Raises:
        InputError: Anything else, or a number below 1.
    """
    if text is None or text == "auto":
        return None
    number = _number(text)
    if number is None:
        raise InputError(f"--micro-batches {shortened(text, 60)!r} is neither a number nor auto.")
    if number < 1:
        raise InputError(f"--micro-batches must be at least 1, got {number}.")
    return number


def read_time_limit(text: str | None) -> float | None:
    """Seconds from text such as `20s`.

    Raises:
        InputError: It is no time, or nothing.
    """
    if text is None:
        return None
    try:
        limit_s = parse_seconds(text)
    except InputError as error:
        raise InputError(f"--time-limit: {error}") from None
    if limit_s <= 0:
        raise InputError(f"--time-limit must be positive, got {shortened(text, 60)}.")
    return limit_s


def read_layers(text: str | None) -> str | int | None:
    """A number of layers, a pattern of parameters' paths, or "operators"."""
    number = None if text is None else _number(text)
    if number is None and text is not None and text.lstrip("-").isdecimal():
        raise InputError(
            f"--layers {shortened(text, 60)!r} is neither a number nor a pattern of paths."
        )
    return text if number is None else number


def _number(text: str) -> int | None:
    """The whole number that a text writes, of up to 18 digits; None for anything else."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def read_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Settings from texts such as `num_layers=4`.

    Raises:
        InputError: All texts that have no such form, and all names that occur twice.
    """
    settings: dict[str, Any] = {}
    faults = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (equals and name.strip() and value.strip()):
            faults.append(f"{pair!r} is not of the form name=value")
        elif name.strip() in settings:
            faults.append(f"{name.strip()!r} is set twice")
        else:
            settings[name.strip()] = value.strip()
    if faults:
        raise InputError(
            f"--set: {'; '.join(faults)}. Write for example --set num_layers=4 --set seq_len=512."
        )
    return settings


def check_destination(path: Path | None, option: str = "--out") -> None:
    """Check, before the work, that its result can be written.

    Raises:
        InputError: It cannot.
    """
    if path is None:
        return
    folder = path.parent
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{option} {shortened(str(path), 60)!r} cannot be written: {reason}."
        ) from None
    if path.is_dir():
        raise InputError(f"{option} {str(path)!r} is a folder. Give the name of a file in it.")
    if not folder.is_dir():
        raise InputError(
            f"{option} {str(path)!r}: there is no folder {str(folder)!r}. Create it first."
        )
    if not os.access(folder, os.W_OK):
        raise InputError(
            f"{option} {str(path)!r}: the folder {str(folder)!r} cannot be written to. Choose"
            " another."
        )
