"""Levels of selective recomputation: a few sets of products that the backward pass of a stage may
recompute.

The products of each kind of layer are ordered by the bytes that they free per second of repeated
work. A level is a threshold on this ratio, the same for all layers, so that levels of different
layers go together: the first repeats only the products that free most, such as attention scores;
the last repeats all that free anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import subcluster
from ..cost import (
    UNIT_FIGURES,
    Chain,
    Picked,
    Problem,
    Recomputation,
    recomputation,
)
from ..graph import OpId, Phase, stage_layers
from ..sharding import NodeGraph, NodeId, operators_of
from ._layer_costs import ONE_DEVICE, LayerCosts, ops_of_layers, price_option

# With more levels, neighbouring ones hardly differ.
_MOST_LEVELS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecomputeLevels:
    """Levels of selective recomputation.

    Attributes:
        nodes: for each level and each kind of layer, the products that may be repeated.
        step_ops: for each level, the operators of these products in the whole step.
    """

    nodes: Sequence[Sequence[frozenset[NodeId]]]
    step_ops: Sequence[frozenset[OpId]]

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Increment:
    """A step along the order of products: all products up to and including the new ones, and the
    bytes that repeating the new ones frees and the seconds that it takes.
    """

    nodes: frozenset[NodeId]
    freed_bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.freed_bytes / max(self.seconds, 1e-12)


def recompute_levels(costs: LayerCosts) -> RecomputeLevels:
    """Levels for the layers of a step, beginning with the one that repeats least; no levels if
    repeating frees nothing.
    """
    increments = [_increments(costs, kind) for kind in range(len(costs.problems))]
    weighted = []
    # The bytes count once for each layer of the kind.
    for kind, of_kind in enumerate(increments):
        for i in of_kind:
            weighted.append((i.bytes_per_s, i.freed_bytes * list(costs.kinds).count(kind)))
    # Thresholds on the bytes freed per second of repeated work, the highest first, each of which
    # lets about an equal part more of all freeable bytes be freed.
    ordered = sorted(weighted, reverse=True)
    total = sum(freed for _, freed in ordered)
    sums = list(itertools.accumulate(freed for _, freed in ordered))
    least = []
    for part in range(1, _MOST_LEVELS + 1):
        # Rounding errors of the sums must not hide the last level.
        wanted = total * part / _MOST_LEVELS * (1 - 1e-9)
        least += [
            worth for (worth, _), freed in zip(ordered, sums, strict=True) if freed >= wanted
        ][:1]
    least = list(dict.fromkeys(least))
    nodes: list[list[frozenset[NodeId]]] = []
    for threshold in least:
        nodes.append([])
        for of_kind in increments:
            worth_repeating = [i.nodes for i in of_kind if i.bytes_per_s >= threshold]
            nodes[-1].append(max(worth_repeating, key=len, default=frozenset()))
    return RecomputeLevels(nodes=nodes, step_ops=[_step_ops(costs, of_level) for of_level in nodes])


def chain_with_levels(
    costs: LayerCosts, levels: RecomputeLevels, chain: Chain
) -> tuple[Chain, tuple[frozenset[OpId], ...]]:
    """The chain with one more option for each mesh and level; and for each option, the step's
    operators that it may repeat.
    """
    plain = [k for k, option in enumerate(chain.options) if option.recompute == "none"]
    # For each level, the seconds of repeated work and the freed bytes of each kind of layer under
    # each option; 0 where the layer cannot run under it.
    options = [chain.options[k] for k in plain]
    shape = (len(costs.problems), len(options))
    seconds, freed = ([np.zeros(shape) for _ in range(len(levels))] for _ in range(2))
    for kind, problem in enumerate(costs.problems):
        sets = [levels.nodes[level][kind] for level in range(len(levels))]
        for o, option in enumerate(options):
            mesh = option.submesh, option.mesh_shape
            solution = costs.solutions[kind][mesh]
            if solution is None:
                continue
            for level, found in enumerate(_recomputed(costs, problem, mesh, solution.picks, sets)):
                seconds[level][kind, o], freed[level][kind, o] = found.seconds, found.freed_bytes
    options = list(chain.options)
    repeated = [frozenset[OpId]()] * len(options)
    columns = {name: [getattr(chain, name)] for name in UNIT_FIGURES}
    # Repeated work and freed bytes grow in proportion to the micro-batch, as activations do.
    scale = costs.step.num_micro_batches / chain.num_micro_batches
    for level, ops in enumerate(levels.step_ops):
        for option in (chain.options[k] for k in plain):
            name = f"{option.name}, recompute operators ({level + 1})"
            options.append(replace(option, name=name, recompute="operators"))
        repeated += [ops] * len(plain)
        again, less = (figures[level][list(costs.kinds)] * scale for figures in (seconds, freed))
        added = {name: getattr(chain, name)[:, plain] for name in UNIT_FIGURES}
        added["backward_s"] = added["backward_s"] + again
        # Both halves of the backward pass read recomputed arrays, so it is not split and defers
        # nothing.
        nothing_deferred = np.where(np.isfinite(added["backward_s"]), 0.0, np.inf)
        added |= {"weight_gradient_s": nothing_deferred, "deferred_bytes": nothing_deferred}
        # Recomputed arrays exist while a backward pass runs, as working memory does.
        added["recomputed_bytes"] = added["recomputed_bytes"] + less
        added["in_flight_bytes"] = np.maximum(added["in_flight_bytes"] - less, 0.0)
        for name, column in added.items():
            columns[name].append(column)
    joined: dict[str, Any] = {
        name: np.concatenate(parts, axis=1) for name, parts in columns.items()
    }
    return replace(chain, options=tuple(options), **joined), tuple(repeated)


def repeated_nodes(
    nodes: NodeGraph, ops: Sequence[OpId], step_ops: frozenset[OpId]
) -> frozenset[NodeId]:
    """The nodes of a stage whose products may be repeated.

    Args:
        ops: for each operator of the stage, its number in the step.
        step_ops: the operators of the step that may be repeated.
    """
    return frozenset(
        node
        for node in _products(nodes)
        # A node stands for several equal layers, but the first and the last may be priced as kinds
        # of their own. So it counts if at least half of its operators may be repeated.
        if (mine := operators_of(nodes, {node}))
        and 2 * sum(ops[op] in step_ops for op in mine) >= len(mine)
    )


def _products(nodes: NodeGraph) -> list[NodeId]:
    """The nodes of products in the forward pass."""
    return [
        node.index for node in nodes.nodes if node.kind == "product" and node.phase is Phase.FORWARD
    ]


def _increments(costs: LayerCosts, kind: int) -> list[_Increment]:
    """The products of a kind of layer, in increments whose freed bytes per second of repeated work
    fall from one to the next: a convex hull.
    """
    problem = costs.problems[kind]
    # Priced on one device, where nothing is split, so that the order of products does not depend on
    # a mesh.
    solution = costs.solutions[kind].get(ONE_DEVICE)
    if solution is None:
        return []

    products = _products(problem.nodes)
    alone = _recomputed(
        costs, problem, ONE_DEVICE, solution.picks, [frozenset({node}) for node in products]
    )
    worth = {
        node: r.freed_bytes / max(r.seconds, 1e-12) for node, r in zip(products, alone, strict=True)
    }
    order = sorted(products, key=lambda node: (-worth[node], node))
    sets = [frozenset(order[: k + 1]) for k in range(len(order))]
    points = _recomputed(costs, problem, ONE_DEVICE, solution.picks, sets)
    hull: list[_Increment] = []
    reached: list[Recomputation] = [Recomputation()]
    for nodes, point in zip(sets, points, strict=True):
        new = _step(reached[-1], point, nodes)
        # An increment that frees more per second than the one before is merged with it, so that the
        # ratio falls.
        while new.freed_bytes > 0 and hull and new.bytes_per_s >= hull[-1].bytes_per_s:
            hull.pop()
            reached.pop()
            new = _step(reached[-1], point, nodes)
        if new.freed_bytes > 0:
            hull.append(new)
            reached.append(point)
    return hull


def _step(before: Recomputation, after: Recomputation, nodes: frozenset[NodeId]) -> _Increment:
    return _Increment(
        nodes=nodes,
        freed_bytes=after.freed_bytes - before.freed_bytes,
        seconds=after.seconds - before.seconds,
    )


def _step_ops(costs: LayerCosts, nodes: Sequence[frozenset[NodeId]]) -> frozenset[OpId]:
    """The step's operators that belong to the given products of each kind of layer, in all layers
    of the kind.
    """
    staged = stage_layers(costs.step.part, costs.step.layers, range(len(costs.step.layers)))
    by_layer = ops_of_layers(staged)
    found: set[OpId] = set()
    for kind, chosen in enumerate(nodes):
        members = [unit for unit, of in zip(costs.units, costs.kinds, strict=True) if of == kind]
        mine = {costs.ops[kind][op] for op in operators_of(costs.problems[kind].nodes, chosen)}
        # Layers of a kind have the same operators in the same order, so positions carry over.
        places = [k for k, op in enumerate(by_layer[members[0]]) if op in mine]
        found.update(by_layer[member][k] for member in members for k in places)
    return frozenset(found)


def _recomputed(
    costs: LayerCosts,
    problem: Problem,
    mesh: tuple[tuple[int, int], tuple[int, ...]],
    picks: NDArray[np.int64],
    sets: Sequence[frozenset[NodeId]],
) -> list[Recomputation]:
    """Costs and savings of repeating each of `sets`, sets of products of a layer, on a mesh."""
    submesh, shape = mesh
    priced = price_option(
        replace(problem, cluster=subcluster(problem.cluster, submesh)), shape, costs.intra
    )
    assert priced is not None
    picked = Picked(priced=priced, picks=picks)
    return [recomputation(picked, problem.graph, nodes) for nodes in sets]
