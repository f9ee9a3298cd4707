"""Memory per device over the course of a step, linear in the choices.

Three kinds of residents: inputs (the whole step), stored arrays (from making to last use), and copies of arrays in
another split for products. All copies of one array live from the first to the last product that reads it converted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..sharding import NodeGraph, Resident, num_shards
from ._choices import shards
from ._priced import Floats, Ints, Priced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """An array held in a second split because of an edge: local bytes of each conversion `(sources, targets)`."""

    share: int
    edges: tuple[int, ...]
    local_bytes: tuple[Floats, ...]
    births: Ints
    deaths: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryModel:
    """Residents and conversions of a priced problem. `local_bytes[r][k]`: resident `r` under choice `k` of its node."""

    num_times: int
    residents: tuple[Resident, ...]
    local_bytes: tuple[Floats, ...]
    conversions: tuple[Conversion, ...]


def memory_model(priced: Priced) -> MemoryModel:
    """Collect what takes memory in a priced problem."""
    graph = priced.graph
    local = []
    for r in graph.residents:
        if r.node < 0:
            local.append(np.array([float(r.num_bytes)]))
            continue
        split_by = tuple(dim >= 0 for dim in r.projection)
        local.append(r.num_bytes / shards(priced.nodes[r.node].choices, split_by, priced.axis_sizes))
    residents = graph.residents
    if priced.repeats > 1:
        # Gradients are summed over micro-batches in buffers that live as long as the step.
        residents = tuple(_held(r, graph) if r.category == "gradients" else r for r in residents)
    return MemoryModel(
        num_times=graph.num_ops + 1,
        residents=residents,
        local_bytes=tuple(local),
        conversions=tuple(_conversions(priced)),
    )


def _held(r: Resident, graph: NodeGraph) -> Resident:
    return Resident(
        node=r.node,
        projection=r.projection,
        num_bytes=r.num_bytes,
        category=r.category,
        label=r.label,
        births=np.zeros_like(r.births),
        deaths=r.deaths,
    )


def _conversions(priced: Priced) -> list[Conversion]:
    """One entry for each set of edges that share their conversions."""
    graph = priced.graph
    by_share: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.kind == "operand":
            by_share.setdefault(edge.share, []).append(edge.index)
    found = []
    for share, indices in by_share.items():
        edges = [graph.edges[i] for i in indices]
        same = all(len(e.starts) == len(edges[0].starts) for e in edges)
        births = np.minimum.reduce([e.starts for e in edges]) if same else edges[0].starts
        deaths = np.maximum.reduce([e.ends for e in edges]) if same else edges[0].ends
        tables = []
        for i in indices:
            p = priced.edges[i]
            local = [graph.edges[i].num_bytes / num_shards(target, priced.axis_sizes) for target in p.targets]
            table = np.where(p.moves, np.array(local), 0.0)
            tables.append(table)
        if any(t.any() for t in tables):
            found.append(
                Conversion(share=share, edges=tuple(indices), local_bytes=tuple(tables), births=births, deaths=deaths)
            )
    return found


def timeline(model: MemoryModel, priced: Priced, picks: NDArray[np.int64]) -> Floats:
    """Bytes on each device while each operator runs. `picks[n]` is the choice of node `n`."""
    change = np.zeros(model.num_times + 1)
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        num_bytes = local[picks[r.node]] if r.node >= 0 else local[0]
        np.add.at(change, r.births, num_bytes)
        np.subtract.at(change, r.deaths + 1, num_bytes)
    for conversion, num_bytes in converted(model, priced, picks):
        np.add.at(change, conversion.births, num_bytes)
        np.subtract.at(change, conversion.deaths + 1, num_bytes)
    return np.cumsum(change)[:-1]


def converted(model: MemoryModel, priced: Priced, picks: NDArray[np.int64]) -> list[tuple[Conversion, float]]:
    """The conversions that choices cause, each with its bytes."""
    found = []
    for conversion in model.conversions:
        distinct = {}
        for i, table in zip(conversion.edges, conversion.local_bytes, strict=True):
            edge, p = priced.graph.edges[i], priced.edges[i]
            s, t = p.source_index[picks[edge.source]], p.target_index[picks[edge.target]]
            distinct[p.sources[s], p.targets[t]] = float(table[s, t])
        total = sum(distinct.values())
        if total:
            found.append((conversion, total))
    return found
