"""Arrays that stay in memory between the passes of a stage: those that its backward pass may read,
and those that deferred weight gradients read, from the first half of a micro-batch's backward pass
to the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...graph import Op, Phase, Role, ValueId, is_from_another_stage
from ...sharding import NodeIndex, Projection

_STATE = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Arrays of one class: `num_bytes` of all of them, divided by the factors of `projection` that
    are split. `handed` is whether the backward pass makes them; otherwise the forward pass does.
    """

    node: int
    projection: Projection
    num_bytes: int
    handed: bool
    label: str


def held_arrays(index: NodeIndex, stored: Sequence[bool]) -> Iterator[Held]:
    """All arrays that deferred weight gradients read. As in the runtime, cheap arrays are
    recomputed from others, which are held instead.

    Args:
        stored: for each class of values whether it reaches memory.
    """
    search = _Search(index, stored)
    for op_class in index.order:
        # Links only pass on what the operators inside a loop read.
        op = index.cuts.first[op_class]
        if op.deferrable and not op.is_link:
            for _, value_class, _ in index.cuts.operands(op_class):
                search.visit(value_class, op.trips)
    for value_class, (turns, handed) in sorted(search.held.items()):
        members = len(index.cuts.folding.value_members[value_class])
        yield _held(index, value_class, members * turns, handed=handed)


def made_arrays(index: NodeIndex) -> dict[ValueId, Held]:
    """The arrays that the forward pass of a stage makes, and those that enter the stage. Members of
    a class of values share one entry.
    """
    graph, value_class = index.cuts.graph, index.cuts.folding.value_class
    values = [item.value for item in graph.inputs if is_from_another_stage(item)]
    for op in graph.ops:
        if op.phase not in (Phase.BACKWARD, Phase.UPDATE):
            values += op.outputs
    by_class: dict[int, Held] = {}
    found: dict[ValueId, Held] = {}
    for value in values:
        of = int(value_class[value])
        if of not in by_class:
            by_class[of] = _held(index, of, 1, handed=False)
        found[value] = by_class[of]
    return found


def _held(index: NodeIndex, value_class: int, count: int, *, handed: bool) -> Held:
    """As many arrays of a class of values."""
    member = index.cuts.folding.value_members[value_class][0]
    landed = index.landed_ports(value_class)
    port = landed[0] if landed else index.class_port(value_class)
    return Held(
        node=port.node,
        projection=port.projection,
        num_bytes=index.cuts.graph.values[member].num_bytes * count,
        handed=handed,
        label=index.label_of_value(value_class),
    )


class _Search:
    """A search backwards through the dataflow. `held` has for each held value class how often a
    member is made in a micro-batch, and whether the backward pass makes it.
    """

    def __init__(self, index: NodeIndex, stored: Sequence[bool]) -> None:
        self._cuts, self._stored = index.cuts, stored
        self._inputs = {item.value: item for item in index.cuts.graph.inputs}
        self._seen: set[int] = set()
        self.held: dict[int, tuple[int, bool]] = {}

    def visit(self, value_class: int, trips: int) -> None:
        """Find the arrays to hold for an array that is read `trips` times."""
        if (
            value_class in self._seen
            or self._cuts.const_only[value_class]
            or self._cuts.param_only[value_class]
        ):
            return
        self._seen.add(value_class)
        producer = self._cuts.producer[value_class]
        if producer is None:
            item = self._inputs.get(self._cuts.folding.value_members[value_class][0])
            if item is not None and item.role not in _STATE and is_from_another_stage(item):
                self.held[value_class] = 1, False
            return
        maker = self._cuts.first[producer[0]]
        if maker.deferrable and not maker.is_link:
            return
        if maker.is_link or self._stored[value_class]:
            self._find(value_class, maker, trips)
            return
        # A result that is not stored is recomputed from its operands.
        for _, source, _ in self._cuts.operands(producer[0]):
            self.visit(source, maker.trips)

    def _find(self, value_class: int, maker: Op, trips: int) -> None:
        handed = maker.phase is Phase.BACKWARD
        if maker.name == "scan_slice":
            # A row of a stack: the whole stack is held.
            for _, stack, _ in self._cuts.operands(self._cuts.producer[value_class][0]):  # type: ignore[index]
                self.visit(stack, max(1, trips // max(self._cuts.shape(stack)[0], 1)))
        elif maker.name == "tie":
            # The carry of a loop is held for every turn.
            self.held[value_class] = max(trips, maker.trips), handed
        else:
            self.held[value_class] = max(1, round(self._cuts.times_made(value_class))), handed
