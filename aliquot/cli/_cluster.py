"""`aliquot cluster`: a cluster description in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import format_bytes
from ._options import Json, read_cluster
from ._session import session

if TYPE_CHECKING:
    from ..cluster import Cluster


def cluster(
    spec: Annotated[
        str,
        typer.Argument(
            help="A preset such as 8xH100 or 4x8xA100-80GB, a TOML file, or detect.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show a cluster's devices, its links, and the sources of their figures."""
    with session(as_json) as say:
        described = read_cluster(spec)
        from ..cluster import logical_mesh_shapes, target_for
        from ..report import Facts

        target = target_for(described.device)
        usable_bytes = target.usable_memory_fraction * described.device.memory_bytes
        meshes = ["x".join(map(str, shape)) for shape in logical_mesh_shapes(described.num_devices)]
        usable = f"{format_bytes(usable_bytes)} of each device's memory for a plan"
        if target.memory_advice:
            usable += f" ({target.memory_advice})"
        say.show(described.headline())
        say.show(Facts([*described.facts(), ("usable", usable), ("meshes", ", ".join(meshes))]))
        say.finish(_data(described, usable_bytes, meshes))


def _data(cluster: Cluster, usable_bytes: float, meshes: list[str]) -> dict[str, Any]:
    return {
        **cluster.to_dict(),
        "num_devices": cluster.num_devices,
        "usable_memory_bytes_per_device": usable_bytes,
        "mesh_shapes": meshes,
    }
