"""Copies between device and host memory: when each of them can run, and what it keeps in device
memory meanwhile.

A copy engine moves arrays beside compute. As compilers place these copies:

* Inside a loop, a copy to the host ends with the turn that makes the array, and a copy to the
  device begins with the turn that reads it: turns wait for their own copies. In a remat region, it
  begins with the region, behind whose barrier it stands.
* Elsewhere a copy to the host lasts until the end of the phase. A copy to the device begins with
  the step, if the compiler makes one (`Target.reads_host_memory`); otherwise the kernel that needs
  the array reads it from host memory, and waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...cluster import Target
from ...graph import NO_VALUE, Memory, Op, Phase, ValueId, traits_of
from ...sharding import Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpan:
    """The operators beside which an array is copied.

    Attributes:
        op: the operator that copies.
        source, result: the array before and after.
        to_host: the direction.
        begin, end: the first operator beside which it can run, and the one before which it must
            have ended.
        stretch: the first operator of the loop body, region or phase that waits for its copies.
    """

    op: Op
    source: ValueId
    result: ValueId
    to_host: bool
    begin: int
    end: int
    stretch: int


def is_on_host(cuts: Cuts, value_class: int) -> bool:
    """True if the arrays of a class lie in host memory."""
    return cuts.graph.values[cuts.folding.value_members[value_class][0]].memory is Memory.HOST


def copy_spans(cuts: Cuts, target: Target) -> Iterator[CopySpan]:
    """The span of each copy of a step, in program order."""
    graph = cuts.graph
    if all(value.memory is Memory.DEVICE for value in graph.values):
        return
    begins, ends = _stretches(graph.ops)
    first_read = [len(graph.ops)] * len(graph.values)
    for op in reversed(graph.ops):
        for source in op.inputs:
            if isinstance(source, int):
                first_read[source] = op.index
    for op in graph.ops:
        if not traits_of(op.name).changes_memory:
            continue
        (source,), (result,) = op.inputs, op.outputs
        if not isinstance(source, int) or result == NO_VALUE:
            continue
        apart = op.trips > 1 or op.region > 0
        begin, end = begins[op.index], ends[op.index]
        to_host = graph.values[result].memory is Memory.HOST
        if to_host:
            yield CopySpan(
                op=op,
                source=source,
                result=result,
                to_host=True,
                begin=op.index,
                end=end,
                stretch=begin,
            )
            continue
        used = max(first_read[result], op.index)
        if not apart:
            begin = used if target.reads_host_memory else 0
        yield CopySpan(
            op=op,
            source=source,
            result=result,
            to_host=False,
            begin=begin,
            end=used,
            stretch=begin if apart else 0,
        )


def written_in_place(
    cuts: Cuts, spans: Sequence[CopySpan], stored: Sequence[bool]
) -> dict[int, int]:
    """For value classes that the update copies to the host, the class of an array of the same size
    into whose buffer they are written: one that only the same kernel reads, such as a gradient or
    a moment that was copied from the host.
    """
    readers: dict[int, set[Phase]] = {}
    for op_class, op in enumerate(cuts.first):
        for _, value_class, _ in cuts.operands(op_class):
            readers.setdefault(value_class, set()).add(op.phase)
    kept = {int(cuts.folding.value_class[i.value]) for i in cuts.graph.inputs}
    places: dict[int, int] = {}
    for span in spans:
        value_class = int(cuts.folding.value_class[span.source])
        if not span.to_host or span.op.phase is not Phase.UPDATE or value_class in places:
            continue
        wanted = cuts.graph.values[span.source].num_bytes
        waiting, seen = [value_class], {value_class}
        while waiting:
            producer = cuts.producer[waiting.pop()]
            if producer is None:
                continue
            for _, operand, _ in cuts.operands(producer[0]):
                if operand in seen or operand in kept:
                    continue
                seen.add(operand)
                value = cuts.graph.values[cuts.folding.value_members[operand][0]]
                free = readers[operand] == {Phase.UPDATE} and operand not in places.values()
                if not stored[operand]:
                    waiting.append(operand)
                elif free and value.num_bytes == wanted and value.memory is Memory.DEVICE:
                    places[value_class] = operand
                    waiting.clear()
                    break
    return places


def _stretches(ops: tuple[Op, ...]) -> tuple[list[int], list[int]]:
    """For each operator, the begin and the end of the stretch that waits for its copies: the loop
    body or remat region that it stands in, otherwise its phase.
    """

    def key(op: Op) -> tuple[Phase, bool, int]:
        return op.phase, op.trips > 1, op.region if op.phase is Phase.BACKWARD else 0

    begins, ends = list(range(len(ops))), [k + 1 for k in range(len(ops))]
    for k in range(1, len(ops)):
        if key(ops[k]) == key(ops[k - 1]):
            begins[k] = begins[k - 1]
    for k in range(len(ops) - 2, -1, -1):
        if key(ops[k]) == key(ops[k + 1]):
            ends[k] = ends[k + 1]
    return begins, ends
