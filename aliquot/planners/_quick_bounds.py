"""Bounds on the time and the memory of a step that need no search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster import LogicalMesh, subcluster
from ..cost import MeshUse, Problem, alive_over_time, least_timeline, price, residents_model

# A program is ruled out only if the lower bound on its memory is 10 % above the limit, because a
# compiler may hold less with larger micro-batches.
_MEMORY_MARGIN = 1.1


def cannot_fit(problem: Problem) -> bool:
    """True if the arrays that are alive at once are too large even if all devices share them
    evenly.
    """
    # No split leaves less on a device than an even share.
    parts = [(r, r.num_bytes) for r in problem.residents]
    least_bytes = (
        float(alive_over_time(parts, problem.nodes.num_ops + 1).max()) / problem.cluster.num_devices
    )
    return least_bytes > _MEMORY_MARGIN * problem.memory_limit_bytes


def never_fits(
    problem: Problem,
    use: MeshUse,
    choices: Sequence[NDArray[np.int64]],
    allowed: Sequence[NDArray[np.bool_]],
) -> bool:
    """True if at some moment the arrays exceed the memory limit even if each is as small as any
    allowed choice of its node makes it. Nothing need be priced for that.

    Args:
        choices, allowed: for each node, `(choices, axes)` and a mask of those.
    """
    model = residents_model(
        problem.residents,
        problem.nodes,
        choices,
        use.under(problem.semantics),
        repeats=problem.num_micro_batches,
    )
    least_bytes = least_timeline(model, [np.flatnonzero(mask) for mask in allowed])
    return float(least_bytes.max()) > problem.memory_limit_bytes * (1 + 1e-9)


def least_compute_s(problem: Problem) -> float:
    """A lower bound on the step time of all plans with at least the problem's number of
    micro-batches, in seconds: the compute of all operators unsplit on one device, where they are
    most efficient, divided by the number of devices; no communication.
    """
    cluster = subcluster(problem.cluster, (1, 1))
    mesh = LogicalMesh(shape=(1,), axis_names=("x",), cluster=cluster)
    priced = price(problem, mesh, repeats=problem.num_micro_batches)
    return sum(float(node.compute_s.min()) for node in priced.nodes) / problem.cluster.num_devices


def is_too_large(problem: Problem, count: int) -> bool:
    """True if a lower bound on memory shows that no split of the step with `count` micro-batches
    fits, which may be more or fewer than the problem has.

    The bound gives every array the live range that it has in the problem and splits it over all
    devices. For a single micro-batch the answer is always False, because that is another program,
    without gradient accumulators.
    """
    if count in (1, problem.num_micro_batches):
        return False
    nodes = problem.nodes
    sizes = problem.graph.batch_sizes
    # Factors that the batch's size divides grow with a larger micro-batch.
    batch_factors = []
    for node, factors in zip(nodes.nodes, nodes.batch_factors, strict=True):
        batch_factors.append({f for f in factors if sizes and node.factors[f].size % sizes[0] == 0})
    growth = problem.num_micro_batches / count
    live_ranges = []
    for r in problem.residents:
        holds_batch = r.node >= 0 and any(r.projection[f] >= 0 for f in batch_factors[r.node])
        live_ranges.append((r, r.num_bytes * (growth if holds_batch else 1.0)))
    least_bytes = (
        float(alive_over_time(live_ranges, nodes.num_ops + 1).max()) / problem.cluster.num_devices
    )
    return least_bytes > _MEMORY_MARGIN * problem.memory_limit_bytes
