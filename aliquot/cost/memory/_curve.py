"""Memory over the course of a step, by part, as plans show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...graph import Graph, Phase
from ...plans import MemoryCurve
from ...sharding import dim_rule
from ._model import Conversion, MemoryUse, alive_over_time
from ._residents import Resident

if TYPE_CHECKING:
    from .._picked import Picked
    from .._priced import Floats

_MOST_MOMENTS = 96


def memory_over_time(
    memory: MemoryUse, picked: Picked, graph: Graph, step_time_s: float
) -> MemoryCurve | None:
    """Bytes on each device by part, at about a hundred moments of the step; None for a step without
    operators.

    The operators are cut into stretches of equal time, and each stretch is shown at the moment of
    its highest total, so that the highest point of the curve is the predicted peak.

    Args:
        step_time_s: the predicted time of the step, over which its operators are spread.
    """
    num_ops = len(graph.ops)
    if not num_ops:
        return None
    categories: dict[str, list[tuple[Resident | Conversion, float]]] = {}
    for array, num_bytes in memory.arrays:
        categories.setdefault(array.category, []).append((array, num_bytes))
    use = {name: alive_over_time(parts, memory.num_times) for name, parts in categories.items()}
    # Stretches of equal time. Bounds that coincide, where operators take longer, are merged.
    total = np.sum(list(use.values()), axis=0)
    starts_s = _starts_s(picked, graph, step_time_s)
    evenly_s = np.linspace(0, step_time_s, _MOST_MOMENTS + 1)[1:-1]
    inner = np.searchsorted(starts_s, evenly_s)
    bounds = np.unique(np.concatenate([[0], inner, [memory.num_times]]))
    moments = [
        first + int(np.argmax(total[first:last]))
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    # Rounding errors of long sums leave fractions of a byte where nothing is held.
    shown = {name: np.maximum(values[moments], 0.0).round(3) for name, values in use.items()}
    places_s = [float(second) for second in starts_s[moments]]
    # The first and the last stretch are drawn to the ends of the step.
    return MemoryCurve(
        seconds=(0.0, *places_s[1:-1], step_time_s)[: len(moments)],
        phases=tuple(graph.ops[min(moment, num_ops - 1)].phase.name.lower() for moment in moments),
        # The largest part first, so that it lies at the bottom of a drawing.
        parts={
            name: tuple(values.tolist())
            for name, values in sorted(shown.items(), key=lambda item: (-item[1].max(), item[0]))
            if values.any()
        },
    )


def _starts_s(picked: Picked, graph: Graph, step_time_s: float) -> Floats:
    """When each operator begins: the step's time, spread over its operators as compute is.

    The seconds of the products of a phase are shared by their arithmetic, those of all else by the
    bytes that it writes; collectives that are not hidden are spread over all.
    """
    weights, priced = np.zeros(len(graph.ops)), picked.priced
    kinds = np.zeros(len(graph.ops), dtype=np.int64)
    flops: dict[int, float] = {}
    for op, op_class in zip(graph.ops, priced.graph.op_class, strict=True):
        if op_class not in flops:
            rule = dim_rule(op, graph, on_missing_rule=priced.graph.on_missing_rule)
            flops[op_class] = rule.flops if rule.contracts else 0.0
        written = sum(graph.values[out].num_bytes for out in op.outputs if out >= 0)
        weights[op.index] = (flops[op_class] or float(written)) * op.trips
        kinds[op.index] = 2 * op.phase + bool(flops[op_class])
    seconds = np.zeros(2 * len(Phase))
    for node, (table, pick) in zip(priced.graph.nodes, picked.rows(), strict=True):
        for phase in Phase:
            seconds[2 * phase + node.multiplies] += table.compute[phase, pick]
    for kind, kind_s in enumerate(seconds):
        of_kind = weights[kinds == kind]
        weights[kinds == kind] = of_kind * kind_s / of_kind.sum() if of_kind.sum() else 0.0
    ends = np.cumsum(weights)
    starts = np.concatenate([[0.0], ends])
    return starts * (step_time_s / ends[-1] if ends[-1] else 0.0)
