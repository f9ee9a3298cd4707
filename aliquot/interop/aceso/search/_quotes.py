"""Quotes of uniform stages from prefix sums: time and memory of many stages at once, for every
level of recomputation.

In a uniform stage all operators have the same state. Each level of recomputation adds kinds of
operators, in the order of memory saved per time. A stage uses the fastest level that fits for as
many of its first operators as necessary, and the level before it for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._problem import SearchProblem
from ._space import Floats, StageSpace

Integers = NDArray[np.int64]

_LEVELS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UniformStages:
    """Prefix sums over the chain for one micro-batch size and one number of devices.

    Attributes:
        states: for each row below, the index of its state in the space.
        work_us: prefix sums of the time of one micro-batch, by state and level.
        edges_us: prefix sums of the time to change the layout before each operator, by state.
        kept_mb: prefix sums of the activations kept of one micro-batch, by state and level.
        saved_mb: activations of each operator that recomputation of it and the next one saves.
        weights_mb: prefix sums of the weights, by state.
        peak_mb, forward_mb, backward_mb: sparse tables for range maxima: of the memory of runs of
            recomputed operators, and of the allocator's reserved memory.
        recompute: by state and level, whether each operator is recomputed.
    """

    space: StageSpace
    states: tuple[int, ...]
    work_us: Floats
    edges_us: Floats
    kept_mb: Floats
    saved_mb: Floats
    weights_mb: Floats
    peak_mb: Floats
    forward_mb: Floats
    backward_mb: Floats
    recompute: NDArray[np.bool_]

    @classmethod
    def make(cls, space: StageSpace) -> UniformStages:
        """Prefix sums of all uniform states with the first algorithm."""
        first = min(algorithm for *_, algorithm in space.states)
        alike = np.diagonal(space.edges_us, axis1=1, axis2=2)[space.edge_of]
        states = tuple(
            k
            for k, (*_, algorithm) in enumerate(space.states)
            if algorithm == first and space.valid[:, k].all() and np.isfinite(alike[:, k]).all()
        )
        kinds, columns = space.kinds, list(states)
        levels = [recompute_levels(space, state, _LEVELS) for state in states]
        depth = max(len(each) for each in levels) if levels else 1
        recompute = np.array(
            [[each[min(k, len(each) - 1)] for k in range(depth)] for each in levels], bool
        )
        recompute = recompute.reshape(len(states), depth, len(kinds))
        kept_mb = space.kept_mb[kinds][:, columns].T[:, None]
        # The activations of a recomputed operator are dropped if the next one is recomputed, too.
        dropped = recompute[..., :-1] & recompute[..., 1:] & space.fused[1:]
        dropped = np.concatenate([dropped, np.zeros_like(dropped[..., :1])], axis=-1)
        saved_mb = kept_mb * dropped
        recompute_us = np.where(recompute, space.again_us[kinds][:, columns].T[:, None], 0.0)
        busy_us = space.busy_us[kinds][:, columns].T[:, None]
        return cls(
            space=space,
            states=states,
            work_us=_prefix(busy_us + recompute_us),
            edges_us=_prefix(alike[:, columns].T),
            kept_mb=_prefix(kept_mb - saved_mb),
            saved_mb=saved_mb,
            weights_mb=_prefix(space.weights_mb[kinds][:, columns].T),
            peak_mb=_sparse(_rounded_up(runs(saved_mb, dropped))),
            forward_mb=_sparse(space.forward_reserved_mb[kinds][:, columns].T),
            backward_mb=_sparse(space.backward_reserved_mb[kinds][:, columns].T),
            recompute=recompute,
        )

    def quote(
        self,
        state: Integers,
        first: Integers,
        last: Integers,
        in_flight: Integers,
        links: Integers,
        limit_mb: float,
    ) -> tuple[Floats, Floats, Integers, Floats]:
        """For each stage: time of one micro-batch, memory, level of recomputation, and the share
        that it needs of the memory that this level saves beyond the one before it.

        Args:
            state: rows of `states`.
            links: a row for each stage: whether the transfers into and out of it cross nodes.
        """
        space, kinds = self.space, self.space.kinds
        column = np.array(self.states)[state]
        work = self.work_us[state, :, last] - self.work_us[state, :, first]
        # The last operator of a stage saves nothing: the next one is in another stage.
        kept_mb = (
            self.kept_mb[state, :, last]
            - self.kept_mb[state, :, first]
            + self.saved_mb[state, :, last - 1]
        )
        weights_mb = self.weights_mb[state, last] - self.weights_mb[state, first]
        end = np.maximum(last - 1, first + 1) if not space.counts_last_reserved else last
        reserved_mb = _range_max(self.forward_mb, state, first, end) + _range_max(
            self.backward_mb, state, first, end
        )
        peak_mb = _range_max(self.peak_mb, state, first, last)
        inputs = space.enters_mb[kinds[first], column]
        fixed_mb = (
            space.state_copies * weights_mb
            + inputs * in_flight
            + np.maximum(reserved_mb, weights_mb)
        )[:, None]
        memory_mb = fixed_mb + kept_mb * in_flight[:, None] + peak_mb
        # The change of layout before the first operator is in no stage.
        edges = self.edges_us[state, last] - self.edges_us[state, first + 1]
        times = work + (self.transfers_us(state, first, last, links) + edges)[:, None]
        fits = memory_mb <= limit_mb
        level = np.where(
            fits.any(axis=1), np.where(fits, times, np.inf).argmin(axis=1), memory_mb.argmin(axis=1)
        )
        rows = np.arange(len(level))
        before = np.maximum(level - 1, 0)
        mixed = fits[rows, level] & ~fits[rows, before] & (times[rows, before] < times[rows, level])
        # The stage has operators of both levels, and so runs of recomputed operators of both.
        peak = np.maximum(peak_mb[rows, level], peak_mb[rows, before])
        allowed_mb = (limit_mb - fixed_mb[:, 0] - peak) / in_flight
        more_mb, fewer_mb = kept_mb[rows, before], kept_mb[rows, level]
        share = np.where(mixed, (more_mb - allowed_mb) / np.maximum(more_mb - fewer_mb, 1e-9), 1.0)
        share = np.clip(share, 0.0, 1.0)
        mixed_us = times[rows, before] + share * (times[rows, level] - times[rows, before])
        mixed_mb = fixed_mb[:, 0] + (more_mb + share * (fewer_mb - more_mb)) * in_flight + peak
        return (
            np.where(mixed, mixed_us, times[rows, level]),
            np.where(mixed, mixed_mb, memory_mb[rows, level]),
            level,
            share,
        )

    def transfers_us(
        self, state: Integers, first: Integers, last: Integers, links: Integers
    ) -> Floats:
        """For each stage, the time of the transfers into and out of it; arguments as in `quote`."""
        space, kinds = self.space, self.space.kinds
        column = np.array(self.states)[state]
        degree = np.array([space.tensor_degrees.index(space.states[c][0]) for c in column])
        entered_between_nodes = np.where(first > 0, links[:, 0], 0)
        left_between_nodes = np.where(last == len(kinds), 1, links[:, 1])
        transfer: Floats = (
            space.enters_us[entered_between_nodes, kinds[first], column]
            + space.leaves_us[left_between_nodes, kinds[last - 1], column, degree]
        )
        return transfer

    def flags(
        self, state: int, level: int, share: float, first: int, last: int
    ) -> NDArray[np.bool_]:
        """Whether each operator of a quoted stage is recomputed: by the stage's level up to the
        operator at which its share is reached, then by the level before it.
        """
        own, before = self.recompute[state, level], self.recompute[state, max(level - 1, 0)]
        inside = slice(first, last - 1)
        more_mb = (
            self.saved_mb[state, level, inside] - self.saved_mb[state, max(level - 1, 0), inside]
        )
        reached = np.cumsum(more_mb) >= share * more_mb.sum() * (1 - 1e-9)
        # Levels change only after an operator for which both save the same, so that no run of
        # recomputed operators is cut.
        ends = np.flatnonzero(reached & (more_mb == 0))
        end = first + 1 + int(ends[0]) if len(ends) else last
        return np.concatenate([own[first:end], before[end:last]])


def quote_all(problem: SearchProblem, micro_batch: int) -> dict[int, UniformStages]:
    """Uniform stages by number of devices; sizes without a uniform state are left out."""
    uniform = {n: UniformStages.make(space) for n, space in problem.spaces(micro_batch).items()}
    return {n: stages for n, stages in uniform.items() if stages.states}


def recompute_levels(space: StageSpace, state: int, count: int) -> list[NDArray[np.bool_]]:
    """Sets of recomputed operators, from none to all that save memory: kinds of operators are added
    in the order of recomputation time per memory saved.
    """
    kept = space.kept_mb[:, state]
    ratio = np.where(kept > 0, space.again_us[:, state] / np.maximum(kept, 1e-9), np.inf)
    order = np.argsort(ratio, kind="stable")
    useful = order[np.isfinite(ratio[order])]
    levels = []
    for chosen in np.unique(np.linspace(0, len(useful), count).astype(int)):
        recomputed = np.isin(space.kinds, useful[:chosen])
        # The next operator must be recomputed, too, or nothing is saved.
        levels.append(recomputed | (np.append(False, recomputed[:-1]) & space.fused))
    return levels


def stage_memory_mb(
    space: StageSpace, state: int, recompute: NDArray[np.bool_], first: int, in_flight: int
) -> Floats:
    """Memory of the uniform stages that begin with operator `first`, by their number of operators
    less one.
    """
    kinds = space.kinds[first:]
    weights = np.cumsum(space.weights_mb[kinds, state])
    kept = space.kept_mb[kinds, state]
    again = recompute[first:]
    # The last operator of a stage saves nothing: the next one is in another stage.
    dropped = np.append(again[:-1] & again[1:] & space.fused[first + 1 :], False)
    saved = np.where(dropped, kept, 0.0)
    activations = space.enters_mb[kinds[0], state] + np.cumsum(kept - saved) + saved
    peak = _before(runs(saved, dropped))
    reserved = [
        np.maximum.accumulate(column[kinds, state])
        if space.counts_last_reserved
        else _before(column[kinds, state])
        for column in (space.forward_reserved_mb, space.backward_reserved_mb)
    ]
    memory: Floats = (
        space.state_copies * weights
        + activations * in_flight
        + peak
        + np.maximum(reserved[0] + reserved[1], weights)
    )
    return memory


def _before(values: Floats) -> Floats:
    """For each place the maximum of all values before it; 0 for the first."""
    return np.concatenate([[0.0], np.maximum.accumulate(values[:-1])])


def _prefix(values: Floats) -> Floats:
    return np.concatenate([np.zeros_like(values[..., :1]), np.cumsum(values, axis=-1)], axis=-1)


def runs(saved: Floats, dropped: NDArray[np.bool_]) -> Floats:
    """Up to each operator, the memory saved by the run of recomputed operators that ends with it;
    operators that keep nothing do not end a run.
    """
    sums = np.cumsum(saved, axis=-1)
    ends = np.maximum.accumulate(np.where(dropped, 0.0, sums), axis=-1)
    return np.where(dropped, sums - ends, 0.0)


def _rounded_up(values: Floats) -> Floats:
    """The values rounded up to single precision: for 1,024 layers, such tables take a gigabyte in
    double precision.
    """
    near = values.astype(np.float32)
    return np.where(near < values, np.nextafter(near, np.float32(np.inf)), near)


def _sparse(values: Floats) -> Floats:
    """Maxima of all ranges whose length is a power of two; the first axis is the exponent."""
    depth = max(values.shape[-1], 1).bit_length()
    levels = np.empty((depth, *values.shape), values.dtype)
    levels[0] = values
    for exponent in range(1, depth):
        before, width = levels[exponent - 1], 2 ** (exponent - 1)
        np.maximum(before[..., :-width], before[..., width:], out=levels[exponent, ..., :-width])
        levels[exponent, ..., -width:] = before[..., -width:]
    return levels


def _range_max(table: Floats, state: Integers, first: Integers, last: Integers) -> Floats:
    """Maxima over ranges `[first, last)` from a sparse table; two ranges whose length is a power of
    two cover each.
    """
    exponent = np.log2(np.maximum(last - first, 1)).astype(int)
    middle = (slice(None),) * (table.ndim - 3)
    at_first, at_last = (
        (exponent, state, *middle, first),
        (exponent, state, *middle, last - 2**exponent),
    )
    maxima: Floats = np.maximum(table[at_first], table[at_last])
    return maxima
