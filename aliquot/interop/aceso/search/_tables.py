"""Lower bounds on the time of every stretch of operators as one stage.

The memory limit of a stage is relaxed by a Lagrange multiplier, a rate in time per memory. Under
one rate the best states and recomputed operators of a stretch are a shortest path over (state,
recomputed or not), extended operator by operator for all stretches that begin at the same place.
Any rate gives a valid bound; the largest counts. Stretches of equal layers are computed once, for
each place of a layer that they can begin at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._space import Floats, StageSpace

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A run of equal layers of a chain: first operator, operators of a layer, number of layers.

    In a chain without layers, `first` is the number of operators and `count` is 0.
    """

    first: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """The first operator after the last layer."""
        return self.first + self.length * self.count


def find_period(kinds: Integers) -> Period:
    """The run of equal layers that leaves the fewest distinct places for a stretch to begin at.

    >>> find_period(np.array([0, 1, 2, 1, 2, 1, 2, 3]))
    Period(first=1, length=2, count=3)
    """
    num = len(kinds)
    best, best_rows = Period(first=num, length=1, count=0), num
    for length in range(1, num // 2 + 1):
        if length >= best_rows:
            break
        same = kinds[:-length] == kinds[length:]
        ends = np.flatnonzero(~np.append(same, False))
        begins = np.concatenate([[0], ends[:-1] + 1])
        longest = int(np.argmax(ends - begins))
        first, count = int(begins[longest]), int((ends - begins)[longest]) // length + 1
        rows = num - length * (count - 1)
        if count > 1 and rows < best_rows:
            best, best_rows = Period(first=first, length=length, count=count), rows
    # A run that saves less than half is not worth the bookkeeping.
    return best if best_rows <= num // 2 else Period(first=num, length=1, count=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StretchBounds:
    """Lower bounds of stretches, indexed by number of stages after the stretch, kind of links,
    first operator, and length less one.

    Attributes:
        bound_us: the bounds; infinite if no stage may have this stretch, or it does not fit.
        rate: index of the rate that gave the bound.
        links: for each kind, whether a stage is entered and left between nodes.
        rates_us_per_mb: Lagrange multipliers, by number of stages after the stretch.
    """

    bound_us: Floats
    rate: NDArray[np.int8]
    links: tuple[tuple[int, int], ...]
    rates_us_per_mb: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PossibleStages:
    """Stretches that may be stages.

    Attributes:
        longest: the most operators of one.
        begins: for each operator, whether a stage may begin with it.
        ends: for each operator and the end of the chain, whether a stage may end before it.
    """

    longest: int
    begins: NDArray[np.bool_]
    ends: NDArray[np.bool_]


def bound_stretches(
    space: StageSpace,
    period: Period,
    *,
    in_flight: Sequence[int],
    rates_us_per_mb: Floats,
    memory_limit_mb: float,
    links: Sequence[tuple[int, int]],
    may_be: PossibleStages,
) -> StretchBounds:
    """Bounds for all stretches that may be stages.

    Args:
        in_flight: micro-batches that a stage holds, by number of stages after it.
        rates_us_per_mb: rates to try, by number of stages after it.
        links: whether a stage is entered and left between nodes (1) or within one (0). The first
            stage counts as entered within a node.
    """
    sweep = _Sweep(
        space, np.array(in_flight, float), rates_us_per_mb, memory_limit_mb, links, may_be.longest
    )
    sweep.run(period, may_be.begins, may_be.ends)
    return StretchBounds(
        bound_us=sweep.bound_us,
        rate=sweep.rate,
        links=tuple(links),
        rates_us_per_mb=rates_us_per_mb,
    )


class _Sweep:
    """Shortest paths from all beginnings at once, with and without recomputation of the last
    operator. They are indexed [state, entry, behind, rate, row]: `entry` is the kind of transfer
    into the stage, `behind` the number of stages after it, and there is a row for each beginning.

    Rows come last because there are many of them: NumPy is fast if the last axis is long.
    """

    def __init__(
        self,
        space: StageSpace,
        in_flight: Floats,
        rates: Floats,
        limit_mb: float,
        links: Sequence[tuple[int, int]],
        longest: int,
    ) -> None:
        self._space, self._rates, self._limit, self._longest = space, rates, limit_mb, longest
        self._num = num = len(space.kinds)
        held = rates * in_flight[:, None]
        # Indexed by kind of operator, then like paths, with axes of length 1 for entries and rows.
        self._saved = held[..., None] * _by_state(space.kept_mb)
        self._own = (
            _by_state(space.busy_us)
            + rates[..., None] * _by_state(space.state_copies * space.weights_mb)
            + self._saved
        )
        self._again = _by_state(space.again_us)
        self._enter = [
            held[..., None] * _by_state(space.enters_mb) + _by_state(space.enters_us[entered])
            for entered in (0, 1)
        ]
        invalid = ~space.valid
        least = [
            np.where(invalid, np.inf, x).min(axis=1)
            for x in (space.forward_reserved_mb, space.backward_reserved_mb)
        ]
        self._least_reserved = least[0][space.kinds], least[1][space.kinds]
        self._leaves = _by_state(np.where(invalid, 0.0, space.leaves_us.min(axis=3)))
        self._edges = [_Edges(costs) for costs in space.edges_us]
        self._links = list(links)
        self._entries = sorted({entered for entered, _ in links})
        self._ends: NDArray[np.bool_] = np.ones(num + 1, bool)
        width = min(longest, num)
        shape = (len(in_flight), len(links), num, width)
        self.bound_us = np.full(shape, np.inf)
        self.rate = np.zeros(shape, np.int8)

    def run(self, period: Period, begins: NDArray[np.bool_], ends: NDArray[np.bool_]) -> None:
        """Bound all stretches: one sweep with a row for each distinct beginning, then one over the
        operators after the layers.
        """
        num, end = self._num, period.end if period.count else self._num
        layer = np.arange(period.first, min(period.first + period.length, end))
        heads, self._ends = np.flatnonzero(begins[:end]), ends
        if period.count:
            # A beginning in the first layer stands for the same beginning in all layers.
            by_layer = begins[period.first : end].reshape(period.count, period.length)
            heads = np.concatenate([heads[heads < period.first], layer[by_layer.any(axis=0)]])
            self._ends = ends.copy()
            for shift in range(period.length, end - period.first, period.length):
                self._ends[period.first : end + 1 - shift] |= ends[period.first + shift : end + 1]
        rows = _Rows.empty(len(heads), self)
        snapshots = {period.end - period.length * later: later for later in range(1, period.count)}
        copies: list[tuple[_Rows, Integers]] = []
        for op in range(end):
            if not self._advance(rows, heads, op, period):
                break
            later = snapshots.get(op + 1)
            if later is not None and end < num:
                shifted = heads + period.length * later
                phases = np.flatnonzero(
                    (heads >= period.first) & begins[np.minimum(shifted, num - 1)]
                )
                copies.append((rows.part(phases), shifted[phases]))
        if end == num:
            return
        self._ends = ends
        after = end + np.flatnonzero(begins[end:])
        tails = [(rows, heads), *copies, (_Rows.empty(len(after), self), after)]
        joined, starts = _Rows.joined([r for r, _ in tails]), np.concatenate([s for _, s in tails])
        for op in range(end, num):
            self._advance(joined, starts, op, None)

    def _advance(self, rows: _Rows, starts: Integers, op: int, period: Period | None) -> bool:
        """Extend every row by operator `op`, begin the rows that start with it, and write the
        bounds; False if no row is left.
        """
        going = (starts <= op) & (op - starts < self._longest)
        if not going.any():
            return bool((starts > op).any())
        chosen = slice(int(np.argmax(going)), len(going) - int(np.argmax(going[::-1])))
        space, kind = self._space, int(self._space.kinds[op])
        plain, again = rows.plain[..., chosen], rows.again[..., chosen]
        either = np.minimum(plain, again)
        edges = self._edges[space.edge_of[op]]
        if space.fused[op]:
            np.subtract(again, self._saved[self._space.kinds[op - 1]], out=again)
            joint = np.minimum(plain, again, out=again)
            again[...] = edges.shortest(joint)
            plain[...] = edges.shortest(either)
            again += self._own[kind] + self._again[kind]
            plain += self._own[kind]
        else:
            plain[...] = edges.shortest(either)
            plain += self._own[kind]
            np.add(plain, self._again[kind], out=again)
        for side in (0, 1):
            rows.reserved[side][chosen] = np.maximum(
                rows.reserved[side][chosen],
                (
                    np.where(op - 1 >= starts[chosen], self._least_reserved[side][op - 1], 0.0)
                    if not space.counts_last_reserved
                    else self._least_reserved[side][op]
                ),
            )
        begun = np.flatnonzero(starts == op)
        if len(begun):
            for k, entered in enumerate(self._entries):
                first = self._own[kind] + self._enter[entered if op else 0][kind]
                rows.plain[:, k, ..., begun] = np.moveaxis(first[:, 0], -1, 0)
                rows.again[:, k, ..., begun] = np.moveaxis((first + self._again[kind])[:, 0], -1, 0)
            if space.counts_last_reserved:
                for side in (0, 1):
                    rows.reserved[side][begun] = self._least_reserved[side][op]
            else:
                for side in (0, 1):
                    rows.reserved[side][begun] = 0.0
        if self._ends[op + 1]:
            self._write(rows, starts, op, chosen, period)
        return True

    def _write(
        self, rows: _Rows, starts: Integers, op: int, chosen: slice, period: Period | None
    ) -> None:
        """Write the bounds of all stretches that end with operator `op`."""
        least = np.minimum(rows.plain[..., chosen], rows.again[..., chosen])
        reserved = rows.reserved[0][chosen] + rows.reserved[1][chosen]
        refund = self._rates[..., None] * (self._limit - reserved)
        kind = self._space.kinds[op]
        last = op + 1 == self._num
        begins = starts[chosen]
        fits = (begins <= op) & (op - begins < self._longest)
        own_starts, offset = begins[fits], op - begins[fits]
        for index, (enters_node, leaves_node) in enumerate(self._links):
            if last and not leaves_node:
                # The last stage is always left between nodes.
                leaves_node = 1
            entry = self._entries.index(enters_node)
            paths = least[:, entry : entry + 1] + self._leaves[leaves_node, kind]
            bounds = paths[:, 0].min(axis=0) - refund
            best = bounds.argmax(axis=1)
            value = np.take_along_axis(bounds, best[:, None], axis=1)[:, 0]
            value, best = value[:, fits], best[:, fits]
            self.bound_us[:, index, own_starts, offset] = value
            self.rate[:, index, own_starts, offset] = best
            if period is None or not period.count:
                continue
            # The same stretch in later layers.
            phased = own_starts >= period.first
            phase_starts, phase_offset = own_starts[phased], offset[phased]
            count = (period.end - (op + 1)) // period.length
            if count <= 0 or not len(phase_starts):
                continue
            later = period.length * np.arange(1, count + 1)
            at = phase_starts[:, None] + later
            self.bound_us[:, index, at, phase_offset[:, None]] = value[:, phased, None]
            self.rate[:, index, at, phase_offset[:, None]] = best[:, phased, None]


def _by_state(values: Floats) -> Floats:
    """Values whose last axis is the state, with further axes so that they can be added to paths."""
    return values[..., None, None, None, None]


class _Edges:
    """Costs of changing from each state of an operator to each state of the next, with equal rows
    and equal columns stored once.

    There are many equal ones for layers, whose states may differ in what they recompute alone.
    """

    def __init__(self, costs: Floats) -> None:
        rows, source = np.unique(costs, axis=0, return_inverse=True)
        self._costs, self._target = np.unique(rows, axis=1, return_inverse=True)
        self._order = np.argsort(source, kind="stable")
        self._first = np.searchsorted(source[self._order], np.arange(len(rows)))
        self._is_plain = len(rows) == len(costs) and self._costs.shape[1] == costs.shape[1]
        if self._is_plain:
            self._costs = costs

    def shortest(self, paths: Floats) -> Floats:
        """Paths to every state through its best predecessor."""
        if not self._is_plain:
            paths = np.minimum.reduceat(paths[self._order], self._first, axis=0)
        if self._costs.size == 1:
            result: Floats = paths + self._costs[0, 0]
        else:
            result = np.full((self._costs.shape[1], *paths.shape[1:]), np.inf)
            for state, following in np.argwhere(np.isfinite(self._costs)):
                to = result[following]
                np.minimum(to, paths[state] + self._costs[state, following], out=to)
        return result if self._is_plain else result[self._target]


class _Rows:
    """Shortest paths so far, a row for each beginning."""

    def __init__(self, plain: Floats, again: Floats, reserved: tuple[Floats, Floats]) -> None:
        self.plain, self.again, self.reserved = plain, again, reserved

    @classmethod
    def empty(cls, count: int, sweep: _Sweep) -> _Rows:
        """Rows whose paths have not begun."""
        _, states, _, behind, rates, _ = sweep._own.shape
        shape = (states, len(sweep._entries), behind, rates, count)
        return cls(
            np.full(shape, np.inf), np.full(shape, np.inf), (np.zeros(count), np.zeros(count))
        )

    @classmethod
    def joined(cls, parts: Sequence[_Rows]) -> _Rows:
        """The rows of all parts, one after the other."""
        return cls(
            np.concatenate([p.plain for p in parts], axis=-1),
            np.concatenate([p.again for p in parts], axis=-1),
            (
                np.concatenate([p.reserved[0] for p in parts]),
                np.concatenate([p.reserved[1] for p in parts]),
            ),
        )

    def part(self, rows: Integers) -> _Rows:
        """A copy of some rows."""
        return _Rows(
            self.plain[..., rows],
            self.again[..., rows],
            (self.reserved[0][rows], self.reserved[1][rows]),
        )
