"""Corrections of the cost model, made from measured operators; planners price with them."""

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
# An operator that takes less than this share of a program's launch cannot be told apart from it,
# and keeps its modelled time.
_LEAST_OF_LAUNCH = 0.25


PLAN_ANYWAY = "To plan from these as they are, give --profiles-of-any (profiles_of_any=True)."


def read_measured(database: ProfileDatabase, cluster: Cluster, *, of_any: bool = False) -> Measured:
    """Read a database's measurements of a cluster's devices with this release of JAX into a frozen
    value. Touches no device.

    Args:
        of_any: also take measurements with other releases of JAX and on other kinds of devices.

    Raises:
        InputError: it holds no operators, or only those of other devices or releases.
    """
    fitting, devices = fitting_rows(database, cluster, of_any=of_any)
    # Several measurements of one point are averaged. If a table has measurements of all
    # devices together, those of one device alone are left out.
    found: defaultdict[str, list[_Entry]] = defaultdict(list)
    for entry in _correct_rows(fitting, cluster):
        found[entry.table].append(entry)
    tables = {}
    for table, entries in sorted(found.items()):
        grade = MEASURED if any(entry.grade == MEASURED for entry in entries) else MEASURED_COMPUTE
        by_point: defaultdict[bytes, list[_Entry]] = defaultdict(list)
        for entry in entries:
            if entry.grade == grade:
                # Points are computed, and equal ones may differ in the last digits.
                by_point[np.round(entry.point, 9).tobytes()].append(entry)
        ratios, spreads = [], []
        some = [by_point[key] for key in sorted(by_point)]
        for same in some:
            ratios.append(np.exp(np.mean([np.log(each.ratio) for each in same])))
            spreads.append(max(each.spread for each in same))
        tables[table] = RatioTable(
            points=np.stack([same[0].point for same in some]),
            ratios=np.array(ratios),
            spreads=np.array(spreads),
            grade=grade,
        )
    links = {crosses: _transfer_link(fitting, cluster, crosses) for crosses in (False, True)}
    transfers = {crosses: link for crosses, link in links.items() if link is not None}
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
    """The measured operators that apply to a cluster's devices, and the devices that they were
    measured on, in words. Raises as `read_measured` does.

    Args:
        advice: sentence for the error that says what else to do if no operator was measured on such
            devices.
    """
    rows = []
    for key, measurement in database.rows():
        operator = Operator.parse(key.program)
        if operator is not None and measurement.seconds is not None:
            rows.append((operator, key, measurement))
    if not rows:
        raise InputError(
            f"{database.path} holds no measured operators. Measure some: aliquot profile run MODEL"
            f" --database {database.path}"
        )
    fitting = [row for row in rows if of_any or _fits(row[1], row[2].grade, cluster)]
    if not fitting:
        hosts = f"{cluster.num_hosts} hosts x " if cluster.num_hosts > 1 else ""
        device = host_device() if cluster.device.kind == "cpu" else cluster.device.name
        raise InputError(
            f"{database.path} holds measurements of {_devices_of(rows)}, and none of"
            f" {hosts}{cluster.devices_per_host} x {device} with JAX {jax.__version__}, which is"
            f" asked for. Measure there: aliquot profile run. {advice}"
        )
    return fitting, _devices_of(fitting)


def _devices_of(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({f"{key.devices} with JAX {key.jax_version}" for _, key, _ in rows}))


def _fits(key: ProgramKey, grade: str, cluster: Cluster) -> bool:
    """True if a measurement applies to a cluster's devices. Virtual CPU devices share the cores of
    their host, so all of a host must have run, unless one device stands for many; accelerators
    compute independently of each other.
    """
    if key.jax_version != jax.__version__:
        return False
    if cluster.device.kind == "cpu":
        stands_for_many = grade == MEASURED_COMPUTE
        return key.device == host_device() and (
            (
                key.num_devices == key.num_hosts * cluster.devices_per_host
                and key.num_hosts <= cluster.num_hosts
            )
            or stands_for_many
        )
    kind = key.device
    name = cluster.device.name
    try:
        return catalogue_name(kind) == name
    except ClusterError:
        return kind == name


def without_launch(row: Row, rows: Iterable[Row]) -> float | None:
    """Seconds of an operator inside a larger program, without a launch; None for the launch itself
    and for operators so short that the launch hides them.

    Args:
        rows: measurements that include those of launches.
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
    """A measurement in its table: its point, the ratio of measured to modelled time, its spread and
    its grade.
    """

    table: str
    point: Floats
    ratio: float
    spread: float
    grade: str


def _correct_rows(rows: Sequence[Row], cluster: Cluster) -> Iterator[_Entry]:
    """Table entries of all measurements that are not hidden by the launch of a program."""
    plain, launches = replace(cluster, measured=None), [row for row in rows if row[0] == LAUNCH]
    for row in rows:
        operator, key, measurement = row
        if operator.kind == TRANSFER:
            continue
        if operator.kind in COLLECTIVES:
            part = part_of(plain, key.num_devices)
            if part is None or part.num_hosts != key.num_hosts:
                continue
        seconds = without_launch(row, launches)
        if seconds is not None:
            # Ratios carry over to sizes that were not measured; seconds would not.
            table, point, modelled_s = modelled_operator(operator, key, plain)
            # If one device ran alone, it says nothing about several that run at the same time.
            is_alone = key.num_devices == 1 < cluster.num_devices
            grade = MEASURED_COMPUTE if is_alone else measurement.grade
            yield _Entry(table, point, seconds / modelled_s, measurement.spread, grade)


def _transfer_link(rows: Sequence[Row], cluster: Cluster, crosses_hosts: bool) -> Link | None:
    """The link that a line through the measured transfers gives: of each device in its host, or of
    each host; None with fewer than two sizes. See `transfer_seconds`.
    """
    sizes, seconds = [], []
    for operator, key, measurement in rows:
        # A transfer goes from one half of the devices to the other over parallel lanes: one for
        # each device of the half or, between hosts, for each host of the half.
        half = key.num_devices // 2
        if (
            operator.kind == TRANSFER
            and (key.num_hosts > 1) is crosses_hosts
            and key.num_devices <= key.num_hosts * cluster.devices_per_host
        ):
            lanes = max(key.num_hosts // 2, 1) if crosses_hosts else half
            sizes.append(operator.sizes[0] / lanes)
            seconds.append(measurement.seconds)
    if len(set(sizes)) < 2:
        return None
    per_byte, latency_s = fit_line(np.array(sizes), np.array(seconds))
    return Link(latency_s=latency_s, bandwidth_bytes_per_s=1 / per_byte)


def fit_line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    """Slope and intercept, neither negative, of the line with the least relative error."""
    from scipy.optimize import least_squares

    # Logarithms of both are fitted, which keeps them above 0.
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
    """The table and the point of an operator, and its seconds by a cluster's cost model where it
    runs alone: products of whole steps are slower, by `Target.sustained_share`.
    """
    if operator.kind in COLLECTIVES:
        part = part_of(cluster, key.num_devices) or cluster
        mesh = LogicalMesh(shape=key.mesh_shape, cluster=part)
        (num_bytes,) = operator.sizes
        latency, per_byte = collective_line(
            operator.kind, operator.axes, mesh, target_for(cluster.device)
        )
        crosses = mesh.link(tuple(mesh.axis_names[axis] for axis in operator.axes)).crosses_hosts
        points = collective_points(np.array([float(num_bytes)]), operator.axes, mesh)
        return collective_kind(operator.kind, crosses), points[0], latency + per_byte * num_bytes
    work = _work(operator)
    mesh = LogicalMesh(shape=(cluster.num_devices,), cluster=cluster)
    target = replace(target_for(cluster.device), sustained_share=1.0)
    seconds = float(work_seconds(work, operator.sizes, _WHOLE, mesh, target)[0])
    table = f"product {operator.dtype}" if operator.kind == "product" else "traffic"
    return table, np.log2(np.array(operator.sizes, np.float64)), seconds


_WHOLE = np.array([[-1]], np.int64)


def _work(operator: Operator) -> Work:
    """The work of an unsplit operator, in the form in which a step's node states it."""
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
    """The part of a cluster with so many devices, in one host or in several whole hosts; None if
    there is no such part.
    """
    per_host = cluster.devices_per_host
    if num_devices > cluster.num_devices or (num_devices > per_host and num_devices % per_host):
        return None
    return subcluster(cluster, (max(1, num_devices // per_host), min(num_devices, per_host)))
