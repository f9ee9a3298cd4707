"""Arithmetic and memory traffic of each node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import EXPERTS, ROOM, Literal, Op, Phase, Scores
from ..sharding import (
    NodeId,
    NodeIndex,
    SlotId,
    SplitBy,
    classes_of_casts,
    divided_by,
    whole_bytes,
)
from .memory import Storage, is_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Arithmetic and memory traffic of a node in one step, all copies together.

    `arrays` are the bytes read and written, each with the factors that divide them; `kernels` is
    the number of kernels that a device launches, however the work is split. `scores` are those of
    fused attention; `is_kernel` is true of kernels that users wrote, which are no products whatever
    they read and write. For `deferrable` see `Op`.

    `cast` is None but for casts of parameters, which need not be made again for each micro-batch:
    true of the first ones that have their results, which are then made once a step, and false of
    others, which are not made at all. Where compilers have no kernel for grouped products, there
    is `ungrouped` times the arithmetic.
    """

    phase: Phase
    split_by: SplitBy
    flops: float = 0.0
    dtype: str = ""
    arrays: tuple[tuple[float, SplitBy], ...] = ()
    kernels: float = 0.0
    deferrable: bool = False
    scores: Scores | None = None
    is_kernel: bool = False
    cast: bool | None = None
    ungrouped: float = 1.0

    def times(self, repeats: int) -> int:
        """How often it runs in a step of `repeats` micro-batches that keeps casts of parameters."""
        if self.phase is Phase.UPDATE:
            return 1
        return repeats if self.cast is None or repeats == 1 else int(self.cast)


def count_work(index: NodeIndex, storage: Storage) -> tuple[tuple[Work, ...], ...]:
    """The work of all nodes, in their order, with what a target's compiler stores."""
    casts = classes_of_casts(index.cuts)
    return tuple(
        (
            _product_work(index, which)
            if kind == "product"
            else _group_work(index, NodeId(node), SlotId(which), storage, casts)
        )
        for node, (kind, which) in enumerate(index.kinds)
    )


def _product_work(index: NodeIndex, op_class: int) -> tuple[Work, ...]:
    """Arithmetic of a product and the arrays it reads and writes."""
    cuts = index.cuts
    op, rule = cuts.first[op_class], cuts.rules[op_class]
    times = len(cuts.folding.members[op_class]) * op.trips
    arrays: list[tuple[float, SplitBy]] = []
    dtype = ""
    for position, operand in enumerate(op.inputs):
        if isinstance(operand, Literal):
            continue
        value = cuts.graph.values[operand]
        # A kernel may take tables of integers before its numbers.
        if not dtype or ("float" not in dtype and "float" in value.dtype):
            dtype = value.dtype
        port = index.product_port(op_class, rule.operands[position])
        # A gather or scatter touches as much of its operand as it moves, not the whole table.
        touched = (
            value.num_bytes
            if rule.flops_per_point
            else min(value.num_bytes, _moved_bytes(index, op_class))
        )
        arrays.append((float(touched) * times, divided_by(port.projection)))
    for position, out in enumerate(op.outputs):
        if out >= 0:
            port = index.product_port(op_class, rule.results[position])
            arrays.append(
                (float(_touched_result(index, op_class, out)) * times, divided_by(port.projection))
            )
    known = sum(num_bytes for num_bytes, _ in arrays)
    if rule.accessed_bytes * times > known > 0:
        again = rule.accessed_bytes * times / known
        # The rule of a kernel that reads its operands several times states more bytes than they
        # have.
        arrays = [(num_bytes * again, split_by) for num_bytes, split_by in arrays]
    arrays += [
        (
            inside.num_bytes * inside.passes * times,
            tuple(factor in inside.divided_by for factor in rule.factors),
        )
        for inside in rule.inside
    ]
    return (
        Work(
            phase=op.phase,
            split_by=(True,) * len(rule.factors),
            flops=rule.flops * times,
            dtype=dtype,
            arrays=tuple(arrays),
            kernels=float(times),
            deferrable=op.deferrable,
            scores=rule.scores,
            is_kernel=op.name == "pallas_call",
            ungrouped=_ungrouped(index, op),
        ),
    )


def _ungrouped(index: NodeIndex, op: Op) -> float:
    """How much more arithmetic an operator of grouped products has as other products: experts
    multiply all places that they have, and `ragged_dot` each row by the matrices of all groups.
    """
    if op.name == "ragged_dot_general":
        sizes = op.inputs[2]
        return float(index.cuts.graph.values[sizes].shape[-1]) if isinstance(sizes, int) else 1.0
    return ROOM if op.name in EXPERTS else 1.0


def _moved_bytes(index: NodeIndex, op_class: int) -> int:
    """Bytes that a gather writes, or that a scatter adds in."""
    op, values = index.cuts.first[op_class], index.cuts.graph.values
    if op.name.startswith("scatter"):
        updates = op.inputs[-1]
        return values[updates].num_bytes if isinstance(updates, int) else 0
    return sum(values[o].num_bytes for o in op.outputs if o >= 0)


def _touched_result(index: NodeIndex, op_class: int, out: int) -> int:
    num_bytes = index.cuts.graph.values[out].num_bytes
    op = index.cuts.first[op_class]
    return (
        # The scatter reads and writes the rows that it adds to.
        min(num_bytes, 2 * _moved_bytes(index, op_class))
        if op.name.startswith("scatter")
        else num_bytes
    )


def _group_work(
    index: NodeIndex,
    node: NodeId,
    group: SlotId,
    storage: Storage,
    casts: Mapping[int, bool],
) -> tuple[Work, ...]:
    """Memory traffic of a group, by phase: each stored array is written once, or as often as its
    compiler does, and read once in each phase that reads it. Casts of parameters stand apart.

    An operator that runs whole reads and writes whole arrays on every device, even if these are
    split before and after it.
    """
    cuts = index.cuts
    # By phase, whether it is deferrable, and what `casts` says of it (None for all other work).
    arrays: dict[tuple[Phase, bool, bool | None], list[tuple[float, SplitBy]]] = defaultdict(list)
    kernels: dict[tuple[Phase, bool, bool | None], float] = defaultdict(float)
    for slot in index.group_slots[group]:
        value_class = index.slot_value[slot]
        producer = cuts.producer[value_class]
        # Arrays in host memory are copied, which copy engines do (`_host_copies.py`).
        if not storage.writes[value_class] or is_on_host(cuts, value_class):
            continue
        members = cuts.folding.value_members[value_class]
        trips = cuts.first[producer[0]].trips if producer is not None else 1
        each_bytes = cuts.graph.values[members[0]].num_bytes * len(members)
        times_made = cuts.times_made(value_class)
        num_bytes = each_bytes * times_made
        split_by = divided_by(index.slot_port(slot).projection)
        if producer is not None and slot == cuts.home(value_class):
            maker = cuts.first[producer[0]]
            made = (maker.phase, maker.deferrable, casts.get(producer[0]))
            if not index.runs_whole(producer[0]):
                arrays[made].append((num_bytes * storage.writes[value_class], split_by))
            kernels[made] += len(members) * trips
        # A copied row is read by products, and where it lies by other code.
        reads = index.reads_by_phase(slot) if storage.stored[value_class] else {}
        for phase, deferrable in reads.items():
            # The update of an array is one kernel, which need not read again what it has written.
            if not (
                producer is not None and phase is cuts.first[producer[0]].phase is Phase.UPDATE
            ):
                cast = _read_by(index, slot, phase, casts)
                times = max(times_made, _times_sliced(index, slot, phase))
                arrays[phase, deferrable, cast].append((each_bytes * times, split_by))
        if members[0] in index.batch_values:
            # Every device receives its part of the batch, which is smaller if the batch is split.
            arrays[Phase.FORWARD, False, None].append((num_bytes, split_by))
    traffic = [
        Work(
            phase=phase,
            split_by=(),
            arrays=tuple(entries),
            kernels=kernels[phase, deferrable, cast],
            deferrable=deferrable,
            cast=cast,
        )
        for (phase, deferrable, cast), entries in sorted(
            arrays.items(), key=lambda entry: (*entry[0][:2], str(entry[0][2]))
        )
    ]
    whole = (False,) * len(index.group_classes[node])
    for op_class in index.group_ops.get(node, ()):
        if index.runs_whole(op_class):
            moved = (
                whole_bytes(index, op_class)
                * len(cuts.folding.members[op_class])
                * cuts.first[op_class].trips
            )
            op = cuts.first[op_class]
            traffic.append(
                Work(
                    phase=op.phase, split_by=(), arrays=((moved, whole),), deferrable=op.deferrable
                )
            )
    return tuple(traffic)


def _times_sliced(index: NodeIndex, slot: SlotId, phase: Phase) -> float:
    """How often loops read all rows of an array in a phase: more than once for a loop inside of
    another, such as one over layers in one over micro-batches.
    """
    values = index.cuts.graph.values
    return max(
        (
            op.trips / max(values[op.inputs[0]].shape[0], 1)
            for op in index.readers_as_split[slot]
            if op.phase is phase and op.name == "scan_slice" and isinstance(op.inputs[0], int)
        ),
        default=0.0,
    )


def _read_by(
    index: NodeIndex, slot: SlotId, phase: Phase, casts: Mapping[int, bool]
) -> bool | None:
    """Of a slot that only casts of parameters read in a phase whether one of them is the first to
    have its result; None if anything else reads it.
    """
    classes = index.cuts.folding.op_class
    readers = [op for op in index.readers_as_split[slot] if op.phase is phase]
    found = [casts.get(int(classes[op.index])) for op in readers]
    return None if None in found else any(found)
