"""Time of a collective on some axes of a mesh: latency plus volume.

Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, sections 3 and 4 (ring and recursive-doubling costs); P. Sanders, J.
Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009 (an
all-reduce with logarithmic latency at ring bandwidth, as in NCCL).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..cluster import LogicalMesh, Target, target_for
from ..sharding import Move, Spec, reshard

_WIDE_ITEMSIZE = {"bfloat16": 2.0, "float16": 2.0}


def widening(dtype: str, target: Target, *, total: bool = False) -> float:
    """By how much the bytes of a collective on this dtype grow: in backends that widen it, or in a
    running `total`.

    Totals over micro-batches are kept in single precision at least.
    """
    return _WIDE_ITEMSIZE.get(dtype, 1.0) if total or target.widened_dtypes else 1.0


def collective_line(
    kind: str, axes: Sequence[int], mesh: LogicalMesh, target: Target, group: int | None = None
) -> tuple[float, float]:
    """`(latency_s, seconds_per_byte)` of a collective; the bytes are those that enter it on each
    device.

    Among n devices (all those along the axes, or groups of `group` of them), with bandwidth w and
    latency a per step: all-reduce 2(n-1)/n B/w + 2 ceil(log2 n) a; all-gather (n-1) B/h + (n-1) a;
    reduce-scatter (n-1)/n B/h + (n-1) a; all-to-all (n-1)/n B/w' + (n-1) a; permute B/w + a. The
    targets say what h and w' are of w.
    """
    link = mesh.link(tuple(mesh.axis_names[a] for a in axes))
    n = link.size if group is None else group
    if n == 1:
        return 0.0, 0.0
    share = target.collective_efficiency if link.crosses_hosts else target.collective_share(n)
    bandwidth = link.bandwidth_bytes_per_s * share
    fixed = target.collective_overhead_s
    match kind:
        case "all-reduce":
            return fixed + 2 * math.ceil(math.log2(n)) * link.latency_s, 2 * (n - 1) / n / bandwidth
        case "all-gather":
            return fixed + (n - 1) * link.latency_s, (n - 1) / bandwidth / target.scatter_gather_share
        case "reduce-scatter":
            return fixed + (n - 1) * link.latency_s, (n - 1) / n / bandwidth / target.scatter_gather_share
        case "all-to-all":
            across = link.all_to_all_bandwidth_bytes_per_s * target.all_to_all_efficiency
            return fixed + (n - 1) * link.latency_s, (n - 1) / n / across
        case "collective-permute":
            return fixed + link.latency_s, 1 / bandwidth
    raise AssertionError(f"unknown collective {kind}")


def through_copies(move: Move, source: Spec, wanted: Spec, target: Target) -> bool:
    """True if a step from `source` to `wanted` gathers or scatters a dim that the compiler first
    has to bring in front.
    """
    if not target.copies_inner_dims:
        return False
    match move.kind:
        case "all-gather":
            return any(source[a] > 0 for a in move.axes)
        case "reduce-scatter":
            # All sums are scattered along the dim that the first of them shall split.
            return wanted[move.axes[0]] > 0
    return False


def move_line(move: Move, copies: bool, mesh: LogicalMesh, target: Target) -> tuple[float, float]:
    """`collective_line` of one step of a conversion, with two `copies` around it: of what enters
    and of what leaves.

    Among n devices, B bytes that enter are read and written, and so are the n B that leave a
    gather, or the B/n that leave a reduce-scatter.
    """
    latency, per_byte = collective_line(move.kind, move.axes, mesh, target, move.group)
    if copies:
        latency += 2 * target.kernel_overhead_s
        leaving = 1 / move.group if move.kind == "reduce-scatter" else move.group
        per_byte += 2 * (1 + leaving) / target.memory_bytes_per_s(mesh.cluster.device)
    return latency, per_byte


def resharding_seconds(source: Spec, wanted: Spec, num_bytes: float, mesh: LogicalMesh) -> float:
    """Seconds to bring an array of so many bytes, counted whole, from one split to another; infinite if nothing can."""
    target = target_for(mesh.cluster.device)
    moves = reshard(source, wanted, mesh.shape, target.reduce_scatter)
    if moves is None:
        return math.inf
    lines = [(move, *move_line(move, through_copies(move, source, wanted, target), mesh, target)) for move in moves]
    return sum(latency + per_byte * move.fraction * num_bytes for move, latency, per_byte in lines)
