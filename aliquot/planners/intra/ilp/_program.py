"""A priced problem as a linear program over choices and conversions.

Variables: `x[n, k]`, node n takes choice k; `y[e, p, q]`, edge e converts split p to split q; `Y[s, p, q]`, a set of edges
that share conversions pays for one. Flow constraints tie `y` to the `x` on both sides: the local-polytope form, whose
relaxation is integral for most of these problems. With an overlapping target, `z` is the part of gradient communication
that the backward pass cannot hide. Only `x` need be integer; the rest then is.

Reference: L. Zheng et al., "Alpa", OSDI 2022, section 4 (choices per operator, costs per edge); M. Wainwright, M. Jordan,
"Graphical models, exponential families, and variational inference", 2008, section 4.1 (the relaxation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....cost import Conversion, MemoryModel, Priced

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Program:
    """Columns and rows as they are added; `arrays()` joins them."""

    cost: list[Floats] = field(default_factory=list)
    num_columns: int = 0
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def add_columns(self, cost: Floats) -> Ints:
        """New variables, at least zero; returns their numbers."""
        first = self.num_columns
        self.cost.append(cost)
        self.num_columns += len(cost)
        return np.arange(first, self.num_columns)

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        """New rows with common bounds; returns the first one's number."""
        first = len(self.lower)
        self.lower += [lower] * count
        self.upper += [upper] * count
        return first

    def add_entries(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Coefficients."""
        self.rows.append(np.asarray(rows, np.int64))
        self.columns.append(np.asarray(columns, np.int64))
        self.values.append(np.broadcast_to(np.asarray(values, np.float64), np.shape(columns)))

    def arrays(self) -> tuple[Floats, Floats, Floats, Ints, Ints, Floats]:
        """Costs, row bounds, and the coefficients as rows, columns, values."""
        return (
            np.concatenate(self.cost),
            np.array(self.lower),
            np.array(self.upper),
            np.concatenate(self.rows),
            np.concatenate(self.columns),
            np.concatenate(self.values),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Which columns stand for the choices of each node, and which choices these are."""

    columns: tuple[Ints, ...]
    allowed: tuple[Ints, ...]
    shared: dict[int, dict[tuple[object, object], int]]
    single: dict[int, tuple[Ints, Ints, Ints]]
    num_integer: int


def build_program(priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> tuple[Program, Choices]:
    """The program of a priced problem; `allowed[n][k]` says which choices of node n may be taken."""
    program = Program()
    kept = [np.flatnonzero(mask) for mask in allowed]
    overlap = priced.target.overlap_fraction
    columns = []
    for node, keep in zip(priced.nodes, kept, strict=True):
        plain = node.compute_s[keep] + node.communication_s[keep]
        columns.append(program.add_columns(plain if overlap else plain + node.gradient_s[keep]))
    num_integer = program.num_columns
    gradient = _Gradient()
    backward = _Gradient()
    for node, keep, mine in zip(priced.nodes, kept, columns, strict=True):
        program.add_entries(np.full(len(mine), program.add_rows(1, 1.0, 1.0)), mine, 1.0)
        gradient.add(mine, node.gradient_s[keep])
        backward.add(mine, node.backward_s[keep])
    shared: dict[int, dict[tuple[object, object], int]] = {}
    single: dict[int, tuple[Ints, Ints, Ints]] = {}
    by_share: dict[int, list[int]] = {}
    for edge in priced.graph.edges:
        by_share.setdefault(edge.share, []).append(edge.index)
    for share, edges in by_share.items():
        hidden = bool(overlap) and priced.graph.edges[edges[0]].gradient
        _add_edges(program, priced, edges, columns, kept, shared.setdefault(share, {}), single, gradient, hidden)
    if overlap:
        _add_overlap(program, overlap, gradient, backward)
    choices = Choices(
        columns=tuple(columns), allowed=tuple(kept), shared=shared, single=single, num_integer=num_integer
    )
    return program, choices


@dataclass(slots=True)
class _Gradient:
    """A linear expression."""

    columns: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def add(self, columns: Ints, values: Floats) -> None:
        some = values != 0
        if some.any():
            self.columns.append(columns[some])
            self.values.append(values[some])

    def joined(self) -> tuple[Ints, Floats]:
        if not self.columns:
            return np.zeros(0, np.int64), np.zeros(0)
        return np.concatenate(self.columns), np.concatenate(self.values)


def _add_edges(
    program: Program,
    priced: Priced,
    edges: Sequence[int],
    columns: Sequence[Ints],
    kept: Sequence[Ints],
    shared: dict[tuple[object, object], int],
    single: dict[int, tuple[Ints, Ints, Ints]],
    gradient: _Gradient,
    hidden: bool,
) -> None:
    """Flows of edges that share conversions. A lone edge carries its costs itself."""
    for index in edges:
        edge, table = priced.graph.edges[index], priced.edges[index]
        source_specs = table.source_index[kept[edge.source]]
        target_specs = table.target_index[kept[edge.target]]
        sources, targets = np.unique(source_specs), np.unique(target_specs)
        seconds = table.seconds[np.ix_(sources, targets)]
        p, q = np.nonzero(np.isfinite(seconds))
        price = seconds[p, q]
        alone = len(edges) == 1
        paid = np.zeros(len(p)) if hidden or not alone else price
        flow = program.add_columns(paid)
        if alone:
            single[index] = (flow, sources[p], targets[q])
            if hidden:
                gradient.add(flow, price)
        first = program.add_rows(len(sources), 0.0, 0.0)
        program.add_entries(first + p, flow, 1.0)
        program.add_entries(first + np.searchsorted(sources, source_specs), columns[edge.source], -1.0)
        first = program.add_rows(len(targets), 0.0, 0.0)
        program.add_entries(first + q, flow, 1.0)
        program.add_entries(first + np.searchsorted(targets, target_specs), columns[edge.target], -1.0)
        if not alone:
            _add_shared(
                program, table.sources, table.targets, sources[p], targets[q], price, flow, shared, gradient, hidden
            )


def _add_shared(
    program: Program,
    source_specs: Sequence[object],
    target_specs: Sequence[object],
    p: Ints,
    q: Ints,
    price: Floats,
    flow: Ints,
    shared: dict[tuple[object, object], int],
    gradient: _Gradient,
    hidden: bool,
) -> None:
    """`flow <= shared`, and the price on the shared column, for each conversion that changes anything."""
    keys = [(source_specs[a], target_specs[b]) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    costly = np.array([k for k, (a, b) in enumerate(keys) if a != b], np.int64)
    fresh = [k for k in costly.tolist() if keys[k] not in shared]
    if fresh:
        made = program.add_columns(np.zeros(len(fresh)) if hidden else price[fresh])
        shared.update({keys[k]: int(column) for k, column in zip(fresh, made, strict=True)})
        if hidden:
            gradient.add(made, price[fresh])
    if len(costly):
        first = program.add_rows(len(costly), -np.inf, 0.0)
        rows = first + np.arange(len(costly))
        program.add_entries(rows, flow[costly], 1.0)
        program.add_entries(rows, np.array([shared[keys[k]] for k in costly.tolist()]), -1.0)


def _add_overlap(program: Program, overlap: float, gradient: _Gradient, backward: _Gradient) -> None:
    """`z >= (1 - overlap) gradient` and `z >= gradient - backward`."""
    exposed = program.add_columns(np.ones(1))
    columns, values = gradient.joined()
    back_columns, back_values = backward.joined()
    first = program.add_rows(2, 0.0, np.inf)
    program.add_entries(np.array([first, first + 1]), np.repeat(exposed, 2), 1.0)
    program.add_entries(np.full(len(columns), first), columns, -(1 - overlap) * values)
    program.add_entries(np.full(len(columns), first + 1), columns, -values)
    program.add_entries(np.full(len(back_columns), first + 1), back_columns, back_values)


def add_memory_row(
    program: Program, choices: Choices, priced: Priced, model: MemoryModel, time: int, limit_bytes: float
) -> None:
    """Keep what is alive at one moment below the limit."""
    row = program.add_rows(1, -np.inf, 1.0)
    fixed = 0.0
    totals = [np.zeros(len(c)) for c in choices.columns]
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        alive = int(np.count_nonzero((r.births <= time) & (r.deaths >= time)))
        if not alive:
            continue
        if r.node < 0:
            fixed += alive * float(local[0])
        else:
            totals[r.node] += alive * local[choices.allowed[r.node]]
    room = limit_bytes - fixed
    program.upper[row] = room / limit_bytes
    for mine, total in zip(choices.columns, totals, strict=True):
        program.add_entries(np.full(len(mine), row), mine, total / limit_bytes)
    # One column may cause several copies; a row may name it once.
    copies = np.zeros(program.num_columns)
    for conversion in model.conversions:
        alive = int(np.count_nonzero((conversion.births <= time) & (conversion.deaths >= time)))
        if alive:
            mine, weights = conversion_columns(choices, priced, conversion)
            np.add.at(copies, mine, alive / limit_bytes * weights)
    some = np.flatnonzero(copies)
    program.add_entries(np.full(len(some), row), some, copies[some])


def conversion_columns(choices: Choices, priced: Priced, conversion: Conversion) -> tuple[Ints, Floats]:
    """The columns that cause a conversion, with the bytes that each adds."""
    weights: dict[int, float] = {}
    for index, table in zip(conversion.edges, conversion.local_bytes, strict=True):
        if index in choices.single:
            flow, p, q = choices.single[index]
            weights.update(zip(flow.tolist(), table[p, q].tolist(), strict=True))
            continue
        shared = choices.shared[priced.graph.edges[index].share]
        specs = priced.edges[index]
        for a, b in zip(*np.nonzero(table), strict=True):
            column = shared.get((specs.sources[a], specs.targets[b]))
            if column is not None:
                weights[column] = float(table[a, b])
    return np.array(list(weights), np.int64), np.array(list(weights.values()))
