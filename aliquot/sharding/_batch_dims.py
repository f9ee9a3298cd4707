"""The dims in which a step's arrays hold the examples of its batch.

A gradient ends where it is summed over the batch: from there on no dim of it holds examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..graph import DimRule, Folding, Graph, Op, Role


def dims_of_batch(
    graph: Graph,
    folding: Folding,
    rules: Sequence[DimRule],
    sources: Sequence[Sequence[Counter[int]]],
    order: Sequence[int],
) -> list[set[int]]:
    """For each value class the dims that hold examples: the leading dim of the inputs that belong
    to the batch, and what operators make of it.

    Where a loop takes one row of that dim after the other, nothing is said of the rows.

    Args:
        graph, folding: the step, and its classes of equal operators and values.
        rules, sources: of each operator class; see `Cuts`.
        order: the operator classes in program order.
    """
    value_class = folding.value_class
    found: list[set[int]] = [set() for _ in folding.value_members]
    for item in graph.inputs:
        if item.role is Role.BATCH and graph.values[item.value].shape[:1] > (1,):
            found[int(value_class[item.value])].add(0)
    if not any(found):
        return found
    first_reader: dict[int, int] = {}
    for place, op_class in enumerate(order):
        for v in (v for read in sources[op_class] for v in read):
            first_reader.setdefault(v, place)
    again = True
    # Again where a layer reads what an equal one made, and where a loop carries examples.
    while again:
        again = False
        for place, op_class in enumerate(order):
            op, rule = graph.ops[folding.members[op_class][0]], rules[op_class]
            arrays = [
                (v, rule.operands[k]) for k, read in enumerate(sources[op_class]) for v in read
            ]
            letters = {letter for v, dims in arrays for dim in found[v] for letter in dims[dim]} - {
                "1"
            }
            if not letters:
                continue
            made = [
                (int(value_class[out]), dims)
                for out, dims in zip(op.outputs, rule.results, strict=True)
                if out >= 0
            ]
            # What a loop carries holds the same in its first turn.
            made += arrays if op.name == "tie" else []
            for v, dims in made:
                holding = {d for d, names in enumerate(dims) if _holds(op, names, letters)}
                if not holding <= found[v]:
                    found[v] |= holding
                    again = again or first_reader.get(v, place) < place
    return found


def _holds(op: Op, names: str, letters: set[str]) -> bool:
    """True if a dim with these factors holds examples, which operands hold in these `letters`."""
    if letters & set(names):
        return True
    # Dims that an operator needs whole have factors of their own on both sides.
    return names.isupper() and not op.is_link and any(map(str.isupper, letters))
