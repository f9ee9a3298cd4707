"""Values of a graph that differ between groups of devices, where each group is given arrays of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...graph import Call, Graph, Literal, Operand, OpId, Wire, is_check, wires_of


def differing(graph: Graph, given: Iterable[int]) -> frozenset[int]:
    """All values that depend on those `given` to each group by itself.

    The others are the same everywhere, and may be split over the devices of all groups: weights,
    above all.
    """
    different = set(given)
    _run(graph, graph.body.items, different)
    return frozenset(different)


def _run(graph: Graph, items: Sequence[OpId | Call], different: set[int]) -> None:
    for item in items:
        if isinstance(item, Call):
            _call(graph, item, different)
        elif not different.isdisjoint(i for i in graph.ops[item].inputs if isinstance(i, int)):
            different.update(graph.ops[item].outputs)


def _call(graph: Graph, call: Call, different: set[int]) -> None:
    """Follow a structured operator into its bodies; loops until a fixed point."""
    wires = wires_of(call)
    _pass(wires.enters, different)
    if call.kind == "cond" and _any(call.inputs[:1], different) and not is_check(call.eqn):
        # Under `vmap` every branch then runs for every group, with all its operands given to each
        # group.
        different.update(inner for _, inner in wires.constants if isinstance(inner, int))
        different.update(call.outputs)
    before = -1
    # It ends, because values are only added.
    while len(different) != before:
        before = len(different)
        for block in call.blocks:
            _run(graph, block.items, different)
        if call.kind == "while" and _any(call.blocks[0].outputs, different):
            # Groups whose loop has ended keep their carries while others go on, so all carries
            # differ.
            different.update(c.inner for c in wires.carries if isinstance(c.inner, int))
        _pass(wires.turns, different)
        if not wires.turns:
            break
    _pass(wires.leaves, different)


def _pass(wires: Iterable[Wire], different: set[int]) -> None:
    for source, target in wires:
        if isinstance(target, int) and _any((source,), different):
            different.add(target)


def _any(operands: Iterable[Operand], different: set[int]) -> bool:
    return any(not isinstance(i, Literal) and i in different for i in operands)
