"""Long chains grouped into whole layers: each layer is one unit, whose operators have the same
degrees and one of a few sets of recomputed operators. The search treats units like operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .._configuration import StageConfiguration
from ._problem import MOST_OPERATORS
from ._quotes import recompute_levels, runs
from ._space import Floats, StageSpace
from ._stage import StageAnswer
from ._tables import find_period

_LEVELS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedSpace:
    """The space of a stage with units in place of operators.

    Attributes:
        space: the space of units; its states have a level of recomputation in place of the
            algorithm.
        begins: the first operator of each unit, and at the end the number of operators.
        degrees: for each state of `space`, the state that all operators of a unit then have.
        recompute: by kind of unit and state, whether each of its operators is recomputed.
    """

    space: StageSpace
    begins: tuple[int, ...]
    degrees: tuple[tuple[int, int, int], ...]
    recompute: tuple[tuple[NDArray[np.bool_], ...], ...]

    def as_stage(self, first: int, answer: StageAnswer) -> StageConfiguration:
        """The configuration of a solved stage that begins with unit `first`."""
        tensor: list[int] = []
        data: list[int] = []
        algorithm: list[int] = []
        recompute: list[bool] = []
        for unit, state in enumerate(answer.states, start=first):
            count = self.begins[unit + 1] - self.begins[unit]
            t, d, a = self.degrees[state]
            tensor += [t] * count
            data += [d] * count
            algorithm += [a] * count
            recompute += self.recompute[int(self.space.kinds[unit])][state].tolist()
        return StageConfiguration(
            num_devices=self.space.num_devices,
            tensor=tuple(tensor),
            data=tuple(data),
            algorithm=tuple(algorithm),
            recompute=tuple(recompute),
        )


def group_spaces(spaces: Mapping[int, StageSpace]) -> dict[int, GroupedSpace]:
    """Spaces of whole layers for chains that are too long to be cut at any operator; empty for
    others.
    """
    kinds = next(iter(spaces.values())).kinds
    if len(kinds) <= MOST_OPERATORS:
        return {}
    units = find_layers(kinds)
    grouped = {n: group_layers(space, units) for n, space in spaces.items()}
    return {n: each for n, each in grouped.items() if each is not None}


def find_layers(kinds: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Units as pairs of first operator and end: every layer of every run of equal layers, and each
    operator between such runs.

    >>> find_layers(np.array([0, 1, 2, 1, 2, 1, 2, 3]))
    [(0, 1), (1, 3), (3, 5), (5, 7), (7, 8)]
    """
    period = find_period(kinds)
    if not period.count:
        return [(k, k + 1) for k in range(len(kinds))]
    layers = [
        (period.first + k * period.length, period.first + (k + 1) * period.length)
        for k in range(period.count)
    ]
    before = find_layers(kinds[: period.first]) if period.first else []
    after = (
        [(a + period.end, b + period.end) for a, b in find_layers(kinds[period.end :])]
        if period.end < len(kinds)
        else []
    )
    return [*before, *layers, *after]


def group_layers(space: StageSpace, units: Sequence[tuple[int, int]]) -> GroupedSpace | None:
    """The space with these units for operators; None if no state is valid for all of them."""
    first_algorithm = min(algorithm for *_, algorithm in space.states)
    uniform = [
        k
        for k, (*_, algorithm) in enumerate(space.states)
        if algorithm == first_algorithm and space.valid[:, k].all()
    ]
    if not uniform:
        return None
    levels = {u: recompute_levels(space, u, _LEVELS) for u in uniform}
    columns = list(itertools.product(uniform, range(max(map(len, levels.values())))))
    signatures = [tuple(space.kinds[a:b].tolist()) for a, b in units]
    kind_of = {signature: k for k, signature in enumerate(dict.fromkeys(signatures))}
    kinds = np.array([kind_of[signature] for signature in signatures])
    unit_of_kind = {kind: unit for unit, kind in reversed(list(enumerate(kinds.tolist())))}
    shape = (len(kind_of), len(columns))
    figures = {
        name: np.zeros(shape)
        for name in ("busy", "weights", "kept", "peak", "forward", "backward", "enters")
    }
    enters_us, leaves_us = np.zeros((2, *shape)), np.zeros((2, *shape, len(space.tensor_degrees)))
    recompute: list[tuple[NDArray[np.bool_], ...]] = []
    for kind in range(len(kind_of)):
        a, b = units[unit_of_kind[kind]]
        members = space.kinds[a:b]
        chosen = []
        for column, (u, level) in enumerate(columns):
            flags = levels[u][min(level, len(levels[u]) - 1)][a:b].copy()
            # Runs of recomputed operators end with the unit.
            flags[0] &= not space.fused[a]
            dropped = np.append(flags[:-1] & flags[1:] & space.fused[a + 1 : b], False)
            saved = np.where(dropped, space.kept_mb[members, u], 0.0)
            inside = sum(float(space.edges_us[space.edge_of[k], u, u]) for k in range(a + 1, b))
            figures["busy"][kind, column] = (
                space.busy_us[members, u].sum() + space.again_us[members, u][flags].sum() + inside
            )
            figures["weights"][kind, column] = space.weights_mb[members, u].sum()
            figures["kept"][kind, column] = space.kept_mb[members, u].sum() - saved.sum()
            figures["peak"][kind, column] = runs(saved, dropped).max()
            # If the judge ignores the last operator of a stage, that of a unit counts only if
            # another unit follows. It is always left out, so that memory is never overestimated.
            counted = members if space.counts_last_reserved else members[:-1]
            figures["forward"][kind, column] = space.forward_reserved_mb[counted, u].max(
                initial=0.0
            )
            figures["backward"][kind, column] = space.backward_reserved_mb[counted, u].max(
                initial=0.0
            )
            figures["enters"][kind, column] = space.enters_mb[members[0], u]
            enters_us[:, kind, column] = space.enters_us[:, members[0], u]
            leaves_us[:, kind, column] = space.leaves_us[:, members[-1], u]
            chosen.append(flags)
        recompute.append(tuple(chosen))
    index = [u for u, _ in columns]
    pairs = list(zip([-1, *kinds[:-1].tolist()], kinds.tolist(), strict=True))
    rows = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
    edges: Floats = np.zeros((len(rows), len(columns), len(columns)))
    for unit, pair in reversed(list(enumerate(pairs))):
        edges[rows[pair]] = space.edges_us[space.edge_of[units[unit][0]]][np.ix_(index, index)]
    grouped = replace(
        space,
        states=tuple((space.states[u][0], space.states[u][1], level) for u, level in columns),
        kinds=kinds,
        valid=np.ones(shape, bool),
        busy_us=figures["busy"],
        again_us=np.zeros(shape),
        weights_mb=figures["weights"],
        kept_mb=figures["kept"],
        forward_reserved_mb=figures["forward"],
        backward_reserved_mb=figures["backward"],
        peak_mb=figures["peak"],
        enters_mb=figures["enters"],
        enters_us=enters_us,
        leaves_us=leaves_us,
        edges_us=edges,
        edge_of=np.array([rows[pair] for pair in pairs]),
        fused=np.zeros(len(units), bool),
        counts_last_reserved=True,
    )
    return GroupedSpace(
        space=grouped,
        begins=(*(a for a, _ in units), units[-1][1]),
        degrees=tuple(space.states[u] for u in index),
        recompute=tuple(recompute),
    )
