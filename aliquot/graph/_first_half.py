"""The operators inside a loop over layers or a remat region of a backward pass that gradients of
its inputs depend on.

The others make gradients of weights, for which no other stage waits. If there are products among
them, the loop or region is run as two (`_halves`), and planners price each of its operators as
needed now or later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ._dataflow import ops_inside, reads_of
from ._effects import any_effects
from ._rule import traits_of
from ._types import Call, Graph, OpId, ValueId, value_ids
from ._wires import Wire, wires_of

# Of the structured operators these can be run as two.
_CUT = ("scan", "remat")


@dataclass(slots=True)
class FirstHalf:
    """The operators that a call must run for some of its results.

    Value indices are unique over all bodies, so one set serves every depth.

    Attributes:
        graph: the graph that the call is part of.
        ops: operators that must run.
        values: values that are needed, in the call's bodies and around the call.
    """

    graph: Graph
    ops: set[OpId] = field(default_factory=set)
    values: set[ValueId] = field(default_factory=set)

    def rest(self, item: OpId | Call) -> list[OpId]:
        """Operators of an item that can be deferred."""
        return [k for k in ops_inside(item) if k not in self.ops]

    def any_products(self, ops: Iterable[OpId]) -> bool:
        """True if any of the operators is a product."""
        return any(traits_of(self.graph.ops[k].name).multiplies for k in ops)

    def add(self, call: Call, results: Collection[ValueId]) -> None:
        """Mark the operators that some results of a call depend on; the whole call if no product
        can be deferred.
        """
        self.values.update(results)
        if call.kind in _CUT:
            self._add_part(call, results)
        else:
            self.add_whole(call)
        # Cutting a call pays only if a product can be deferred.
        if not self.any_products(self.rest(call)):
            self.add_whole(call)

    def add_whole(self, call: Call) -> None:
        """Mark all operators and values of a call."""
        self.ops.update(ops_inside(call))
        self.values.update(value_ids(call.outputs))
        self.values.update(reads_of(self.graph, call))
        for block in call.blocks:
            self._add_values(block.items)
            self.values.update(value_ids(block.inputs))

    def _add_values(self, items: Sequence[OpId | Call]) -> None:
        for item in items:
            if isinstance(item, Call):
                self.add_whole(item)
            else:
                op = self.graph.ops[item]
                self.values.update(value_ids((*op.inputs, *op.outputs)))

    def _add_items(self, items: Sequence[OpId | Call]) -> None:
        for item in reversed(items):
            if isinstance(item, Call):
                results = self.values.intersection(item.outputs)
                if results:
                    self.add(item, results)
                continue
            op = self.graph.ops[item]
            if not self.values.isdisjoint(op.outputs):
                self.ops.add(item)
                self.values.update(value_ids(op.inputs))

    def _add_part(self, call: Call, results: Collection[ValueId]) -> None:
        wires = wires_of(call)
        self._want(wires.leaves, self.values if call.kind == "scan" else results)
        before = -1
        # What one turn needs may make another carried value needed: repeat until nothing is new.
        while len(self.values) != before:
            before = len(self.values)
            self._add_items(call.blocks[0].items)
            # The previous turn must make the carried values that this one reads.
            self._want(wires.turns, self.values)
            if not wires.turns:
                break
        if call.kind == "scan":
            self._want([(c.result, c.inner) for c in wires.carries], self.values)
            self._want([(c.start, c.inner) for c in wires.carries], self.values)
            self._want(wires.slices, self.values)

    def _want(self, wires: Iterable[Wire], wanted: Collection[ValueId]) -> None:
        """Mark the sources of those targets that are in `wanted`."""
        for source, target in wires:
            if not (isinstance(source, int) and isinstance(target, int)):
                continue
            if target in wanted and source >= 0:
                self.values.add(source)


def first_half(graph: Graph, call: Call, needed: Collection[ValueId]) -> FirstHalf | None:
    """The part of a call that makes the results needed now; None if no product can be deferred.

    It includes results that depend on no deferrable product, such as gradients of the scale of a
    norm: to defer them, more arrays would have to be kept.

    Args:
        needed: results that other stages wait for.
    """
    if call.kind not in _CUT or any_effects(call, graph):
        return None
    half = FirstHalf(graph)
    half.add(call, needed)
    if not half.any_products(half.rest(call)):
        return None
    late: set[ValueId] = set()
    _follow(graph, (call,), half, late)
    # This may have marked the last deferrable products, so look for products again.
    half.add(call, {o for o in call.outputs if o >= 0 and o not in late})
    return half if half.any_products(half.rest(call)) else None


def _follow(
    graph: Graph, items: Sequence[OpId | Call], half: FirstHalf, behind: set[ValueId]
) -> None:
    """Add to `behind` the values that depend on products that can be deferred."""
    for item in items:
        if not isinstance(item, Call):
            op = graph.ops[item]
            if item not in half.ops and (
                half.any_products((item,)) or not behind.isdisjoint(value_ids(op.inputs))
            ):
                behind.update(op.outputs)
            continue
        if item.kind not in _CUT:
            if half.any_products(half.rest(item)) or not behind.isdisjoint(reads_of(graph, item)):
                behind.update(item.outputs)
            continue
        wires = wires_of(item)
        _pass(wires.enters, behind)
        before = -1
        while len(behind) != before:
            # A dependence may pass from turn to turn through carries: repeat until nothing is new.
            before = len(behind)
            _follow(graph, item.blocks[0].items, half, behind)
            _pass(wires.turns, behind)
            if not wires.turns:
                break
        _pass(wires.leaves, behind)


def _pass(wires: Iterable[Wire], behind: set[ValueId]) -> None:
    """Add to `behind` the targets whose sources are in it."""
    for source, target in wires:
        if isinstance(source, int) and isinstance(target, int) and source in behind:
            behind.add(target)
