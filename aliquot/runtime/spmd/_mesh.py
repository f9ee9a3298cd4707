"""Meshes over the first devices, and whether these can run a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...core import PlanMismatchError
from ...graph import Graph, missing_kernels


def make_mesh(
    shape: Sequence[int], axis_names: Sequence[str], devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the first devices, numbered row by row, that leaves splits to the compiler where
    a plan is silent.

    Raises:
        PlanMismatchError: there are too few devices.
    """
    needed = math.prod(shape)
    available = list(jax.devices() if devices is None else devices)
    if len(available) < needed:
        raise PlanMismatchError(
            f"the plan is for {needed} devices ({'x'.join(map(str, shape))}), and there are"
            f" {len(available)}",
            asked="the plan does not fit these devices",
            advice=(
                "Plan for the devices at hand (Cluster.detect()), or on CPUs set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before starting Python."
            ),
        )
    grid = np.array(available[:needed], dtype=object).reshape(tuple(shape))
    # In explicit meshes, JAX's default, sharding constraints would be refused.
    return Mesh(grid, tuple(axis_names), axis_types=(AxisType.Auto,) * len(tuple(shape)))


def axis_names(mesh: Any, among: Collection[Any] | None = None) -> list[str]:
    """Names of a mesh's axes in their order: of all, or of those among some."""
    return [str(name) for name in mesh.axis_names if among is None or name in among]


def require_kernels(graph: Graph, devices: Sequence[Any]) -> None:
    """Refuse devices that lack a kernel of the step. Raises `PlanMismatchError`."""
    missing = missing_kernels(graph, devices[0].platform) if devices else ""
    if missing:
        raise PlanMismatchError(
            f"the step calls {missing}, and these are {devices[0].platform} devices",
            asked="the plan does not fit these devices",
            advice=(
                "Run it on the devices that it was planned for, or plan a step without them: for a"
                " model of the zoo, --attention plain."
            ),
        )
