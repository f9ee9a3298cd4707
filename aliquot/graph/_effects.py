"""Operators with effects besides computing arrays: they print, call back to Python, or write to a
reference.
"""

from __future__ import annotations

import itertools

from ._types import Call, Graph, Op, OpId


def has_effects(op: Op) -> bool:
    """True if an operator has effects, so that it must run exactly as often as in the step."""
    return op.eqn is not None and bool(op.eqn.effects)


def any_effects(item: OpId | Call, graph: Graph) -> bool:
    """True if an operator, or one inside a structured one, has effects."""
    if isinstance(item, int):
        return has_effects(graph.ops[item])
    inside = itertools.chain.from_iterable(block.items for block in item.blocks)
    return any(any_effects(inner, graph) for inner in inside)


def operators_with_effects(graph: Graph) -> tuple[Op, ...]:
    """Every operator with effects, in program order."""
    return tuple(filter(has_effects, graph.ops))


def is_ordered(op: Op) -> bool:
    """True if an effect must happen in program order, which JAX keeps only on a single device."""
    return op.params.get("ordered") is True
