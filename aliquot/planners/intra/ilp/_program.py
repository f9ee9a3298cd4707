"""A priced problem as a linear program over choices and conversions.

Variables: `x[n, k]`, node n takes choice k; `y[e, p, q]`, edge e converts split p to split q; `Y[s,
p, q]`, a set of edges that share conversions pays for one. Flow constraints tie `y` to the `x` on
both sides: the local-polytope form, whose relaxation is integral for most of these problems. With
an overlapping target, `z` is the part of gradient communication that the backward pass cannot hide.
Only `x` need be integer; the rest then is.

Reference: L. Zheng et al., "Alpa", OSDI 2022, section 4 (choices per operator, costs per edge); M.
Wainwright, M. Jordan, "Graphical models, exponential families, and variational inference", 2008,
section 4.1 (the relaxation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....cost import Conversion, MemoryModel, Priced
from ._layout import Choices, Layouts, Prices, lay_out

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Program:
    """A linear program that grows by columns and rows; `arrays()` joins them."""

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
        """Add coefficients."""
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


def build_program(
    priced: Priced, allowed: Sequence[NDArray[np.bool_]], known: Layouts | None = None
) -> tuple[Program, Choices]:
    """The program of a priced problem.

    Args:
        allowed: `allowed[n][k]` is true if node n may take choice k.
        known: cache of layouts of the same node graph.
    """
    layout = lay_out(priced, allowed) if known is None else known.of(priced, allowed)
    prices = Prices.of(priced)
    program = Program(
        cost=[prices.plain[layout.node_prices], prices.conversions[layout.other_prices]],
        num_columns=len(layout.node_prices) + len(layout.other_prices),
        lower=list(layout.lower),
        upper=list(layout.upper),
        rows=[layout.rows],
        columns=[layout.columns],
        values=[layout.values],
    )
    if layout.overlap_row >= 0:
        program.add_entries(*layout.overlap(prices, priced.target.overlap_fraction))
    return program, layout.choices


def add_memory_row(
    program: Program, choices: Choices, priced: Priced, model: MemoryModel, time: int, limit_bytes: float
) -> None:
    """Add the row that keeps memory at one moment within the limit."""
    row = program.add_rows(1, -np.inf, 1.0)
    fixed, totals = alive_bytes(choices, model, time)
    room = limit_bytes - fixed
    program.upper[row] = room / limit_bytes
    for mine, total in zip(choices.columns, totals, strict=True):
        program.add_entries(np.full(len(mine), row), mine, total / limit_bytes)
    # A column may cause several copies, but a row may contain it only once.
    copies = np.zeros(program.num_columns)
    for conversion in model.conversions:
        alive = int(np.count_nonzero((conversion.births <= time) & (conversion.deaths >= time)))
        if alive:
            mine, weights = conversion_columns(choices, priced, conversion)
            np.add.at(copies, mine, alive / limit_bytes * weights)
    some = np.flatnonzero(copies)
    program.add_entries(np.full(len(some), row), some, copies[some])


def alive_bytes(choices: Choices, model: MemoryModel, time: int) -> tuple[float, list[Floats]]:
    """Bytes on a device at one moment without conversions: a constant part, and those of each
    choice of each node.
    """
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
    return fixed, totals


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
