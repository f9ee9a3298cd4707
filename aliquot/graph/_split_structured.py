"""Writes the bodies of a split step, with the loops, remat regions and branches in them: a scan
over layers becomes one scan for each range of layers, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import _jax_compat as compat
from ._split_emission import Emission, Place, define, define_all, parts_at, read, write_link
from ._split_operators import write_operator
from ._split_reach import is_split, opens
from ._split_values import index_of
from ._types import NO_VALUE, Block, Call, Op, Operand, ValueId, value_ids


def write_step(emission: Emission) -> Block:
    """Write the whole step; returns its nested view."""
    arrays, graph = emission.arrays, emission.graph
    inputs = itertools.chain(*map(arrays.declare, graph.input_values))
    place = Place(items=[])
    _write_items(emission, graph.body, place)
    outputs = itertools.chain(*map(arrays.parts, graph.output_values))
    return Block(inputs=tuple(inputs), items=tuple(place.items), outputs=tuple(outputs))


def _write_items(emission: Emission, block: Block, place: Place) -> None:
    calls: Mapping[str, Callable[[Emission, Call, Place], None]] = {
        "remat": _write_remat,
        "scan": _write_scan,
        "while": _write_while,
        "cond": _write_cond,
    }
    for item in block.items:
        if isinstance(item, Call):
            calls[item.kind](emission, item, place)
        else:
            write_operator(emission, emission.graph.ops[item], place)


def _like(emission: Emission, call: Call) -> Op:
    """A link of a loop, which stands for the loop where an operator is needed."""
    links = emission.graph.links
    ends = value_ids((*call.outputs, *call.blocks[-1].inputs))
    return links[next(v for v in ends if v in links)]


def _read_all(
    emission: Emission, call: Call, operands: Sequence[Operand], first: int, place: Place
) -> list[Operand]:
    """Operands of a loop as wholes; `operands` begin at its operand number `first`."""
    avals = [v.aval for v in call.eqn.invars[first : first + len(operands)]]
    like = _like(emission, call)
    found = []
    for i, a in zip(operands, avals, strict=True):
        found.append(read(emission, i, place, like, call.eqn, a))
    return found


def _write_whole(
    emission: Emission,
    call: Call,
    blocks: Sequence[Block],
    operands: Sequence[Operand],
    results: Sequence[ValueId],
    place: Place,
) -> None:
    """Write a loop, or branches, on whole arrays, and define the results."""
    place.items.append(
        replace(call, blocks=tuple(blocks), inputs=tuple(operands), outputs=tuple(results))
    )
    define_all(emission, call.outputs, results, place, _like(emission, call), call.eqn)


def _write_scan(emission: Emission, call: Call, place: Place) -> None:
    """Write a scan: one for each range if it is cut, else one on whole arrays."""
    arrays, params = emission.arrays, call.eqn.params
    num_consts, num_carry = compat.scan_counts(params)
    first = num_consts + num_carry
    consts = _read_all(emission, call, call.inputs[:num_consts], 0, place)
    carry = _read_all(emission, call, call.inputs[num_consts:first], num_consts, place)
    if place.in_loop or not is_split(call, arrays.stacked, arrays.rows):
        slices = _read_all(emission, call, call.inputs[first:], first, place)
        operands = [*consts, *carry, *slices]
        results = _write_one_scan(emission, call, call.eqn, operands, None, place)
        define_all(emission, call.outputs, results, place, _like(emission, call), call.eqn)
        return
    for old in call.outputs[num_carry:]:
        arrays.declare(old)
    numbered = list(enumerate(arrays.ranges))
    # A scan in reverse takes the last rows first.
    for k, (start, stop) in reversed(numbered) if params["reverse"] else numbered:
        slices = [arrays.parts(v)[k] for v in call.inputs[first:]]
        eqn = emission.equations.scan_on_rows(call.eqn, stop - start)
        results = _write_one_scan(emission, call, eqn, [*consts, *carry, *slices], k, place)
        carry = list(results[:num_carry])
    ends = zip(call.outputs[:num_carry], carry, call.eqn.outvars[:num_carry], strict=True)
    for old, last, var in ends:
        whole = index_of(last)
        define(emission, old, whole, place, _like(emission, call), call.eqn, var.aval)


def _write_one_scan(
    emission: Emission,
    call: Call,
    eqn: Any,
    operands: Sequence[Operand],
    piece: int | None,
    place: Place,
) -> list[ValueId]:
    """Write one scan: all of it, or piece number `piece`, whose stacked results are declared.

    Returns its results.
    """
    arrays, params = emission.arrays, eqn.params
    num_consts, num_carry = compat.scan_counts(params)
    (block,) = call.blocks
    body = place.loop(params["length"], call.eqn.params["length"])
    inner = arrays.declare_whole(block.inputs[num_consts:])
    for k, new in enumerate(inner):
        # A carry enters the loop once, a slice in every turn.
        where = place if k < num_carry else body
        old = index_of(block.inputs[num_consts + k])
        write_link(emission, old, where, (operands[num_consts + k],), new)
    _write_items(emission, block, body)
    ends = list(map(arrays.known, block.outputs))
    results: list[ValueId] = []
    for k, old in enumerate(call.outputs):
        stacks = k >= num_carry
        results.append(
            index_of(arrays.parts(old)[piece]) if stacks and piece is not None else arrays.new(old)
        )
        made_of = (ends[k],) if stacks else (ends[k], inner[k])
        write_link(emission, old, body if stacks else place, made_of, results[-1])
    whole = Block(
        inputs=(*operands[:num_consts], *inner), items=tuple(body.items), outputs=tuple(ends)
    )
    place.items.append(
        replace(call, eqn=eqn, blocks=(whole,), inputs=tuple(operands), outputs=tuple(results))
    )
    return results


def _write_while(emission: Emission, call: Call, place: Place) -> None:
    arrays, params = emission.arrays, call.eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    operands = _read_all(emission, call, call.inputs, 0, place)
    condition, block = call.blocks
    formal, first = block.inputs[num_body:], num_cond + num_body
    carried = arrays.declare_whole(formal)
    for old, start, new in zip(formal, operands[first:], carried, strict=True):
        write_link(emission, index_of(old), place, (start,), new)
    blocks = [
        _loop_body(emission, condition, (*operands[:num_cond], *carried), place),
        _loop_body(emission, block, (*operands[num_cond:first], *carried), place),
    ]
    results = list(map(arrays.new, call.outputs))
    ends = zip(call.outputs, blocks[1].outputs, carried, results, strict=True)
    for result, last, inner, new in ends:
        write_link(emission, result, place, (last, inner), new)
    _write_whole(emission, call, blocks, operands, results, place)


def _loop_body(emission: Emission, block: Block, inputs: Sequence[Operand], place: Place) -> Block:
    """Write a body that sees every array as a whole."""
    body = place.loop(1, 1)
    _write_items(emission, block, body)
    outputs = tuple(map(emission.arrays.known, block.outputs))
    return Block(inputs=tuple(inputs), items=tuple(body.items), outputs=outputs)


def _body(emission: Emission, block: Block, place: Place) -> Block:
    """Write a body that sees pieces of arrays, unless it is inside a loop."""
    arrays = emission.arrays
    # Arrays that are concatenated inside a body cannot be read outside of it.
    around = arrays.whole_here
    if not place.in_loop:
        arrays.whole_here = {}
    inputs = itertools.chain(*[parts_at(emission, i, place) for i in block.inputs])
    _write_items(emission, block, place)
    outputs = itertools.chain(*[parts_at(emission, o, place) for o in block.outputs])
    arrays.whole_here = around
    return Block(inputs=tuple(inputs), items=tuple(place.items), outputs=tuple(outputs))


def _write_remat(emission: Emission, call: Call, place: Place) -> None:
    # Regions get new numbers, because one in a loop over layers is written once for each range.
    emission.num_regions += 1
    region = place.body(emission.num_regions)
    (block,) = call.blocks
    body = _body(emission, block, region)
    results: list[ValueId] = []
    for old, inner in zip(call.outputs, block.outputs, strict=True):
        parts = parts_at(emission, inner, place)
        if old < 0:
            results += [NO_VALUE] * len(parts)
        elif old == inner:
            results += map(index_of, parts)
        else:
            fresh = emission.arrays.declare(old)
            for part, new in zip(parts, fresh, strict=True):
                write_link(emission, old, region, (part,), new)
            results += fresh
    place.items.append(replace(call, blocks=(body,), inputs=body.inputs, outputs=tuple(results)))


def _write_cond(emission: Emission, call: Call, place: Place) -> None:
    if not opens(call):
        operands = _read_all(emission, call, call.inputs, 0, place)
        whole = [_loop_body(emission, block, operands[1:], place) for block in call.blocks]
        made = list(map(emission.arrays.new, call.outputs))
        for k, (old, new) in enumerate(zip(call.outputs, made, strict=True)):
            write_link(emission, old, place, [block.outputs[k] for block in whole], new)
        _write_whole(emission, call, whole, operands, made, place)
        return
    (which,) = _read_all(emission, call, call.inputs[:1], 0, place)
    blocks = [_body(emission, block, place.body(place.region)) for block in call.blocks]
    results: list[ValueId] = []
    for old in call.outputs:
        for new in emission.arrays.declare(old):
            ends = [block.outputs[len(results)] for block in blocks]
            write_link(emission, old, place, ends, new)
            results.append(new)
    inputs = (which, *blocks[0].inputs)
    place.items.append(replace(call, blocks=tuple(blocks), inputs=inputs, outputs=tuple(results)))
