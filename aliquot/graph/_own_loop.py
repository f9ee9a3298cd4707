"""A step's own loop over micro-batches: a scan that adds up the gradients of parts of the batch.

    parts = jax.tree.map(lambda a: a.reshape(16, -1, *a.shape[1:]), batch)
    grads, _ = jax.lax.scan(lambda total, part: (add(total, grad(loss)(params, part)), None), ...)

Without the loop, its body on the whole batch adds up the same rows, if what it adds are sums over
them. Such a step can be cut into micro-batches as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
from msgspec import structs

from . import _jax_compat as compat
from ._dataflow import items_of, links_around, ops_inside, read_by
from ._effects import any_effects
from ._extract import Extract, with_items
from ._rule import traits_of
from ._types import Block, Call, Graph, Op, Operand, OpId, Phase, Role, ValueId, value_ids


class OwnLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A loop over micro-batches in a step.

    Attributes:
        call: the loop.
        turns: how many micro-batches it has.
        cuts: positions of the operators that cut the batch for it.
        rows: for each value that a turn gets, the array of the batch of which it is a part.
        added: what each turn adds to the totals; `additions` are the operators that do.
        sums: for each result of an operator that adds up what the turns have stacked, what these
            are in a turn; the operators are `sum_ops`.
    """

    call: Call
    turns: int
    cuts: frozenset[OpId]
    rows: Mapping[ValueId, ValueId]
    added: frozenset[ValueId]
    additions: frozenset[OpId]
    sums: Mapping[ValueId, Operand]
    sum_ops: frozenset[OpId]


def find_own_loop(graph: Graph) -> OwnLoop | None:
    """The loop over micro-batches of a step that has one, and one alone."""
    found = []
    for item in graph.body.items:
        if isinstance(item, Call) and item.kind == "scan" and (loop := _own_loop(graph, item)):
            found.append(loop)
    return found[0] if len(found) == 1 else None


def _own_loop(graph: Graph, call: Call) -> OwnLoop | None:
    (block,) = call.blocks
    num_consts, num_carry = compat.scan_counts(call.eqn.params)
    turns: int = call.eqn.params["length"]
    backward = any(graph.ops[k].phase is Phase.BACKWARD for k in ops_inside(call))
    if turns < 2 or not backward or any_effects(call, graph):
        return None
    # Each turn takes the next rows of the batch, and nothing else that differs between turns.
    batch = graph.inputs_of(Role.BATCH)
    rows: dict[ValueId, ValueId] = {}
    cuts: set[OpId] = set()
    for outer, part in zip(
        call.inputs[num_consts + num_carry :], block.inputs[num_consts + num_carry :], strict=True
    ):
        maker = graph.makers.get(outer) if isinstance(outer, int) else None
        if maker is None or maker.name != "reshape" or maker.inputs[0] not in batch:
            return None
        assert isinstance(part, int) and isinstance(outer, int)
        whole = maker.inputs[0]
        shape, cut = graph.values[whole].shape, graph.values[outer].shape
        if cut != (turns, shape[0] // turns, *shape[1:]):
            return None
        rows[part] = whole
        cuts.add(maker.index)
    # Totals are read by the additions to them alone.
    readers: dict[ValueId, list[Op]] = {}
    for op in graph.ops:
        for i in op.inputs:
            if isinstance(i, int):
                readers.setdefault(i, []).append(op)
    added: set[ValueId] = set()
    additions: set[OpId] = set()
    results = set(call.outputs)
    top = {item for item in block.items if not isinstance(item, Call)}
    for total, new in zip(
        block.inputs[num_consts : num_consts + num_carry], block.outputs[:num_carry], strict=True
    ):
        if new == total:
            continue
        if not isinstance(new, int):
            return None
        maker = graph.makers.get(new)
        assert isinstance(total, int)
        reading = []
        for op in (*readers.get(total, []), *readers.get(new, [])):
            if not (op.is_link and op.outputs[0] in results):
                reading.append(op)
        if maker is None or reading != [maker] or maker.index not in top:
            return None
        summands = [i for i in maker.inputs if i != total]
        if not traits_of(maker.name).adds or len(maker.inputs) != 2 or len(summands) != 1:
            return None
        if not isinstance(summands[0], int) or block.outputs.count(new) != 1:
            return None
        added.add(summands[0])
        additions.add(maker.index)
    sums: dict[ValueId, Operand] = {}
    sum_ops: set[OpId] = set()
    for stack, each in zip(call.outputs[num_carry:], block.outputs[num_carry:], strict=True):
        for op in readers.get(stack, []):
            is_sum = op.name == "reduce_sum" and tuple(op.params["axes"]) == (0,)
            if not is_sum or not isinstance(each, int):
                return None
            sums[op.outputs[0]] = each
            sum_ops.add(op.index)
            added.add(each)
    read = graph.returned
    for item in graph.body.items:
        if isinstance(item, Call) and item is not call:
            read.update(value_ids(item.inputs))
    if not read.isdisjoint(call.outputs[num_carry:]) or not rows or not added:
        return None
    return OwnLoop(
        call=call,
        turns=turns,
        cuts=frozenset(cuts),
        rows=rows,
        added=frozenset(added),
        additions=frozenset(additions),
        sums=sums,
        sum_ops=frozenset(sum_ops),
    )


def in_one_turn(graph: Graph, larger: Graph) -> Extract:
    """The step with one turn over the whole batch in place of its loop over micro-batches.

    Args:
        graph: a step with such a loop.
        larger: the same operators, one by one, on a batch that is larger by the number of turns, so
            that each turn has as many rows as the batch of `graph`.
    """
    here, loop = find_own_loop(graph), find_own_loop(larger)
    assert here is not None and loop is not None, "no loop over micro-batches"
    (block,) = loop.call.blocks
    num_consts, num_carry = compat.scan_counts(loop.call.eqn.params)
    # What stands for the values around the loop's body.
    instead: dict[ValueId, Operand] = {**loop.rows}
    totals = block.inputs[num_consts : num_consts + num_carry]
    for total, start in zip(totals, loop.call.inputs[num_consts:], strict=False):
        assert isinstance(total, int)
        instead[total] = start
    for result, new in zip(loop.call.outputs, block.outputs[:num_carry], strict=False):
        instead[result] = instead.get(new, new) if isinstance(new, int) else new
    instead |= loop.sums

    def operands(given: Iterable[Operand]) -> tuple[Operand, ...]:
        return tuple([instead.get(i, i) if isinstance(i, int) else i for i in given])

    def replaced(op_or_call: OpId | Call) -> OpId | Call:
        if not isinstance(op_or_call, Call):
            return op_or_call
        blocks = []
        for inner in op_or_call.blocks:
            items = tuple(map(replaced, inner.items))
            inputs, outputs = operands(inner.inputs), operands(inner.outputs)
            blocks.append(Block(inputs=inputs, items=items, outputs=outputs))
        return replace(op_or_call, inputs=operands(op_or_call.inputs), blocks=tuple(blocks))

    # With the links of the loops inside it.
    inside = set(ops_inside(loop.call))
    for inner in block.items:
        if isinstance(inner, Call):
            inside |= links_around(larger, inner)
    ops = [structs.replace(op, inputs=operands(op.inputs)) for op in graph.ops]
    values = list(graph.values)
    for k in inside:
        one = larger.ops[k]
        ops[k] = structs.replace(one, inputs=ops[k].inputs, trips=one.trips // loop.turns)
        for o in one.outputs:
            if o >= 0:
                values[o] = larger.values[o]
    items: list[OpId | Call] = []
    for item in graph.body.items:
        if item is here.call:
            items += block.items
        elif isinstance(item, Call) or item not in loop.sum_ops:
            items.append(item)
    outputs = tuple([replace(o, value=operands([o.value])[0]) for o in graph.outputs])
    body = Block(
        inputs=graph.body.inputs,
        items=tuple(map(replaced, items)),
        outputs=tuple([o.value for o in outputs]),
    )
    whole = replace(graph, ops=tuple(ops), values=tuple(values), body=body, outputs=outputs)
    every = items_of(whole)
    needed = {*read_by(every), *whole.returned}
    kept = []
    for each in every:
        # The batch is no longer cut for the loop.
        if each.op_or_call not in loop.cuts or not needed.isdisjoint(each.outputs):
            kept.append(each)
    return with_items(whole, kept)
