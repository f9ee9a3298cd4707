"""The fastest way to run one stretch of operators as a stage under a memory limit, by extending
labels operator by operator.

A label is a partial stage: its time and memory so far, and the state of its last operator. A label
is dropped if another one dominates it, or if a lower bound on the remaining operators puts it above
the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ._dominance import TOLERANCE, undominated
from ._space import Floats, StageSpace

# The most places at which two paths are joined.
_MOST_MIXED = 120
# The most labels that are compared with each other at an operator, as a multiple of those kept.
_MOST_COMPARED = 3

Integers = NDArray[np.int64]
# Ceilings that are tried one after another, as shares above the bound.
_RISES = (0.0005, 0.002, 0.005, 0.01, 0.03, 0.1, 1.0, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """The fastest known way to run a stage, with a lower bound.

    Attributes:
        time_us: time of the fastest known way; infinite if none is known.
        bound_us: a lower bound on the time of all ways; the ceiling if all are above it.
        closed: whether the search proved that no way is faster than its ceiling.
        states: for each operator, its index among the space's states.
        recompute: for each operator, whether it is recomputed.
    """

    time_us: float
    bound_us: float
    closed: bool = False
    states: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if it is proved that no way is faster."""
        return self.closed or self.bound_us >= self.time_us * (1 - TOLERANCE)

    def improved(self, other: StageAnswer) -> StageAnswer:
        """The faster of two answers with the higher of their bounds."""
        faster = min(self, other, key=lambda answer: answer.time_us)
        return replace(
            faster, bound_us=max(self.bound_us, other.bound_us), closed=self.closed or other.closed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Operators `[first, last)` as a stage.

    Attributes:
        in_flight: number of micro-batches that the stage holds.
        entered, left: whether the transfers into and out of the stage cross nodes.
    """

    first: int
    last: int
    in_flight: int
    entered: int
    left: int


def solve_stage(
    space: StageSpace,
    stretch: Stretch,
    *,
    memory_limit_mb: float,
    ceiling_us: float,
    rate_us_per_mb: float,
    max_labels: int = 4000,
) -> StageAnswer:
    """The fastest way to run a stretch, if it takes less than the ceiling.

    Args:
        rate_us_per_mb: an estimate of the Lagrange multiplier of memory; the better it is, the
            fewer labels remain.
        max_labels: labels kept at each operator; if some are dropped, the bound may lie below the
            time of the answer. With 0 the answer is the best of the shortest paths.
    """
    if not stretch.first:
        stretch = replace(stretch, entered=0)
    left = 1 if stretch.last == len(space.kinds) else stretch.left
    best = StageAnswer(time_us=np.inf, bound_us=ceiling_us)
    # Transfers out of the stage depend on the tensor degree of its first operator, or do not.
    ways = space.leaves_us[left, space.kinds[stretch.last - 1]]
    are_equal = bool((ways == ways[:, :1]).all())
    for k, degree in enumerate(space.tensor_degrees[: 1 if are_equal else None]):
        leaves = ways[:, k]
        allowed = np.array([are_equal or degree == tp for tp, *_ in space.states])
        ceiling = min(best.time_us, ceiling_us)
        labels = _Labels(space, stretch, leaves, allowed, memory_limit_mb)
        answer = labels.solve(ceiling, rate_us_per_mb, max_labels)
        bound = min(best.bound_us, answer.bound_us)
        best = answer if answer.time_us < best.time_us else best
        best = replace(best, bound_us=bound)
    return replace(best, closed=best.bound_us >= ceiling_us)


class _Labels:
    def __init__(
        self,
        space: StageSpace,
        stretch: Stretch,
        leaves: Floats,
        allowed: NDArray[np.bool_],
        limit_mb: float,
    ) -> None:
        first, last, in_flight = stretch.first, stretch.last, stretch.in_flight
        self._space, self._in_flight, self._limit = space, in_flight, limit_mb
        self._leaves = leaves
        kinds = space.kinds[first:last]
        self._kinds = kinds
        self._busy = space.busy_us[kinds].copy()
        self._busy[0][~allowed] = np.inf
        self._busy[0] += space.enters_us[stretch.entered, kinds[0]]
        self._again = space.again_us[kinds]
        self._kept = space.kept_mb[kinds] * in_flight
        self._mb = self._kept + space.state_copies * space.weights_mb[kinds]
        self._mb[0] += in_flight * space.enters_mb[kinds[0]]
        self._edge_of = space.edge_of[first:last]
        self._distinct_edges = space.edges_us
        self._edges = [space.edges_us[e] for e in self._edge_of]
        self._fused = space.fused[first:last]

    def solve(self, ceiling: float, rate: float, max_labels: int) -> StageAnswer:
        """The fastest way below the ceiling. Lower bounds on the remaining operators are computed
        under a few rates, then labels are extended below ceilings that rise from the bound.
        """
        if not np.isfinite(self._busy[0]).any():
            return StageAnswer(time_us=np.inf, bound_us=np.inf)
        memory_to_go = self._to_go(np.ones(1), 0.0)
        if self._bounds(memory_to_go[0], np.ones(1), 0.0)[0] > self._limit + TOLERANCE:
            return StageAnswer(time_us=np.inf, bound_us=np.inf)
        rates_tried = np.array([0.0, *((rate or 1.0) * np.geomspace(0.1, 8, 14))])
        bounds = self._bounds(self._to_go(rates_tried, 1.0)[0], rates_tried)
        at = int(bounds.argmax())
        if bounds[at] >= ceiling:
            return StageAnswer(time_us=np.inf, bound_us=ceiling)
        # Rates closely spaced around the best bound, and larger ones, so that some shortest path
        # fits in memory.
        low, high = rates_tried[max(at - 1, 0)], rates_tried[min(at + 1, len(rates_tried) - 1)]
        rates_tried = np.unique(
            np.concatenate([[0.0], np.linspace(low, high, 17), high * np.geomspace(1.2, 100, 8)])
        )
        togo = self._to_go(rates_tried, 1.0)
        bounds = self._bounds(togo[0], rates_tried)
        bound = float(bounds.max())
        rounded = self._rounded(rates_tried, togo)
        ceiling = min(ceiling, rounded.time_us)
        if not max_labels or bound >= ceiling * (1 - TOLERANCE):
            return replace(rounded, bound_us=min(bound, ceiling))
        chosen_rates = np.unique(np.append(np.argsort(-bounds)[:3], 0))
        best = rounded
        for share in _RISES:
            bar = min(ceiling, bound * (1 + share))
            answer = self._extend(
                bar,
                rates_tried[chosen_rates],
                togo[:, chosen_rates],
                memory_to_go[:, 0],
                max_labels,
            )
            best = min(best, answer, key=lambda each: each.time_us)
            bound = max(bound, min(answer.bound_us, best.time_us))
            if answer.bound_us < bar or np.isfinite(answer.time_us) or bar >= ceiling:
                break
        if not np.isfinite(best.time_us) and bar < ceiling:
            # All ways that fit were dropped at the limit of labels; try again up to the full
            # ceiling.
            best = self._extend(
                ceiling,
                rates_tried[chosen_rates],
                togo[:, chosen_rates],
                memory_to_go[:, 0],
                max_labels,
            )
        return replace(best, bound_us=bound)

    def _rounded(self, rates: Floats, togo: Floats) -> StageAnswer:
        """The fastest way that fits in memory among the shortest paths, one for each rate, and
        mixtures of two of them with neighbouring rates.
        """
        states, again = self._shortest(rates, togo)
        fits = np.flatnonzero(self._totals(states, again)[1] <= self._limit + TOLERANCE)
        if len(fits) and fits[0]:
            # Refine between the last rate whose path does not fit and the first whose path does.
            between = np.linspace(rates[fits[0] - 1], rates[fits[0]], 9)
            states, again = self._shortest(between, self._to_go(between, 1.0))
            fits = np.flatnonzero(self._totals(states, again)[1] <= self._limit + TOLERANCE)
            if len(fits) and fits[0]:
                states, again = self._mixed(states, again, int(fits[0]) - 1, int(fits[0]))
        times, memory = self._totals(states, again)
        times = np.where(memory <= self._limit + TOLERANCE, times, np.inf)
        best = int(times.argmin())
        if not np.isfinite(times[best]):
            return StageAnswer(time_us=np.inf, bound_us=0.0)
        return StageAnswer(
            time_us=float(times[best]),
            bound_us=0.0,
            states=tuple(states[:, best].tolist()),
            recompute=tuple(again[:, best].astype(bool).tolist()),
        )

    def _shortest(self, rates: Floats, togo: Floats) -> tuple[Integers, Integers]:
        """States and recomputed operators of the shortest path under each rate: a row for each
        operator, a column for each rate.
        """
        count = len(self._kinds)
        states = np.zeros((count, len(rates)), np.int64)
        again = np.zeros((count, len(rates)), np.int64)
        cost = np.broadcast_to(
            self._busy[0] + rates[:, None] * self._mb[0], (len(rates), self._busy.shape[1])
        )
        both = np.empty((len(rates), 2, self._busy.shape[1]))
        both[:, 0], both[:, 1] = cost, cost + self._again[0]
        both += togo[0]
        for op in range(count):
            if op:
                before, redone = states[op - 1], again[op - 1]
                cost_here = self._busy[op] + rates[:, None] * self._mb[op] + self._edges[op][before]
                saved = (
                    self._kept[op - 1][before] * redone * rates
                    if self._fused[op]
                    else np.zeros(len(rates))
                )
                both[:, 0] = cost_here
                both[:, 1] = cost_here + self._again[op] - saved[:, None]
                both += togo[op]
            flat = both.reshape(len(rates), -1).argmin(axis=1)
            again[op], states[op] = np.divmod(flat, both.shape[-1])
        return states, again

    @staticmethod
    def _mixed(
        states: Integers, again: Integers, faster: int, smaller: int
    ) -> tuple[Integers, Integers]:
        """Both paths, and every path that begins as one of them and ends as the other.

        From one rate to the next, equal layers change all at once. If one of two paths needs too
        much memory and the other is needlessly slow, the best path has some layers of each.
        """
        count = len(states)
        ends = np.unique(np.linspace(0, count, min(count, _MOST_MIXED) + 1).astype(int))
        begins = np.arange(count)[:, None] < ends

        def joined(path: Integers) -> Integers:
            one, other = path[:, [smaller]], path[:, [faster]]
            return np.concatenate(
                [np.where(begins, one, other), np.where(begins, other, one)], axis=1
            )

        return joined(states), joined(again)

    def _totals(self, states: NDArray[np.int64], again: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Times and memory of whole paths, a column for each."""
        space, count = self._space, len(states)
        at, kinds, redone = np.arange(count)[:, None], self._kinds[:, None], again.astype(bool)
        # Operators and the changes of layout before them, added up in their order.
        times = np.zeros((count, 2, states.shape[1]))
        times[1:, 0] = self._distinct_edges[self._edge_of[1:, None], states[:-1], states[1:]]
        times[:, 1] = self._busy[at, states] + np.where(redone, self._again[at, states], 0.0)
        dropped = redone[1:] & redone[:-1] & self._fused[1:, None]
        saved_mb = np.where(dropped, self._kept[at[:-1], states[:-1]], 0.0)
        memory_mb = self._mb[at, states]
        memory_mb[1:] -= saved_mb
        run_mb = peak_mb = np.zeros(states.shape[1])
        for is_dropped, saved in zip(dropped, saved_mb / self._in_flight, strict=True):
            run_mb = np.where(is_dropped, run_mb + saved, 0.0)
            peak_mb = np.maximum(peak_mb, run_mb)
        counted = slice(count if space.counts_last_reserved else count - 1)
        kinds, chosen = kinds[counted], states[counted]
        reserved_mb = sum(
            table[kinds, chosen].max(axis=0, initial=0.0)
            for table in (space.forward_reserved_mb, space.backward_reserved_mb)
        )
        weights_mb = space.weights_mb[self._kinds[:, None], states].cumsum(axis=0)[-1]
        peak_mb = np.maximum(peak_mb, space.peak_mb[kinds, chosen].max(axis=0, initial=0.0))
        total_us = times.reshape(2 * count, -1).cumsum(axis=0)[-1] + self._leaves[states[-1]]
        held_mb = peak_mb + np.maximum(reserved_mb, weights_mb)
        return total_us, memory_mb.cumsum(axis=0)[-1] + held_mb

    def _to_go(self, rates: Floats, time: float) -> Floats:
        """The least cost of all operators after each one and of the transfer out of the stage,
        indexed by operator, rate, recomputed or not, and state.

        Args:
            time: weight of times in the cost: 1, or 0 for memory alone.
        """
        count, states = self._busy.shape
        result = np.zeros((count, len(rates), 2, states))
        result[-1] = time * self._leaves
        # States that cannot be run have infinite times, which 0 must not multiply.
        busy = np.where(
            np.isfinite(self._busy), time * np.nan_to_num(self._busy, posinf=0.0), np.inf
        )
        cost = busy[:, None] + rates[:, None] * self._mb[:, None]
        costs = np.stack([cost, cost + time * self._again[:, None]], axis=2)
        saved = rates[:, None] * self._kept[:, None]
        edges = np.where(
            np.isfinite(self._distinct_edges),
            time * np.nan_to_num(self._distinct_edges, posinf=0.0),
            np.inf,
        )
        for op in range(count - 1, 0, -1):
            reached = _least_after(result[op] + costs[op], edges[self._edge_of[op]])
            to_plain, to_again = reached[:, 0], reached[:, 1]
            np.minimum(to_plain, to_again, out=result[op - 1][:, 0])
            if self._fused[op]:
                to_again = to_again - saved[op - 1]
            np.minimum(to_plain, to_again, out=result[op - 1][:, 1])
        return result

    def _bounds(self, togo: Floats, rates: Floats, time: float = 1.0) -> Floats:
        """The lower bound on the whole stage under each rate: the least cost, minus the cost of the
        memory limit at that rate. With `time` 0, the least memory at a rate of 1.
        """
        busy = np.where(
            np.isfinite(self._busy[0]), time * np.nan_to_num(self._busy[0], posinf=0.0), np.inf
        )
        start = busy + rates[:, None] * self._mb[0]
        whole = np.minimum(start + togo[:, 0], start + time * self._again[0] + togo[:, 1]).min(
            axis=-1
        )
        least: Floats = whole - time * rates * self._limit
        return least

    def _extend(
        self, ceiling: float, rates: Floats, togo: Floats, memory_to_go: Floats, max_labels: int
    ) -> StageAnswer:
        """The fastest way below the ceiling, found by extending labels operator by operator."""
        count = len(self._kinds)
        begin = np.flatnonzero(np.isfinite(self._busy[0]))
        states = np.repeat(begin, 2)
        again = np.tile([0, 1], len(begin))
        time = self._busy[0][states] + again * self._again[0][states]
        zero = np.zeros(len(states))
        # Columns: time, memory, weights, current run, longest run, forward and backward reserved.
        labels = np.stack(
            [
                time,
                self._mb[0][states],
                self._space.weights_mb[self._kinds[0]][states],
                zero,
                zero,
                zero,
                zero,
            ],
            axis=1,
        )
        history: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        parents = np.full(len(states), -1)
        lost = np.inf
        for op in range(count):
            if op:
                labels, states, again, parents = self._step(op, labels, states, again)
            elif self._space.counts_last_reserved:
                self._reserve(labels, states, 0)
            reduced = self._reduced(labels, states, again, op, rates, togo)
            held = self._held(labels)
            fits = labels[:, 1] + held + memory_to_go[op][again, states] <= self._limit + TOLERANCE
            alive = np.flatnonzero((reduced < ceiling) & fits)
            if not len(alive):
                return StageAnswer(time_us=np.inf, bound_us=min(lost, ceiling))
            if len(alive) > _MOST_COMPARED * max_labels:
                ranked = alive[np.argsort(reduced[alive], kind="stable")]
                lost = min(lost, float(reduced[ranked[_MOST_COMPARED * max_labels]]))
                alive = ranked[: _MOST_COMPARED * max_labels]
            order = alive[np.lexsort((labels[alive, 1], labels[alive, 0]))]
            keep = order[undominated(labels[order], states[order] * 2 + again[order])]
            if len(keep) > max_labels:
                ranked = keep[np.argsort(reduced[keep], kind="stable")]
                lost = min(lost, float(reduced[ranked[max_labels]]))
                keep = np.sort(ranked[:max_labels])
            labels, states, again, parents = labels[keep], states[keep], again[keep], parents[keep]
            history.append((states, again, parents))
        time = labels[:, 0] + self._leaves[states]
        fits = labels[:, 1] + self._held(labels) <= self._limit + TOLERANCE
        time = np.where(fits & (time < ceiling), time, np.inf)
        if not np.isfinite(time).any():
            return StageAnswer(time_us=np.inf, bound_us=min(lost, ceiling))
        at = int(time.argmin())
        time_us = float(time[at])
        path, flags = [], []
        for own_states, own_again, own_parents in reversed(history):
            path.append(int(own_states[at]))
            flags.append(bool(own_again[at]))
            at = int(own_parents[at])
        return StageAnswer(
            time_us=time_us,
            bound_us=min(time_us, lost),
            states=tuple(path[::-1]),
            recompute=tuple(flags[::-1]),
        )

    def _step(
        self, op: int, labels: Floats, states: NDArray[np.int64], again: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The labels extended by every state of the next operator, recomputed and not."""
        if not self._space.counts_last_reserved:
            labels = labels.copy()
            self._reserve(labels, states, op - 1)
        edges = self._edges[op][states] + self._busy[op]
        parent, state = np.nonzero(np.isfinite(edges))
        grown = labels[parent]
        grown[:, 0] += edges[parent, state]
        grown[:, 1] += self._mb[op][state]
        grown[:, 2] += self._space.weights_mb[self._kinds[op]][state]
        plain, redone = grown, grown.copy()
        plain[:, 3] = 0.0
        redone[:, 0] += self._again[op][state]
        if self._fused[op]:
            saved = np.where(again[parent] == 1, self._kept[op - 1][states[parent]], 0.0)
            redone[:, 1] -= saved
            redone[:, 3] = np.where(again[parent] == 1, redone[:, 3] + saved / self._in_flight, 0.0)
            redone[:, 4] = np.maximum(redone[:, 4], redone[:, 3])
        else:
            redone[:, 3] = 0.0
        result = np.concatenate([plain, redone])
        states, parents = np.tile(state, 2), np.tile(parent, 2)
        again = np.repeat([0, 1], len(state))
        if self._space.counts_last_reserved:
            self._reserve(result, states, op)
        return result, states, again, parents

    def _reserve(self, labels: Floats, states: NDArray[np.int64], op: int) -> None:
        """Raise the maxima that labels keep (peak of recomputation, reserved memory) to those of an
        operator.
        """
        kind = self._kinds[op]
        labels[:, 4] = np.maximum(labels[:, 4], self._space.peak_mb[kind][states])
        labels[:, 5] = np.maximum(labels[:, 5], self._space.forward_reserved_mb[kind][states])
        labels[:, 6] = np.maximum(labels[:, 6], self._space.backward_reserved_mb[kind][states])

    def _held(self, labels: Floats) -> Floats:
        """Memory that labels need beyond the sum over their operators."""
        held: Floats = labels[:, 4] + np.maximum(labels[:, 5] + labels[:, 6], labels[:, 2])
        return held

    def _reduced(
        self,
        labels: Floats,
        states: NDArray[np.int64],
        again: NDArray[np.int64],
        op: int,
        rates: Floats,
        togo: Floats,
    ) -> Floats:
        """A lower bound on the time of every completion of each label."""
        over = labels[:, 1] + self._held(labels) - self._limit
        least: Floats = (togo[op][:, again, states] + rates[:, None] * over).max(axis=0) + labels[
            :, 0
        ]
        return least


def _least_after(costs: Floats, edges: Floats) -> Floats:
    """For each state, the least cost through any next state. The axis of next states is short, so a
    loop is faster than a reduction.
    """
    result = costs[..., :1] + edges[:, 0]
    for following in range(1, edges.shape[1]):
        np.minimum(result, costs[..., following, None] + edges[:, following], out=result)
    return result
