"""Time of copies between device and host memory, beside compute.

Copies in one direction follow each other on one copy engine. The two directions run beside each
other, so that a phase waits for the slower one. A copy is hidden as far as there is compute between
the moment from which it can run and the moment at which it must have ended (`CopySpan`); the rest
is exposed, and the step waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..cluster import Device, Target
from ..graph import Phase, traits_of
from ..sharding import Cuts, NodeId, NodeIndex, Projection
from ._choices import shards
from .memory import CopySpan, copy_spans

if TYPE_CHECKING:
    from ._picked import Picked
    from ._priced import Priced

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostCopy:
    """A copy of one array in each turn of its loop, `num_bytes` in one run of the step's phases.

    Attributes:
        node, projection: the factors of the node whose splits divide `num_bytes`.
        phase: the phase that waits for it.
        to_host: its direction.
        stretch: copies of one direction and stretch queue for each other; see `CopySpan`.
        room: for each phase, the share of its compute beside which the copy can run.
    """

    node: NodeId
    projection: Projection
    num_bytes: float
    phase: Phase
    to_host: bool
    stretch: int
    room: tuple[float, ...]


def find_copies(
    index: NodeIndex, stored: Sequence[bool], device: Device, target: Target
) -> tuple[HostCopy, ...]:
    """The copies of a step.

    Args:
        stored: for each class of values whether it reaches memory.
    """
    cuts = index.cuts
    spans = list(copy_spans(cuts, target))
    if not spans:
        return ()
    graph = cuts.graph
    seconds = np.zeros((len(Phase), len(graph.ops) + 1))
    for op in graph.ops:
        seconds[op.phase, op.index + 1] = _unsplit_seconds(cuts, op.index, stored, device, target)
    passed = np.cumsum(seconds, axis=1)
    whole = np.maximum(passed[:, -1], np.finfo(float).tiny)

    def made(span: CopySpan) -> HostCopy:
        port = index.class_port(int(cuts.folding.value_class[span.result]))
        # A copy that a scheduler does not hide ends before anything else runs.
        end = max(span.begin, span.end) if target.overlap_fraction else span.begin
        room = (passed[:, end] - passed[:, span.begin]) / whole
        return HostCopy(
            node=port.node,
            projection=port.projection,
            num_bytes=float(graph.values[span.result].num_bytes * span.op.trips),
            phase=span.op.phase,
            to_host=span.to_host,
            stretch=span.stretch,
            room=tuple(room.tolist()),
        )

    return tuple(made(span) for span in spans)


def _unsplit_seconds(
    cuts: Cuts, op_index: int, stored: Sequence[bool], device: Device, target: Target
) -> float:
    """Seconds of an operator on one device, if nothing is split: what counts are proportions."""
    op = cuts.graph.ops[op_index]
    if op.is_link or traits_of(op.name).changes_memory:
        return 0.0
    rule = cuts.rules[int(cuts.folding.op_class[op_index])]
    values, classes = cuts.graph.values, cuts.folding.value_class
    outputs = [o for o in op.outputs if o >= 0]
    moved = sum(values[o].num_bytes for o in outputs if stored[int(classes[o])])
    flops_s = 0.0
    if rule.flops and outputs:
        flops_s = rule.flops / target.product_flops_per_s(device, values[outputs[0]].dtype)
    return op.trips * max(flops_s, 2 * moved / target.memory_bytes_per_s(device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Queue:
    """The first copies, by the room that they have, of one direction and stretch: they must end
    within the room of the last of them. `members` are positions in `Priced.copies`.
    """

    members: tuple[int, ...]
    room: tuple[float, ...]
    phase: Phase
    to_host: bool


def queues(copies: Sequence[HostCopy]) -> Iterator[tuple[Queue, ...]]:
    """For each direction and stretch the queues of its copies. The longest wait among them is
    exposed: copies run by earliest deadline, which makes it as short as it can be. A phase waits
    for the direction whose stretches wait longer.

    Reference: J. R. Jackson, "Scheduling a production line to minimize maximum tardiness", 1955.
    """

    def key(k: int) -> tuple[Phase, bool, int]:
        return copies[k].phase, copies[k].to_host, copies[k].stretch

    def order(k: int) -> tuple[tuple[Phase, bool, int], float]:
        return key(k), sum(copies[k].room)

    for _, group in itertools.groupby(sorted(range(len(copies)), key=order), key):
        positions = list(group)
        yield tuple(
            Queue(
                members=tuple(positions[: n + 1]),
                room=copies[k].room,
                phase=copies[k].phase,
                to_host=copies[k].to_host,
            )
            for n, k in enumerate(positions)
            # Of copies with the same room, the last is decisive.
            if n + 1 == len(positions) or copies[positions[n + 1]].room != copies[k].room
        )


def copy_seconds(priced: Priced) -> list[Floats]:
    """Seconds of each copy in a step, under each choice of its node."""
    host = priced.mesh.cluster.host
    speed = host.copy_bytes_per_s * priced.target.bandwidth_efficiency
    seconds = []
    for copy in priced.copies:
        times = 1 if copy.phase is Phase.UPDATE else priced.repeats
        parts: Floats | float = 1.0
        if copy.node >= 0:
            split_by = tuple([dim >= 0 for dim in copy.projection])
            parts = shards(priced.nodes[copy.node].choices, split_by, priced.axis_sizes)
        seconds.append(np.atleast_1d(np.asarray(copy.num_bytes * times / speed / parts)))
    return seconds


def copy_times(picked: Picked) -> tuple[Floats, Floats]:
    """Seconds of copies in a step, by the phase that waits for them: all of them, and the exposed
    ones.
    """
    priced, picks, total = picked.priced, picked.picks, np.zeros(len(Phase))
    if not priced.copies:
        return total, total
    compute = np.zeros(len(Phase))
    for node, pick in picked.rows():
        compute += node.compute[:, pick]
    taken = [
        float(seconds[picks[copy.node]] if copy.node >= 0 else seconds[0])
        for copy, seconds in zip(priced.copies, copy_seconds(priced), strict=True)
    ]
    for copy, seconds in zip(priced.copies, taken, strict=True):
        total[copy.phase] += seconds
    waiting = np.zeros((2, len(Phase)))
    for group in queues(priced.copies):
        waits = [sum(taken[k] for k in q.members) - float(compute @ q.room) for q in group]
        waiting[int(group[0].to_host), group[0].phase] += max(0.0, *waits)
    return total, waiting.max(axis=0)
