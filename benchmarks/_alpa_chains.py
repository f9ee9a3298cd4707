"""Chains of a case of Alpa's suites as the planner makes them, and what planners answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from _alpa_suite import describe
from _results import say

import aliquot as aq
from aliquot.cluster import target_for
from aliquot.core import AliquotError
from aliquot.cost import Chain, ChainPlan
from aliquot.graph import Layers, cut_alike
from aliquot.planners._counts import counts_to_try
from aliquot.planners._layer_costs import build_chains
from aliquot.planners.inter import Grid, StageDP
from aliquot.sharding import LayeredStep, sketch_step


def make_chains(
    graph: Any, cluster: aq.Cluster, counts: Sequence[int], layers: Layers | str | None = None
) -> tuple[LayeredStep, list[Chain], list[int]]:
    """As the planner makes them: priced at the middle one of the numbers of micro-batches."""
    sketch = sketch_step(
        graph, counts[len(counts) // 2], layers=layers if isinstance(layers, str) else None
    )
    if isinstance(layers, Layers):
        sketch = dataclasses.replace(sketch, layers=cut_alike(layers, sketch.part))
    limit = target_for(cluster.device).usable_bytes(cluster.device)
    return sketch, *build_chains(
        sketch, cluster, intra=aq.ILP(), counts=counts, memory_limit_bytes=limit
    )


def own_counts(graph: Any, cluster: aq.Cluster) -> list[int]:
    """The largest numbers of micro-batches that the planner may try."""
    return [count for group in counts_to_try(graph, cluster) for count in group[-2:]]


def answer(planner: StageDP | Grid, chains: Sequence[Chain]) -> ChainPlan | None:
    try:
        return planner.solve(chains)
    except AliquotError as error:
        say(str(error))
        return None


def described(plan: ChainPlan | None, chain: Chain) -> str:
    return (
        ""
        if plan is None
        else f"{plan.schedule} x {plan.num_micro_batches}: {describe(plan, chain)}"
    )
