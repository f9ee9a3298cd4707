"""Columns and rows of a priced problem's linear program, and the positions of its prices.

Meshes with axes of other sizes or speeds mostly have the same choices and conversions, with other
prices. So the program is laid out once, and each problem only puts in its prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ....cost import Priced

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Positions from the end of `Prices.conversions`, after all conversions.
_ONE, _ZERO = -2, -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Columns of the program for the choices of each node, with the choices that they stand for."""

    columns: tuple[Ints, ...]
    allowed: tuple[Ints, ...]
    shared: dict[int, dict[tuple[object, object], int]]
    single: dict[int, tuple[Ints, Ints, Ints]]
    num_integer: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """All prices of a problem as flat arrays: those of choices and those of conversions."""

    plain: Floats
    gradient: Floats
    backward: Floats
    conversions: Floats

    @classmethod
    def of(cls, priced: Priced) -> Prices:
        """The prices of a problem; without overlap, those of gradients are added to the plain ones."""
        gradient = np.concatenate([node.gradient_s for node in priced.nodes])
        plain = np.concatenate([node.compute_s + node.communication_s for node in priced.nodes])
        return cls(
            plain=plain if priced.target.overlap_fraction else plain + gradient,
            gradient=gradient,
            backward=np.concatenate([node.backward_s for node in priced.nodes]),
            conversions=np.concatenate([*(table.seconds.ravel() for table in priced.edges), [1.0, 0.0]]),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Layout:
    """A program without prices.

    Attributes:
        choices: the meaning of columns.
        node_prices: for each column of a choice, the position of its price in `Prices`.
        other_prices: likewise for each other column, among conversions.
        lower, upper: bounds of rows.
        rows, columns, values: coefficients that do not depend on prices.
        hidden: columns of conversions that the backward pass may hide, and the positions of their
            prices.
        overlap_row: the first of the two rows of overlap; -1 without overlap.
    """

    choices: Choices
    node_prices: Ints
    other_prices: Ints
    lower: list[float]
    upper: list[float]
    rows: Ints
    columns: Ints
    values: Floats
    hidden: tuple[Ints, Ints]
    overlap_row: int

    def overlap(self, prices: Prices, fraction: float) -> tuple[Ints, Ints, Floats]:
        """Coefficients of `z >= (1 - fraction) gradient` and `z >= gradient - backward`."""
        columns_of_choices = np.arange(len(self.node_prices))
        columns = np.concatenate((columns_of_choices, self.hidden[0]))
        gradient = np.concatenate((prices.gradient[self.node_prices], prices.conversions[self.hidden[1]]))
        some = gradient != 0
        columns, gradient = columns[some], gradient[some]
        backward = prices.backward[self.node_prices]
        hiding = np.flatnonzero(backward)
        first = self.overlap_row
        counts = (len(columns), len(columns), len(hiding))
        return (
            np.repeat([first, first + 1, first + 1], counts),
            np.concatenate((columns, columns, hiding)),
            np.concatenate((-(1 - fraction) * gradient, -gradient, backward[hiding])),
        )


class Layouts:
    """Cache of layouts of one node graph."""

    def __init__(self) -> None:
        self._known: dict[object, Layout] = {}

    def of(self, priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> Layout:
        """The layout of a problem; `allowed[n][k]` is true if node n may take choice k."""
        key = (
            priced.target.overlap_fraction > 0,
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


@dataclass(slots=True)
class _Entries:
    """A list of coefficients that grows."""

    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, rows: Ints, columns: Ints, value: float) -> None:
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(value)

    def joined(self) -> tuple[Ints, Ints, Floats]:
        counts = [len(columns) for columns in self.columns]
        return np.concatenate(self.rows), np.concatenate(self.columns), np.repeat(np.array(self.values), counts)


class _Draft:
    """Builder of a layout."""

    def __init__(self, priced: Priced, allowed: Sequence[NDArray[np.bool_]]) -> None:
        self.priced = priced
        self.overlaps = bool(priced.target.overlap_fraction)
        self.kept = [np.flatnonzero(mask) for mask in allowed]
        ends = np.cumsum([0, *(len(kept) for kept in self.kept)])
        self.columns = [np.arange(a, b) for a, b in zip(ends, ends[1:])]
        self.num_columns = self.num_integer = int(ends[-1])
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.entries = _Entries()
        self.prices: list[Ints] = []
        self.hidden: list[tuple[Ints, Ints]] = []
        self.single: dict[int, tuple[Ints, Ints, Ints]] = {}
        self.shared: dict[int, dict[tuple[object, object], int]] = {}
        self.places = np.cumsum([0, *(table.seconds.size for table in priced.edges)])

    def finish(self) -> Layout:
        for mine in self.columns:
            self.entries.add(np.full(len(mine), self._add_rows(1, 1.0, 1.0)), mine, 1.0)
        by_share: dict[int, list[int]] = {}
        for edge in self.priced.graph.edges:
            by_share.setdefault(edge.share, []).append(edge.index)
        for share, edges in by_share.items():
            self._add_edges(edges, self.shared.setdefault(share, {}))
        overlap_row = -1
        if self.overlaps:
            exposed = self._add_columns(np.array([_ONE]))
            overlap_row = self._add_rows(2, 0.0, np.inf)
            self.entries.add(overlap_row + np.arange(2), np.repeat(exposed, 2), 1.0)
        starts = np.cumsum([0, *(len(node.choices) for node in self.priced.nodes)])
        rows, columns, values = self.entries.joined()
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
            lower=self.lower,
            upper=self.upper,
            rows=rows,
            columns=columns,
            values=values,
            hidden=(
                np.concatenate([*(columns for columns, _ in self.hidden), none]),
                np.concatenate([*(places for _, places in self.hidden), none]),
            ),
            overlap_row=overlap_row,
        )

    def _add_columns(self, places: Ints) -> Ints:
        """Add variables with the positions of their prices."""
        first = self.num_columns
        self.num_columns += len(places)
        self.prices.append(places)
        return np.arange(first, self.num_columns)

    def _add_rows(self, count: int, lower: float, upper: float) -> int:
        first = len(self.lower)
        self.lower += [lower] * count
        self.upper += [upper] * count
        return first

    def _add_edges(self, edges: Sequence[int], shared: dict[tuple[object, object], int]) -> None:
        """Add the flows of edges that share conversions. The flow of a single edge has its own
        price.
        """
        hidden = self.overlaps and self.priced.graph.edges[edges[0]].gradient
        for index in edges:
            edge, table = self.priced.graph.edges[index], self.priced.edges[index]
            sources, source_places = _specs_left(self.kept[edge.source], table.source_index, len(table.sources))
            targets, target_places = _specs_left(self.kept[edge.target], table.target_index, len(table.targets))
            finite = np.isfinite(table.seconds)
            if finite.shape != (len(sources), len(targets)):
                finite = finite[sources[:, None], targets]
            p, q = np.nonzero(finite)
            places = self.places[index] + sources[p] * len(table.targets) + targets[q]
            alone = len(edges) == 1
            flow = self._add_columns(np.full(len(p), _ZERO) if hidden or not alone else places)
            if alone:
                self.single[index] = (flow, sources[p], targets[q])
                if hidden:
                    self.hidden.append((flow, places))
            for mine, specs, own, node in (
                (p, sources, source_places, edge.source),
                (q, targets, target_places, edge.target),
            ):
                first = self._add_rows(len(specs), 0.0, 0.0)
                self.entries.add(first + mine, flow, 1.0)
                self.entries.add(first + own, self.columns[node], -1.0)
            if not alone:
                keys = [
                    (table.sources[a], table.targets[b])
                    for a, b in zip(sources[p].tolist(), targets[q].tolist(), strict=True)
                ]
                self._add_shared(keys, places, flow, shared, hidden)

    def _add_shared(
        self,
        keys: Sequence[tuple[object, object]],
        places: Ints,
        flow: Ints,
        shared: dict[tuple[object, object], int],
        hidden: bool,
    ) -> None:
        """Add `flow <= shared`, with the price on the shared column, for each conversion between
        different splits.
        """
        costly = np.array([k for k, (a, b) in enumerate(keys) if a != b], np.int64)
        fresh = [k for k in costly.tolist() if keys[k] not in shared]
        if fresh:
            new_columns = self._add_columns(np.full(len(fresh), _ZERO) if hidden else places[fresh])
            shared.update({keys[k]: int(column) for k, column in zip(fresh, new_columns, strict=True)})
            if hidden:
                self.hidden.append((new_columns, places[fresh]))
        if len(costly):
            rows = self._add_rows(len(costly), -np.inf, 0.0) + np.arange(len(costly))
            self.entries.add(rows, flow[costly], 1.0)
            self.entries.add(rows, np.array([shared[keys[k]] for k in costly.tolist()]), -1.0)


def _specs_left(kept: Ints, spec_of: Ints, count: int) -> tuple[Ints, Ints]:
    """The specs of an edge's side that allowed choices give, and for each choice the position of
    its spec among them.
    """
    if len(kept) == len(spec_of):
        return np.arange(count), spec_of
    is_left = np.zeros(count, np.bool_)
    is_left[spec_of[kept]] = True
    return np.flatnonzero(is_left), (np.cumsum(is_left) - 1)[spec_of[kept]]
