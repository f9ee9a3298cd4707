"""Values of a graph that differ between groups of devices, where each group is given arrays of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...graph import Block, Call, Graph, Literal, Operand, OpId, is_check, scan_counts


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
    match call.kind:
        case "scan":
            (block,) = call.blocks
            _pass(call.inputs, block.inputs, different)
            first, count = scan_counts(call.eqn.params)
            _loop(graph, block, block.inputs[first : first + count], different)
            _pass(block.outputs, call.outputs, different)
        case "while":
            condition, block = call.blocks
            num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]
            init, carried = call.inputs[num_cond + num_body :], block.inputs[num_body:]
            _pass(call.inputs[:num_cond], condition.inputs[:num_cond], different)
            _pass(call.inputs[num_cond : num_cond + num_body], block.inputs[:num_body], different)
            _pass(init, carried, different)
            _loop(graph, block, carried, different)
            _pass(carried, condition.inputs[num_cond:], different)
            _run(graph, condition.items, different)
            if _any(condition.outputs, different):
                # Groups whose loop has ended keep their carries while others go on, so all carries
                # differ.
                different.update(i for i in carried if isinstance(i, int))
                _loop(graph, block, carried, different)
            _pass(block.outputs, call.outputs, different)
            _pass(carried, call.outputs, different)
        case "cond":
            chosen_apart = _any(call.inputs[:1], different) and not is_check(call.eqn)
            for block in call.blocks:
                _pass(call.inputs[1:], block.inputs, different)
                if chosen_apart:
                    # Under `vmap` every branch then runs for every group, with all its operands
                    # given to each group.
                    different.update(i for i in block.inputs if isinstance(i, int))
                    different.update(call.outputs)
                _run(graph, block.items, different)
                _pass(block.outputs, call.outputs, different)
        case _:
            (block,) = call.blocks
            _pass(call.inputs, block.inputs, different)
            _run(graph, block.items, different)
            _pass(block.outputs, call.outputs, different)


def _loop(graph: Graph, block: Block, carried: Sequence[Operand], different: set[int]) -> None:
    """Follow a body until the set of carries that differ is a fixed point."""
    # It ends, because values are only added.
    while True:
        _run(graph, block.items, different)
        before = len(different)
        _pass(block.outputs[: len(carried)], carried, different)
        if len(different) == before:
            return


def _pass(sources: Sequence[Operand], targets: Sequence[Operand], different: set[int]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if isinstance(target, int) and _any((source,), different):
            different.add(target)


def _any(operands: Iterable[Operand], different: set[int]) -> bool:
    return any(not isinstance(i, Literal) and i in different for i in operands)
