"""Engines by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..core import InputError, listing, nearest
from ._engine import AbstractEngine

_MOST_LOCAL = 1024


def check_engine(
    spec: str,
    *,
    num_hosts: int | None = None,
    num_devices_per_host: int | None = None,
    min_hosts: int | None = None,
    address: str | None = None,
) -> None:
    """Check the text that names an engine, such as `local:2` or `ray`, and its options.

    Raises:
        InputError: everything that is wrong with them.
    """
    problems = []
    counts = {
        "--num-hosts": num_hosts,
        "--num-devices-per-host": num_devices_per_host,
        "--min-hosts": min_hosts,
    }
    for option, value in counts.items():
        if value is not None and value < 1:
            problems.append(f"{option} must be at least 1, got {value}")
    local = re.fullmatch(r"local:(\d{1,9})", spec)
    if local:
        of_ray = {"--num-hosts": num_hosts, "--min-hosts": min_hosts, "--address": address}
        problems += [
            f"{option} is for Ray; local:{local[1]} already says how many processes this machine"
            " runs"
            for option, value in of_ray.items()
            if value is not None
        ]
        if not 1 <= int(local[1]) <= _MOST_LOCAL:
            problems.append(f"{spec} asks for {local[1]} processes, and 1 to {_MOST_LOCAL} can be")
    elif spec != "ray":
        problems.append(
            f"{spec!r} is no engine: {nearest(spec, ('local:2', 'ray'))} The number after local:"
            " is that of the processes"
        )
    if num_hosts is not None and min_hosts is not None and min_hosts > num_hosts:
        problems.append(f"--min-hosts {min_hosts} is more than --num-hosts {num_hosts}")
    if problems:
        raise InputError(listing(f"nothing can be launched with {spec}", problems))


def make_engine(
    spec: str,
    *,
    num_hosts: int | None,
    num_devices_per_host: int | None,
    min_hosts: int | None,
    address: str | None,
    note: Callable[[str], None],
) -> AbstractEngine:
    """The engine that a text names. Raises `InputError`: see `check_engine`."""
    check_engine(
        spec,
        num_hosts=num_hosts,
        num_devices_per_host=num_devices_per_host,
        min_hosts=min_hosts,
        address=address,
    )
    if spec != "ray":
        from ._local import LocalEngine

        return LocalEngine(int(spec.removeprefix("local:")), num_devices_per_host)
    from ._ray import RayEngine

    return RayEngine(
        num_hosts=num_hosts,
        num_devices=num_devices_per_host,
        min_hosts=min_hosts,
        address=address,
        note=note,
    )
