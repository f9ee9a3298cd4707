"""Computation, memory traffic and communication of each node by itself."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..graph import Literal, Phase
from ._nodes import NodeCollective, Projection, SplitBy, Work

if TYPE_CHECKING:
    from ._node_index import NodeIndex


def _divided(projection: Projection) -> SplitBy:
    """The factors that divide an array: those that stand for one of its dims."""
    return tuple(dim >= 0 for dim in projection)


def product_work(naming: NodeIndex, op_class: int) -> tuple[Work, ...]:
    """Arithmetic of a product and the arrays it reads and writes."""
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    times = len(cuts.folding.members[op_class]) * op.trips
    arrays: list[tuple[float, SplitBy]] = []
    dtype = ""
    for position, operand in enumerate(op.inputs):
        if isinstance(operand, Literal):
            continue
        value = cuts.graph.values[operand]
        dtype = dtype or value.dtype
        port = naming.product_port(op_class, rule.operands[position])
        # A gather or scatter touches as much of its operand as it moves, not the whole table.
        touched = value.num_bytes if rule.flops_per_point else min(value.num_bytes, _moved_bytes(naming, op_class))
        arrays.append((float(touched) * times, _divided(port.projection)))
    for position, out in enumerate(op.outputs):
        if out >= 0:
            port = naming.product_port(op_class, rule.results[position])
            arrays.append((float(_touched_result(naming, op_class, out)) * times, _divided(port.projection)))
    known = sum(num_bytes for num_bytes, _ in arrays)
    if rule.accessed_bytes * times > known > 0:
        again = rule.accessed_bytes * times / known
        arrays = [(num_bytes * again, split_by) for num_bytes, split_by in arrays]
    return (
        Work(
            phase=op.phase,
            split_by=(True,) * len(rule.factors),
            flops=rule.flops * times,
            dtype=dtype,
            arrays=tuple(arrays),
            kernels=float(times),
            deferrable=op.deferrable,
        ),
    )


def _moved_bytes(naming: NodeIndex, op_class: int) -> int:
    """Bytes that a gather writes, or that a scatter adds in."""
    op, values = naming.cuts.first[op_class], naming.cuts.graph.values
    if op.name.startswith("scatter"):
        updates = op.inputs[-1]
        return values[updates].num_bytes if isinstance(updates, int) else 0
    return sum(values[o].num_bytes for o in op.outputs if o >= 0)


def _touched_result(naming: NodeIndex, op_class: int, out: int) -> int:
    num_bytes = naming.cuts.graph.values[out].num_bytes
    op = naming.cuts.first[op_class]
    return min(num_bytes, 2 * _moved_bytes(naming, op_class)) if op.name.startswith("scatter") else num_bytes


def product_collectives(naming: NodeIndex, op_class: int) -> tuple[NodeCollective, ...]:
    """A product's reductions other than sums cannot stay partial: they are finished at once."""
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    if not rule.reduced or rule.reduce == "sum":
        return ()
    out = op.outputs[0]
    value = cuts.graph.values[out]
    port = naming.product_port(op_class, rule.results[0])
    return (
        NodeCollective(
            kind="all-reduce",
            factors=tuple(k for k, f in enumerate(rule.factors) if f in rule.reduced),
            split_by=_divided(port.projection),
            num_bytes=float(value.num_bytes),
            dtype=value.dtype,
            count=float(len(cuts.folding.members[op_class]) * op.trips),
            phase=op.phase,
            gradient=False,
            label=naming.label(op_class),
            deferrable=op.deferrable,
        ),
    )


def group_work(naming: NodeIndex, index: int, slots: list[int]) -> tuple[Work, ...]:
    """Memory traffic of a group, by phase: each stored array is written once and read once by each
    phase.

    What runs whole reads and writes everything on every device, however its arrays are split before
    and behind.
    """
    cuts, storage = naming.cuts, naming.storage
    arrays: dict[tuple[Phase, bool], list[tuple[float, SplitBy]]] = defaultdict(list)
    kernels: dict[tuple[Phase, bool], float] = defaultdict(float)
    for slot in slots:
        value_class = naming.slot_value[slot]
        producer = cuts.producer[value_class]
        if not storage.stored[value_class]:
            continue
        members = cuts.folding.value_members[value_class]
        trips = cuts.first[producer[0]].trips if producer is not None else 1
        num_bytes = cuts.graph.values[members[0]].num_bytes * len(members) * cuts.times_made(value_class)
        split_by = _divided(naming.slot_port(slot).projection)
        if producer is not None and slot == cuts.home(value_class):
            maker = cuts.first[producer[0]]
            if not naming.runs_whole(producer[0]):
                arrays[maker.phase, maker.deferrable].append((num_bytes, split_by))
            kernels[maker.phase, maker.deferrable] += len(members) * trips
        for phase, deferrable in naming.reads_by_phase(slot).items():
            # The update of an array is one kernel, which still holds what it has just written.
            if not (producer is not None and phase is cuts.first[producer[0]].phase is Phase.UPDATE):
                arrays[phase, deferrable].append((num_bytes, split_by))
        if members[0] in naming.batch_values:
            # Every device receives its part of the batch: less, where it is split.
            arrays[Phase.FORWARD, False].append((num_bytes, split_by))
    traffic = [
        Work(
            phase=phase,
            split_by=(),
            arrays=tuple(entries),
            kernels=kernels[phase, deferrable],
            deferrable=deferrable,
        )
        for (phase, deferrable), entries in sorted(arrays.items())
    ]
    whole = (False,) * len(naming.group_classes[index])
    for op_class in naming.group_ops.get(index, ()):
        if naming.runs_whole(op_class):
            moved = whole_bytes(naming, op_class) * _times(naming, op_class)
            op = cuts.first[op_class]
            traffic.append(Work(phase=op.phase, split_by=(), arrays=((moved, whole),), deferrable=op.deferrable))
    return tuple(traffic)


def whole_bytes(naming: NodeIndex, op_class: int) -> float:
    """Bytes that an operator reads and writes each time."""
    cuts = naming.cuts
    op = cuts.first[op_class]
    arrays = {i for i in (*op.inputs, *op.outputs) if isinstance(i, int) and i >= 0}
    return max(float(sum(cuts.graph.values[i].num_bytes for i in arrays)), cuts.rules[op_class].accessed_bytes)


def group_collectives(naming: NodeIndex, index: int) -> tuple[NodeCollective, ...]:
    """Sums of reductions over a split factor, and gathers of what an operator needs whole."""
    collectives = []
    for op_class in naming.group_ops.get(index, ()):
        collectives += _reductions(naming, op_class)
        collectives += _gathers(naming, op_class)
    return tuple(collectives)


def batch_sums(naming: NodeIndex, batch_factors: Sequence[frozenset[int]]) -> int:
    """Between how many products of the backward pass layers need sums over the batch, in a step.

    Sums that stand between the same products are combined where they are summed over devices.
    """
    cuts, members = naming.cuts, naming.cuts.folding.members
    products = sorted(k for c, rule in enumerate(cuts.rules) if rule.contracts for k in members[c])
    stretches: set[int] = set()
    for node, op_classes in naming.group_ops.items():
        for op_class in op_classes if batch_factors[node] else ():
            op = cuts.first[op_class]
            if op.phase is Phase.BACKWARD and op.trips == 1:
                sums = [r for r in _reductions(naming, op_class) if not r.gradient]
                if any(batch_factors[node] & set(r.factors) for r in sums):
                    stretches.update(bisect.bisect(products, k) for k in members[op_class])
    return len(stretches)


def _times(naming: NodeIndex, op_class: int) -> float:
    return float(len(naming.cuts.folding.members[op_class]) * naming.cuts.first[op_class].trips)


def _reductions(naming: NodeIndex, op_class: int) -> list[NodeCollective]:
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    factors: dict[int, None] = {}
    for position, value_class, _ in cuts.operands(op_class):
        projection = naming.slot_port(cuts.operand_slot(op_class, value_class)).projection
        for dim, letters in enumerate(rule.operands[position]):
            if letters[0] in rule.reduced and dim in projection:
                factors[projection.index(dim)] = None
    out = op.outputs[0] if op.outputs else -1
    if not factors or out < 0:
        return []
    value = cuts.graph.values[out]
    # A scalar result belongs to no group; nothing divides it.
    result_projection = naming.slot_port(cuts.home(int(cuts.folding.value_class[out]))).projection
    size = len(naming.group_classes[naming.op_group[op_class]])
    return [
        NodeCollective(
            kind="all-reduce",
            factors=tuple(factors),
            split_by=_divided(result_projection) if result_projection else (False,) * size,
            num_bytes=float(sum(cuts.graph.values[o].num_bytes for o in op.outputs if o >= 0)),
            dtype=value.dtype,
            count=_times(naming, op_class),
            phase=op.phase,
            gradient=op.phase is Phase.BACKWARD and naming.enters_update(out),
            label=naming.label(op_class),
            deferrable=op.deferrable,
        )
    ]


def _gathers(naming: NodeIndex, op_class: int) -> list[NodeCollective]:
    cuts = naming.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    if op.is_link:
        return []
    gathers = []
    for position, value_class, count in cuts.operands(op_class):
        slot = cuts.operand_slot(op_class, value_class)
        projection = naming.slot_port(slot).projection
        for dim, letters in enumerate(rule.operands[position]):
            if dim not in projection or letters == "1":
                continue
            factor = projection.index(dim)
            if letters[0] in rule.reduced or naming.passes_through(op_class, letters[0], factor):
                continue
            value = cuts.graph.values[cuts.folding.value_members[value_class][0]]
            gathers.append(
                NodeCollective(
                    kind="all-gather",
                    factors=(factor,),
                    split_by=_divided(projection),
                    num_bytes=float(value.num_bytes),
                    dtype=value.dtype,
                    count=float(count * op.trips),
                    phase=op.phase,
                    gradient=False,
                    label=naming.label(op_class),
                    deferrable=op.deferrable,
                )
            )
    return gathers
