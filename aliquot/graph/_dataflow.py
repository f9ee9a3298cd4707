"""A step as a list of items, which a pipeline assigns to stages: its operators, and each of its
loops and remat regions as one item.

An item is *shared* if each stage that needs its results may compute them for itself: it is cheap,
and depends on parameters or on the batch, but not on both (masks, position tables, casts of
parameters).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import structs

from ._rule import traits_of
from ._types import Call, Graph, Input, OpId, Phase, Role, ValueId, value_ids

# Floating point operations that take about as long as moving one byte, on GPUs and TPUs of the last
# ten years.
_FLOPS_PER_BYTE = 150.0
FROM_ANOTHER_STAGE = "value "
"""Prefix of the paths of inputs that another stage makes, in the extracted step of a stage."""


class Item(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An operator or a call at the top of a step.

    Attributes:
        op_or_call: the operator's index, or the call.
        inputs, outputs: values, without literals and unnamed results.
        ops: indices of the operators in it.
        phase: forward or backward (prologue counts as forward), or update.
        shared: see the module.
    """

    op_or_call: OpId | Call
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    ops: tuple[OpId, ...]
    phase: Phase
    shared: bool


def is_from_another_stage(item: Input) -> bool:
    """True if an input of an extract is no input of the whole step."""
    return item.path.startswith(FROM_ANOTHER_STAGE)


def items_of(graph: Graph) -> tuple[Item, ...]:
    """All items of a step, in program order."""
    parameter = graph.inputs_of(Role.PARAMETER, Role.OPTIMIZER_STATE)
    # For each value, bits for what it depends on: parameters (1), the batch (2), or anything that
    # only one stage computes (4).
    sees = [0] * len(graph.values)
    for item in graph.inputs:
        if is_from_another_stage(item):
            sees[item.value] = 4
        else:
            sees[item.value] = 1 if item.value in parameter else 2 * (item.role is Role.BATCH)
    # None may read what a later phase makes. Values that depend on an update which itself depends
    # on the forward or backward pass:
    late: set[ValueId] = set()
    # Values that depend on the forward or backward pass.
    seen: set[ValueId] = set()
    backward: set[ValueId] = set()
    ordered: list[Item] = []
    for op_or_call in graph.body.items:
        one = _item(graph, op_or_call, sees)
        behind = one.phase is not Phase.UPDATE or not seen.isdisjoint(one.inputs)
        if not late.isdisjoint(one.inputs):
            # A second training in the same step, of other parameters: all of it counts as part of
            # the first one's update.
            if one.phase is not Phase.UPDATE:
                one = structs.replace(one, phase=Phase.UPDATE)
        elif one.phase is Phase.FORWARD and not backward.isdisjoint(one.inputs):
            # A loop that holds both passes counts as backward, because its loss is known only then.
            one = structs.replace(one, phase=Phase.BACKWARD)
        if behind and not one.shared:
            seen.update(one.outputs)
        if one.phase is Phase.BACKWARD and not one.shared:
            backward.update(one.outputs)
        if one.phase is Phase.UPDATE and not seen.isdisjoint(one.inputs):
            seen.update(one.outputs)
            late.update(one.outputs)
        ordered.append(one)
    # Items that count as update but are read by the passes must run before these.
    wanted: set[ValueId] = set()
    for k in range(len(ordered) - 1, -1, -1):
        one = ordered[k]
        if one.phase is Phase.UPDATE and not wanted.isdisjoint(one.outputs):
            ordered[k] = one = structs.replace(one, phase=Phase.FORWARD)
        if one.phase is not Phase.UPDATE:
            wanted.update(one.inputs)
    return tuple(ordered)


def forward_places(items: Sequence[Item]) -> tuple[int, ...]:
    """Positions of the items of the forward pass that are not shared."""
    places = []
    for k, item in enumerate(items):
        if item.phase is Phase.FORWARD and not item.shared:
            places.append(k)
    return tuple(places)


def _item(graph: Graph, op_or_call: OpId | Call, sees: list[int]) -> Item:
    """The item of an operator or call at the top of a step. Records in `sees` what its results
    depend on.
    """
    # Nearly all are operators.
    inside = tuple(ops_inside(op_or_call)) if isinstance(op_or_call, Call) else (op_or_call,)
    inputs = reads_of(graph, op_or_call)
    made = op_or_call.outputs if isinstance(op_or_call, Call) else graph.ops[op_or_call].outputs
    outputs = tuple([o for o in made if o >= 0])
    reads = 0
    for i in inputs:
        reads |= sees[i]
    heavy = isinstance(op_or_call, Call) or traits_of(graph.ops[op_or_call].name).multiplies
    # An item that depends on parameters and batch (3) is work of one stage, and so is one that
    # depends on such work (4).
    shared = not heavy and reads in (0, 1, 2)
    for o in outputs:
        # Other stages cannot compute what depends on an item that is not shared.
        sees[o] = reads if shared else reads | 4
    phase = graph.ops[inside[0]].phase if len(inside) == 1 else Phase.UPDATE
    if len(inside) > 1:
        phases = {graph.ops[k].phase for k in inside}
        if Phase.BACKWARD in phases:
            phase = Phase.BACKWARD
        elif phases & {Phase.FORWARD, Phase.PROLOGUE}:
            phase = Phase.FORWARD
    return Item(
        op_or_call=op_or_call,
        inputs=inputs,
        outputs=outputs,
        ops=inside,
        phase=Phase.FORWARD if phase is Phase.PROLOGUE else phase,
        shared=shared,
    )


def links_around(graph: Graph, call: Call) -> set[OpId]:
    """Links between a call's bodies and the values around them."""
    ends = set(call.outputs)
    links: set[OpId] = set()
    for block in call.blocks:
        ends.update(value_ids(block.inputs))
        for item in block.items:
            if isinstance(item, Call):
                links |= links_around(graph, item)
    return links | {graph.links[o].index for o in ends if o in graph.links}


def made_by(items: Iterable[Item]) -> set[ValueId]:
    """All results of items."""
    return set(itertools.chain.from_iterable(item.outputs for item in items))


def read_by(items: Iterable[Item]) -> dict[ValueId, None]:
    """All values that items read, in order."""
    return dict.fromkeys(itertools.chain.from_iterable(item.inputs for item in items))


def made_at(items: Sequence[Item]) -> dict[ValueId, int]:
    """For each result of items the position of the item."""
    places: dict[ValueId, int] = {}
    for k, item in enumerate(items):
        places.update(dict.fromkeys(item.outputs, k))
    return places


def plain_item(graph: Graph, op_or_call: OpId | Call, phase: Phase) -> Item:
    """An item made of any operator or call, also of one inside a body, or of half of a call."""
    outputs = op_or_call.outputs if isinstance(op_or_call, Call) else graph.ops[op_or_call].outputs
    return Item(
        op_or_call=op_or_call,
        inputs=reads_of(graph, op_or_call),
        outputs=tuple(value_ids(outputs)),
        ops=tuple(ops_inside(op_or_call)),
        phase=phase,
        shared=False,
    )


def reads_of(graph: Graph, op_or_call: OpId | Call) -> tuple[ValueId, ...]:
    """The values that an item reads from outside of it, including those that its bodies read
    directly.
    """
    if not isinstance(op_or_call, Call):
        return tuple(dict.fromkeys(value_ids(graph.ops[op_or_call].inputs)))
    read = value_ids(op_or_call.inputs)
    for block in op_or_call.blocks:
        # Remat bodies may read values around them that are no operands of the call.
        bound = set(value_ids(block.inputs))
        for item in block.items:
            read += [i for i in reads_of(graph, item) if i not in bound]
            bound.update(item.outputs if isinstance(item, Call) else graph.ops[item].outputs)
        read += [i for i in block.outputs if isinstance(i, int) and i not in bound]
    return tuple(dict.fromkeys(read))


def ops_inside(op_or_call: OpId | Call) -> Iterator[OpId]:
    """Indices of the operators that an item runs, without links."""
    if not isinstance(op_or_call, Call):
        yield op_or_call
        return
    for block in op_or_call.blocks:
        for item in block.items:
            yield from ops_inside(item)


def rough_costs(graph: Graph, items: Sequence[Item]) -> list[float]:
    """Rough weight of each item: floating point operations, plus bytes moved times
    `_FLOPS_PER_BYTE`.
    """
    sizes = [value.num_bytes for value in graph.values]
    costs = []
    for item in items:
        weights = []
        for op in (graph.ops[k] for k in item.ops):
            arrays = [sizes[v] for v in value_ids((*op.inputs, *op.outputs))]
            # A link moves one row of a stack in each turn.
            moved = min(arrays, default=0) if op.is_link else sum(arrays)
            flops = 0.0
            if op.name == "dot_general":
                (contracted, _), _ = op.params["dimension_numbers"]
                left = op.eqn.invars[0].aval.shape
                summed = math.prod(left[d] for d in contracted)
                flops = 2.0 * math.prod(op.eqn.outvars[0].aval.shape) * summed
            elif op.name == "conv_general_dilated":
                kernel = op.eqn.invars[1].aval.shape
                # Each element of the result sums over all dims of the kernel except its output
                # features.
                features = kernel[op.params["dimension_numbers"].rhs_spec[0]]
                flops = 2.0 * math.prod(op.eqn.outvars[0].aval.shape) * math.prod(kernel) / features
            weights.append(op.trips * (flops + _FLOPS_PER_BYTE * moved))
        costs.append(sum(weights))
    return costs
