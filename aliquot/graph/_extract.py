"""Extracts: some layers of a step as a separate step, with forward, backward and update; values
that cross its border become inputs and outputs.

Planners split the operators of a stage as they split those of a whole step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

import msgspec
from msgspec import structs

from ._dataflow import FROM_ANOTHER_STAGE, Item, items_of, links_around, made_by, read_by
from ._deferrable import Deferrable, deferrable_items
from ._stages import SHARED, Staging
from ._types import (
    Block,
    Call,
    Graph,
    Input,
    Literal,
    Op,
    Operand,
    OpId,
    Output,
    Phase,
    Role,
    StageId,
    ValueId,
)


class Extract(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A part of a graph.

    Attributes:
        graph: the part, its operators and values numbered anew.
        ops: for each of its operators the index in the whole graph.
        values: for each of its values the index in the whole graph.
    """

    graph: Graph
    ops: tuple[OpId, ...]
    values: tuple[ValueId, ...]


class StageExtracts(Sequence[Extract]):
    """Extracts of the stages of a step, each made when it is asked for: searches look at many
    stages and drop most after the first.

    Args:
        graph: the step, at any size of its batch.
        staging: its stages.
        batch_dims: for each value that is cut with the batch, the dim along which it is. A value
            that enters a stage with the batch in its first dim gets the role of the batch, so that
            it is split like one.
    """

    def __init__(self, graph: Graph, staging: Staging, batch_dims: Mapping[ValueId, int]) -> None:
        self._graph, self._staging, self._batch_dims = graph, staging, batch_dims
        self._made: dict[int, Extract] = {}

    def __len__(self) -> int:
        return self._staging.num_stages

    @overload
    def __getitem__(self, stage: int) -> Extract: ...
    @overload
    def __getitem__(self, stage: slice) -> tuple[Extract, ...]: ...
    def __getitem__(self, stage: int | slice) -> Extract | tuple[Extract, ...]:
        if isinstance(stage, slice):
            return tuple(self[k] for k in range(*stage.indices(len(self))))
        if not 0 <= stage < len(self):
            raise IndexError(f"there is no stage {stage} of {len(self)}")
        if stage not in self._made:
            self._made[stage] = self._make(StageId(stage))
        return self._made[stage]

    @functools.cached_property
    def _items_of(self) -> list[list[int]]:
        """By stage, the positions of its items."""
        items_of: list[list[int]] = [[] for _ in range(len(self))]
        for k, stage in enumerate(self._staging.stage):
            if stage != SHARED:
                items_of[stage].append(k)
        return items_of

    @functools.cached_property
    def _readers(self) -> dict[ValueId, set[StageId]]:
        """For each value the stages that read it."""
        readers: dict[ValueId, set[StageId]] = {}
        for item, stage in zip(self._staging.items, self._staging.stage, strict=True):
            if stage != SHARED:
                for i in item.inputs:
                    readers.setdefault(i, set()).add(stage)
        return readers

    @functools.cached_property
    def _maker(self) -> dict[ValueId, int]:
        """For each shared value the position of the item that makes it."""
        found: dict[ValueId, int] = {}
        for k, (item, stage) in enumerate(
            zip(self._staging.items, self._staging.stage, strict=True)
        ):
            if stage == SHARED:
                for o in item.outputs:
                    if item.phase is not Phase.UPDATE or self._graph.values[o].shape:
                        found[o] = k
        return found

    @functools.cached_property
    def _deferrable(self) -> Deferrable:
        return deferrable_items(self._graph, self._staging.items, self._staging.stage)

    @functools.cached_property
    def _named(self) -> dict[ValueId, Input]:
        return {item.value: item for item in self._graph.inputs}

    def _make(self, stage: StageId) -> Extract:
        graph, items = self._graph, self._staging.items
        mine, deferrable = self._items_of[stage], self._deferrable
        # With the shared items that they need, except scalars of the update, which `_maker` leaves
        # out because their arithmetic is long and cheap.
        wanted, waiting = set(mine), list(mine)
        while waiting:
            for i in items[waiting.pop()].inputs:
                k = self._maker.get(i)
                if k is not None and k not in wanted:
                    wanted.add(k)
                    waiting.append(k)
        chosen = [items[k] for k in sorted(wanted)]
        made_here = made_by(chosen)
        inputs = []
        for v in read_by(chosen):
            if v not in made_here and v not in graph.constants:
                # Values that enter with the batch in their first dim are this stage's batch.
                role = Role.BATCH if self._batch_dims.get(v) == 0 else Role.OTHER
                inputs.append(
                    self._named.get(v) or Input(path=f"{FROM_ANOTHER_STAGE}{v}", value=v, role=role)
                )
        outputs = [o for o in graph.outputs if isinstance(o.value, int) and o.value in made_here]
        results = {o.value for o in outputs}
        made_by_stage = made_by(items[k] for k in mine)
        # Shared results do not cross, because each stage computes them for itself.
        crossing = {v for v in made_by_stage - results if self._readers.get(v, set()) - {stage}}
        outputs += [Output(path=f"value {v}", value=v) for v in sorted(crossing)]
        builder = _Builder(graph)
        late = set()
        for k in mine:
            if k in deferrable.items or k in deferrable.halves:
                for op in builder.ops_of([items[k]]):
                    if deferrable.defers(k, graph.ops[op]):
                        late.add(op)
        return builder.build(chosen, inputs, outputs, late)


def extract_items(graph: Graph, items: Sequence[Item]) -> Extract:
    """Some items of a step as a separate graph, such as a group of products with the operators
    between them.

    Values that the items read are inputs; values that others read are outputs.

    Args:
        items: of `items_of(graph)`.
    """
    made_here = made_by(items)
    named = {item.value: item for item in graph.inputs}
    inputs = []
    for v in read_by(items):
        if v not in made_here and v not in graph.constants:
            inputs.append(
                named.get(v) or Input(path=f"{FROM_ANOTHER_STAGE}{v}", value=v, role=Role.OTHER)
            )
    places = {item.op_or_call for item in items if not isinstance(item.op_or_call, Call)}
    calls = {id(item.op_or_call) for item in items if isinstance(item.op_or_call, Call)}
    leaving = graph.returned
    for item in items_of(graph):
        if (
            item.op_or_call not in places
            if not isinstance(item.op_or_call, Call)
            else id(item.op_or_call) not in calls
        ):
            leaving.update(item.inputs)
    outputs = [Output(path=f"value {v}", value=v) for v in sorted(made_here & leaving)]
    # An input's successor is an output of the whole step, which this part does not have.
    lone = [replace(i, output=None) for i in inputs]
    return _Builder(graph).build(items, lone, outputs, set())


def with_items(graph: Graph, items: Sequence[Item]) -> Extract:
    """A whole step with these items alone, numbered anew."""
    return _Builder(graph).build(items, graph.inputs, graph.outputs, set())


def same_structure(a: Extract, b: Extract) -> bool:
    """True if two parts have the same operators on arrays of the same shapes, one by one."""
    if a is b:
        return True
    x, y = a.graph, b.graph
    if (len(x.ops), len(x.inputs), len(x.outputs)) != (len(y.ops), len(y.inputs), len(y.outputs)):
        return False
    for i, j in zip(x.inputs, y.inputs):
        if (i.value, i.role) != (j.value, j.role):
            return False
    for v, w in zip(x.values, y.values):
        if (v.shape, v.dtype) != (w.shape, w.dtype):
            return False
    for p, q in zip(x.ops, y.ops):
        if (p.name, p.outputs, p.phase, p.deferrable) != (q.name, q.outputs, q.phase, q.deferrable):
            return False
        if _indices(p) != _indices(q):
            return False
    return len(x.values) == len(y.values)


def _indices(op: Op) -> list[int | None]:
    return [i if isinstance(i, int) else None for i in op.inputs]


class _Builder:
    """Builds an extract from items: numbers its operators and values anew."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._deferrable: set[OpId] = set()
        self._op_number: dict[OpId, OpId] = {}
        self._value_number: dict[ValueId, ValueId] = {}
        self._values: list[ValueId] = []

    def build(
        self,
        items: Sequence[Item],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        deferrable: set[OpId],
    ) -> Extract:
        graph = self._graph
        self._deferrable = deferrable
        ops = sorted(self.ops_of(items))
        self._op_number = {k: OpId(n) for n, k in enumerate(ops)}
        place = {id(o): n for n, o in enumerate(graph.outputs)}
        positions = {place[id(o)]: n for n, o in enumerate(outputs) if id(o) in place}
        new_inputs = []
        for i in inputs:
            output = positions.get(i.output) if i.output is not None else None
            new_inputs.append(replace(i, value=self._value(i.value), output=output))
        new_ops = tuple([self._op(graph.ops[k]) for k in ops])
        new_items = tuple([self._renumbered(item.op_or_call) for item in items])
        new_outputs = tuple([replace(o, value=self._operand(o.value)) for o in outputs])
        block = Block(
            inputs=tuple([i.value for i in new_inputs]),
            items=new_items,
            outputs=tuple([o.value for o in new_outputs]),
        )
        constants = {}
        for v, c in graph.constants.items():
            if v in self._value_number:
                constants[self._value_number[v]] = c
        values = []
        for n, v in enumerate(self._values):
            values.append(structs.replace(graph.values[v], index=ValueId(n)))
        part = replace(
            graph,
            values=tuple(values),
            ops=new_ops,
            body=block,
            inputs=tuple(new_inputs),
            constants=constants,
            outputs=new_outputs,
        )
        return Extract(graph=part, ops=tuple(ops), values=tuple(self._values))

    def ops_of(self, items: Sequence[Item]) -> set[OpId]:
        """Indices of all operators inside items, links included."""
        kept = set(itertools.chain.from_iterable(item.ops for item in items))
        for item in items:
            if isinstance(item.op_or_call, Call):
                kept |= links_around(self._graph, item.op_or_call)
        return kept

    def _value(self, index: ValueId) -> ValueId:
        if index < 0:
            return index
        number = self._value_number.get(index)
        if number is None:
            number = self._value_number[index] = ValueId(len(self._values))
            self._values.append(index)
        return number

    def _operand(self, operand: Operand) -> Operand:
        return operand if isinstance(operand, Literal) else self._value(operand)

    def _op(self, op: Op) -> Op:
        known = self._value_number
        # This runs thousands of times: `replace` would take twice as long, and so would calls for
        # values that already have a number.
        return Op(
            index=self._op_number[op.index],
            name=op.name,
            inputs=tuple(
                [
                    known[i] if type(i) is not Literal and i in known else self._operand(i)
                    for i in op.inputs
                ]
            ),
            outputs=tuple([known[o] if o in known else self._value(o) for o in op.outputs]),
            params=op.params,
            phase=op.phase,
            scope=op.scope,
            trips=op.trips,
            eqn=op.eqn,
            region=op.region,
            deferrable=op.index in self._deferrable,
        )

    def _renumbered(self, op_or_call: OpId | Call) -> OpId | Call:
        if not isinstance(op_or_call, Call):
            return self._op_number[op_or_call]
        inputs = tuple(map(self._operand, op_or_call.inputs))
        outputs = tuple(map(self._value, op_or_call.outputs))
        blocks = []
        for block in op_or_call.blocks:
            blocks.append(
                Block(
                    inputs=tuple(map(self._operand, block.inputs)),
                    items=tuple(map(self._renumbered, block.items)),
                    outputs=tuple(map(self._operand, block.outputs)),
                )
            )
        return replace(op_or_call, inputs=inputs, outputs=outputs, blocks=tuple(blocks))
