"""From measured operators to the corrections that planners price with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ..cluster import (
    MEASURED,
    MEASURED_COMPUTE,
    Cluster,
    Link,
    LogicalMesh,
    catalogue_name,
    subcluster,
    target_for,
)
from ..core import ClusterError, InputError
from ..cost import (
    Measured,
    RatioTable,
    Work,
    collective_kind,
    collective_line,
    collective_points,
    work_seconds,
)
from ..graph import Phase
from ..plans import item_bytes
from ._database import Measurement, ProfileDatabase, ProgramKey
from ._operators import COLLECTIVES, LAUNCH, TRANSFER, Operator
from ._programs import host_device

Floats = NDArray[np.float64]
# An operator that takes less than this share of a launch cannot be told apart from it, and stays as
# modelled.
_LEAST_OF_LAUNCH = 0.25


PLAN_ANYWAY = "To plan from these as they are, give --profiles-of-any (profiles_of_any=True)."


def read_measured(database: ProfileDatabase, cluster: Cluster, *, of_any: bool = False) -> Measured:
    """Freeze what a database knows of a cluster's devices, as this release of JAX compiles for
    them. Touches no device.

    Args:
        of_any: take measurements of other releases of JAX and of other kinds of devices too.

    Raises:
        InputError: it holds no operators, or only those of other devices or releases.
    """
    fitting, devices = fitting_rows(database, cluster, of_any=of_any)
    tables = _tables(_correct_rows(fitting, cluster))
    transfers = {
        crosses: link
        for crosses in (False, True)
        if (link := _transfer_link(fitting, cluster, crosses))
    }
    what = f"{sum(len(table.points) for table in tables.values())} operators of {devices}"
    compute_only = not any(operator.axes for operator, _, _ in fitting) and cluster.num_devices > 1
    if any(table.grade == MEASURED_COMPUTE for table in tables.values()):
        what += f", measured on one alone (grade {MEASURED_COMPUTE})"
    source = f"{what}; collectives are modelled" if compute_only else what
    return Measured(tables=tables, source=source, transfers=transfers)


Row = tuple[Operator, ProgramKey, Measurement]


def fitting_rows(
    database: ProfileDatabase, cluster: Cluster, *, of_any: bool = False, advice: str = PLAN_ANYWAY
) -> tuple[list[Row], str]:
    """Measured operators of a cluster's devices, and what these are in words. Raises as
    `read_measured` does.

    Args:
        advice: what else to do where none are of the cluster's devices.
    """
    rows = [
        (operator, key, measurement)
        for key, measurement in database.rows()
        if (operator := Operator.parse(key.program)) is not None and measurement.seconds is not None
    ]
    if not rows:
        raise InputError(
            f"{database.path} holds no measured operators. Measure some: aliquot profile run MODEL"
            f" --database {database.path}"
        )
    fitting = [row for row in rows if of_any or _fits(row[1], row[2].grade, cluster)]
    if not fitting:
        device = host_device() if cluster.device.kind == "cpu" else cluster.device.name
        raise InputError(
            f"{database.path} holds measurements of {_devices_of(rows)}, and none of"
            f" {cluster.num_devices} x {device} with JAX {jax.__version__}, which is asked for."
            f" Measure there: aliquot profile run. {advice}"
        )
    return fitting, _devices_of(fitting)


def _devices_of(rows: Iterable[Row]) -> str:
    return ", ".join(
        sorted(
            {f"{key.num_devices} x {key.device} with JAX {key.jax_version}" for _, key, _ in rows}
        )
    )


def _fits(key: ProgramKey, grade: str, cluster: Cluster) -> bool:
    """Virtual devices share cores, so that their number counts, unless one was to stand for many;
    real ones work each by itself.
    """
    if key.jax_version != jax.__version__:
        return False
    if cluster.device.kind == "cpu":
        stands_for_many = grade == MEASURED_COMPUTE
        return key.device == host_device() and (
            key.num_devices == cluster.num_devices or stands_for_many
        )
    return _is_of(key.device, cluster.device.name)


def _is_of(kind: str, name: str) -> bool:
    try:
        return catalogue_name(kind) == name
    except ClusterError:
        return kind == name


def without_launch(row: Row, rows: Iterable[Row]) -> float | None:
    """Seconds of an operator inside a program; None where the launch of its program hides them.

    Args:
        rows: among which the launches are.
    """
    operator, key, measurement = row
    assert measurement.seconds is not None
    launches = [
        m.seconds for other, k, m in rows if other == LAUNCH and k.num_devices == key.num_devices
    ]
    launch_s = launches[0] or 0.0 if launches else 0.0
    seconds = measurement.seconds - launch_s
    return None if operator == LAUNCH or seconds <= _LEAST_OF_LAUNCH * launch_s else seconds


class _Entry(NamedTuple):
    """A measurement in its table: where, its ratio to the cost model, its spread, and its grade."""

    table: str
    point: Floats
    ratio: float
    spread: float
    grade: str


def _correct_rows(rows: Sequence[Row], cluster: Cluster) -> Iterator[_Entry]:
    """All measurements that the launch of a program does not hide."""
    plain, launches = replace(cluster, measured=None), [row for row in rows if row[0] == LAUNCH]
    for row in rows:
        operator, key, measurement = row
        seconds = without_launch(row, launches)
        if seconds is not None and _runs_on(operator, key, plain):
            # Ratios carry over to sizes that were not measured; seconds would not.
            table, point, modelled_s = modelled_operator(operator, key, plain)
            yield _Entry(
                table,
                point,
                seconds / modelled_s,
                measurement.spread,
                _grade(key, measurement, cluster),
            )


def _grade(key: ProgramKey, measurement: Measurement, cluster: Cluster) -> str:
    """That of a measurement for a cluster: one device that ran alone says nothing of others that
    run beside it.
    """
    return MEASURED_COMPUTE if key.num_devices == 1 < cluster.num_devices else measurement.grade


def _runs_on(operator: Operator, key: ProgramKey, cluster: Cluster) -> bool:
    if operator.kind == TRANSFER:
        return False
    return operator.kind not in COLLECTIVES or part_of(cluster, key.num_devices) is not None


def _transfer_link(rows: Sequence[Row], cluster: Cluster, crosses_hosts: bool) -> Link | None:
    """A line through the measured transfers, for each device of a host or for each host; see
    `transfer_seconds`.
    """
    sizes, seconds = [], []
    for operator, key, measurement in rows:
        # Transfers go from one half of the devices to the other, each on a lane of its own.
        half = key.num_devices // 2
        if (
            operator.kind == TRANSFER
            and (key.num_devices > cluster.devices_per_host) is crosses_hosts
        ):
            lanes = max(half // cluster.devices_per_host, 1) if crosses_hosts else half
            sizes.append(operator.sizes[0] / lanes)
            seconds.append(measurement.seconds)
    if len(set(sizes)) < 2:
        return None
    per_byte, latency_s = fit_line(np.array(sizes), np.array(seconds))
    return Link(latency_s=latency_s, bandwidth_bytes_per_s=1 / per_byte)


def fit_line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Slope and start of the line of least relative error, both at least 0."""
    from scipy.optimize import least_squares

    # Fitted by logarithms, which keeps both figures above 0.
    start = np.log([seconds.max() / sizes.max(), seconds.min()])
    found = least_squares(
        lambda line: (np.exp(line[0]) * sizes + np.exp(line[1])) / seconds - 1,
        start,
        loss="soft_l1",
    )
    return float(np.exp(found.x[0])), float(np.exp(found.x[1]))


def modelled_operator(
    operator: Operator, key: ProgramKey, cluster: Cluster
) -> tuple[str, Floats, float]:
    """Table and point of an operator, and what the cost model of a cluster says of it, in
    seconds.
    """
    if operator.kind in COLLECTIVES:
        part = part_of(cluster, key.num_devices) or cluster
        mesh = LogicalMesh(shape=tuple(int(size) for size in key.mesh.split("x")), cluster=part)
        (num_bytes,) = operator.sizes
        latency, per_byte = collective_line(
            operator.kind, operator.axes, mesh, target_for(cluster.device)
        )
        crosses = mesh.link(tuple(mesh.axis_names[axis] for axis in operator.axes)).crosses_hosts
        points = collective_points(np.array([float(num_bytes)]), operator.axes, mesh)
        return collective_kind(operator.kind, crosses), points[0], latency + per_byte * num_bytes
    work = _work(operator)
    mesh = LogicalMesh(shape=(cluster.num_devices,), cluster=cluster)
    seconds = float(work_seconds(work, operator.sizes, _WHOLE, mesh, target_for(cluster.device))[0])
    table = f"product {operator.dtype}" if operator.kind == "product" else "traffic"
    return table, np.log2(np.array(operator.sizes, np.float64)), seconds


_WHOLE = np.array([[-1]], np.int64)


def _work(operator: Operator) -> Work:
    """An operator as a step's node states it, of which nothing is split."""
    if operator.kind != "product":
        return Work(
            phase=Phase.FORWARD,
            split_by=(),
            arrays=((float(operator.sizes[0]), (False,)),),
            kernels=1.0,
        )
    batch, rows, columns, depth = operator.sizes
    bytes_each = float(item_bytes(operator.dtype))
    # Factors: products, rows, columns, and what is summed over.
    left, right, result = (
        (True, True, False, True),
        (True, False, True, True),
        (True, True, True, False),
    )
    return Work(
        phase=Phase.FORWARD,
        split_by=(True, True, True, True),
        flops=2.0 * batch * rows * columns * depth,
        dtype=operator.dtype,
        arrays=(
            (bytes_each * batch * rows * depth, left),
            (bytes_each * batch * depth * columns, right),
            (bytes_each * batch * rows * columns, result),
        ),
        kernels=1.0,
    )


def is_measured(operator: Operator, mesh_shape: tuple[int, ...], cluster: Cluster) -> bool:
    """True if a cluster's measurements hold an operator of about this size."""
    if operator == LAUNCH or cluster.measured is None:
        return operator == LAUNCH
    if operator.kind == TRANSFER:
        return (
            cluster.measured.transfer_link(math.prod(mesh_shape) > cluster.devices_per_host)
            is not None
        )
    key = ProgramKey(
        program=str(operator),
        device="",
        num_devices=math.prod(mesh_shape),
        mesh="x".join(map(str, mesh_shape)),
        jax_version="",
    )
    table, point, seconds = modelled_operator(operator, key, replace(cluster, measured=None))
    return bool(cluster.measured.correct(table, point[None], np.array([seconds])).is_measured[0])


def part_of(cluster: Cluster, num_devices: int) -> Cluster | None:
    """So many devices of a cluster: of one host, or of several whole ones; None if there are none
    such.
    """
    per_host = cluster.devices_per_host
    if num_devices > cluster.num_devices or (num_devices > per_host and num_devices % per_host):
        return None
    return subcluster(cluster, (max(1, num_devices // per_host), min(num_devices, per_host)))


def _tables(corrected: Iterable[_Entry]) -> dict[str, RatioTable]:
    """Tables of points, each once: of several measurements of one point the mean.

    Where all devices were measured together, what one of them measured alone is left out.
    """
    found: defaultdict[str, list[_Entry]] = defaultdict(list)
    for entry in corrected:
        found[entry.table].append(entry)
    tables = {}
    for table, entries in sorted(found.items()):
        grade = MEASURED if any(entry.grade == MEASURED for entry in entries) else MEASURED_COMPUTE
        by_point: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        for entry in entries:
            if entry.grade == grade:
                # Points are computed, and equal ones may differ in the last digits.
                by_point[np.round(entry.point, 9).tobytes()].append(entry)
        some = [by_point[key] for key in sorted(by_point)]
        tables[table] = RatioTable(
            points=np.stack([same[0].point for same in some]),
            ratios=np.array(
                [np.exp(np.mean([np.log(each.ratio) for each in same])) for same in some]
            ),
            spreads=np.array([max(each.spread for each in same) for same in some]),
            grade=grade,
        )
    return tables
