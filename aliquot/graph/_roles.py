"""Roles of inputs in training: parameter, optimizer state, other state, batch. Dataflow alone
decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ._rule import traits_of
from ._traits import Moves
from ._types import Input, Literal, Op, Operand, Output, Phase, Role, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
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
    floating = bytearray(_is_floating(value) for value in values)
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
        if op.name == "random_wrap" or (
            _hands_on_keys(op.name) and any(key[o] for o in op.outputs if o >= 0)
        ):
            for i in op.inputs if op.name == "tie" else op.inputs[:1]:
                if type(i) is not Literal:
                    key[i] = 1
    return Reach(read=read, forward=forward, backward=backward, learned=learned, key=key)


def _hands_on_keys(primitive: str) -> bool:
    # A raw key may be cut out of an array of keys before it is used.
    moves = traits_of(primitive).moves
    return primitive in ("tie", "scan_slice") or (
        moves is not None and (moves.permutes or moves is Moves.SELECT)
    )


def _is_floating(value: Value) -> bool:
    return "float" in value.dtype or "complex" in value.dtype


def assign_roles(
    reach: Reach,
    values: Sequence[Value],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    batch: set[str],
) -> tuple[Input, ...]:
    """Inputs with their roles; `batch` holds the paths of inputs that each step gets anew.

    A parameter is a floating-point input that the forward pass reads and whose successor is
    learned, or does not depend on the data at all (a frozen parameter). State that the forward pass
    never reads is optimizer state; other state is running statistics, random keys, loss scales and
    the like. A floating-point array that the forward pass reads and that has no successor (a
    teacher's weights) counts as a parameter too.
    """

    def role(item: Input) -> Role:
        value = values[item.value]
        floating = _is_floating(value)
        if item.path in batch:
            return Role.BATCH
        if item.output is None:
            return (
                Role.PARAMETER
                if floating and value.shape and reach.read[item.value]
                else Role.OTHER
            )
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
        return Role.PARAMETER if floating and (learned or frozen) else Role.STATE

    return tuple(replace(item, role=role(item)) for item in inputs)


def batch_paths(
    names: Sequence[str],
    arguments: Sequence[str],
    values: Sequence[Value],
    inputs: Sequence[Input],
    reach: Reach,
    trains: bool,
) -> set[str]:
    """Paths of the inputs that each step gets anew; `names` are the arguments in order, `arguments`
    gives the argument of each input.

    These are arrays whose first dim has the batch's size, in arguments of which no array has a
    successor. The batch's size is the one on which all arrays of an argument agree; if there are
    several such sizes, that of most arrays, and in a tie that of the last argument, because a batch
    comes after the parameters. If nothing is trained, the first argument holds the parameters.
    Random keys do not count for the size, but an array of one key for each example belongs to the
    batch.
    """
    groups: dict[str, list[Input]] = {name: [] for name in names if name in set(arguments)}
    for name, item in zip(arguments, inputs, strict=True):
        groups[name].append(item)
    fresh = [items for items in groups.values() if all(i.output is None for i in items)]
    if not trains and len(groups) > 1:
        first = next(iter(groups.values()))
        fresh = [items for items in fresh if items is not first]
    sized = [
        [
            (i.path, values[i.value].shape[0])
            for i in items
            if values[i.value].shape and not reach.key[i.value]
        ]
        for items in fresh
    ]
    agreeing = [pairs for pairs in sized if len({size for _, size in pairs}) == 1]
    # Reversed, because `Counter` returns the first of equally frequent sizes, not the last.
    votes = Counter(size for pairs in reversed(agreeing or sized) for _, size in pairs)
    if not votes:
        return set()
    size = votes.most_common(1)[0][0]
    keys = {
        i.path
        for items in fresh
        for i in items
        if reach.key[i.value] and _is_key_array(values[i.value], size)
    }
    return {path for pairs in agreeing or sized for path, length in pairs if length == size} | keys


def _is_key_array(value: Value, size: int) -> bool:
    """True if a value is an array of `size` keys; a raw key is itself an array, of two or four
    numbers.
    """
    dims = value.shape if value.dtype.startswith("key<") else value.shape[:-1]
    return dims[:1] == (size,)
