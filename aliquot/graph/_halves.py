"""Splitting of loops over layers and remat regions of a backward pass in two halves: the first
makes what other stages wait for, the second what only the update needs.

The first half hands operands and cotangents of the deferred products to the second, which
recomputes what is cheap to make from them. A loop stacks the values that it hands on, one row for
each turn. Regions stay regions: inlined, they would lose the barriers that keep the compiler from
merging the recomputation with the original.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
from msgspec import structs

from . import _jax_compat as compat
from ._dataflow import made_by, ops_inside, plain_item, read_by, reads_of
from ._first_half import FirstHalf
from ._recompute import items_between, values_to_keep
from ._types import Block, Call, Graph, Operand, OpId, Phase, Value, ValueId, value_ids
from ._wires import Carry, Wire, wires_of

_WireT = TypeVar("_WireT", Carry, tuple[Operand, ValueId])


class Halves(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A call in two halves.

    Attributes:
        first: makes the results that are needed now, and the values that it hands on.
        second: makes the other results.
        handed: values that the first half hands to the second.
        values: those of the graph, and new ones for stacks that are handed on.
    """

    first: Call
    second: Call
    handed: tuple[ValueId, ...]
    values: tuple[Value, ...]


def halve(graph: Graph, call: Call, half: FirstHalf, free: Collection[ValueId]) -> Halves:
    """Cut a call in two halves.

    Args:
        graph: the graph that the call is part of; some of its values may be new.
        half: the operators of the first half.
        free: values that the second half can read although the first does not hand them on, such as
            parameters.
    """
    builder = _Builder(graph, half)
    first, second, handed = builder.call(call, frozenset(free))
    return Halves(first=first, second=second, handed=handed, values=tuple(builder.values))


class _Builder:
    """Builds both halves of a call, with new values for the stacks that the first hands on."""

    def __init__(self, graph: Graph, half: FirstHalf) -> None:
        self._graph, self._half = graph, half
        self.values = list(graph.values)

    def call(self, call: Call, free: frozenset[ValueId]) -> tuple[Call, Call, tuple[ValueId, ...]]:
        """Both halves, and the values that the first hands to the second."""
        return self._region(call, free) if call.kind == "remat" else self._loop(call, free)

    def _region(
        self, call: Call, free: frozenset[ValueId]
    ) -> tuple[Call, Call, tuple[ValueId, ...]]:
        (block,) = call.blocks
        named = [wire for wire in wires_of(call).results if wire[1] >= 0]
        results, late = _parted(named, self._half.values)
        first, second, handed = self._items(block.items, [b for b, _ in late], free, frozenset())
        given = {o for _, o in results}
        # A region shares the indices of the values around it, so values keep theirs when it hands
        # them on.
        results += [(v, v) for v in handed if v not in given]
        return self._as_region(call, first, results), self._as_region(call, second, late), handed

    def _as_region(
        self, call: Call, items: Sequence[OpId | Call], results: Sequence[tuple[Operand, ValueId]]
    ) -> Call:
        block = Block(inputs=(), items=tuple(items), outputs=tuple(b for b, _ in results))
        bare = replace(call, blocks=(block,), inputs=(), outputs=tuple(o for _, o in results))
        reads = reads_of(self._graph, bare)
        return replace(bare, blocks=(replace(block, inputs=reads),), inputs=reads)

    def _loop(self, call: Call, free: frozenset[ValueId]) -> tuple[Call, Call, tuple[ValueId, ...]]:
        """Both halves of a loop. Each carry, and each stacked result, belongs to one of them."""
        (block,) = call.blocks
        wires, needed = wires_of(call), self._half.values
        free = free | {i for whole, i in wires.slices if isinstance(i, int) and whole in free}
        # Values from outside the loop need not be stacked.
        sliced = [whole for whole, _ in wires.slices]
        free |= {i for i in reads_of(self._graph, call) if i not in sliced}
        now, late = _parted(wires.carries, needed)
        stacks, late_stacks = _parted(wires.results, needed)
        # Carries that only the second half's loop has are not handed on.
        first, second, handed = self._items(
            block.items,
            [*(row for row, _ in late_stacks), *(c.end for c in late)],
            free.union(value_ids([c.inner for c in late])),
            frozenset(value_ids([c.inner for c in now])),
        )
        slices, handed_stacks = [*wires.slices], []
        for v in handed:
            stack = self._stacked(v, call.eqn.params["length"])
            handed_stacks.append(stack)
            stacks.append((v, stack))
            slices.append((stack, v))
        return (
            self._as_loop(call, first, now, wires.slices, stacks),
            self._as_loop(call, second, late, slices, late_stacks),
            tuple(handed_stacks),
        )

    def _as_loop(
        self,
        call: Call,
        items: Sequence[OpId | Call],
        carries: Sequence[Carry],
        slices: Sequence[Wire],
        stacks: Sequence[tuple[Operand, ValueId]],
    ) -> Call:
        """One half of a loop: a scan with the given items, carries, slices and stacked results."""
        starts: list[Operand] = []
        inner: list[Operand] = []
        ends: list[Operand] = []
        results: list[ValueId] = []
        for c in carries:
            starts.append(c.start)
            inner.append(c.inner)
            ends.append(c.end)
            results.append(c.result)
        for row, stack in stacks:
            ends.append(row)
            results.append(stack)
        read = set(value_ids(ends))
        for item in items:
            read.update(reads_of(self._graph, item))
        for whole, row in slices:
            # Others are left out, so that they need not be kept for this half.
            if row in read:
                starts.append(whole)
                inner.append(row)
        block = Block(inputs=tuple(inner), items=tuple(items), outputs=tuple(ends))
        return Call(
            kind="scan",
            eqn=compat.loop_like(call.eqn, len(carries)),
            blocks=(block,),
            inputs=tuple(starts),
            outputs=tuple(results),
        )

    def _stacked(self, value: ValueId, length: int) -> ValueId:
        row = self.values[value]
        new = structs.replace(row, index=ValueId(len(self.values)), shape=(length, *row.shape))
        self.values.append(new)
        return new.index

    def _items(
        self,
        items: Sequence[OpId | Call],
        late_ends: Sequence[Operand],
        free: frozenset[ValueId],
        turning: frozenset[ValueId],
    ) -> tuple[list[OpId | Call], list[OpId | Call], tuple[ValueId, ...]]:
        """Items of a body for both halves, and the values that the first hands to the second.

        Args:
            late_ends: results of the second half.
            free: see `halve`.
            turning: values that the first half's loop carries.
        """
        first: list[OpId | Call] = []
        second: list[OpId | Call] = []
        for item in items:
            inside = set(ops_inside(item))
            if inside <= self._half.ops and (inside or self._is_needed(item)):
                first.append(item)
            elif inside.isdisjoint(self._half.ops):
                second.append(item)
            else:
                assert isinstance(item, Call)
                now, later, _ = self.call(item, free)
                first.append(now)
                second.append(later)
        now_items = [plain_item(self._graph, item, Phase.BACKWARD) for item in first]
        names = [self._graph.ops[item.ops[0]].name if item.ops else "" for item in now_items]
        late_items = [plain_item(self._graph, item, Phase.BACKWARD) for item in second]
        made_late = made_by(late_items)
        read = read_by(late_items) | dict.fromkeys(value_ids(late_ends))
        made = made_by(now_items) | turning
        wanted = [i for i in read if i in made]
        kept = values_to_keep(
            now_items,
            names,
            wanted,
            self.values,
            free=free,
            read_anyway={i for i in read if i not in made and i not in made_late},
        )
        # Cheap items of the first half run again in the second, on the values that were kept.
        again = items_between(now_items, wanted, kept)
        handed = tuple(sorted(kept & made))
        return first, [*(item.op_or_call for item in again), *second], handed

    def _is_needed(self, item: OpId | Call) -> bool:
        return isinstance(item, Call) and not self._half.values.isdisjoint(item.outputs)


def _parted(wires: Iterable[_WireT], needed: Collection[ValueId]) -> tuple[list[_WireT], ...]:
    """The wires that end in needed values, and the others."""
    now: list[_WireT] = []
    late: list[_WireT] = []
    for wire in wires:
        (now if wire[-1] in needed else late).append(wire)
    return now, late
