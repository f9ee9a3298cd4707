"""Programs of the stages that run once in a step, after the last micro-batch, in rounds.

A round ends where scalars of other stages are needed, such as the norm of all gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from ...graph import (
    SHARED,
    Call,
    Operand,
    StageId,
    Staging,
    ValueId,
    items_of,
    made_at,
    made_by,
    place_update,
    read_by,
)
from ._micro_batch_graphs import MicroBatchGraphs, subgraph
from ._stage_programs import Part, StageProgram


class Update:
    """Programs that run once a step, after the last micro-batch."""

    def __init__(
        self, parts: MicroBatchGraphs, staging: Staging, made_by: Mapping[ValueId, StageId]
    ) -> None:
        self._graph = graph = parts.late
        self._items = items = items_of(graph)
        self._maker = made_at(items)
        self._crossing = {v: made_by[v] for v in parts.crossing if v in made_by}
        self._given = {*parts.early.input_values, *graph.constants}
        self._early = set(parts.early_values)
        self._stage = [SHARED] * len(items)
        homes = dict(staging.home)
        self.home = place_update(
            graph, items, range(len(items)), self._stage, self._crossing, homes
        )
        # A loop or region without a stage runs on one; other shared items, such as scalars, run on
        # each stage that reads them.
        for k, item in enumerate(items):
            if isinstance(item.op_or_call, Call) and self._stage[k] == SHARED:
                self._stage[k] = StageId(0)
        self._rounds: dict[tuple[StageId, ValueId], int] = {}
        self._last = staging.num_stages
        self._round_of = self._late_as_can_be(list(map(self._item_round, range(len(items)))))
        self.stage_of_value: dict[ValueId, StageId] = {
            o: self._stage[k] for o, k in self._maker.items() if self._stage[k] != SHARED
        }
        self.outputs = list(map(self._where, graph.output_values))
        self.programs = self._build()

    def _round(self, stage: StageId, value: ValueId) -> int:
        """The first round of a stage's update in which it can have a value."""
        known = self._rounds.get((stage, value))
        if known is not None:
            return known
        if value in self._crossing:
            # Values of other stages arrive between rounds, so that only the next one can read them.
            first = 0 if self._crossing[value] == stage else 1
        elif value in self._maker:
            k = self._maker[value]
            if self._stage[k] == SHARED:
                first = max((self._round(stage, i) for i in self._items[k].inputs), default=0)
            else:
                first = self._item_round(k) + (self._stage[k] != stage)
        else:
            first = 0
        self._rounds[stage, value] = first
        return first

    def _item_round(self, k: int) -> int:
        """The first round in which an item's stage has all operands of the item; 0 for shared
        items.
        """
        stage = self._stage[k]
        if stage == SHARED:
            return 0
        return max((self._round(stage, i) for i in self._items[k].inputs), default=0)

    def _late_as_can_be(self, rounds: list[int]) -> list[int]:
        """Rounds of items. An item that only later rounds of its own stage read is deferred until
        the first of these.

        So the moments of an optimizer, which would decay in one round and take up clipped gradients
        in the next, are not copied in between, and can be donated.
        """
        readers: dict[ValueId, set[int]] = {}
        for k, item in enumerate(self._items):
            for i in item.inputs:
                readers.setdefault(i, set()).add(k)
        # In reverse, so that a chain of items is deferred as a whole.
        for k in range(len(self._items) - 1, -1, -1):
            readers_of_item = set[int]()
            for o in self._items[k].outputs:
                readers_of_item.update(readers.get(o, ()))
            if readers_of_item and all(
                self._stage[reader] == self._stage[k] != SHARED for reader in readers_of_item
            ):
                rounds[k] = max(rounds[k], min(rounds[reader] for reader in readers_of_item))
        return rounds

    def _where(self, operand: Operand) -> tuple[StageId, int] | None:
        """Stage and round that hold a result of the step."""
        if not isinstance(operand, int) or operand in self._given:
            return None
        if operand in self._crossing:
            return self._crossing[operand], 0
        if operand in self._maker and self._stage[self._maker[operand]] != SHARED:
            k = self._maker[operand]
            return self._stage[k], self._round_of[k]
        return min(
            ((s, self._round(s, operand)) for s in map(StageId, range(self._last))),
            key=lambda w: (w[1], w[0]),
        )

    def _build(self) -> list[StageProgram]:
        """The programs of all stages and rounds. Also finds the totals that they want."""
        items_in: dict[tuple[StageId, int], set[int]] = {}
        results: dict[tuple[StageId, int], set[ValueId]] = {}
        for k in range(len(self._items)):
            if self._stage[k] != SHARED:
                items_in.setdefault((self._stage[k], self._round_of[k]), set()).add(k)
        for output, where in zip(self._graph.outputs, self.outputs, strict=True):
            if where is not None and isinstance(output.value, int):
                results.setdefault(where, set()).add(output.value)
                items_in.setdefault(where, set())
                if output.value in self._maker:
                    items_in[where].add(self._maker[output.value])
        closed = {key: self._closure(key[0], chosen) for key, chosen in items_in.items()}
        reads = {key: self._reads(chosen) for key, chosen in closed.items()}
        # An early value that is only a result of the step has no readers: it is read here to be
        # returned.
        for key, values in results.items():
            reads[key] += [v for v in sorted(values & self._early) if v not in reads[key]]
        # Totals are combined in the first round, even if only later rounds or other stages read
        # them.
        totals_read = self._crossing.keys() & set(itertools.chain(*reads.values()))
        for v in totals_read:
            closed.setdefault((self._crossing[v], 0), set())
            reads.setdefault((self._crossing[v], 0), [])
        self.wanted_totals = totals_read | (
            self._crossing.keys() & set(itertools.chain(*results.values()))
        )
        combined_in = {v: (self._crossing[v], 0) for v in self.wanted_totals}
        programs = []
        for key in sorted(closed, key=lambda key: (key[1], key[0])):
            stage, number = key
            inside: set[ValueId] = set()
            for k in closed[key]:
                if self._stage[k] == stage:
                    inside.update(self._items[k].outputs)
            combines = tuple(sorted(v for v, where in combined_in.items() if where == key))
            elsewhere: set[ValueId] = set()
            for other, read in reads.items():
                if other != key:
                    elsewhere.update(read)
            exports = (inside | set(combines)) & elsewhere | results.get(key, set())
            items = sorted(closed[key])
            programs.append(
                StageProgram(
                    stage=stage,
                    part=Part.UPDATE,
                    round=number,
                    graph=subgraph(
                        self._graph,
                        [*reads[key], *(v for v in combines if v not in reads[key])],
                        [self._items[k].op_or_call for k in items],
                        sorted(exports),
                    ),
                    given=tuple(v for v in reads[key] if v in self._given),
                    early=tuple(v for v in reads[key] if v in self._early),
                    imports=tuple(
                        v
                        for v in reads[key]
                        if v not in self._given and v not in self._early and v not in combines
                    ),
                    exports=tuple(sorted(exports)),
                    combines=combines,
                )
            )
        self.stage_of_value |= {v: self._crossing[v] for v in self.wanted_totals}
        return programs

    def _closure(self, stage: StageId, chosen: Iterable[int]) -> set[int]:
        """Items together with the shared items that they need."""
        items = set(chosen)
        waiting = list(items)
        while waiting:
            for i in self._items[waiting.pop()].inputs:
                k = self._maker.get(i)
                if k is not None and k not in items and self._stage[k] == SHARED:
                    items.add(k)
                    waiting.append(k)
        return items

    def _reads(self, chosen: Iterable[int]) -> list[ValueId]:
        """Values that items read and none of them makes."""
        items = [self._items[k] for k in sorted(chosen)]
        inside = made_by(items) | self._graph.constants.keys()
        return [i for i in read_by(items) if i not in inside]
