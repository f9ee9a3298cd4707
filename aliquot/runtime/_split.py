"""A step on micro-batches -> programs for the stages of a pipeline, as plain data.

Every stage gets a forward and a backward program, run for each micro-batch, and one program for each round of the update.
A round ends where scalars of other stages are needed, such as the norm of all gradients. What a program reads and neither
makes nor is given becomes an import; `_pipeline_program` makes functions of programs, `_instructions` moves arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph import SHARED, Call, Graph, Item, Operand, Phase, Staging, items_of, place_update
from ..sharding import MicroBatchPlan
from ._parts import Parts, subgraph
from ._push_out import push_out
from ._recompute import what_to_keep
from ._totals import is_summed


class Part(enum.StrEnum):
    """Which part of a stage's work a program does. A backward pass comes whole, or as two programs."""

    EARLY = "early"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    BACKWARD_WEIGHT = "backward weight"
    UPDATE = "update"


PER_MICRO_BATCH = frozenset({Part.FORWARD, Part.BACKWARD, Part.BACKWARD_INPUT, Part.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageProgram:
    """One program of one stage.

    Attributes:
        stage, part: whose work, and which; `round` counts those of the update.
        graph: its operators; inputs are the values that it reads, outputs those that it makes for others.
        given: inputs of the step, and constants, that it reads.
        early: values that it reads from its stage's early program, by their names in its graph.
        imports: what it reads from other programs: values of the same micro-batch, or of earlier rounds.
        exports: what it makes for other programs, or for the user; `kept` are those that its own stage reads again.
        totals: what it makes of every micro-batch for the update: added up, or kept one by one (`stacked`).
        combines: totals that it turns into the whole batch's values before anything else.
    """

    stage: int
    part: Part
    round: int = 0
    graph: Graph
    given: tuple[int, ...]
    early: tuple[int, ...] = ()
    imports: tuple[int, ...] = ()
    exports: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    totals: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    combines: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Such as `stage 2 backward`."""
        number = f" {self.round}" if self.part is Part.UPDATE else ""
        return f"stage {self.stage} {self.part}{number}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePrograms:
    """All programs of a pipeline.

    Attributes:
        programs: in an order in which they could run.
        made_by: for each value that programs exchange, the (first) stage that makes it.
        outputs: for each of the step's outputs the stage and round that hold it, or None if it is an input or literal.
        home: for each input that is no batch its stage.
    """

    programs: tuple[StageProgram, ...]
    made_by: Mapping[int, int]
    outputs: tuple[tuple[int, int] | None, ...]
    home: Mapping[int, int]


def split_stages(
    parts: Parts,
    plan: MicroBatchPlan | None,
    staging: Staging,
    *,
    split_backward: bool = False,
    recompute: frozenset[int] = frozenset(),
) -> StagePrograms:
    """Programs of all stages.

    Args:
        parts: the step cut over time.
        plan: how it was cut; None for a step that runs on its whole batch at once.
        staging: stages of the whole step's items.
        split_backward: make two programs of a backward pass: what the stage before waits for, and the rest.
        recompute: stages whose backward programs work everything out again from what enters the stage.
    """
    parts = push_out(parts, plan, staging)
    body = _Body(parts, staging, split_backward, plan, recompute)
    update = _Update(parts, staging, body.made)
    early = _early_programs(parts, [*body.programs.values(), *update.programs])
    wanted = update.wanted_totals
    programs = [*early, *body.finished(wanted, plan), *update.programs]
    return StagePrograms(
        programs=tuple(programs),
        made_by=body.made | update.made,
        outputs=tuple(update.outputs),
        home=update.home,
    )


# ---- forward and backward --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A program while its items are gathered."""

    stage: int
    part: Part
    own: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


class _Body:
    """Programs that run for each micro-batch."""

    def __init__(
        self,
        parts: Parts,
        staging: Staging,
        split: bool,
        plan: MicroBatchPlan | None,
        recompute: frozenset[int],
    ) -> None:
        self._parts, self._staging, self._split = parts, staging, split
        self._items = items_of(parts.body)
        self._order = {id(item): k for k, item in enumerate(self._items)}
        self._maker = {o: item for item in self._items for o in item.outputs}
        self._num_values = len(plan.whole.values) if plan else len(parts.body.values)
        self._stage = self._stages()
        self._given = {i.value for i in parts.early.inputs} | set(parts.late.constants)
        self._early = set(parts.inside)
        drafts = self._drafts()
        self.made = {o: s for item in self._items for o in item.outputs if (s := self._stage[id(item)]) != SHARED}
        self._add_shared_crossing(drafts)
        for draft in drafts.values():
            self._close(draft)
        self._keep_less(drafts, recompute)
        self._drafts_by = drafts
        self.programs = {key: self._program(draft, drafts, ()) for key, draft in drafts.items()}

    def _stages(self) -> dict[int, int]:
        """Stages by item: those of the whole step's items, and for what was put in between those of its operands."""
        by_op: dict[tuple[str, int], int] = {}
        for item, stage in zip(self._staging.items, self._staging.stage, strict=True):
            by_op |= dict.fromkeys(_keys(item), stage)
        found: dict[int, int] = {}
        made: dict[int, int] = {}
        for item in self._items:
            known = [by_op[key] for key in _keys(item) if key in by_op]
            stage = known[0] if known else max((made.get(i, SHARED) for i in item.inputs), default=SHARED)
            # A conversion of an operand belongs to whoever reads it.
            if not known and all(o >= self._num_values for o in item.outputs):
                stage = SHARED
            found[id(item)] = stage
            made |= dict.fromkeys(item.outputs, stage)
        return found

    def _drafts(self) -> dict[tuple[int, Part], _Draft]:
        drafts: dict[tuple[int, Part], _Draft] = {}
        for stage in range(self._staging.num_stages):
            for part in self._parts_of_a_task():
                drafts[stage, part] = _Draft(stage, part)
        backward: dict[int, list[Item]] = {}
        for item in self._items:
            stage = self._stage[id(item)]
            if stage == SHARED:
                continue
            if item.phase is Phase.BACKWARD:
                backward.setdefault(stage, []).append(item)
            else:
                drafts[stage, Part.FORWARD].own.append(item)
        for stage, items in backward.items():
            if self._split:
                inner, rest = self._split_backward(stage, items)
                drafts[stage, Part.BACKWARD_INPUT].own = inner
                drafts[stage, Part.BACKWARD_WEIGHT].own = rest
            else:
                drafts[stage, Part.BACKWARD].own = items
        return drafts

    def _parts_of_a_task(self) -> tuple[Part, ...]:
        if self._split:
            return Part.FORWARD, Part.BACKWARD_INPUT, Part.BACKWARD_WEIGHT
        return Part.FORWARD, Part.BACKWARD

    def _split_backward(self, stage: int, items: list[Item]) -> tuple[list[Item], list[Item]]:
        """What other stages wait for, with all that it takes, and the rest."""
        others = {i for item in self._items if self._stage[id(item)] not in (stage, SHARED) for i in item.inputs}
        needed: set[int] = set()
        inner: list[Item] = []
        for item in reversed(items):
            if any(o in others or o in needed for o in item.outputs):
                inner.append(item)
                needed.update(item.inputs)
        chosen = {id(item) for item in inner}
        return inner[::-1], [item for item in items if id(item) not in chosen]

    def _add_shared_crossing(self, drafts: Mapping[tuple[int, Part], _Draft]) -> None:
        """What the update needs of shared items is worked out by the last stage's forward program."""
        last = self._staging.num_stages - 1
        for value in self._parts.crossing:
            if value in self._maker and value not in self.made:
                self.made[value] = last
                drafts[last, Part.FORWARD].own.append(self._maker[value])

    def _close(self, draft: _Draft, again: Iterable[Item] = ()) -> None:
        """Add the shared items that a program needs, and `again`: forward items that it works out once more."""
        items = {id(item): item for item in [*draft.own, *again]}
        waiting = list(items.values())
        while waiting:
            for i in waiting.pop().inputs:
                maker = self._maker.get(i)
                if maker is not None and id(maker) not in items and self._stage[id(maker)] == SHARED:
                    items[id(maker)] = maker
                    waiting.append(maker)
        draft.items = sorted(items.values(), key=lambda item: self._order[id(item)])
        inside = {o for item in draft.items for o in item.outputs}
        known = inside | self._parts.body.constants.keys()
        draft.reads = list(dict.fromkeys(i for item in draft.items for i in item.inputs if i not in known))

    def _keep_less(self, drafts: Mapping[tuple[int, Part], _Draft], recompute: frozenset[int]) -> None:
        """Work out again, in a backward program, what is cheaper to work out than to keep from the forward program."""
        graph = self._parts.body
        anybody = {o for item in self._items if self._stage[id(item)] == SHARED for o in item.outputs}
        free = self._given | self._early | {self._parts.group, self._parts.micro_batch} | anybody
        free |= graph.constants.keys()
        for stage in range(self._staging.num_stages):
            forward = drafts[stage, Part.FORWARD]
            mine = [item for item in forward.items if self._stage[id(item)] != SHARED]
            names = [graph.ops[item.ops[0]].name if item.ops else "" for item in mine]
            inside = {o for item in mine for o in item.outputs}
            for part in self._parts_of_a_task()[1:]:
                draft = drafts[stage, part]
                wanted = [i for i in draft.reads if i in inside]
                read_anyway = {i for i in draft.reads if i not in inside}
                kept = what_to_keep(
                    mine,
                    names,
                    wanted,
                    graph.values,
                    free=free,
                    read_anyway=read_anyway,
                    everything=stage in recompute,
                )
                self._close(draft, _needed(mine, wanted, kept))

    def finished(self, wanted: Iterable[int], plan: MicroBatchPlan | None) -> list[StageProgram]:
        """The programs, with totals of `wanted` values where they are made."""
        found = []
        wanted = set(wanted)
        for draft in self._drafts_by.values():
            inside = {o for item in draft.own for o in item.outputs}
            totals = tuple(sorted(v for v in inside & wanted if self.made[v] == draft.stage))
            found.append(self._program(draft, self._drafts_by, totals, plan))
        # An order in which they could run: up the stages, then down.
        return sorted(
            found, key=lambda p: (p.part is not Part.FORWARD, p.stage * (1 if p.part is Part.FORWARD else -1))
        )

    def _program(
        self,
        draft: _Draft,
        drafts: Mapping[tuple[int, Part], _Draft],
        totals: tuple[int, ...],
        plan: MicroBatchPlan | None = None,
    ) -> StageProgram:
        own = {o for item in draft.own for o in item.outputs}
        read_elsewhere = {i for other in drafts.values() if other is not draft for i in other.reads}
        exports = tuple(sorted(own & read_elsewhere))
        stacked = tuple(v for v in totals if plan is not None and not is_summed(v, plan))
        outputs = [*exports, *totals]
        numbers = {self._parts.group, self._parts.micro_batch}
        given = tuple(sorted(i for i in draft.reads if i in self._given))
        return StageProgram(
            stage=draft.stage,
            part=draft.part,
            graph=subgraph(self._parts.body, draft.reads, [item.what for item in draft.items], outputs),
            given=given,
            early=tuple(sorted(i for i in draft.reads if i in self._early)),
            imports=tuple(
                sorted(i for i in draft.reads if i not in self._given and i not in self._early and i not in numbers)
            ),
            exports=exports,
            kept=frozenset(v for other in drafts.values() if other.stage == draft.stage for v in other.reads) & own,
            totals=tuple(v for v in totals if v not in stacked),
            stacked=stacked,
        )


def _keys(item: Item) -> list[tuple[str, int]]:
    """What an item goes by in the whole step and in what was made of it."""
    return [("op", item.what)] if isinstance(item.what, int) else [("call", o) for o in item.outputs]


def _needed(items: Sequence[Item], wanted: Sequence[int], kept: frozenset[int]) -> list[Item]:
    """The items that make what is wanted out of what is kept."""
    need = {v for v in wanted if v not in kept}
    found = []
    for item in reversed(items):
        if any(o in need for o in item.outputs):
            found.append(item)
            need.update(i for i in item.inputs if i not in kept)
    return found[::-1]


# ---- update ----------------------------------------------------------------------------------------------------------


class _Update:
    """Programs that run once a step, behind the last micro-batch."""

    def __init__(self, parts: Parts, staging: Staging, made: Mapping[int, int]) -> None:
        self._graph = graph = parts.late
        self._items = items = items_of(graph)
        self._maker = {o: k for k, item in enumerate(items) for o in item.outputs}
        self._crossing = {v: made[v] for v in parts.crossing if v in made}
        self._given = {i.value for i in parts.early.inputs} | set(graph.constants)
        self._early = set(parts.early_values)
        self._stage = [SHARED] * len(items)
        homes = dict(staging.home)
        self.home = place_update(graph, items, range(len(items)), self._stage, self._crossing, homes)
        for k, item in enumerate(items):
            if isinstance(item.what, Call) and self._stage[k] == SHARED:
                self._stage[k] = 0
        self._rounds: dict[tuple[int, int], int] = {}
        self._last = staging.num_stages
        self._round_of = self._late_as_can_be([self._item_round(k) for k in range(len(items))])
        self.made: dict[int, int] = {o: self._stage[k] for o, k in self._maker.items() if self._stage[k] != SHARED}
        self.outputs: list[tuple[int, int] | None] = [self._where(o.value) for o in graph.outputs]
        self.programs = self._build()

    def _round(self, stage: int, value: int) -> int:
        """The first round of a stage's update in which it can have a value."""
        known = self._rounds.get((stage, value))
        if known is not None:
            return known
        if value in self._crossing:
            found = 0 if self._crossing[value] == stage else 1
        elif value in self._maker:
            k = self._maker[value]
            if self._stage[k] == SHARED:
                found = max((self._round(stage, i) for i in self._items[k].inputs), default=0)
            else:
                found = self._item_round(k) + (self._stage[k] != stage)
        else:
            found = 0
        self._rounds[stage, value] = found
        return found

    def _item_round(self, k: int) -> int:
        stage = self._stage[k]
        if stage == SHARED:
            return 0
        return max((self._round(stage, i) for i in self._items[k].inputs), default=0)

    def _late_as_can_be(self, rounds: list[int]) -> list[int]:
        """Rounds of items, with those that only later rounds of their own stage read put off until then.

        So moments that decay in one round and take up clipped gradients in the next are neither copied in between nor
        kept from being donated.
        """
        readers: dict[int, set[int]] = {}
        for k, item in enumerate(self._items):
            for i in item.inputs:
                readers.setdefault(i, set()).add(k)
        for k in range(len(self._items) - 1, -1, -1):
            own = {reader for o in self._items[k].outputs for reader in readers.get(o, ())}
            if own and all(self._stage[reader] == self._stage[k] != SHARED for reader in own):
                rounds[k] = max(rounds[k], min(rounds[reader] for reader in own))
        return rounds

    def _where(self, operand: Operand) -> tuple[int, int] | None:
        """Which stage and round hold a result of the step."""
        if not isinstance(operand, int) or operand in self._given:
            return None
        if operand in self._crossing:
            return self._crossing[operand], 0
        if operand in self._maker and self._stage[self._maker[operand]] != SHARED:
            k = self._maker[operand]
            return self._stage[k], self._round_of[k]
        return min(((s, self._round(s, operand)) for s in range(self._last)), key=lambda w: (w[1], w[0]))

    def _build(self) -> list[StageProgram]:
        own: dict[tuple[int, int], set[int]] = {}
        results: dict[tuple[int, int], set[int]] = {}
        for k in range(len(self._items)):
            if self._stage[k] != SHARED:
                own.setdefault((self._stage[k], self._round_of[k]), set()).add(k)
        for output, where in zip(self._graph.outputs, self.outputs, strict=True):
            if where is not None and isinstance(output.value, int):
                results.setdefault(where, set()).add(output.value)
                own.setdefault(where, set())
                if output.value in self._maker:
                    own[where].add(self._maker[output.value])
        closed = {key: self._closure(key[0], chosen) for key, chosen in own.items()}
        reads = {key: self._reads(chosen) for key, chosen in closed.items()}
        # What is worked out early and nothing but a result is read by nobody.
        for key, values in results.items():
            reads[key] += [v for v in sorted(values & self._early) if v not in reads[key]]
        # Totals are combined in the first round, also where only later rounds or other stages read them.
        for v in {v for values in reads.values() for v in values if v in self._crossing}:
            closed.setdefault((self._crossing[v], 0), set())
            reads.setdefault((self._crossing[v], 0), [])
        self.wanted_totals = {v for values in reads.values() for v in values if v in self._crossing}
        self.wanted_totals |= {v for found in results.values() for v in found if v in self._crossing}
        combined_in = {v: (self._crossing[v], 0) for v in self.wanted_totals}
        programs = []
        for key in sorted(closed, key=lambda key: (key[1], key[0])):
            stage, number = key
            inside = {o for k in closed[key] for o in self._items[k].outputs if self._stage[k] == stage}
            combines = tuple(sorted(v for v, where in combined_in.items() if where == key))
            elsewhere = {v for other, values in reads.items() if other != key for v in values}
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
                        [self._items[k].what for k in items],
                        sorted(exports),
                    ),
                    given=tuple(v for v in reads[key] if v in self._given),
                    early=tuple(v for v in reads[key] if v in self._early),
                    imports=tuple(
                        v for v in reads[key] if v not in self._given and v not in self._early and v not in combines
                    ),
                    exports=tuple(sorted(exports)),
                    combines=combines,
                )
            )
        self.made |= {v: self._crossing[v] for v in self.wanted_totals}
        return programs

    def _closure(self, stage: int, chosen: Iterable[int]) -> set[int]:
        items = set(chosen)
        waiting = list(items)
        while waiting:
            for i in self._items[waiting.pop()].inputs:
                k = self._maker.get(i)
                if k is not None and k not in items and self._stage[k] == SHARED:
                    items.add(k)
                    waiting.append(k)
        return items

    def _reads(self, chosen: Iterable[int]) -> list[int]:
        inside = {o for k in chosen for o in self._items[k].outputs} | self._graph.constants.keys()
        return list(dict.fromkeys(i for k in sorted(chosen) for i in self._items[k].inputs if i not in inside))


def _early_programs(parts: Parts, programs: Sequence[StageProgram]) -> list[StageProgram]:
    """What is worked out once on the whole batch, by every stage that reads it."""
    outside = dict(zip(parts.inside, parts.early_values, strict=True))
    items = items_of(parts.early)
    found = []
    for stage in sorted({p.stage for p in programs if p.early}):
        wanted = {outside.get(v, v) for p in programs if p.stage == stage for v in p.early}
        need = set(wanted)
        own: list[Item] = []
        for item in reversed(items):
            if any(o in need for o in item.outputs):
                own.append(item)
                need.update(item.inputs)
        made = {o for item in own for o in item.outputs} | parts.early.constants.keys()
        reads = sorted({i for item in own for i in item.inputs if i not in made})
        graph = subgraph(parts.early, reads, [item.what for item in own[::-1]], sorted(wanted))
        found.append(
            StageProgram(stage=stage, part=Part.EARLY, graph=graph, given=tuple(reads), exports=tuple(sorted(wanted)))
        )
    return found
