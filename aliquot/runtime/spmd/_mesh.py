"""Meshes over the first devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ...core import PlanMismatchError


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
