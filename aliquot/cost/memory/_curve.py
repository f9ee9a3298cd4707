"""Memory over the course of a step, by part, as plans show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...graph import Graph
from ...plans import MemoryCurve
from ._model import Conversion, MemoryModel, alive_over_time, converted
from ._residents import Resident

if TYPE_CHECKING:
    from .._priced import Ints, Priced

_MOST_MOMENTS = 96


def memory_over_time(
    model: MemoryModel, priced: Priced, picks: Ints, graph: Graph
) -> MemoryCurve | None:
    """Bytes on each device by part, at about a hundred moments of the step; None for a step without
    operators.

    The operators are cut into stretches of equal length, and each stretch is shown at the moment of
    its highest total, so that the highest point of the curve is the predicted peak.
    """
    num_ops = len(graph.ops)
    if not num_ops:
        return None
    categories: dict[str, list[tuple[Resident | Conversion, float]]] = {}
    for resident, local in zip(model.residents, model.local_bytes, strict=True):
        num_bytes = float(local[picks[resident.node]] if resident.node >= 0 else local[0])
        categories.setdefault(resident.category, []).append((resident, num_bytes))
    categories.setdefault("resharded copies", []).extend(converted(model, priced, picks))
    use = {name: alive_over_time(parts, model.num_times) for name, parts in categories.items()}
    # Stretches of equally many operators. Bounds that coincide, in short steps, are merged.
    total = np.sum(list(use.values()), axis=0)
    bounds = np.unique(np.linspace(0, model.num_times, _MOST_MOMENTS + 1).round().astype(np.int64))
    moments = [
        first + int(np.argmax(total[first:last]))
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    # Rounding errors of long sums leave fractions of a byte where nothing is held.
    shown = {name: np.maximum(values[moments], 0.0).round(3) for name, values in use.items()}
    return MemoryCurve(
        phases=tuple(graph.ops[min(moment, num_ops - 1)].phase.name.lower() for moment in moments),
        # The largest part first, so that it lies at the bottom of a drawing.
        parts={
            name: tuple(values.tolist())
            for name, values in sorted(shown.items(), key=lambda item: (-item[1].max(), item[0]))
            if values.any()
        },
    )
