"""Changes with which a step that fits under no plan may fit, computed from the smallest plan that
was found. `aliquot.find_remedies` tries them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..core import divisors, format_bytes
from ..cost import Conversion, Picked, Problem, Resident, alive_over_time
from ..graph import Role
from ._counts import MOST_MICRO_BATCHES, batch_size
from ._quick_bounds import cannot_fit
from .intra import Space, TooLarge

_MOST_TIMES = 64


class _Part(NamedTuple):
    """Arrays in the memory of a device.

    Attributes:
        holds_batch: whether they are smaller with more micro-batches.
        is_split: whether the mesh axis that more devices lengthen splits them, so that each holds
            less of them.
    """

    alive: Resident | Conversion
    num_bytes: float
    holds_batch: bool
    is_split: bool


def what_may_fit(
    problem: Problem,
    picked: Picked,
    spaces: Sequence[Space | TooLarge],
    growing_axis: int,
) -> tuple[list[str], str]:
    """Changes with which the step may fit, the smallest first, and a line that is empty unless
    neither more micro-batches nor more devices help.

    More micro-batches and more devices are named, with their number, if the smallest plan that was
    found fits in them with the splits that it has: arrays that hold the batch shrink with the
    micro-batches, arrays that the growing mesh axis splits with the devices, and no others.

    Args:
        picked: the smallest plan.
        spaces: all in which plans were looked for.
        growing_axis: the mesh axis that more devices lengthen.
    """
    parts, limit_bytes = _parts(picked, growing_axis), problem.memory_limit_bytes
    times = problem.nodes.num_ops + 1

    def needed_bytes(of_batch: float, of_split: float, more: float = 0.0) -> float:
        kept = []
        for p in parts:
            size = p.num_bytes * (of_batch if p.holds_batch else 1.0)
            kept.append((p.alive, size * (of_split if p.is_split else 1.0)))
        return float(alive_over_time(kept, times).max()) + more

    now, devices = problem.num_micro_batches, problem.cluster.num_devices
    rows = batch_size(problem.graph)
    splits_parameters = any(_can_split(problem, space, Role.PARAMETER) for space in spaces)
    splits_state = any(_can_split(problem, space, Role.OPTIMIZER_STATE) for space in spaces)
    # With the first further micro-batch sums of gradients are kept.
    sums = 0.0
    if now == 1:
        parameters = [p for p in parts if getattr(p.alive, "category", "") == "parameters"]
        sums = sum(p.num_bytes for p in parameters)
        if splits_state and not splits_parameters:
            sums /= devices
    advice = []
    # Each micro-batch is split as far as the batch is now.
    pieces = 1
    for p in parts:
        is_batch = isinstance(p.alive, Resident) and p.alive.category == "batch" and p.holds_batch
        if isinstance(p.alive, Resident) and is_batch and p.num_bytes:
            pieces = max(pieces, round(p.alive.num_bytes / p.num_bytes))
    fewest = None
    for count in divisors(rows * now, most=MOST_MICRO_BATCHES):
        if count <= now or rows * now // count % pieces:
            continue
        if needed_bytes(now / count, 1.0, sums) <= limit_bytes:
            fewest = count
            advice.append(f"{count} micro-batches or more (now {now})")
            break
    may_be_shared = not cannot_fit(problem)
    if may_be_shared and not splits_parameters:
        advice.append("method zero3, shard or auto, which split parameters too")
    times_devices = (2**k for k in range(1, int(math.log2(_MOST_TIMES)) + 1))
    most = next((n for n in times_devices if needed_bytes(1.0, 1 / n) <= limit_bytes), None)
    if most is not None:
        advice.append(f"{devices * most} such devices (now {devices})")
    # Some spaces have fewer choices than operators have.
    leaves_out = not any(all(mask.all() for mask in space.allowed) for space in spaces)
    if may_be_shared and splits_parameters and leaves_out:
        advice.append("method shard or auto, which leave every split open")
    remark = ""
    if fewest is None and most is None:
        whole_bytes = needed_bytes(0.0, 0.0)
        why = f": {format_bytes(whole_bytes)} are whole on each device at once"
        remark = (
            f"\n  With its splits neither smaller micro-batches nor {devices * _MOST_TIMES} such"
            f" devices fit{why if whole_bytes > limit_bytes else ''}."
        )
    return advice, remark


def _parts(picked: Picked, growing_axis: int) -> list[_Part]:
    """All that the devices hold under known choices."""
    nodes, parts = picked.priced.graph, []
    for r, num_bytes in picked.memory.residents:
        if r.node < 0:
            parts.append(_Part(r, num_bytes, r.category == "batch", False))
            continue
        batch = nodes.batch_factors[r.node]
        factor = picked.choices[r.node][growing_axis]
        holds_batch = any(r.projection[f] >= 0 for f in batch)
        is_split = factor >= 0 and r.projection[factor] >= 0
        parts.append(_Part(r, num_bytes, holds_batch, is_split))
    for conversion, num_bytes in picked.memory.conversions:
        edges = [nodes.edges[i] for i in conversion.edges]
        if all(edge.kind == "result" for edge in edges):
            # Operands of products whose sums over devices wait: activations, split as the batch is.
            parts.append(_Part(conversion, num_bytes, True, True))
            continue
        holds_batch = any(
            edge.source_projection[f] >= 0
            for edge in edges
            for f in nodes.batch_factors[edge.source]
        )
        is_split = all(
            picked.priced.edges[i].targets[picked.ends[i][1]][growing_axis] >= 0
            for i in conversion.edges
        )
        parts.append(_Part(conversion, num_bytes, holds_batch, is_split))
    return parts


def _can_split(problem: Problem, space: Space | TooLarge, role: Role) -> bool:
    """True if a space has a choice that splits an array of a role."""
    nodes = set()
    for item, port in zip(problem.graph.inputs, problem.nodes.input_ports, strict=True):
        if item.role is role and port.node >= 0:
            nodes.add(port.node)
    choices = space.choices
    return any((choices[n][space.allowed[n]] >= 0).any() for n in nodes)
