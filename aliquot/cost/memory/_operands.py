"""Types in which a compiler stores operands of products: TPUs keep float32 operands as bfloat16.

An array that only products read is stored in the type in which they multiply, also if a loop stacks
it for another loop. A cast of a parameter is the same in each turn of a loop, so it is hoisted out
of the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...graph import Op, Phase, traits_of
from ...sharding import Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """Parameters whose casts to a narrower type are hoisted out of loops.

    Attributes:
        itemsize: by value class of the parameter, the bytes of an element of its cast.
        replaced: value classes of the step's own casts, which the hoisted ones replace.
        until: the last operator of the loops.
    """

    itemsize: dict[int, int]
    replaced: frozenset[int]
    until: int


def only_multiplied(cuts: Cuts) -> list[bool]:
    """For each value class, whether it is float32 and read only by products at default precision,
    also through operators that only pass it on.
    """
    read = [False] * len(cuts.producer)
    otherwise = [False] * len(cuts.producer)
    for output in cuts.graph.outputs:
        if isinstance(output.value, int):
            otherwise[int(cuts.folding.value_class[output.value])] = True
    # In reverse, so that all readers of a result come before its maker.
    for op_class in _backwards(cuts):
        op = cuts.first[op_class]
        passes = _passes_on(op) and all(read[o] and not otherwise[o] for o in _results(cuts, op))
        for _, value_class, _ in cuts.operands(op_class):
            read[value_class] = True
            if not (passes or _multiplies_narrowly(cuts, op)):
                otherwise[value_class] = True
    return [
        read[v]
        and not otherwise[v]
        and cuts.producer[v] is not None
        and _dtype(cuts, v) == "float32"
        for v in range(len(read))
    ]


def casts_of_parameters(cuts: Cuts, product_itemsize: int, *, in_loop: bool) -> Casts:
    """Find the parameters that are cast once for all turns of loops.

    Args:
        product_itemsize: bytes of an element of float32 as products at default precision read it.
        in_loop: whether the whole graph is the body of a loop, over micro-batches.
    """
    needed = [0] * len(cuts.producer)
    for op_class in _backwards(cuts):
        op = cuts.first[op_class]
        results = [o for o in _results(cuts, op) if cuts.param_only[o]]
        turns = op.phase is not Phase.UPDATE and (in_loop or op.trips > 1)
        for _, value_class, _ in cuts.operands(op_class):
            itemsize_read = _itemsize(cuts, value_class)
            if turns and _multiplies_narrowly(cuts, op):
                itemsize_read = product_itemsize
            if turns and (traits_of(op.name).multiplies or op.name == "gather"):
                needed[value_class] = max(needed[value_class], itemsize_read)
            needed[value_class] = max([needed[value_class], *(needed[o] for o in results)])
    parameters = {int(cuts.folding.value_class[i.value]) for i in cuts.graph.inputs}
    itemsize = {
        # A cast that takes no fewer bytes would only be another copy.
        v: needed[v]
        for v in parameters
        if cuts.param_only[v] and 0 < needed[v] < _itemsize(cuts, v)
    }
    replaced: set[int] = set()
    # In program order, so that casts of casts are found.
    for op_class in reversed(_backwards(cuts)):
        if any(v in itemsize or v in replaced for _, v, _ in cuts.operands(op_class)):
            replaced.update(
                v for v in _results(cuts, cuts.first[op_class]) if cuts.param_only[v] and needed[v]
            )
    turned = (
        op.index
        for op in cuts.graph.ops
        if op.phase is not Phase.UPDATE and (in_loop or op.trips > 1)
    )
    return Casts(itemsize=itemsize, replaced=frozenset(replaced), until=max(turned, default=0))


def _backwards(cuts: Cuts) -> list[int]:
    return sorted(range(len(cuts.first)), key=lambda c: -cuts.first[c].index)


def _results(cuts: Cuts, op: Op) -> list[int]:
    return [int(cuts.folding.value_class[o]) for o in op.outputs if o >= 0]


def _passes_on(op: Op) -> bool:
    moves = traits_of(op.name).moves
    return op.is_link or (moves is not None and moves.permutes)


def _multiplies_narrowly(cuts: Cuts, op: Op) -> bool:
    """True for a product of float32 at default precision, which hardware computes in a narrower
    type.
    """
    if not traits_of(op.name).multiplies:
        return False
    asked = op.params.get("precision") or ()
    # JAX states one precision for both operands, or one for each.
    names = {
        getattr(p, "name", "DEFAULT") for p in (asked if isinstance(asked, tuple) else (asked,))
    }
    operands = {cuts.graph.values[i].dtype for i in op.inputs if isinstance(i, int)}
    return names <= {"DEFAULT"} and operands == {"float32"}


def _dtype(cuts: Cuts, value_class: int) -> str:
    return cuts.graph.values[cuts.folding.value_members[value_class][0]].dtype


def _itemsize(cuts: Cuts, value_class: int) -> int:
    return cuts.graph.values[cuts.folding.value_members[value_class][0]].itemsize
