"""A priced problem as a linear program over choices and conversions.

Variables: `x[n, k]`, node n takes choice k; `y[e, p, q]`, edge e converts split p to split q. Flow
constraints tie `y` to the `x` on both sides: the local-polytope form, whose relaxation is integral
for most of these problems. Edges that share conversions pay for each once; see `_layout.py`. With
an overlapping target, choices and conversions pay what nothing can hide, and `z` is the rest of the
collectives for which there is not enough compute to hide them.
Only `x` need be integer; the others then are, too.

Reference: L. Zheng et al., "Alpa", OSDI 2022, section 4 (choices per operator, costs per edge); M.
Wainwright, M. Jordan, "Graphical models, exponential families, and variational inference", 2008,
section 4.1 (the relaxation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....cost import (
    Conversion,
    MemoryModel,
    Priced,
    Resident,
    alive_over_time,
    copy_seconds,
    queues,
)
from ....graph import Phase
from ._layout import Choices, Groups, Layouts, Prices, Rows, lay_out

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# A solution takes a choice if the choice's column has more than this.
MIXED = 1e-6


@dataclass(slots=True, kw_only=True)
class Program(Rows):
    """A linear program that grows by columns and rows; `arrays()` joins them.

    Attributes:
        groups: the flow columns of edges that share conversions.
        excess: the excess columns that were added, by group number.
        global_rows: rows of memory and overlap, with the coefficients of all columns that were
            there when the row was added.
    """

    cost: list[Floats] = field(default_factory=list)
    num_columns: int = 0
    groups: Groups = field(default_factory=lambda: Groups.of({}))
    excess: dict[int, int] = field(default_factory=dict)
    global_rows: list[tuple[int, Floats]] = field(default_factory=list)

    def add_columns(self, cost: Floats) -> Ints:
        """New variables, at least zero; returns their numbers."""
        first = self.num_columns
        self.cost.append(cost)
        self.num_columns += len(cost)
        return np.arange(first, self.num_columns)

    def share(self, values: Floats) -> bool:
        """Add excess columns for shared conversions that a solution does not pay in full; True if
        there are any.
        """
        return self.add_excess(np.flatnonzero(self.groups.unpaid(values)))

    def add_excess(self, groups: Ints) -> bool:
        """Add an excess column for each of the groups that has none yet and costs time or memory;
        True if any was added.
        """
        groups = np.array([g for g in groups.tolist() if g not in self.excess], np.int64)
        first = self.groups.first[groups]
        cost = np.concatenate(self.cost)[first]
        of_rows = [
            (row, np.concatenate((values, np.zeros(self.num_columns - len(values))))[first])
            for row, values in self.global_rows
        ]
        # An excess that costs no time and takes no memory needs no column.
        some = np.any([cost != 0, *(values != 0 for _, values in of_rows)], axis=0)
        groups, times = groups[some], self.groups.counts[groups[some]]
        if not len(groups):
            return False
        excess = self.add_columns(cost[some] * times)
        self.excess.update(zip(groups.tolist(), excess.tolist(), strict=True))
        for row, values in of_rows:
            costly = np.flatnonzero(values[some])
            self.add_entries(
                np.full(len(costly), row), excess[costly], (values[some] * times)[costly]
            )
        first_row = self.add_rows(int(times.sum()), -np.inf, 0.0)
        self.add_entries(*self.groups.rows(groups, first_row, excess))
        return True

    def arrays(self) -> tuple[Floats, Floats, Floats, Ints, Ints, Floats]:
        """Costs, lower and upper bounds of rows, and the coefficients as rows, columns, values."""
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
        cost=[
            prices.exposed[layout.node_prices],
            prices.exposed_conversions[layout.other_prices] * layout.other_shares,
        ],
        num_columns=len(layout.node_prices) + len(layout.other_prices),
        lower=list(layout.lower),
        upper=list(layout.upper),
        rows=[layout.rows],
        columns=[layout.columns],
        values=[layout.values],
        groups=layout.groups,
    )
    if layout.overlap_row >= 0:
        seconds = layout.overlap(prices)
        # The solver's tolerances are absolute, and a second is long. What does not hide counts in
        # units of the largest price.
        unit_s = float(np.abs(seconds).max(initial=0.0)) or 1.0
        program.cost[1][layout.unhidden] = unit_s
        for row, values in enumerate(seconds, layout.overlap_row):
            columns = np.flatnonzero(values)
            program.add_entries(np.full(len(columns), row), columns, values[columns] / unit_s)
            program.global_rows.append((row, values / unit_s))
    # For each stretch of copies between device and host memory a variable `e`: the seconds for
    # which it waits, `e >= copies - compute beside them`; and for each phase the seconds for which
    # the step waits, at least those of the stretches of either direction.
    copies_s = copy_seconds(priced) if priced.copies else []
    # As above, in units of the longest copy.
    unit_s = max([float(np.max(s)) for s in copies_s], default=0.0) or 1.0
    of_phase: dict[Phase, int] = {}
    of_direction: dict[tuple[Phase, bool], int] = {}
    for group in queues(priced.copies):
        (column,) = program.add_columns(np.zeros(1))
        phase, direction = group[0].phase, (group[0].phase, group[0].to_host)
        if phase not in of_phase:
            of_phase[phase] = int(program.add_columns(np.full(1, unit_s))[0])
        if direction not in of_direction:
            of_direction[direction] = program.add_rows(1, -np.inf, 0.0)
            ends = np.array([of_phase[phase]])
            program.add_entries(np.array([of_direction[direction]]), ends, -1.0)
        program.add_entries(np.array([of_direction[direction]]), np.array([column]), 1.0)
        for queue in group:
            waits: list[Floats | float] = [0.0] * len(layout.choices.columns)
            fixed = 0.0
            for k in queue.members:
                node = priced.copies[k].node
                if node < 0:
                    fixed += float(copies_s[k][0])
                else:
                    waits[node] = waits[node] + copies_s[k]
            room = np.array(queue.room)
            row = program.add_rows(1, -np.inf, -fixed / unit_s)
            program.add_entries(np.array([row]), np.array([column]), -1.0)
            for n, (columns, kept) in enumerate(
                zip(layout.choices.columns, layout.choices.allowed, strict=True)
            ):
                values = (waits[n] - room @ priced.nodes[n].compute)[kept] / unit_s
                some = np.flatnonzero(values)
                program.add_entries(np.full(len(some), row), columns[some], values[some])
    return program, layout.choices


def add_memory_row(
    program: Program,
    choices: Choices,
    priced: Priced,
    model: MemoryModel,
    time: int,
    limit_bytes: float,
) -> None:
    """Add a row that keeps memory at one moment within the limit."""
    row = program.add_rows(1, -np.inf, 1.0)
    fixed, totals = alive_bytes(choices, model, time)
    room = limit_bytes - fixed
    # All memory rows are shares of the limit, which keeps coefficients near one.
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
    # An excess column pays what all flows of its group leave unpaid.
    for group, column in program.excess.items():
        copies[column] = program.groups.counts[group] * copies[program.groups.first[group]]
    program.global_rows.append((row, copies))
    some = np.flatnonzero(copies)
    program.add_entries(np.full(len(some), row), some, copies[some])


def alive_bytes(choices: Choices, model: MemoryModel, time: int) -> tuple[float, list[Floats]]:
    """Bytes that are live on a device at one moment, without conversions: a constant part, and the
    bytes of each choice of each node.
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


def conversion_columns(
    choices: Choices, priced: Priced, conversion: Conversion
) -> tuple[Ints, Floats]:
    """The columns that cause a conversion, with the bytes that each adds. Flows that share the
    conversion add an equal part each.
    """
    weights: dict[int, float] = {}
    for index, table in zip(conversion.edges, conversion.local_bytes, strict=True):
        if index in choices.single:
            flow, p, q = choices.single[index]
            weights.update(zip(flow.tolist(), table[p, q].tolist(), strict=True))
            continue
        shared = choices.shared[priced.graph.edges[index].share]
        specs = priced.edges[index]
        for a, b in zip(*np.nonzero(table), strict=True):
            flows = shared.get((specs.sources[a], specs.targets[b]), ())
            weights.update(dict.fromkeys(flows, float(table[a, b]) / max(len(flows), 1)))
    return np.array(list(weights), np.int64), np.array(list(weights.values()))


def mixed_timeline(choices: Choices, priced: Priced, model: MemoryModel, values: Floats) -> Floats:
    """Bytes over time under a solution that may mix choices."""
    parts: list[tuple[Resident | Conversion, float]] = []
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        held = local[0]
        if r.node >= 0:
            held = values[choices.columns[r.node]] @ local[choices.allowed[r.node]]
        parts.append((r, float(held)))
    for conversion in model.conversions:
        columns, weights = conversion_columns(choices, priced, conversion)
        parts.append((conversion, float(values[columns] @ weights)))
    return alive_over_time(parts, model.num_times)


def decode(choices: Choices, values: Floats) -> Ints:
    """For each node, the choice that has the largest share in a solution."""
    return np.array(
        [
            int(allowed[int(np.argmax(values[columns]))])
            for columns, allowed in zip(choices.columns, choices.allowed, strict=True)
        ],
        np.int64,
    )


def is_mixed(choices: Choices, values: Floats) -> bool:
    """True if a solution mixes choices of a node."""
    x = values[: choices.num_integer]
    # A smaller distance from 0 or 1 is rounding.
    return bool(np.any(np.minimum(x, 1 - x) > MIXED))


def exclude(program: Program, choices: Choices, picks: Ints) -> None:
    """Forbid one combination of choices."""
    chosen = []
    for columns, kept, pick in zip(choices.columns, choices.allowed, picks.tolist(), strict=True):
        chosen.append(columns[np.flatnonzero(kept == pick)])
    excluded = np.concatenate(chosen)
    # At least one of the picks must change.
    row = program.add_rows(1, -np.inf, float(len(picks) - 1))
    program.add_entries(np.full(len(excluded), row), excluded, 1.0)
