"""Sums over tokens that may wait for the last micro-batch: gradients of parameters.

Over an axis that splits the sequence each device has the gradient's summand of its own tokens. It
keeps that until the end, as it does over data axes, if all that follows is linear: adding up,
casting, rearranging, and the stack or running total of a loop. Whatever else reads a sum needs it
at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..graph import (
    Block,
    Call,
    Graph,
    Literal,
    Op,
    Operand,
    OpId,
    Phase,
    ValueId,
    scan_counts,
    traits_of,
    value_ids,
)

_SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add"})


def sums_that_wait(
    graph: Graph, crossing: Collection[ValueId] | None = None
) -> dict[OpId, frozenset[ValueId]]:
    """The operators of the backward pass whose sums may wait, each with the values that hold their
    summands until then.

    Args:
        graph: a step; or what runs in each micro-batch.
        crossing: its results that are added up over micro-batches; by default what the update
            reads.
    """
    walk = _Walk(graph=graph, is_step=crossing is None)
    walk.visit(graph.body)
    walk.needed |= graph.returned - set(crossing or ())
    waiting = {}
    for op in walk.sums:
        held = dict.fromkeys(value_ids(op.outputs))
        pending = list(held)
        while pending and walk.needed.isdisjoint(pending):
            following: list[ValueId] = []
            for value in pending:
                following.extend(walk.following.get(value, ()))
            pending = [v for v in dict.fromkeys(following) if v not in held]
            held |= dict.fromkeys(pending)
        if not pending:
            waiting[op.index] = frozenset(held)
    return waiting


def adds_or_hands_on(op: Op) -> bool:
    """True if it is a sum of arrays, or an operator that keeps all elements of one: a partial sum
    passes through it as a partial sum.
    """
    traits = traits_of(op.name)
    return traits.adds or (traits.moves is not None and traits.moves.keeps_all)


@dataclass(slots=True, kw_only=True)
class _Walk:
    """What becomes of the values of a graph.

    Attributes:
        is_step: whether the update is part of the graph, and reads finished sums.
        sums: the operators in question.
        following: for each value those that hold summands if it does.
        needed: values that are needed at once, by what runs before the update.
    """

    graph: Graph
    is_step: bool
    sums: list[Op] = field(default_factory=list)
    following: dict[ValueId, list[ValueId]] = field(default_factory=dict)
    needed: set[ValueId] = field(default_factory=set)
    _zeros: set[ValueId] = field(default_factory=set)

    def visit(self, block: Block, *, always: bool = True) -> None:
        """Follow a block's values, and those of the blocks inside it; `always`: whether it runs
        whatever the numbers are.
        """
        for item in block.items:
            if not isinstance(item, Call):
                self._operator(self.graph.ops[item], always)
                continue
            runs = always and item.kind in ("scan", "remat")
            for inner in item.blocks:
                self.visit(inner, always=runs)
            if item.kind == "scan" and runs:
                self._scan(item)
            elif item.kind == "remat" and runs:
                self._pass_on(item.blocks[0].outputs, item.outputs)
            else:
                self._need(item.inputs)

    def _operator(self, op: Op, always: bool) -> None:
        # What links say is known from the loops themselves.
        if op.is_link or (self.is_step and op.phase is Phase.UPDATE):
            return
        if op.name in _SUMS and op.phase is Phase.BACKWARD and always:
            self.sums.append(op)
        if op.name == "broadcast_in_dim" and self._is_zero(op.inputs[0]):
            self._zeros.update(op.outputs)
        hands_on = adds_or_hands_on(op) or op.name == "reduce_sum"
        if always and hands_on and not traits_of(op.name).runs_on_pieces:
            for read in op.inputs:
                self._pass_on([read], op.outputs)
        else:
            self._need(op.inputs)

    def _scan(self, scan: Call) -> None:
        (block,) = scan.blocks
        consts, carries = scan_counts(scan.eqn.params)
        self._pass_on(block.outputs, scan.outputs)
        for k in range(carries):
            self._pass_on(block.outputs[k : k + 1], block.inputs[consts + k : consts + k + 1])
            if not self._is_zero(scan.inputs[consts + k]):
                self._need(block.inputs[consts + k : consts + k + 1])
        self._need(scan.inputs[consts:])

    def _pass_on(self, given: Iterable[Operand], made: Iterable[Operand]) -> None:
        for one, other in zip(given, made, strict=True):
            if isinstance(one, int) and isinstance(other, int) and other >= 0 and one != other:
                self.following.setdefault(one, []).append(other)

    def _need(self, operands: Iterable[Operand]) -> None:
        self.needed.update(value_ids(operands))

    def _is_zero(self, operand: Operand) -> bool:
        if isinstance(operand, Literal):
            # Arrays of this type hold no numbers that could be compared.
            return operand.dtype == "float0" or bool(operand.value == 0)
        return operand in self._zeros
