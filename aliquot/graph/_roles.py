"""Roles of inputs in training: parameter, optimizer state, other state, batch. Dataflow alone
decides.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from ._rule import DimRule, declared_rule, traits_of
from ._traits import Moves
from ._types import (
    Input,
    Literal,
    Op,
    Operand,
    Output,
    Phase,
    Role,
    Value,
    ValueId,
    result_shapes,
    value_ids,
)


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the dataflow of each value: one byte per value for each question.

    Attributes:
        read: forward or backward operators read it, directly or through prologue operators.
        forward: it depends on the forward pass.
        backward: it depends on the backward pass.
        learned: it depends on the backward pass through floating-point values only. A loss scale
            does not: it depends only on whether gradients are finite.
        key: it is a random key, typed or raw.
    """

    read: bytearray
    forward: bytearray
    backward: bytearray
    learned: bytearray
    key: bytearray


def reach_of(ops: Sequence[Op], values: Sequence[Value]) -> Reach:
    """The `Reach` of all values, in one pass over the operators forwards and one backwards."""
    size = len(values)
    forward, backward, learned = bytearray(size), bytearray(size), bytearray(size)
    floating = bytearray(map(_is_floating, values))
    for op in ops:
        is_forward, is_backward = op.phase is Phase.FORWARD, op.phase is Phase.BACKWARD
        is_learned = is_backward
        for i in op.inputs:
            if type(i) is not Literal:
                is_forward = is_forward or forward[i] == 1
                is_backward = is_backward or backward[i] == 1
                is_learned = is_learned or learned[i] == 1
        if is_forward or is_backward:
            for out in op.outputs:
                if out >= 0:
                    forward[out], backward[out] = is_forward, is_backward
                    learned[out] = is_learned and floating[out]
    read = bytearray(size)
    key = bytearray(value.dtype.startswith("key<") for value in values)
    for op in reversed(ops):
        inner = op.phase is Phase.FORWARD or op.phase is Phase.BACKWARD
        if inner or (op.phase is Phase.PROLOGUE and any(read[o] for o in op.outputs if o >= 0)):
            for i in op.inputs:
                if type(i) is not Literal:
                    read[i] = 1
        # Until it is wrapped, a raw key is an array of numbers like any other, so look backwards.
        moves = traits_of(op.name).moves
        # A raw key may be cut out of an array of keys before it is used.
        hands_on = op.name in ("tie", "scan_slice") or (
            moves is not None and (moves.permutes or moves is Moves.SELECT)
        )
        if op.name == "random_wrap" or (hands_on and any(key[o] for o in op.outputs if o >= 0)):
            for i in op.inputs if op.name == "tie" else op.inputs[:1]:
                if type(i) is not Literal:
                    key[i] = 1
    return Reach(read=read, forward=forward, backward=backward, learned=learned, key=key)


def _is_floating(value: Value) -> bool:
    return "float" in value.dtype or "complex" in value.dtype


def _weights(ops: Sequence[Op], values: Sequence[Value], batch: set[ValueId]) -> bytearray:
    """For each value whether it holds weights, of any dtype: a product reads it, or something that
    is made of it element by element and of nothing of the batch, such as what is unpacked from
    integers and scaled; or it is a table from which rows are looked up that become floating-point
    numbers.

    Args:
        batch: inputs that each step gets anew.
    """
    size = len(values)
    fed, weights, turns_float = bytearray(size), bytearray(size), bytearray(size)
    for value in batch:
        fed[value] = 1
    for op in ops:
        # What a loop carries does not stay what it was before the first turn.
        if op.name == "tie" or any(type(i) is not Literal and fed[i] for i in op.inputs):
            for out in op.outputs:
                if out >= 0:
                    fed[out] = 1
    for op in reversed(ops):
        sources = value_ids(op.inputs)
        results = value_ids(op.outputs)
        if op.phase is Phase.UPDATE or not sources or not results:
            continue
        traits, first, result = traits_of(op.name), sources[0], results[0]
        if traits.moves is not None and traits.moves.keeps_all:
            turns_float[first] |= turns_float[result] or _is_floating(values[result])
        made: list[ValueId] = []
        if traits.multiplies:
            made = sources
        elif op.name == "gather":
            made = _looked_up(op, values, weights, turns_float)
        elif any(weights[o] for o in results):
            # Places of elements are no part of what an array holds.
            if op.name == "scan_slice" or traits.moves is Moves.SELECT:
                made = [first]
            elif op.name.startswith("scatter"):
                made = value_ids((op.inputs[0], op.inputs[2]))
            else:
                made = sources
            # A bit is part of one weight. A table of more numbers is computed from a few, such as
            # positions.
            made = [i for i in made if _size(values[result]) <= 8 * values[i].num_bytes]
        for i in made:
            weights[i] |= not fed[i]
    return weights


def _looked_up(
    op: Op, values: Sequence[Value], weights: bytearray, turns_float: bytearray
) -> list[ValueId]:
    """The operands of a gather that hold weights: a table of weights, and the codes of weights that
    are looked up one by one in a smaller table.
    """
    (table, index), result = op.inputs[:2], op.outputs[0]
    size = _size(values[result])
    takes_rows = size > math.prod(_shape(index, values)[:-1])
    made = []
    if type(table) is not Literal and (weights[result] or (takes_rows and turns_float[result])):
        made.append(table)
    is_code = not takes_rows and size > math.prod(_shape(table, values))
    if type(index) is not Literal and weights[result] and is_code:
        made.append(index)
    return made


def _shape(operand: Operand, values: Sequence[Value]) -> tuple[int, ...]:
    return values[operand].shape if isinstance(operand, int) else operand.shape


def _size(value: Value) -> int:
    return math.prod(value.shape)


def assign_roles(
    reach: Reach,
    ops: Sequence[Op],
    values: Sequence[Value],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    batch: set[str],
) -> tuple[Input, ...]:
    """Inputs with their roles; `batch` holds the paths of inputs that each step gets anew.

    A parameter is an input that the forward pass reads, and that is floating-point or holds weights
    (see `_weights`), such as the integers of a quantized network. Its successor is learned, or does
    not depend on the data at all (a frozen parameter); or it has none (a teacher's weights). State
    that the forward pass never reads is optimizer state; other state is running statistics, random
    keys, loss scales and the like.
    """
    has_integers, new = False, set()
    for item in inputs:
        value = values[item.value]
        if item.path in batch:
            new.add(item.value)
        elif value.shape and not _is_floating(value) and not reach.key[item.value]:
            has_integers = True
    # Few steps have any.
    weights = _weights(ops, values, new) if has_integers else bytearray(len(values))

    def role(item: Input) -> Role:
        value = values[item.value]
        floating = _is_floating(value)
        weighs = weights[item.value] == 1 and bool(value.shape) and not reach.key[item.value]
        if item.path in batch:
            return Role.BATCH
        if item.output is None:
            read = reach.read[item.value] == 1 and bool(value.shape)
            return Role.PARAMETER if read and (floating or weighs) else Role.OTHER
        if reach.key[item.value]:
            return Role.STATE
        successor: Operand = outputs[item.output].value
        position = successor if isinstance(successor, int) else None
        after_forward = position is not None and reach.forward[position] == 1
        after_backward = position is not None and reach.backward[position] == 1
        if not reach.read[item.value]:
            # `measured`: running statistics that only evaluation reads.
            measured = after_forward and not after_backward
            return Role.STATE if measured else Role.OPTIMIZER_STATE
        # A scalar that depends on neither pass is a counter, not a frozen parameter.
        frozen = position == item.value or (
            bool(value.shape) and not after_forward and not after_backward
        )
        learned = position is not None and reach.learned[position] == 1
        if floating:
            return Role.PARAMETER if learned or frozen else Role.STATE
        return Role.PARAMETER if weighs and (after_backward or frozen) else Role.STATE

    return tuple(replace(item, role=role(item)) for item in inputs)


class _Rows(enum.IntEnum):
    """How the forward pass uses the rows of an array: the more, the less they are examples."""

    EACH = 0
    ONE_BY_ONE = 1
    TOGETHER = 2


def _uses_of_rows(
    ops: Sequence[Op], values: Sequence[Value], starts: Sequence[ValueId]
) -> dict[ValueId, _Rows]:
    """How the forward pass uses the first dim of arrays: products contract that of weights, lookups
    choose from that of a table, and scans run over that of stacked layers.
    """
    uses = dict.fromkeys(starts, _Rows.EACH)
    # The arrays whose rows a value holds, and the dim of the value that they lie along.
    holds: dict[ValueId, dict[ValueId, int]] = {start: {start: 0} for start in starts}
    for op in ops:
        declare = declared_rule(op.name)
        is_read = any(i in holds for i in value_ids(op.inputs))
        if declare is None or not is_read or op.phase in (Phase.BACKWARD, Phase.UPDATE):
            continue
        operands = [i if isinstance(i, Literal) else values[i] for i in op.inputs]
        rule = declare(operands, result_shapes(op, values), op.params)
        for i, dims in zip(op.inputs, rule.operands, strict=True):
            for start, dim in holds.get(i, {}).items() if isinstance(i, int) else ():
                kept = _places(dims[dim], op, rule)
                if op.name == "scan_slice" and dim == 0:
                    uses[start] = max(uses[start], _Rows.ONE_BY_ONE)
                elif rule.contracts and (not kept or i == _kernel(op)):
                    uses[start] = _Rows.TOGETHER
                elif not rule.contracts:
                    for out, after in kept:
                        holds.setdefault(out, {})[start] = after
    return uses


def _places(names: str, op: Op, rule: DimRule) -> list[tuple[ValueId, int]]:
    """The results of an operator, and their dims, that have the factors of a dim of an operand."""
    found = []
    for out, dims in zip(op.outputs, rule.results, strict=True):
        found += [(out, dim) for dim, other in enumerate(dims) if other == names and out >= 0]
    return found


def _kernel(op: Op) -> Operand | None:
    """What a convolution multiplies its images by, of which no dim is rows of examples."""
    return op.inputs[1] if op.name == "conv_general_dilated" else None


def _use_of_largest(
    arrays: Sequence[ValueId], values: Sequence[Value], uses: Mapping[ValueId, _Rows]
) -> int:
    """How the rows of the largest of some arrays are used: biases and masks say less."""
    most = max((_size(values[i]) for i in arrays), default=0)
    return min((uses[i] for i in arrays if _size(values[i]) == most), default=0)


def batch_paths(
    names: Sequence[str],
    arguments: Sequence[str],
    ops: Sequence[Op],
    values: Sequence[Value],
    inputs: Sequence[Input],
    reach: Reach,
    trains: bool,
) -> set[str]:
    """Paths of the inputs that each step gets anew; `names` are the arguments in order, `arguments`
    gives the argument of each input.

    These are arrays whose first dim has the batch's size, in arguments of which no array has a
    successor. The batch's size is the one on which all arrays of an argument agree; if there are
    several such sizes, that of the arguments whose rows are least like those of weights (see
    `_uses_of_rows`), then that of most arrays, and in a tie that of the last argument, because a
    batch comes after the parameters. If nothing is trained, the first argument holds the
    parameters. Random keys do not count for the size, but an array of one key for each example
    belongs to the batch.
    """
    groups: dict[str, list[Input]] = {name: [] for name in names if name in set(arguments)}
    for name, item in zip(arguments, inputs, strict=True):
        groups[name].append(item)
    fresh = [items for items in groups.values() if all(i.output is None for i in items)]
    if not trains and len(groups) > 1:
        first = next(iter(groups.values()))
        fresh = [items for items in fresh if items is not first]
    # The size of each array by path, for each argument.
    sized: list[dict[str, int]] = []
    value_of = {item.path: item.value for item in inputs}
    for items in fresh:
        sizes = {}
        for i in items:
            if values[i.value].shape and not reach.key[i.value]:
                sizes[i.path] = values[i.value].shape[0]
        sized.append(sizes)
    sized = [sizes for sizes in sized if len(set(sizes.values())) == 1] or sized
    if len(sized) > 1:
        uses = _uses_of_rows(ops, values, [value_of[path] for sizes in sized for path in sizes])
        ranks = [
            _use_of_largest([value_of[path] for path in sizes], values, uses) for sizes in sized
        ]
        least = [k for k, rank in enumerate(ranks) if rank == min(ranks)]
        of_least = {size for k in least for size in sized[k].values()}
        # An array of as many rows behind the batch may belong to it, such as nodes behind a graph.
        sized = [
            sizes
            for k, sizes in enumerate(sized)
            if k in least or (k > max(least) and set(sizes.values()) <= of_least)
        ]
    # Reversed, because `Counter` returns the first of equally frequent sizes, not the last.
    votes = Counter(itertools.chain(*(sizes.values() for sizes in reversed(sized))))
    if not votes:
        return set()
    size = votes.most_common(1)[0][0]
    found = set()
    for items in fresh:
        for i in items:
            value = values[i.value]
            # A raw key is itself an array, of two or four numbers.
            dims = value.shape if value.dtype.startswith("key<") else value.shape[:-1]
            if reach.key[i.value] and dims[:1] == (size,):
                found.add(i.path)
    for sizes in sized:
        found |= {path for path, length in sizes.items() if length == size}
    return found
