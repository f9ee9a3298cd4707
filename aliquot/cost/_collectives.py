"""Time of a collective over some axes of a mesh: a latency, plus the bytes over a bandwidth.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, sections 3 and 4 (ring and recursive-doubling costs); P. Sanders, J.
Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009 (an
all-reduce with logarithmic latency at ring bandwidth, as in NCCL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster import Corrections, LogicalMesh, Target, target_for
from ..graph import Phase
from ..sharding import RING, Edge, Move, NodeCollective, Spec, gathered_by_rows, reshard

_WIDE_ITEMSIZE = {"bfloat16": 2.0, "float16": 2.0}


def widening(dtype: str, target: Target, total_dtype: str = "") -> float:
    """Factor by which a collective moves more bytes than its dtype has: 2 for 16-bit floats if the
    backend widens them, or in a running total that the step has in more bits; otherwise 1.

    Totals over micro-batches are accumulated in single precision at least, and rounded to the
    step's own dtype before devices add up theirs.

    Args:
        total_dtype: the dtype in which the step has a running total; empty for all else.
    """
    is_wide = target.widened_dtypes or (total_dtype and total_dtype not in _WIDE_ITEMSIZE)
    return _WIDE_ITEMSIZE.get(dtype, 1.0) if is_wide else 1.0


# Scale of the number of devices and their distance, relative to sizes in bytes, in the points of
# measurements: those with another number of devices count for less than those of another size.
_FAR = 8.0
LEAST_MEASURED_BYTES = 1024.0


def collective_line(
    kind: str,
    axes: Sequence[int],
    mesh: LogicalMesh,
    target: Target,
    group: int | None = None,
    near_bytes: float | None = None,
) -> tuple[float, float]:
    """`(latency_s, seconds_per_byte)` of a collective; the bytes are those that enter it on each
    device.

    Where collectives were measured, the line goes through the measurement at `near_bytes`.

    Among n devices (all those along the axes, or groups of `group` of them), with bandwidth w and
    latency a per step: all-reduce 2(n-1)/n B/w + 2 ceil(log2 n) a; all-gather (n-1) B/h + (n-1) a;
    reduce-scatter (n-1)/n B/h + (n-1) a; all-to-all (n-1)/n B/w' + (n-1) a; permute B/w + a. Here h
    is w times the target's `scatter_gather_share`, and w' the link's bandwidth for all-to-alls
    times the target's efficiency. To each, the target adds a fixed overhead.
    """
    latency, per_byte = _modelled_line(kind, axes, mesh, target, group)
    # A group of one device has neither latency nor bytes to correct.
    if near_bytes is None or mesh.cluster.measured is None or not latency + per_byte:
        return latency, per_byte
    seconds = np.array([latency + per_byte * near_bytes])
    ratio = float(
        collective_corrections(kind, axes, mesh, group, np.array([near_bytes]), seconds).ratios[0]
    )
    return latency * ratio, per_byte * ratio


def in_hops(kind: str, axes: Sequence[int], mesh: LogicalMesh) -> tuple[str, int]:
    """The collective that devices run, and how often: a ring is a permute to each of the others."""
    if kind != RING:
        return kind, 1
    return "collective-permute", math.prod(mesh.shape[a] for a in axes) - 1


def rounded_bytes(num_bytes: float, mesh: LogicalMesh) -> float | None:
    """A size rounded to a power of two, so that conversions of arrays of about the same size share
    one correction.

    None where nothing was measured.
    """
    if mesh.cluster.measured is None:
        return None
    return float(2.0 ** round(math.log2(max(num_bytes, 1.0))))


def collective_kind(kind: str, crosses_hosts: bool) -> str:
    """Name of the table of measurements by which a collective is corrected."""
    return f"{kind} {'between hosts' if crosses_hosts else 'in host'}"


def collective_points(
    num_bytes: NDArray[np.float64], axes: Sequence[int], mesh: LogicalMesh, group: int | None = None
) -> NDArray[np.float64]:
    """Collectives as points of a table of measurements, `(sizes, 3)`: number of devices, distance
    between neighbours, and bytes that enter on each device.
    """
    size = math.prod(mesh.shape[a] for a in axes) if group is None else group
    # Distance matters because devices that are far apart in the mesh use other links.
    stride = math.prod(mesh.shape[max(axes) + 1 :])
    points = np.empty((len(num_bytes), 3))
    points[:, 0], points[:, 1] = _FAR * math.log2(size), _FAR * math.log2(stride)
    points[:, 2] = size_points(num_bytes)
    return points


def size_points(num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sizes as points of a table of measurements: logarithms to base 2, at least that of a
    kibibyte, below which nothing gets faster.
    """
    return np.asarray(np.log2(np.maximum(num_bytes, LEAST_MEASURED_BYTES)), np.float64)


def collective_corrections(
    kind: str,
    axes: Sequence[int],
    mesh: LogicalMesh,
    group: int | None,
    num_bytes: NDArray[np.float64],
    seconds: NDArray[np.float64],
) -> Corrections:
    """Corrections, from measurements, of collectives whose modelled seconds are given. The mesh's
    cluster must hold measurements.
    """
    assert mesh.cluster.measured is not None
    crosses = mesh.link(tuple(mesh.axis_names[a] for a in axes)).crosses_hosts
    points = collective_points(num_bytes, axes, mesh, group)
    return mesh.cluster.measured.correct(collective_kind(kind, crosses), points, seconds)


def _modelled_line(
    kind: str, axes: Sequence[int], mesh: LogicalMesh, target: Target, group: int | None
) -> tuple[float, float]:
    link = mesh.link(tuple(mesh.axis_names[a] for a in axes))
    n = link.size if group is None else group
    if n == 1:
        return 0.0, 0.0
    share = target.collective_efficiency if link.crosses_hosts else target.collective_share(n)
    bandwidth = link.bandwidth_bytes_per_s * share
    fixed = target.collective_overhead_s
    match kind:
        case "all-reduce":
            # Two trees, up and down: latency proportional to their depth, volume of a ring.
            return fixed + 2 * math.ceil(math.log2(n)) * link.latency_s, 2 * (n - 1) / n / bandwidth
        case "all-gather":
            return (
                fixed + (n - 1) * link.latency_s,
                (n - 1) / bandwidth / target.scatter_gather_share,
            )
        case "reduce-scatter":
            return (
                fixed + (n - 1) * link.latency_s,
                (n - 1) / n / bandwidth / target.scatter_gather_share,
            )
        case "all-to-all":
            across = link.all_to_all_bandwidth_bytes_per_s * target.all_to_all_efficiency
            return fixed + (n - 1) * link.latency_s, (n - 1) / n / across
        case "collective-permute":
            return fixed + link.latency_s, 1 / bandwidth
    raise AssertionError(f"unknown collective {kind}")


def combined_share(num_bytes: NDArray[np.float64] | float, target: Target) -> NDArray[np.float64]:
    """Share of a collective's start that an array of `num_bytes` pays: compilers combine the sums
    of gradients, and the gathers of parameters, new ones at the end of a step included, up to a
    threshold of bytes.
    """
    combined_bytes = target.combined_bytes or 1e-9
    return np.asarray(np.minimum(np.asarray(num_bytes) / combined_bytes, 1.0), np.float64)


def pieces(edge: Edge, source: Spec, target: Spec, habits: Target) -> int:
    """Number of parts into which a conversion is cut; they run one after the other."""
    # Only the gathers at the end of a step are cut into rows.
    if edge.kind != "alias" or edge.phase is not Phase.UPDATE:
        return 1
    above = habits.rows_above_bytes
    return (
        edge.length
        if gathered_by_rows(edge.length, edge.rank, edge.num_bytes, source, target, above)
        else 1
    )


def through_copies(move: Move, source: Spec, wanted: Spec, target: Target) -> bool:
    """True if a collective between `source` and `wanted` gathers or scatters a dim that the
    compiler first transposes to the front.
    """
    if not target.copies_inner_dims:
        return False
    match move.kind:
        case "all-gather":
            # Tiles of the first dim are contiguous, and need no copies.
            return any(source[a] > 0 for a in move.axes)
        case "reduce-scatter":
            # All sums are scattered along one dim: that of the first axis. See `spec_after_sums`.
            return wanted[move.axes[0]] > 0
    return False


def move_line(
    move: Move, copies: bool, mesh: LogicalMesh, target: Target, near_bytes: float | None = None
) -> tuple[float, float]:
    """`collective_line` of one move of a conversion of an array of about `near_bytes`; with
    `copies`, including one of what enters the collective and one of what leaves it.

    Among n devices, copies read and write the B bytes that enter, and the n B that leave an
    all-gather or the B/n that leave a reduce-scatter.
    """
    entering = None if near_bytes is None else move.fraction * near_bytes
    latency, per_byte = collective_line(move.kind, move.axes, mesh, target, move.group, entering)
    if copies:
        latency += 2 * target.kernel_overhead_s
        leaving = 1 / move.group if move.kind == "reduce-scatter" else move.group
        per_byte += 2 * (1 + leaving) / target.memory_bytes_per_s(mesh.cluster.device)
    return latency, per_byte


def resharding_seconds(source: Spec, wanted: Spec, num_bytes: float, mesh: LogicalMesh) -> float:
    """Seconds to convert an array of `num_bytes` (of the whole array) from one split to another;
    infinite if no conversion exists.
    """
    target = target_for(mesh.cluster.device)
    moves = reshard(source, wanted, mesh.shape, target.sum_collective)
    if moves is None:
        return math.inf
    near = rounded_bytes(num_bytes, mesh)
    lines = [
        (move, *move_line(move, through_copies(move, source, wanted, target), mesh, target, near))
        for move in moves
    ]
    return sum(latency + per_byte * move.fraction * num_bytes for move, latency, per_byte in lines)


def split_deferred_axes(
    collective: NodeCollective, axes: tuple[int, ...], waiting: frozenset[int]
) -> list[tuple[tuple[int, ...], bool]]:
    """Axes of a node's collective by when it runs: in each micro-batch (False), or once after the
    last (True), as sums of gradients over the axes `waiting` do; see `MeshUse.waits_over`.
    """
    # Only sums of gradients can be deferred; gathered arrays are needed at once.
    if not collective.gradient or collective.kind != "all-reduce":
        return [(axes, False)]
    now = tuple(a for a in axes if a not in waiting)
    deferred = tuple(a for a in axes if a in waiting)
    return [(summed, once) for summed, once in ((now, False), (deferred, True)) if summed]
