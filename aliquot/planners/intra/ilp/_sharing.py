"""Shared conversions: edges that convert an array alike pay once, which the program is taught only
where it matters.

If several edges convert an array alike, the array is converted once. In a program this needs a row
for each edge and conversion, three quarters of all rows, few of which ever bind. So each of `m`
flows first pays `1 / m` of the price, which is right where all edges convert alike and too little
otherwise. Where a solution pays too little, a column for the excess is added, with a price of its
own: `excess >= flow - mean of all flows`. Its cost and its bytes are `m` times those of a flow.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
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
        keys = [
            # A conversion of a single flow pays its whole price already.
            (share, key)
            for share, flows in shared.items()
            for key in flows
            if len(flows[key]) > 1
        ]
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
