"""Which arrays reach memory, and for how long.

A compiler fuses chains of element-wise operators; only what crosses a fusion's border is stored. An array is stored when
a product makes or reads it, when another phase reads it, when a reduction and something else both read it (a fusion cannot
hold both sides of a reduction), or when the step returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph import Op, Phase
from ._cuts import Cuts

_VIEWS = frozenset({"scan_slice", "tie"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """`stored[c]`: whether values of class `c` reach memory. `last_use[v]`: last operator that needs value `v`, or -1."""

    stored: tuple[bool, ...]
    last_use: NDArray[np.int64]


def find_storage(cuts: Cuts) -> Storage:
    """Storage of all arrays of a cut graph."""
    stored = _stored(cuts)
    return Storage(stored=tuple(stored), last_use=_last_use(cuts, stored))


def _stored(cuts: Cuts) -> list[bool]:
    readers: list[set[int]] = [set() for _ in cuts.producer]
    for op_class in range(len(cuts.first)):
        for _, value_class, _ in cuts.operands(op_class):
            readers[value_class].add(op_class)
    returned = {int(cuts.folding.value_class[o.value]) for o in cuts.graph.outputs if isinstance(o.value, int)}
    stored = []
    for value_class, made in enumerate(cuts.producer):
        if made is None:
            stored.append(True)
            continue
        maker = cuts.first[made[0]]
        read_by = [(cuts.first[r], cuts.rules[r]) for r in readers[value_class]]
        stored.append(
            maker.name not in _VIEWS
            and not cuts.const_only[value_class]
            and (
                maker.name == "scan_stack"
                or cuts.rules[made[0]].contracts
                or value_class in returned
                or any(rule.contracts or _other_phase(maker, op) for op, rule in read_by)
                or (len(read_by) > 1 and any(rule.reduced for _, rule in read_by))
            )
        )
    return stored


def _other_phase(maker: Op, reader: Op) -> bool:
    return maker.phase is not reader.phase and maker.phase is not Phase.PROLOGUE


def _last_use(cuts: Cuts, stored: list[bool]) -> NDArray[np.int64]:
    """Last readers, through arrays that are fused away, and to the end of a loop for what a loop reads from outside."""
    graph = cuts.graph
    classes = cuts.folding.value_class.tolist()
    loop_end = _loop_ends(graph.ops)
    made_at = [1] * len(graph.values)
    for op in graph.ops:
        for out in op.outputs:
            if out >= 0:
                made_at[out] = op.trips
    last = [-1] * len(graph.values)
    for op in reversed(graph.ops):
        reach = op.index
        for out in op.outputs:
            if out >= 0 and not stored[classes[out]]:
                reach = max(reach, last[out])
        for source in op.inputs:
            if isinstance(source, int):
                until = loop_end[op.index] if op.trips > made_at[source] else reach
                last[source] = max(last[source], until, reach)
    return np.array(last, np.int64)


def _loop_ends(ops: tuple[Op, ...]) -> list[int]:
    """For each operator inside a loop, the last operator of the stretch of loop bodies that it stands in."""
    ends = list(range(len(ops)))
    for k in range(len(ops) - 2, -1, -1):
        if ops[k].trips > 1 and ops[k + 1].trips > 1:
            ends[k] = ends[k + 1]
    return ends
