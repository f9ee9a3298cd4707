"""Values of a graph that differ between groups of devices, where each group is given arrays of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph import Block, Call, Graph, Literal, Operand, is_check, scan_counts


def differing(graph: Graph, given: Iterable[int]) -> frozenset[int]:
    """All values that depend on those `given` to each group by itself.

    The others are the same everywhere, and may be split over the devices of all groups: weights, above all.
    """
    found = set(given)
    _run(graph, graph.body.items, found)
    return frozenset(found)


def _run(graph: Graph, items: Sequence[int | Call], found: set[int]) -> None:
    for item in items:
        if isinstance(item, Call):
            _call(graph, item, found)
        elif not found.isdisjoint(i for i in graph.ops[item].inputs if isinstance(i, int)):
            found.update(graph.ops[item].outputs)


def _call(graph: Graph, call: Call, found: set[int]) -> None:
    match call.kind:
        case "scan":
            (block,) = call.blocks
            _pass(call.inputs, block.inputs, found)
            first, count = scan_counts(call.eqn.params)
            _loop(graph, block, block.inputs[first : first + count], found)
            _pass(block.outputs, call.outputs, found)
        case "while":
            condition, block = call.blocks
            num_cond, num_body = call.eqn.params["cond_nconsts"], call.eqn.params["body_nconsts"]
            init, carried = call.inputs[num_cond + num_body :], block.inputs[num_body:]
            _pass(call.inputs[:num_cond], condition.inputs[:num_cond], found)
            _pass(call.inputs[num_cond : num_cond + num_body], block.inputs[:num_body], found)
            _pass(init, carried, found)
            _loop(graph, block, carried, found)
            _pass(carried, condition.inputs[num_cond:], found)
            _run(graph, condition.items, found)
            if _any(condition.outputs, found):
                # Rows that are done keep what they have, whatever it is made of.
                found.update(i for i in carried if isinstance(i, int))
                _loop(graph, block, carried, found)
            _pass(block.outputs, call.outputs, found)
            _pass(carried, call.outputs, found)
        case "cond":
            chosen_apart = _any(call.inputs[:1], found) and not is_check(call.eqn)
            for block in call.blocks:
                _pass(call.inputs[1:], block.inputs, found)
                if chosen_apart:
                    # Every group then runs every branch, on copies of what the branch takes.
                    found.update(i for i in block.inputs if isinstance(i, int))
                    found.update(call.outputs)
                _run(graph, block.items, found)
                _pass(block.outputs, call.outputs, found)
        case _:
            (block,) = call.blocks
            _pass(call.inputs, block.inputs, found)
            _run(graph, block.items, found)
            _pass(block.outputs, call.outputs, found)


def _loop(graph: Graph, block: Block, carried: Sequence[Operand], found: set[int]) -> None:
    """Run a body until what it carries differs no more than before."""
    while True:
        _run(graph, block.items, found)
        before = len(found)
        _pass(block.outputs[: len(carried)], carried, found)
        if len(found) == before:
            return


def _pass(sources: Sequence[Operand], targets: Sequence[Operand], found: set[int]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if isinstance(target, int) and _any((source,), found):
            found.add(target)


def _any(operands: Iterable[Operand], found: set[int]) -> bool:
    return any(not isinstance(i, Literal) and i in found for i in operands)
