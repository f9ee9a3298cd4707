"""Memory per device over the course of a step, linear in the choices.

It is the sum of residents, which are inputs (alive for the whole step) and stored arrays (alive
from their making to their last use), and of conversions: copies of arrays in the split that a
product reads. A converted copy lives from the first to the last product that reads it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...graph import Memory, Phase
from ...sharding import Edge, NodeGraph, NodeId, Spec, num_shards
from .._choices import shards
from .._collectives import pieces
from ._deferred import deferred_arrays
from ._pace import compute_per_gather
from ._residents import Resident

if TYPE_CHECKING:
    from .._mesh_use import MeshUse
    from .._picked import Picked
    from .._priced import Floats, Ints, Priced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """An array held in a second split because of an edge; `local_bytes` has for each edge a table
    of bytes on a device, `(sources, targets)`. `category` is what readers call these arrays:
    gradients that wait for their sum over devices, as large as that needs them, activations that
    wait for products of such gradients, or copies.
    """

    share: int
    edges: tuple[int, ...]
    local_bytes: tuple[Floats, ...]
    births: Ints
    deaths: Ints
    category: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryModel:
    """Residents and conversions of a priced problem. `local_bytes[r][k]` are the bytes of resident
    `r` on a device under choice `k` of its node.
    """

    num_times: int
    residents: tuple[Resident, ...]
    local_bytes: tuple[Floats, ...]
    conversions: tuple[Conversion, ...]

    def under(self, picked: Picked) -> MemoryUse:
        """What a device holds under a choice for every node."""
        picks, edges, conversions = picked.picks, picked.priced.edges, []
        for conversion in self.conversions:
            distinct = {}
            for i, table in zip(conversion.edges, conversion.local_bytes, strict=True):
                s, t = picked.ends[i]
                # Equal conversions of several edges are one array.
                distinct[edges[i].sources[s], edges[i].targets[t]] = float(table[s, t])
            total = sum(distinct.values())
            if total:
                conversions.append((conversion, total))
        residents = [
            (r, float(local[picks[r.node]] if r.node >= 0 else local[0]))
            for r, local in zip(self.residents, self.local_bytes, strict=True)
        ]
        return MemoryUse(
            num_times=self.num_times, residents=tuple(residents), conversions=tuple(conversions)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryUse:
    """What a device holds during a step under a choice for every node.

    Attributes:
        num_times: moments of the step: its operators, and its end.
        residents, conversions: all that is held, each with its bytes on a device.
    """

    num_times: int
    residents: tuple[tuple[Resident, float], ...]
    conversions: tuple[tuple[Conversion, float], ...]

    @property
    def arrays(self) -> tuple[tuple[Resident | Conversion, float], ...]:
        """Residents, then conversions."""
        return (*self.residents, *self.conversions)

    def over_time(self) -> Floats:
        """Bytes on each device while each operator runs."""
        return alive_over_time(self.arrays, self.num_times)

    @cached_property
    def _peak(self) -> tuple[float, int]:
        # Of thousands of moments the record keeps this one.
        use = self.over_time()
        return float(use.max()), int(np.argmax(use))

    @property
    def peak_bytes(self) -> float:
        """The most bytes that a device needs at once."""
        return self._peak[0]

    @property
    def peak_moment(self) -> int:
        """The operator during which it needs them."""
        return self._peak[1]

    @cached_property
    def peak_parts(self) -> dict[str, float]:
        """Bytes by category at that moment, largest first."""
        moment, parts = self.peak_moment, defaultdict[str, float](float)
        for array, num_bytes in self.arrays:
            alive = int(np.count_nonzero((array.births <= moment) & (array.deaths >= moment)))
            parts[array.category] += alive * num_bytes
        return {k: v for k, v in sorted(parts.items(), key=lambda kv: -kv[1]) if v}

    @cached_property
    def keeping_casts(self) -> MemoryUse:
        """The same if casts of parameters are made once and kept for the whole step."""
        return replace(self, residents=tuple([(_kept(r), size) for r, size in self.residents]))


def memory_model(priced: Priced, *, in_turn: bool, memory: Memory = Memory.DEVICE) -> MemoryModel:
    """Residents and conversions of a priced problem.

    Args:
        memory: the memory that is counted; arrays are resharded in device memory only.
        in_turn: whether collectives inside backward layers take turns with all-reduces. Fewer
            products are deferred then, so memory with it is a lower bound on memory without it.
            `takes_turns` tells for known choices.
    """
    return residents_model(
        priced.residents,
        priced.graph,
        [node.choices for node in priced.nodes],
        priced.use,
        repeats=priced.repeats,
        memory=memory,
        conversions=_conversions(priced, in_turn) if memory is Memory.DEVICE else (),
    )


def residents_model(
    residents: Sequence[Resident],
    graph: NodeGraph,
    choices: Sequence[Ints],
    use: MeshUse,
    *,
    repeats: int,
    memory: Memory = Memory.DEVICE,
    conversions: Sequence[Conversion] = (),
) -> MemoryModel:
    """Residents of a problem that need not be priced, and any conversions.

    Args:
        choices: for each node, `(choices, axes)`.
        use, repeats: as in `Priced`.
        memory: the memory that is counted.
    """
    # Gradients are summed over data axes, and over the axis that splits the sequence, only after
    # the last micro-batch. Until then each device holds its own sum, so these axes do not divide
    # its bytes; nor do they those of casts that are gathered once.
    waits = use.data_axes | use.context_axes
    whole_sizes = use.mesh.shape
    undivided = tuple(1 if a in waits else n for a, n in enumerate(whole_sizes))
    kept, local = [], []
    # Cached, because many arrays are split alike.
    parts: dict[object, Floats] = {}
    for r in residents:
        if r.memory is not memory:
            continue
        gradient = repeats > 1 and r.category == "gradients"
        gathered = use.gathers_once and (r.cast is not None or r.hoisted)
        if r.node < 0:
            num_bytes = np.array([float(r.num_bytes)])
        else:
            sizes = undivided if gradient or gathered else whole_sizes
            key = r.node, r.projection, sizes
            if key not in parts:
                split_by = tuple([dim >= 0 for dim in r.projection])
                parts[key] = shards(choices[r.node], split_by, sizes)
            num_bytes = r.num_bytes / parts[key]
        for part in _summed(r, graph) if gradient else (r,):
            kept.append(_kept(part) if use.gathers_once else part)
            local.append(num_bytes)
    return MemoryModel(
        # One moment more than operators: the end, when results are held.
        num_times=graph.num_ops + 1,
        residents=tuple(kept),
        local_bytes=tuple(local),
        conversions=tuple(conversions),
    )


def least_timeline(model: MemoryModel, allowed: Sequence[Ints]) -> Floats:
    """A lower bound on bytes over time: every array as small as any allowed choice of its node
    makes it.

    Args:
        allowed: for each node, the numbers of its allowed choices, at least one.
    """
    parts = [
        (r, float(local[allowed[r.node]].min() if r.node >= 0 else local[0]))
        for r, local in zip(model.residents, model.local_bytes, strict=True)
    ]
    return alive_over_time(parts, model.num_times)


def _summed(r: Resident, graph: NodeGraph) -> Iterator[Resident]:
    """Residents of a gradient under micro-batches: its total, for the whole step, and the stack of
    a loop over layers in between.
    """
    yield dataclasses.replace(
        # Totals are zeroed before the first micro-batch and read after the last.
        r,
        births=np.zeros_like(r.births),
        deaths=np.full_like(r.deaths, graph.num_ops),
    )
    if r.stacked:
        yield r


def _conversions(priced: Priced, in_turn: bool) -> list[Conversion]:
    """One entry for each set of edges that share their conversions, then entries for arrays that
    deferred products and gathers hold besides.
    """
    graph = priced.graph
    by_share: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.kind == "operand":
            by_share.setdefault(edge.share, []).append(edge.index)
    parameters = {r.node: r.num_bytes for r in priced.residents if r.category == "parameters"}
    gathered_ahead = _gathered_ahead(priced)
    conversions = []
    pieces: dict[tuple[Spec, ...], Floats] = {}
    for share, indices in by_share.items():
        if not any(priced.edges[i].moves.any() for i in indices):
            continue
        edges = [graph.edges[i] for i in indices]
        births, deaths = edges[0].starts, edges[0].ends
        # Live ranges can be joined only if the edges convert the same number of copies.
        if len(edges) > 1 and all(len(e.starts) == len(births) for e in edges):
            births = np.minimum.reduce([e.starts for e in edges])
            deaths = np.maximum.reduce([e.ends for e in edges])
        if gathered_ahead and any(_waits_for_nothing(e, priced) for e in edges):
            ahead = births <= np.quantile(births, gathered_ahead)
            births = np.where(ahead, 0, births)
        tables = []
        for i in indices:
            p = priced.edges[i]
            if p.targets not in pieces:
                pieces[p.targets] = np.array(
                    [float(num_shards(target, priced.axis_sizes)) for target in p.targets]
                )
            tables.append(np.where(p.moves, graph.edges[i].num_bytes / pieces[p.targets], 0.0))
        if any(t.any() for t in tables):
            conversions.append(
                Conversion(
                    share=share,
                    edges=tuple(indices),
                    local_bytes=tuple(tables),
                    births=births,
                    deaths=deaths,
                    category=_category(edges),
                )
            )
    if priced.target.delays_gradients:
        for deferred in deferred_arrays(priced, in_turn):
            conversions.append(
                Conversion(
                    share=deferred.edge.share,
                    edges=(deferred.edge.index,),
                    local_bytes=(deferred.local_bytes,),
                    births=deferred.births,
                    deaths=deferred.deaths,
                    category=deferred.category,
                )
            )
    if priced.target.gathers_leading_dim:
        conversions += _transposed(priced, parameters)
        conversions += _gathered_anew(priced)
    return conversions


def _transposed(priced: Priced, parameters: Mapping[NodeId, int]) -> Iterator[Conversion]:
    """Transposed copies of parameters, with the split dim first, which XLA makes before a gather
    along a dim other than the first. Before a loop it copies the whole stack, which only the body
    of the loop casts.
    """
    for edge in priced.graph.edges:
        if edge.kind != "operand" or edge.phase is not Phase.FORWARD:
            continue
        if edge.source not in parameters:
            continue
        p = priced.edges[edge.index]
        inner = np.array([[_gathers_inner(s, t) for t in p.targets] for s in p.sources])
        if inner.any():
            in_loop = edge.count > len(edge.starts)
            whole = parameters[edge.source] if in_loop else edge.num_bytes
            local = np.array([whole / num_shards(s, priced.axis_sizes) for s in p.sources])
            yield Conversion(
                share=edge.share,
                edges=(edge.index,),
                local_bytes=(np.where(inner, local[:, None], 0.0),),
                births=np.zeros_like(edge.starts),
                deaths=np.full_like(edge.ends, priced.graph.num_ops),
                category=_category([edge]),
            )


def _gathered_anew(priced: Priced) -> Iterator[Conversion]:
    """New parameters that are gathered, at the end of a step, along another dim than the first: not
    into their buffers but into new arrays, which are then copied there.

    A scheduler that hides latency makes these copies after all gathers, so that the arrays are
    alive together; only arrays that are gathered row by row are not.
    """
    if not priced.target.hides_latency:
        return
    for edge in priced.graph.edges:
        # A vector has no inner dim.
        if edge.kind != "alias" or edge.phase is not Phase.UPDATE or edge.rank < 2:
            continue
        p = priced.edges[edge.index]
        inner = np.array(
            [
                [_gathers_inner(s, t) and pieces(edge, s, t, priced.target) == 1 for t in p.targets]
                for s in p.sources
            ]
        )
        if inner.any():
            local = np.array([edge.num_bytes / num_shards(t, priced.axis_sizes) for t in p.targets])
            moments = np.full_like(edge.starts, priced.graph.num_ops)
            yield Conversion(
                share=edge.share,
                edges=(edge.index,),
                local_bytes=(np.where(inner & p.moves, local[None, :], 0.0),),
                births=moments,
                deaths=moments,
                category=_category([edge]),
            )


def _category(edges: Sequence[Edge]) -> str:
    return "unreduced gradients" if all(e.gradient for e in edges) else "resharded copies"


def _gathers_inner(source: Spec, target: Spec) -> bool:
    """True if a dim other than the first is gathered."""
    return any(s > 0 and t != s for s, t in zip(source, target, strict=True))


def _gathered_ahead(priced: Priced) -> float:
    """Share of the parameters that are gathered before anything else happens: less where products
    take long compared with gathers, if the scheduler hides latency.
    """
    share = priced.target.gathered_ahead
    if share and priced.target.hides_latency:
        share = min(share, max(1.0 - compute_per_gather(priced), 0.0))
    return share


def _waits_for_nothing(edge: Edge, priced: Priced) -> bool:
    """True if a conversion can run at the start of the step: the forward pass converts a large
    parameter, or its cast, itself, outside of loops.

    Small parameters are gathered together with others, and conversions of the backward pass wait
    behind a remat region's barrier.
    """
    # Two of this size would still be gathered together.
    if 2 * edge.num_bytes <= priced.target.combined_bytes:
        return False
    return edge.parameter and edge.phase is Phase.FORWARD and edge.count == len(edge.starts)


def _kept(resident: Resident) -> Resident:
    """A cast of a parameter, made before the first micro-batch and kept until the update: equal
    ones are one array. Other arrays as they are.
    """
    if resident.cast is None:
        return resident
    copies = len(resident.births) if resident.cast else 0
    return replace(
        resident,
        category="casts of parameters",
        births=np.zeros(copies, np.int64),
        deaths=np.full(copies, resident.read_until, np.int64),
    )


def alive_over_time(parts: Sequence[tuple[Resident | Conversion, float]], num_times: int) -> Floats:
    """[num_times], the bytes of all parts that are alive, each from its births to its deaths."""
    # Sum of changes: each part is added at its births and subtracted after its deaths. One
    # `bincount` for all, because thousands of additions to short slices would be slow.
    moments = [moment for part, _ in parts for moment in (part.births, part.deaths + 1)]
    weights = np.array([sign * num_bytes for _, num_bytes in parts for sign in (1.0, -1.0)])
    change: Floats = np.bincount(
        np.concatenate([np.zeros(0, np.int64), *moments]),
        np.repeat(weights, np.array([len(m) for m in moments], np.int64)),
        num_times + 1,
    ).astype(np.float64, copy=False)
    return np.cumsum(change)[:-1]
