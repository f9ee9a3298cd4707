"""The operators to measure before a step can be planned from measurements: all that planners price
for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cluster import AbstractMeasured, Cluster, Corrections, LogicalMesh, target_for
from ..cost import (
    LEAST_MEASURED_BYTES,
    MeshUse,
    PlannedStep,
    Problem,
    collective_kind,
    collective_line,
    collective_points,
    price,
)
from ._measured import part_of
from ._operators import (
    COLLECTIVES,
    LAUNCH,
    TRANSFER,
    Operator,
    collective_operator,
    transfer_operator,
)

_STEP = 4.0
"""Ratio of neighbouring sizes of traffic and of collectives."""
# Sizes of the transfers to measure, in bytes.
_TRANSFERS = (1 << 16, 1 << 20, 1 << 23, 1 << 26)


# Worth, operator and mesh.
_Ranked = tuple[float, Operator, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class _Asked(AbstractMeasured):
    """Measurements that correct nothing, but record what they are asked for: for each kind, the
    points, each with a weight that says how useful its measurement is.

    If an operator may be split in several ways, a split's weight is the time of the fastest, times
    the square of the ratio of the fastest time to its own.
    """

    points: dict[str, dict[tuple[float, ...], float]] = field(default_factory=dict)

    def correct(self, kind: str, points: np.ndarray, seconds: np.ndarray) -> Corrections:
        known, least = self.points.setdefault(kind, {}), float(seconds.min(initial=np.inf))
        for point, each in zip(points.tolist(), seconds.tolist(), strict=True):
            known[tuple(point)] = known.get(tuple(point), 0.0) + (
                least**3 / each**2 if each else 0.0
            )
        return Corrections(
            np.ones(len(points)), np.zeros(len(points), np.bool_), np.zeros(len(points))
        )

    def transfer_link(self, crosses_hosts: bool) -> None:
        return None


def required_operators(
    problem: Problem,
    mesh_shapes: Sequence[tuple[int, ...]],
    *,
    largest_in_host_bytes: float = math.inf,
    largest_between_hosts_bytes: float = math.inf,
) -> list[tuple[Operator, tuple[int, ...]]]:
    """The operators that determine the prices of a problem's choices, each with a mesh to run it
    on.

    Products have the sizes of the problem; for traffic and each collective, neighbouring sizes
    differ by a factor of four. The launch of a program comes first, then products, traffic,
    collectives and transfers in turn, the most useful of each first.

    Args:
        problem: a step.
        mesh_shapes: the meshes that it may be planned on.
        largest_in_host_bytes, largest_between_hosts_bytes: limits on the sizes of collectives and
            transfers.
    """
    asked = _Asked()
    cluster = replace(problem.cluster, measured=asked)
    for shape in mesh_shapes:
        price(problem, LogicalMesh(shape=shape, cluster=cluster), repeats=problem.num_micro_batches)
    return _listed(
        asked,
        mesh_shapes,
        cluster,
        (largest_in_host_bytes, largest_between_hosts_bytes),
        transfers=True,
    )


def alone_on_one_device(
    operators: Sequence[tuple[Operator, tuple[int, ...]]],
) -> list[tuple[Operator, tuple[int, ...]]]:
    """The operators that one device can run alone, with a mesh of one device: all but collectives
    and transfers.

    Their measurements have the grade `MEASURED_COMPUTE`.
    """
    return list(
        dict.fromkeys((op, (1,)) for op, _ in operators if not op.axes and op.kind != TRANSFER)
    )


def operators_of_plan(planned: PlannedStep) -> list[tuple[Operator, tuple[int, ...]]]:
    """The operators that determine a plan's prediction, as `required_operators` lists them.

    The stages of a pipeline run at the same time, so their products are measured on all devices at
    once; their collectives are measured on the devices of one stage.
    """
    asked = _Asked()
    shapes: dict[tuple[int, ...], None] = {}
    whole = Cluster.from_dict(planned.plan.cluster)
    for stage, of_plan in zip(planned.stages, planned.plan.stages, strict=True):
        cluster = replace(stage.problem.cluster, measured=asked)
        shapes[of_plan.mesh_shape] = None
        price(
            stage.problem,
            MeshUse.of_stage(of_plan, cluster),
            repeats=stage.problem.num_micro_batches,
            choices=[np.array([choice], np.int64) for choice in stage.choices],
        )
    is_pipeline = planned.layered is not None
    return _listed(asked, list(shapes), whole, (math.inf, math.inf), transfers=is_pipeline)


def _listed(
    asked: _Asked,
    mesh_shapes: Sequence[tuple[int, ...]],
    cluster: Cluster,
    limits: tuple[float, float],
    *,
    transfers: bool,
) -> list[tuple[Operator, tuple[int, ...]]]:
    """The launch of a program, and then the operators that were asked for, as `required_operators`
    orders them.
    """
    alone = (cluster.num_devices,)
    products: list[_Ranked] = []
    for kind, points in asked.points.items():
        name, _, dtype = kind.partition(" ")
        for point, worth in points.items() if name == "product" else ():
            sizes = tuple(round(2**log) for log in point)
            if min(sizes) >= 1:
                products.append((worth, Operator("product", dtype, sizes), alone))
    traffic: list[_Ranked] = []
    logs = [point[0] for point in asked.points.get("traffic", {})]
    for size in _sizes(min(logs), max(logs)) if logs else ():
        traffic.append((float(size), Operator("traffic", "float32", (size,)), alone))
    collectives: list[_Ranked] = []
    for shape in mesh_shapes:
        for worth, operator in _collectives(asked, shape, cluster, limits):
            collectives.append((worth, operator, shape))
    moves = _transfers(cluster, limits) if transfers else []
    found = [products, traffic, collectives, moves]
    for some in found:
        some.sort(key=lambda each: (-each[0], str(each[1]), each[2]))
    in_turn = filter(None, itertools.chain(*itertools.zip_longest(*found)))
    unique = {(str(operator), shape): (operator, shape) for _, operator, shape in in_turn}
    return [(LAUNCH, alone), *unique.values()]


def _collectives(
    asked: _Asked, shape: tuple[int, ...], cluster: Cluster, limits: tuple[float, float]
) -> list[tuple[float, Operator]]:
    """Collectives along every set of axes of a mesh, over the range of sizes that were asked for,
    each with its modelled seconds.
    """
    part = part_of(replace(cluster, measured=None), math.prod(shape))
    if part is None:
        return []
    mesh, target = LogicalMesh(shape=shape, cluster=part), target_for(cluster.device)
    found = []
    for count, kind in itertools.product(range(1, len(shape) + 1), COLLECTIVES):
        for axes in itertools.combinations(range(len(shape)), count):
            if math.prod(shape[axis] for axis in axes) == 1:
                continue
            crosses = mesh.link(tuple(mesh.axis_names[axis] for axis in axes)).crosses_hosts
            points = asked.points.get(collective_kind(kind, crosses), {})
            group = collective_points(np.ones(1), axes, mesh)[0, :2].tolist()
            logs = [point[2] for point in points if list(point[:2]) == group]
            if not logs:
                continue
            line = collective_line(kind, axes, mesh, target)
            for size in _sizes(min(logs), max(logs)):
                operator = collective_operator(kind, shape, axes, size)
                if operator.sizes[0] <= limits[crosses]:
                    found.append((line[0] + line[1] * operator.sizes[0], operator))
    return found


def _transfers(cluster: Cluster, limits: tuple[float, float]) -> list[_Ranked]:
    """Transfers from one half of all devices, and of those of a host, to the other, each with its
    size and mesh.
    """
    # Between the hosts, and within one.
    counts = dict.fromkeys((cluster.num_devices, cluster.devices_per_host))
    found: list[_Ranked] = []
    for count in counts:
        for size in _TRANSFERS:
            if count % 2 == 0 and size <= limits[count > cluster.devices_per_host]:
                found.append((float(size), transfer_operator(size, count), (count,)))
    return found


def _sizes(least_log: float, largest_log: float) -> list[int]:
    """Sizes in bytes, each four times the one before, that cover the range between two powers of
    two, given by their logarithms.
    """
    first = max(2.0**least_log, LEAST_MEASURED_BYTES)
    count = math.ceil(max(largest_log - math.log2(first), 0.0) / math.log2(_STEP)) + 1
    return [round(first * _STEP**k) for k in range(count)]
