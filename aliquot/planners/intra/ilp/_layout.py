"""Columns and rows of a priced problem's linear program, and the positions of its prices.

Meshes with axes of other sizes or speeds mostly have the same choices and conversions, with other
prices. So the program is laid out once, and each problem only fills in its prices.

If several edges convert an array alike, the array is converted once. In a program this needs a row
for each edge and conversion, three quarters of all rows, few of which ever bind. So each of `m`
flows first pays `1 / m` of the price, which is right where all edges convert alike and too little
otherwise. Where a solution pays too little, a column for the excess is added, with a price of its
own: `excess >= flow - mean of all flows`. Its cost and its bytes are `m` times those of a flow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....cost import Priced, PricedEdge, PricedNode
from ....graph import Phase

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# The splits of an array before and after a conversion.
Conversion: TypeAlias = tuple[Hashable, Hashable]
# Position of the constant 0, which ends the prices of conversions.
_ZERO = -1
# Solutions satisfy rows within the solver's tolerance, which is a tenth of this.
_UNPAID = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Flows of several edges that share a conversion: `members[starts[g]:][:counts[g]]` are those
    of group `g`, and `number` finds a group by its share and conversion.
    """

    members: Ints
    starts: Ints
    counts: Ints
    number: Mapping[tuple[int, Hashable], int]

    @classmethod
    def of(cls, shared: Mapping[int, Mapping[tuple[Hashable, Hashable], Sequence[int]]]) -> Groups:
        """The groups of all shares, from the flows of each conversion."""
        keys = []
        # A conversion of a single flow pays its whole price already.
        for share, flows in shared.items():
            for key in flows:
                if len(flows[key]) > 1:
                    keys.append((share, key))
        counts = np.array([len(shared[share][key]) for share, key in keys], np.int64)
        return cls(
            members=np.array(
                [column for share, key in keys for column in shared[share][key]], np.int64
            ),
            starts=np.cumsum(counts) - counts,
            counts=counts,
            number={key: number for number, key in enumerate(keys)},
        )

    @property
    def first(self) -> Ints:
        """The first flow of each group."""
        return self.members[self.starts]

    def unpaid(self, values: Floats) -> Floats:
        """For each group, the excess of its largest flow over the mean; 0 if that is rounding."""
        if not len(self.counts):
            return np.zeros(0)
        flows = values[self.members]
        largest = np.maximum.reduceat(flows, self.starts)
        # Compared with the mean, as each flow pays an equal share of the price.
        excess = largest - np.add.reduceat(flows, self.starts) / self.counts
        return np.where(excess > _UNPAID, excess, 0.0)

    def rows(self, groups: Ints, first_row: int, excess: Ints) -> tuple[Ints, Ints, Floats]:
        """Coefficients of `flow - mean - excess <= 0` for each flow of some groups, whose excess
        columns are given.
        """
        rows: list[Ints] = []
        columns: list[Ints] = []
        values: list[Floats] = []
        for group, column in zip(groups.tolist(), excess.tolist(), strict=True):
            count = int(self.counts[group])
            flows = self.members[self.starts[group] :][:count]
            of_flow = first_row + np.arange(count)
            rows += [np.repeat(of_flow, count), of_flow]
            columns += [np.tile(flows, count), np.full(count, column)]
            values += [(np.eye(count) - 1 / count).ravel(), np.full(count, -1.0)]
            first_row += count
        return np.concatenate(rows), np.concatenate(columns), np.concatenate(values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Columns of the program for the choices of each node, with the choices that they stand for.

    Attributes:
        columns, allowed: for each node, its columns and the choices behind them.
        shared: for each set of edges that share conversions, the flow columns of each conversion.
        single: for each other edge, its flow columns with the positions of the splits on both
            sides.
        num_integer: the number of columns of choices, which come first.
    """

    columns: tuple[Ints, ...]
    allowed: tuple[Ints, ...]
    shared: dict[int, dict[Conversion, list[int]]]
    single: dict[int, tuple[Ints, Ints, Ints]]
    num_integer: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """All prices of a problem as flat arrays: those of choices and those of conversions.

    Attributes:
        exposed: seconds that nothing can hide.
        hideable: seconds that hide behind compute where there is enough of it.
        once: the part of these after the last micro-batch.
        beside, last: compute of all forward and backward passes, and of the last micro-batch's
            backward pass.
    """

    exposed: Floats
    hideable: Floats
    once: Floats
    beside: Floats
    last: Floats
    exposed_conversions: Floats
    hideable_conversions: Floats
    once_conversions: Floats

    @classmethod
    def of(cls, priced: Priced) -> Prices:
        """The prices of a problem."""

        def choices(prices: Callable[[PricedNode], Floats]) -> Floats:
            return np.concatenate([prices(node) for node in priced.nodes])

        def conversions(prices: Callable[[PricedEdge], Floats]) -> Floats:
            return np.concatenate([*(prices(edge).ravel() for edge in priced.edges), [0.0]])

        return cls(
            exposed=choices(lambda n: n.exposed_s),
            hideable=choices(lambda n: n.hideable_s),
            once=choices(lambda n: n.once_hideable_s),
            beside=choices(lambda n: n.beside_s),
            last=choices(lambda n: n.compute[Phase.BACKWARD] / priced.repeats),
            exposed_conversions=conversions(lambda e: e.seconds - e.hideable_s),
            hideable_conversions=conversions(lambda e: e.hideable_s),
            once_conversions=conversions(lambda e: e.once_hideable_s),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Layout:
    """A program without prices.

    Attributes:
        choices: the meaning of columns.
        node_prices: for each column of a choice, the position of its prices in the arrays of
            `Prices` for choices.
        other_prices: for each other column, the position of its price in those of conversions.
        other_shares: the share of this price that each of these columns pays.
        lower, upper: bounds of rows.
        rows, columns, values: coefficients that do not depend on prices.
        groups: flows of several edges that share a conversion.
        overlap_row: the first of the two rows of overlap; -1 without overlap.
        unhidden: position, among the columns that are no choices, of the time for which
            collectives that can hide find no compute.
    """

    choices: Choices
    node_prices: Ints
    other_prices: Ints
    other_shares: Floats
    lower: list[float]
    upper: list[float]
    rows: Ints
    columns: Ints
    values: Floats
    groups: Groups
    overlap_row: int
    unhidden: int

    def overlap(self, prices: Prices) -> tuple[Floats, Floats]:
        """Coefficients of all columns in `z >= hideable - beside` and `z >= once - last`."""
        nodes, others = self.node_prices, self.other_prices
        return (
            np.concatenate(
                (
                    (prices.beside - prices.hideable)[nodes],
                    -prices.hideable_conversions[others] * self.other_shares,
                )
            ),
            np.concatenate(
                (
                    (prices.last - prices.once)[nodes],
                    -prices.once_conversions[others] * self.other_shares,
                )
            ),
        )


class Layouts:
    """Cache of layouts of one node graph."""

    def __init__(self) -> None:
        self._known: dict[object, Layout] = {}

    def of(self, priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> Layout:
        """The layout of a problem; `allowed[n][k]` is true if node n may take choice k."""
        key = (
            priced.target.hides_collectives,
            # Choices, masks and possible conversions determine the layout; prices do not.
            tuple([(node.choices.shape, node.choices.tobytes()) for node in priced.nodes]),
            tuple([mask.tobytes() for mask in allowed]),
            tuple([np.isfinite(table.seconds).tobytes() for table in priced.edges]),
        )
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = lay_out(priced, allowed)
        return layout


def lay_out(priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> Layout:
    """The columns and rows of a problem's program."""
    return _Draft(priced, allowed).finish()


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of a linear program with their bounds and coefficients."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        """New rows with common bounds; returns the first one's number."""
        first = len(self.lower)
        self.lower += [lower] * count
        self.upper += [upper] * count
        return first

    def add_entries(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Add coefficients."""
        self.rows.append(rows)
        self.columns.append(columns)
        # Most are one number, for which broadcasting would take several times as long.
        each = values if isinstance(values, np.ndarray) else np.full(len(columns), values)
        self.values.append(each)


class _Draft:
    """Builder of a layout."""

    def __init__(self, priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> None:
        self.priced = priced
        self.overlaps = priced.target.hides_collectives
        self.kept = [np.flatnonzero(mask) for mask in allowed]
        ends = np.cumsum([0, *(len(kept) for kept in self.kept)])
        self.columns = [np.arange(a, b) for a, b in zip(ends, ends[1:])]
        self.num_columns = self.num_integer = int(ends[-1])
        self.rows = Rows()
        self.prices: list[Ints] = []
        self.shares: list[Floats] = []
        self.single: dict[int, tuple[Ints, Ints, Ints]] = {}
        self.shared: dict[int, dict[Conversion, list[int]]] = {}
        self.places = np.cumsum([0, *(table.seconds.size for table in priced.edges)])

    def finish(self) -> Layout:
        for mine in self.columns:
            # Each node takes one choice.
            self.rows.add_entries(np.full(len(mine), self.rows.add_rows(1, 1.0, 1.0)), mine, 1.0)
        by_share: dict[int, list[int]] = {}
        for edge in self.priced.graph.edges:
            by_share.setdefault(edge.share, []).append(edge.index)
        for share, edges in by_share.items():
            if len(edges) == 1:
                self._add_single(edges[0])
            else:
                self.shared[share] = self._add_shared(edges)
        overlap_row = -1
        if self.overlaps:
            # Its price is set by `build_program`.
            unhidden = self._add_columns(np.array([_ZERO]))
            overlap_row = self.rows.add_rows(2, 0.0, np.inf)
            self.rows.add_entries(overlap_row + np.arange(2), np.repeat(unhidden, 2), 1.0)
        starts = np.cumsum([0, *(len(node.choices) for node in self.priced.nodes)])
        none = np.zeros(0, np.int64)
        return Layout(
            choices=Choices(
                columns=tuple(self.columns),
                allowed=tuple(self.kept),
                shared=self.shared,
                single=self.single,
                num_integer=self.num_integer,
            ),
            node_prices=np.concatenate([start + kept for start, kept in zip(starts, self.kept)]),
            other_prices=np.concatenate([*self.prices, none]),
            other_shares=np.concatenate([*self.shares, np.zeros(0)]),
            lower=self.rows.lower,
            upper=self.rows.upper,
            rows=np.concatenate(self.rows.rows),
            columns=np.concatenate(self.rows.columns),
            values=np.concatenate(self.rows.values),
            groups=Groups.of(self.shared),
            overlap_row=overlap_row,
            # The last column that was added.
            unhidden=self.num_columns - self.num_integer - 1,
        )

    def _add_columns(self, places: Ints, shares: Floats | None = None) -> Ints:
        """Add variables with the positions of their prices, and the shares of these that they
        pay.
        """
        first = self.num_columns
        self.num_columns += len(places)
        self.prices.append(places)
        self.shares.append(np.ones(len(places)) if shares is None else shares)
        return np.arange(first, self.num_columns)

    def _add_single(self, index: int) -> None:
        """Add the flows of an edge whose conversions are its own."""
        sides = self._sides(index)
        flow = self._add_columns(sides.places)
        self.single[index] = (flow, sides.sources[sides.p], sides.targets[sides.q])
        self._tie(index, sides, flow)

    def _add_shared(self, edges: Sequence[int]) -> dict[Conversion, list[int]]:
        """Add the flows of edges that share conversions; returns those of each conversion.

        Each pays an equal share of the price, which is less than the price where not all edges
        convert alike; `Program.share` adds what is missing where it matters.
        """
        by_edge = [self._sides(index) for index in edges]
        flows: dict[Conversion, list[int]] = {}
        price: dict[Conversion, int] = {}
        keys: list[Conversion] = []
        column = self.num_columns
        for index, sides in zip(edges, by_edge, strict=True):
            table = self.priced.edges[index]
            sources, targets = sides.sources[sides.p].tolist(), sides.targets[sides.q].tolist()
            for a, b, place in zip(sources, targets, sides.places.tolist(), strict=True):
                key = table.sources[a], table.targets[b]
                keys.append(key)
                # An array that keeps its split costs nothing, and needs no sharing.
                if key[0] != key[1]:
                    flows.setdefault(key, []).append(column)
                    price.setdefault(key, place)
                column += 1
        places = np.array([price.get(key, _ZERO) for key in keys], np.int64)
        shares = np.array([1 / len(flows[key]) if key in flows else 1.0 for key in keys])
        added = self._add_columns(places, shares)
        ends = np.cumsum([len(sides.places) for sides in by_edge])[:-1]
        for index, sides, flow in zip(edges, by_edge, np.split(added, ends), strict=True):
            self._tie(index, sides, flow)
        return flows

    def _sides(self, index: int) -> _Sides:
        edge, table = self.priced.graph.edges[index], self.priced.edges[index]
        sources, source_places = _specs_left(
            self.kept[edge.source], table.source_index, len(table.sources)
        )
        targets, target_places = _specs_left(
            self.kept[edge.target], table.target_index, len(table.targets)
        )
        finite = np.isfinite(table.seconds)
        if finite.shape != (len(sources), len(targets)):
            finite = finite[sources[:, None], targets]
        p, q = np.nonzero(finite)
        places = self.places[index] + sources[p] * len(table.targets) + targets[q]
        return _Sides(sources, source_places, targets, target_places, p, q, places)

    def _tie(self, index: int, sides: _Sides, flow: Ints) -> None:
        """Tie an edge's flows to the choices on both sides."""
        edge = self.priced.graph.edges[index]
        for of_flow, specs, choices, node in (
            (sides.p, sides.sources, sides.source_places, edge.source),
            (sides.q, sides.targets, sides.target_places, edge.target),
        ):
            # For each split, its flows sum to as much as the choices that give it.
            first = self.rows.add_rows(len(specs), 0.0, 0.0)
            self.rows.add_entries(first + of_flow, flow, 1.0)
            self.rows.add_entries(first + choices, self.columns[node], -1.0)


class _Sides(NamedTuple):
    """The splits on both sides of an edge, those of each choice, and the possible conversions with
    the positions of their prices.
    """

    sources: Ints
    source_places: Ints
    targets: Ints
    target_places: Ints
    p: Ints
    q: Ints
    places: Ints


def _specs_left(kept: Ints, spec_of: Ints, count: int) -> tuple[Ints, Ints]:
    """The specs of an edge's side that allowed choices give, and for each choice the position of
    its spec among them.
    """
    if len(kept) == len(spec_of):
        return np.arange(count), spec_of
    is_left = np.zeros(count, np.bool_)
    is_left[spec_of[kept]] = True
    return np.flatnonzero(is_left), (np.cumsum(is_left) - 1)[spec_of[kept]]
