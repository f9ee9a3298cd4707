"""Costs of the layers of a captured step, written out or in a loop, at a number of
micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost import Chain
from ..graph import Layers, scans_over_layers, split_scans, whole_layers
from ..sharding import LayeredStep, sketch_step
from ._base import Task
from ._helper import HelperProcess
from ._layer_costs import LayerCosts, solve_layers
from .intra import AbstractIntra


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayers:
    """Layers of a step with their costs at a number of micro-batches.

    Attributes:
        chains: the chain of that number first, then those of other numbers, scaled from it.
        kinds: for each unit, the number of its kind.
        length: iterations of the loop over layers, each of them a unit; 0 if there is no loop.
        costs: the costs of each kind of layer, from which the chains are made.
    """

    sketch: LayeredStep
    costs: LayerCosts
    chains: Sequence[Chain]
    kinds: Sequence[int]
    length: int

    @property
    def least_compute_s(self) -> float:
        """Seconds of the layers for a whole batch on a single device, without communication,
        divided by the number of devices.
        """
        return self.costs.least_compute_s / self.costs.cluster.num_devices


def price_layers(
    task: Task,
    counts: Sequence[int],
    *,
    intra: AbstractIntra,
    layers: str | int | Layers | None,
    helper: HelperProcess,
) -> PricedLayers:
    """The layers of a step, priced at the first of some numbers of micro-batches, with chains for
    all of them. The fewest come first, as the largest micro-batch can be split over every submesh.

    Args:
        counts: numbers of micro-batches.
        intra: finds the splits of each layer.
        layers: where stages may be cut; see `PipeshardParallel`; or the layers themselves.
    """
    graph = task.graph
    length = (
        max((scan.length for scan in scans_over_layers(graph) if scan.length > 1), default=0)
        if layers is None
        else 0
    )
    sketched = split_scans(graph, _few_ranges(length)).graph if length else graph
    sketch = sketch_step(
        sketched,
        counts[0],
        layers=layers,
        semantics=task.semantics,
        on_missing_rule=task.on_missing_rule,
    )
    last = len(_few_ranges(length)) - 2
    solve = functools.partial(
        solve_layers,
        cluster=task.cluster,
        intra=intra,
        counts=counts,
        copies=tuple(0 if k == 0 else last if k == length - 1 else 1 for k in range(length)),
        on_missing_rule=task.on_missing_rule,
        recomputes=task.recomputes,
        progress=task.progress,
        helper=helper,
    )
    costs = solve(sketch)
    if sketch.layers.inner:
        whole = solve(replace(sketch, layers=whole_layers(sketch.layers)))
        costs = replace(costs, whole=whole)
    chains = [costs.chain(count, task.limit_bytes) for count in dict.fromkeys(counts)]
    return PricedLayers(sketch=sketch, costs=costs, chains=chains, kinds=costs.kinds, length=length)


def _few_ranges(length: int) -> tuple[int, ...]:
    """Bounds of ranges that single out the first, an inner and the last layer; all other layers
    equal the inner one.
    """
    return tuple(sorted({0, 1, 2, length - 1, length} & set(range(length + 1))))
