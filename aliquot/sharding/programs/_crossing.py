"""Values that cross between stages, as their programs exchange them: those of a micro-batch, whose
bytes planners and the judge price, and those for which updates wait.

State that is handed on from one micro-batch to the next never crosses: a stage keeps it from one of
its forward programs to the next, as the first stage would otherwise wait for the last before it
could begin another micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...core import CaptureError
from ...graph import (
    SHARED,
    Call,
    Graph,
    Phase,
    Role,
    StageId,
    Staging,
    ValueId,
    items_of,
    sums_for_the_update,
)
from ._micro_batch_graphs import MicroBatchGraphs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Crossing:
    """Values that cross each cut between neighbouring stages, one entry for each cut.

    A value that a stage further away reads crosses every cut on the way.

    Attributes:
        forward: values sent to later stages.
        backward: gradients sent to earlier stages.
        graph: the graph of these values, at the size of one micro-batch.
    """

    forward: tuple[frozenset[ValueId], ...]
    backward: tuple[frozenset[ValueId], ...]
    graph: Graph = field(repr=False)

    @property
    def forward_bytes(self) -> tuple[float, ...]:
        """Bytes to the later stages across each cut."""
        return self._bytes(self.forward)

    @property
    def backward_bytes(self) -> tuple[float, ...]:
        """Bytes to the earlier stages across each cut."""
        return self._bytes(self.backward)

    def _bytes(self, cuts: tuple[frozenset[ValueId], ...]) -> tuple[float, ...]:
        values = self.graph.values
        return tuple([float(sum([values[v].num_bytes for v in cut])) for cut in cuts])


def find_crossing(graph: Graph, staging: Staging) -> Crossing:
    """Values that neighbouring stages exchange for each micro-batch.

    Results of shared items do not cross, because each stage computes them. Neither do terms of the
    gradient of a parameter that several stages use, which are added up once, in the update.

    Args:
        graph: the step at the size of one micro-batch.
    """
    made_by: dict[ValueId, StageId] = {}
    late = sums_for_the_update(graph, staging.items)
    num_cuts = staging.num_stages - 1
    forward: list[set[ValueId]] = [set() for _ in range(num_cuts)]
    backward: list[set[ValueId]] = [set() for _ in range(num_cuts)]
    for k, (item, stage) in enumerate(zip(staging.items, staging.stage, strict=True)):
        if stage == SHARED or item.phase is Phase.UPDATE or k in late:
            continue
        for value in item.inputs:
            maker = made_by.get(value, stage)
            # Cut k lies between stages k and k + 1.
            for cut in range(maker, stage):
                forward[cut].add(value)
            for cut in range(stage, maker):
                backward[cut].add(value)
        made_by.update(dict.fromkeys(item.outputs, stage))
    return Crossing(
        forward=tuple(map(frozenset, forward)),
        backward=tuple(map(frozenset, backward)),
        graph=graph,
    )


def find_early_updates(graph: Graph, staging: Staging) -> frozenset[StageId]:
    """The stages whose update reads nothing of other stages: they can be updated as soon as their
    own gradients are complete.

    The others wait, for example for the norm of all gradients, for whether all of them are finite,
    or for what another stage adds to the gradient of a parameter that both use.

    Args:
        graph: the step at the size of one micro-batch.
    """
    # For each value the stages that make it; none if every stage has it or makes it for itself.
    sources: dict[ValueId, frozenset[StageId]] = {}
    late = sums_for_the_update(graph, staging.items)
    waiting: set[StageId] = set()
    for k, (item, stage) in enumerate(zip(staging.items, staging.stage, strict=True)):
        is_update = item.phase is Phase.UPDATE
        runs_on = stage
        if is_update and stage == SHARED and isinstance(item.op_or_call, Call):
            # A loop or region that no stage claims runs on the first.
            runs_on = StageId(0)
        read = frozenset[StageId]()
        if is_update or k in late:
            read = read.union(*(sources.get(i, frozenset()) for i in item.inputs))
        if k not in late and not (is_update and runs_on == SHARED):
            if is_update and read - {runs_on}:
                waiting.add(runs_on)
            read = frozenset({runs_on} - {SHARED})
        sources.update(dict.fromkeys(item.outputs, read))
    return frozenset(map(StageId, range(staging.num_stages))) - waiting


def written_in_place(parts: MicroBatchGraphs, graph: Graph, staging: Staging) -> MicroBatchGraphs:
    """The graphs of a step without gradients on its whole batch, in which stages hand on the state
    that they alone read and replace, such as a cache: its buffer is then that of its successor.
    """
    if any(op.phase is Phase.BACKWARD for op in graph.ops):
        return parts
    elsewhere = set[ValueId]()
    for part in (parts.early, parts.late):
        for k in items_of(part):
            elsewhere.update(k.inputs)
    returned = [o.value for o in graph.outputs]
    pairs = []
    for item in graph.inputs:
        v, new = item.value, None if item.output is None else returned[item.output]
        if item.role is Role.BATCH or not isinstance(new, int) or new not in parts.crossing:
            continue
        before, after = graph.values[v], graph.values[new]
        users = set()
        for each, stage in zip(staging.items, staging.stage, strict=True):
            if v in each.inputs or new in each.outputs:
                users.add(stage)
        if (
            (before.shape, before.dtype) == (after.shape, after.dtype)
            and returned.count(new) == 1
            and v not in returned
            and v not in elsewhere
            and len(users) == 1
            and SHARED not in users
        ):
            pairs.append((v, ValueId(new)))
    return replace(parts, handed_on=tuple(pairs))


def require_one_stage(
    graph: Graph, staging: Staging, handed_on: Sequence[tuple[ValueId, ValueId]]
) -> None:
    """Refuse stages that would have to pass state on to each other between micro-batches.

    Raises:
        CaptureError: names the state, and the stages that make and read it.
    """
    if not handed_on:
        return
    stage_of = {}
    for item, s in zip(staging.items, staging.stage, strict=True):
        stage_of.update(dict.fromkeys(item.outputs, s))
    last = StageId(staging.num_stages - 1)
    # Shared values that nobody else computes are made by the last stage.
    home = {v: last if stage_of[new] == SHARED else stage_of[new] for v, new in handed_on}
    # For each value the state that it is made of, as far as each stage computes it for itself.
    made_of = {v: {v} for v in home}
    paths = {i.value: i.path for i in graph.inputs}
    for item, stage in zip(staging.items, staging.stage, strict=True):
        state = set[ValueId]().union(*(made_of.get(i, ()) for i in item.inputs))
        if not state or item.phase is Phase.UPDATE:
            continue
        if stage == SHARED:
            made_of |= dict.fromkeys(item.outputs, state)
            continue
        for v in sorted(state):
            if stage != home[v] or item.phase is Phase.BACKWARD:
                reader = f"stage {stage}" if stage != home[v] else "its backward pass"
                raise CaptureError(
                    f"{graph.name} cannot run on independent micro-batches in these stages: the"
                    f" forward pass of stage {home[v]} hands {paths[v]} on to the next micro-batch,"
                    f" and {reader} reads it too. Plan one program (method=WholeProgram(),"
                    " --method program), or use num_micro_batches=1."
                )
