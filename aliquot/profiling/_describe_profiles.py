"""The contents of a profile database as plain data: kinds of programs, curves, and outliers."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from ..cluster import AXIS_NAMES, Cluster
from ._database import Measurement, ProfileDatabase, ProgramKey
from ._measured import read_measured
from ._operators import COLLECTIVES, LAUNCH, TRANSFER, Operator

_NOISY = 0.3
_FAR_OFF = 1.0
_TITLES = {
    "products": "Matrix products, measured",
    "traffic": "Elementwise traffic, measured",
    TRANSFER: "Transfers between halves of the devices, measured",
}
_HORIZONTAL = {"products": "operations", TRANSFER: "bytes of the whole array"}
_UNITS = {"products": "GFLOP/s of each device", TRANSFER: "GB/s of all devices"}


def describe_profiles(database: ProfileDatabase, cluster: Cluster | None = None) -> dict[str, Any]:
    """The contents of a database: kinds of programs, corrections of the cost model, outliers.

    Args:
        cluster: the cluster with whose cost model measurements are compared; without one there are
            no corrections.
    """
    by_kind: defaultdict[tuple[str, str, str], list[Measurement]] = defaultdict(list)
    outliers = []
    for key, measurement in database.rows():
        operator = Operator.parse(key.program)
        if operator is None:
            kind = "segment or conversion"
        elif operator.kind in (*COLLECTIVES, LAUNCH.kind):
            kind = operator.kind
        else:
            kind = f"{operator.kind} {operator.dtype}"
        by_kind[kind, _devices(key), measurement.grade].append(measurement)
        if measurement.spread > _NOISY and measurement.seconds is not None:
            reason = f"its runs spread by {measurement.spread:.0%}"
            outliers.append(_outlier(key, measurement, reason))
    kinds = []
    for (kind, devices, grade), some in sorted(by_kind.items()):
        seconds = [m.seconds for m in some if m.seconds is not None]
        spreads = [m.spread for m in some if m.seconds is not None]
        described: dict[str, Any] = {
            "kind": kind,
            "devices": devices,
            "grade": grade,
            "measured": len(seconds),
            "failed": len(some) - len(seconds),
            "least_s": min(seconds, default=None),
            "most_s": max(seconds, default=None),
            "spread": float(np.median(spreads)) if spreads else None,
        }
        kinds.append(described)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in outliers + _unlike_neighbours(database):
        which = row["program"], row["devices"]
        if which in found:
            row = {**row, "reason": f"{found[which]['reason']}; {row['reason']}"}
        found[which] = row
    return {
        "kinds": kinds,
        "tables": [] if cluster is None else _tables(database, cluster),
        "outliers": sorted(found.values(), key=lambda row: -float(row["seconds"])),
    }


def _devices(key: ProgramKey) -> str:
    return f"{key.devices}, JAX {key.jax_version}"


def _outlier(key: ProgramKey, measurement: Measurement, reason: str) -> dict[str, Any]:
    operator = Operator.parse(key.program)
    name = measurement.label or key.program
    return {
        "program": name if operator is None else operator.described(key.mesh),
        "devices": _devices(key),
        "seconds": measurement.seconds,
        "reason": reason,
    }


def _tables(database: ProfileDatabase, cluster: Cluster) -> list[dict[str, Any]]:
    measured = read_measured(database, cluster)
    return [
        {
            "table": kind,
            "sizes": len(table.points),
            "median_ratio": float(np.median(table.ratios)),
            "interpolation_error": table.interpolation_error,
        }
        for kind, table in measured.tables.items()
    ]


def measured_curves(database: ProfileDatabase) -> list[dict[str, Any]]:
    """Curves to draw: rates over sizes, for each family of operators and each number of devices or
    mesh.
    """
    series: defaultdict[str, defaultdict[str, dict[float, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for key, measurement in database.rows():
        operator = Operator.parse(key.program)
        if operator is None or operator == LAUNCH or not measurement.seconds:
            continue
        where = key.devices
        if operator.kind == "product":
            flops = 2.0 * math.prod(operator.sizes)
            series["products"][f"{operator.dtype}, {where}"][flops] = (
                flops / measurement.seconds / 1e9
            )
        elif operator.kind in ("traffic", TRANSFER):
            size = float(operator.sizes[0])
            series[operator.kind][where][size] = size / measurement.seconds / 1e9
        else:
            along = ",".join(AXIS_NAMES[axis] for axis in operator.axes)
            size = float(operator.sizes[0])
            name = f"along {along} of {key.mesh}"
            series[operator.kind][name][size] = size / measurement.seconds / 1e9
    curves = []
    for family, some in sorted(series.items()):
        curves.append(
            {
                "file": family,
                "title": _TITLES.get(family, f"{family.capitalize()}, measured"),
                "horizontal": _HORIZONTAL.get(family, "bytes on each device"),
                "unit": _UNITS.get(family, "GB/s of each device"),
                "series": {name: dict(sorted(values.items())) for name, values in some.items()},
            }
        )
    return curves


def _unlike_neighbours(database: ProfileDatabase) -> list[dict[str, Any]]:
    """Operators that take more than twice as long as the next larger one of the same kind."""
    groups: defaultdict[Any, list[tuple[float, ProgramKey, Measurement]]] = defaultdict(list)
    for key, measurement in database.rows():
        operator = Operator.parse(key.program)
        if operator is None or operator.kind in (LAUNCH.kind, "product"):
            continue
        if measurement.seconds:
            alike = operator.kind, _devices(key), key.mesh, operator.axes
            groups[alike].append((float(operator.sizes[0]), key, measurement))
    found = []
    for some in groups.values():
        some.sort(key=lambda each: each[0])
        for (_, key, measurement), (_, _, larger) in zip(some, some[1:], strict=False):
            assert measurement.seconds is not None and larger.seconds is not None
            if measurement.seconds > (1 + _FAR_OFF) * larger.seconds:
                reason = "a larger one takes less than half as long"
                found.append(_outlier(key, measurement, reason))
    return found
