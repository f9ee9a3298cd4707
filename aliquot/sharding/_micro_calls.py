"""Structured operators in the walk of `_micro_walk`: what is inside them, and which operator stands for them."""

from __future__ import annotations

from collections.abc import Iterator

from ..graph import Call, Graph, Op, Phase


def ops_of(call: Call) -> list[int]:
    """The operators inside a structured one, in order."""
    found: list[int] = []
    for block in call.blocks:
        for item in block.items:
            found += ops_of(item) if isinstance(item, Call) else [item]
    return found


def first_op(call: Call, graph: Graph) -> Op:
    """The operator that stands for a call in messages; one of its links where the body is empty."""
    inside = ops_of(call)
    if inside:
        return graph.ops[inside[0]]
    results = set(call.outputs)
    return next(op for op in graph.ops if results & set(op.outputs))


def phase_of(call: Call, graph: Graph) -> Phase:
    """The phase of a structured operator; that of the update where its body is empty."""
    inside = ops_of(call)
    return graph.ops[inside[0]].phase if inside else Phase.UPDATE


def standing_for(item: int | Call, graph: Graph) -> Iterator[int]:
    """Every operator that can be named in a finding about an item: those inside, and those that stand for calls."""
    if isinstance(item, Call):
        yield first_op(item, graph).index
        for block in item.blocks:
            for inner in block.items:
                yield from standing_for(inner, graph)
    else:
        yield item


def indexed_dims(op: Op) -> tuple[int, ...]:
    """The dims of the array that the components of a lookup's indices stand for."""
    numbers = op.params["dimension_numbers"]
    found: tuple[int, ...] = numbers.start_index_map if op.name == "gather" else numbers.scatter_dims_to_operand_dims
    return tuple(found)
