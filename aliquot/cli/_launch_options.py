"""Options of verbs that start processes on several hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How processes are started, and started again when one fails."""

    max_restarts: Annotated[
        int | None,
        typer.Option(
            help=(
                "How often all processes are started again when one fails; by default 3 where the"
                " run has checkpoints, else 0."
            ),
            show_default=False,
        ),
    ] = None
    num_devices_per_host: Annotated[
        int | None,
        typer.Option(
            help=(
                "Devices of each process; virtual ones on CPUs. By default all GPUs, shared out"
                " among the processes of a host."
            ),
            show_default=False,
        ),
    ] = None
    num_hosts: Annotated[
        int | None, typer.Option(help="Ray: hosts; by default all.", show_default=False)
    ] = None
    min_hosts: Annotated[
        int | None,
        typer.Option(
            help="Ray: hosts with which it may start again when others are gone; by default all.",
            show_default=False,
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            help=(
                "Ray: host:port of the cluster's head; by default RAY_ADDRESS, else a cluster that"
                " runs here, else one that is started here."
            ),
            show_default=False,
        ),
    ] = None
