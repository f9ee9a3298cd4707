"""Programs for the stages of a pipeline, made from a step on micro-batches, as plain data.

Every stage gets a forward and a backward program, run for each micro-batch, and one program for
each round of the update. A round ends where scalars of other stages are needed, such as the norm of
all gradients. A value that a program reads but neither makes nor gets as an input of the step is an
import. The runtime turns programs into functions and moves the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from msgspec import structs

from ...graph import (
    SHARED,
    Call,
    Graph,
    Item,
    OpId,
    Phase,
    Role,
    StageId,
    Staging,
    ValueId,
    deferrable_items,
    find_repeated,
    halve,
    items_of,
    made_by,
    plain_item,
    read_by,
    recomputed_runs,
)
from ..micro_batches import MicroBatchPlan
from ._crossing import require_one_stage
from ._micro_batch_graphs import MicroBatchGraphs, subgraph
from ._push_out import push_out
from ._split_update import Update
from ._stage_programs import Part, StageProgram, StagePrograms
from ._tie_runs import tie_runs

Recompute: TypeAlias = Mapping[StageId, frozenset[OpId] | None]
"""By stage the operators that its backward program may recompute; None for all."""


def split_stages(
    parts: MicroBatchGraphs,
    plan: MicroBatchPlan | None,
    staging: Staging,
    *,
    split_backward: bool = False,
    recompute: Recompute = MappingProxyType({}),
) -> StagePrograms:
    """Programs of all stages.

    Args:
        parts: the step cut over time.
        plan: how it was cut; None for a step that runs on its whole batch at once.
        staging: stages of the whole step's items.
        split_backward: make two programs of each backward pass (see `deferrable_items`), except of
            stages in `recompute`.
        recompute: by stage the costly operators that its backward program recomputes; None:
            everything, from what enters the stage.
    """
    parts = push_out(parts, plan, staging)
    require_one_stage(parts.late, staging, parts.handed_on)
    body = _Body(parts, staging, split_backward, plan, recompute)
    update = Update(parts, staging, body.stage_of_value)
    early = _early_programs(parts, [*body.programs.values(), *update.programs])
    wanted = update.wanted_totals
    # Which totals the update wants is known only after it was cut into rounds.
    programs = [*early, *body.finished(wanted, plan), *update.programs]
    return StagePrograms(
        programs=tuple(programs),
        made_by=body.stage_of_value | update.stage_of_value,
        outputs=tuple(update.outputs),
        home=update.home,
    )


@dataclass(slots=True)
class _Draft:
    """A program while its items are gathered.

    Attributes:
        assigned: the items that belong to its stage and part.
        items: `assigned`, and the shared or recomputed items that these need.
        again: the recomputed items.
        reads: values that it takes from other programs or from the step's inputs.
    """

    stage: StageId
    part: Part
    assigned: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    again: list[Item] = field(default_factory=list)
    reads: list[ValueId] = field(default_factory=list)


class _Body:
    """Programs that run for each micro-batch."""

    def __init__(
        self,
        parts: MicroBatchGraphs,
        staging: Staging,
        split: bool,
        plan: MicroBatchPlan | None,
        recompute: Recompute,
    ) -> None:
        self._graphs, self._staging, self._split = parts, staging, split
        self._items = list(items_of(parts.body))
        self._num_values = len(plan.whole.values) if plan else len(parts.body.values)
        self._stage = self._stages()
        self._recompute = recompute
        self._deferrable: set[int] = set()
        if split:
            self._defer()
        self._order = {id(item): k for k, item in enumerate(self._items)}
        self._maker: dict[ValueId, Item] = {}
        for item in self._items:
            self._maker.update(dict.fromkeys(item.outputs, item))
        self._given = {*parts.early.input_values, *parts.late.constants}
        self._handed = {value for value, _ in parts.handed_on}
        self._given -= self._handed
        self._early = set(parts.inside)
        drafts = self._drafts()
        self.stage_of_value: dict[ValueId, StageId] = {}
        for item in self._items:
            stage = self._stage[id(item)]
            if stage != SHARED:
                self.stage_of_value.update(dict.fromkeys(item.outputs, stage))
        self._add_shared_crossing(drafts)
        for draft in drafts.values():
            self._close(draft)
        self._keep_less(drafts)
        self._drafts_by = drafts
        self.programs = {key: self._program(draft, drafts, ()) for key, draft in drafts.items()}

    def _stages(self) -> dict[int, StageId]:
        """The stage of each item, by id. Items of the whole step keep theirs; operators that were
        inserted get that of their operands, and conversions are shared.
        """
        by_op: dict[tuple[str, int], StageId] = {}
        for item, stage in zip(self._staging.items, self._staging.stage, strict=True):
            by_op |= dict.fromkeys(_keys(item), stage)
        stages: dict[int, StageId] = {}
        made_by: dict[ValueId, StageId] = {}
        for item in self._items:
            known = [by_op[key] for key in _keys(item) if key in by_op]
            stage = (
                known[0]
                if known
                else max((made_by.get(i, SHARED) for i in item.inputs), default=SHARED)
            )
            # A conversion of an operand runs in each program that reads it.
            if not known and all(o >= self._num_values for o in item.outputs):
                stage = SHARED
            stages[id(item)] = stage
            made_by |= dict.fromkeys(item.outputs, stage)
        return stages

    def _defer(self) -> None:
        """Find deferrable items, and cut loops and regions of which only a part is deferrable in
        two.
        """
        # All other items of the body run in forward programs.
        phased = [
            i if i.phase is Phase.BACKWARD else structs.replace(i, phase=Phase.FORWARD)
            for i in self._items
        ]
        stages = [self._stage[id(item)] for item in self._items]
        deferrable = deferrable_items(self._graphs.body, phased, stages)
        free = set(self._graphs.body.input_values)
        for item, stage in zip(self._items, stages, strict=True):
            if stage == SHARED:
                free.update(item.outputs)
        items: list[Item] = []
        for k, item in enumerate(self._items):
            half = deferrable.halves.get(k)
            # A stage that recomputes would have to recompute twice, once for each half.
            if half is None or stages[k] in self._recompute:
                items.append(item)
                if k in deferrable.items and stages[k] not in self._recompute:
                    self._deferrable.add(id(item))
                continue
            assert isinstance(item.op_or_call, Call)
            body = self._graphs.body
            halves = halve(body, item.op_or_call, half, free)
            body = replace(body, values=halves.values)
            self._graphs = replace(self._graphs, body=body)
            pair = [plain_item(body, call, item.phase) for call in (halves.first, halves.second)]
            # Stages are kept by identity, since both halves stand for the same operators.
            self._stage |= {id(one): stages[k] for one in pair}
            self._deferrable.add(id(pair[1]))
            items += pair
        self._items = items

    def _drafts(self) -> dict[tuple[StageId, Part], _Draft]:
        """A draft for each stage and part, with the items assigned to it."""
        drafts: dict[tuple[StageId, Part], _Draft] = {}
        for stage in map(StageId, range(self._staging.num_stages)):
            for part in self._parts_of_a_task():
                drafts[stage, part] = _Draft(stage, part)
        backward: dict[StageId, list[Item]] = {}
        for item in self._items:
            stage = self._stage[id(item)]
            if stage == SHARED:
                continue
            if item.phase is Phase.BACKWARD:
                backward.setdefault(stage, []).append(item)
            else:
                drafts[stage, Part.FORWARD].assigned.append(item)
        for stage, items in backward.items():
            if not self._split:
                drafts[stage, Part.BACKWARD].assigned = items
                continue
            for item in items:
                waits = id(item) in self._deferrable
                drafts[
                    stage, Part.BACKWARD_WEIGHT if waits else Part.BACKWARD_INPUT
                ].assigned.append(item)
        return drafts

    def _parts_of_a_task(self) -> tuple[Part, ...]:
        if self._split:
            return Part.FORWARD, Part.BACKWARD_INPUT, Part.BACKWARD_WEIGHT
        return Part.FORWARD, Part.BACKWARD

    def _add_shared_crossing(self, drafts: Mapping[tuple[StageId, Part], _Draft]) -> None:
        """Let the last stage's forward program compute the results of shared items that the update
        needs.
        """
        last = StageId(self._staging.num_stages - 1)
        for value in self._graphs.crossing:
            if value in self._maker and value not in self.stage_of_value:
                self.stage_of_value[value] = last
                drafts[last, Part.FORWARD].assigned.append(self._maker[value])

    def _close(self, draft: _Draft, again: Iterable[Item] = ()) -> None:
        """Add the shared items that a program needs; `again`: forward items that it recomputes."""
        items = {id(item): item for item in [*draft.assigned, *again]}
        waiting = list(items.values())
        while waiting:
            for i in waiting.pop().inputs:
                maker = self._maker.get(i)
                if (
                    # Shared items are made of the batch and constants alone: each program computes
                    # them itself rather than receive them.
                    maker is not None
                    and id(maker) not in items
                    and self._stage[id(maker)] == SHARED
                ):
                    items[id(maker)] = maker
                    waiting.append(maker)
        draft.items = sorted(items.values(), key=lambda item: self._order[id(item)])
        known = made_by(draft.items) | self._graphs.body.constants.keys()
        draft.reads = [i for i in read_by(draft.items) if i not in known]

    def _keep_less(self, drafts: Mapping[tuple[StageId, Part], _Draft]) -> None:
        """Recompute, in backward programs, values that are cheaper to recompute than to keep from
        the forward program.
        """
        graph = self._graphs.body
        shared = made_by(item for item in self._items if self._stage[id(item)] == SHARED)
        free = self._given | self._early | {self._graphs.group, self._graphs.micro_batch} | shared
        free |= graph.constants.keys()
        for stage in map(StageId, range(self._staging.num_stages)):
            forward = drafts[stage, Part.FORWARD]
            unshared = [item for item in forward.items if self._stage[id(item)] != SHARED]
            for part in self._parts_of_a_task()[1:]:
                draft = drafts[stage, part]
                repeat = self._recompute.get(stage, frozenset())
                repeated = find_repeated(graph, unshared, draft.reads, free=free, repeat=repeat)
                draft.again = list(repeated.items)
                self._close(draft, draft.again)

    def finished(
        self, wanted: Iterable[ValueId], plan: MicroBatchPlan | None
    ) -> list[StageProgram]:
        """The programs. Those that make `wanted` values for the update also return their totals."""
        programs = []
        wanted = set(wanted)
        for draft in self._drafts_by.values():
            inside = made_by(draft.assigned) - {new for _, new in self._graphs.handed_on}
            totals = tuple(
                sorted(v for v in inside & wanted if self.stage_of_value[v] == draft.stage)
            )
            programs.append(self._program(draft, self._drafts_by, totals, plan))
        # An order in which they could run: up the stages, then down.
        return sorted(
            programs,
            key=lambda p: (
                p.part is not Part.FORWARD,
                p.stage * (1 if p.part is Part.FORWARD else -1),
            ),
        )

    def _program(
        self,
        draft: _Draft,
        drafts: Mapping[tuple[StageId, Part], _Draft],
        totals: tuple[ValueId, ...],
        plan: MicroBatchPlan | None = None,
    ) -> StageProgram:
        """The program of a draft. It returns the values that other programs read, and `totals`."""
        made_here = made_by(draft.assigned)
        read_elsewhere: set[ValueId] = set()
        read_on_stage: set[ValueId] = set()
        for other in drafts.values():
            if other is not draft:
                read_elsewhere.update(other.reads)
            if other.stage == draft.stage:
                read_on_stage.update(other.reads)
        exports = tuple(sorted(made_here & read_elsewhere))
        # Values that cannot be added up, such as slices of the batch, are kept part by part.
        stacked = tuple(v for v in totals if plan is not None and not plan.is_summed(v))
        handed_on = tuple((v, new) for v, new in self._graphs.handed_on if new in made_here)
        outputs = list(dict.fromkeys([*exports, *totals, *(new for _, new in handed_on)]))
        numbers = {self._graphs.group, self._graphs.micro_batch}
        given = tuple(sorted(self._given.intersection(draft.reads)))
        imports = set(draft.reads) - self._given - self._early - self._handed - numbers
        base, items = self._in_order(draft)
        return StageProgram(
            stage=draft.stage,
            part=draft.part,
            graph=subgraph(base, draft.reads, items, outputs),
            given=given,
            early=tuple(sorted(self._early.intersection(draft.reads))),
            imports=tuple(sorted(imports)),
            exports=exports,
            kept=frozenset(made_here & read_on_stage),
            totals=tuple(v for v in totals if v not in stacked),
            stacked=stacked,
            handed_on=handed_on,
        )

    def _in_order(self, draft: _Draft) -> tuple[Graph, list[OpId | Call]]:
        """The graph and the items of a program, recomputed ones where they are needed."""
        body = self._graphs.body
        if not draft.again or self._recompute.get(draft.stage) is None:
            return body, [item.op_or_call for item in draft.items]
        again = set(map(id, draft.again))
        assigned = set(map(id, draft.assigned))
        backward = [item for item in draft.items if id(item) in assigned]
        untied = body.inputs_of(Role.PARAMETER, Role.OPTIMIZER_STATE)
        untied |= {self._graphs.group, self._graphs.micro_batch}
        runs = recomputed_runs([i for i in draft.items if id(i) in again - assigned], backward)
        graph, items = tie_runs(body, runs, backward, untied)
        shared = [i.op_or_call for i in draft.items if id(i) not in again and id(i) not in assigned]
        return graph, [*shared, *items]


def _keys(item: Item) -> list[tuple[str, int]]:
    """Key of an item that is the same in the whole step and in its parts."""
    return (
        [("op", item.op_or_call)]
        if isinstance(item.op_or_call, int)
        else [("call", o) for o in item.outputs]
    )


def _early_programs(
    parts: MicroBatchGraphs, programs: Sequence[StageProgram]
) -> list[StageProgram]:
    """Programs that run once on the whole batch, on every stage that reads their results."""
    outside = dict(zip(parts.inside, parts.early_values, strict=True))
    items = items_of(parts.early)
    early_programs = []
    for stage in sorted({p.stage for p in programs if p.early}):
        wanted = set()
        for p in programs:
            if p.stage == stage:
                for v in p.early:
                    wanted.add(outside.get(v, v))
        need = set(wanted)
        items_of_stage: list[Item] = []
        # In reverse, so that all readers of an item come before it.
        for item in reversed(items):
            if not need.isdisjoint(item.outputs):
                items_of_stage.append(item)
                need.update(item.inputs)
        made_early = made_by(items_of_stage) | parts.early.constants.keys()
        reads = sorted(read_by(items_of_stage).keys() - made_early)
        graph = subgraph(
            parts.early, reads, [item.op_or_call for item in items_of_stage[::-1]], sorted(wanted)
        )
        early_programs.append(
            StageProgram(
                stage=stage,
                part=Part.EARLY,
                graph=graph,
                given=tuple(reads),
                exports=tuple(sorted(wanted)),
            )
        )
    return early_programs
