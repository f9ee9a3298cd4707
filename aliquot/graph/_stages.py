"""Assignment of a whole step to the stages of a pipeline, given the stages of its forward pass.

It needs no markers and no names. A residual or weight is at hand on the last stage whose forward
pass reads it, a cotangent on the stage that makes it. A backward operator runs on the earliest of
the stages of its operands: cotangents come from later stages, so this is where its residuals and
weights are, and one cotangent crosses each cut. An update runs where its parameters are.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from ..core import DisjointSets
from ._dataflow import Item
from ._layers import Layers
from ._types import Call, Graph, Phase, Role, StageId, ValueId

SHARED = StageId(-1)
"""In place of a stage: each stage that needs the result computes it for itself."""


class Staging(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Stages of a step's items.

    Attributes:
        num_stages: how many there are.
        items: of the step, in program order.
        stage: of each item; `SHARED` for those that run on every stage that needs them.
        home: for each input that is no batch, the stage that keeps it; scalars have none.
        users: for each input the stages whose forward or backward pass reads it.
    """

    num_stages: int
    items: tuple[Item, ...]
    stage: tuple[StageId, ...]
    home: dict[ValueId, StageId]
    users: dict[ValueId, frozenset[StageId]]


def stage_layers(graph: Graph, layers: Layers, first_layers: Sequence[int]) -> Staging:
    """Stages of all items of a step, given the first layer of each stage; the first stage begins at
    layer 0.
    """
    bounds = [layers.starts[k] for k in first_layers]
    stage_of = {}
    for place, k in enumerate(layers.forward):
        stage_of[k] = StageId(bisect.bisect_right(bounds, place) - 1)
    return assign_stages(graph, layers.items, stage_of, len(first_layers))


def assign_stages(
    graph: Graph, items: Sequence[Item], forward_stage: Mapping[int, StageId], num_stages: int
) -> Staging:
    """Stages of all items of a step.

    Args:
        items: of the step.
        forward_stage: for each forward item that is not shared, its stage, which never decreases in
            program order.
        num_stages: how many there are.
    """
    stages = [SHARED] * len(items)
    users: dict[ValueId, set[StageId]] = {}
    origins = _origins(graph, items)
    latest: dict[ValueId, StageId] = {}  # the last stage whose forward pass makes or reads a value
    made_by: dict[ValueId, StageId] = {}  # the stage of the backward item that makes a value
    parameters = graph.inputs_of(Role.PARAMETER)
    for k, item in enumerate(items):
        if item.phase is Phase.UPDATE or item.shared:
            continue
        if item.phase is Phase.FORWARD:
            stages[k] = forward_stage[k]
        else:
            known = [made_by.get(i, latest.get(i)) for i in item.inputs]
            sources = itertools.chain(*(origins.get(i, ()) for i in item.inputs))
            known += [latest.get(o) for o in sources if o in parameters]
            # Cotangents come from later stages: the earliest of these is where the residuals are.
            stages[k] = min((s for s in known if s is not None), default=StageId(num_stages - 1))
        for i in item.inputs:
            for origin in origins.get(i, ()):
                users.setdefault(origin, set()).add(stages[k])
                if item.phase is Phase.FORWARD:
                    latest[origin] = max(latest.get(origin, stages[k]), stages[k])
            if item.phase is Phase.FORWARD and i in latest:
                latest[i] = max(latest[i], stages[k])
        place = made_by if item.phase is Phase.BACKWARD else latest
        place.update(dict.fromkeys(item.outputs, stages[k]))
    update = [k for k, item in enumerate(items) if item.phase is Phase.UPDATE]
    crossing = dict(made_by)
    for item, stage in zip(items, stages, strict=True):
        if item.phase is Phase.FORWARD:
            crossing.update(dict.fromkeys(item.outputs, stage))
    homes = {v: min(s) for v, s in users.items()}
    home = place_update(graph, items, update, stages, crossing, homes)
    return Staging(
        num_stages=num_stages,
        items=tuple(items),
        stage=tuple(stages),
        home=home,
        users={v: frozenset(s) for v, s in users.items()},
    )


def _origins(graph: Graph, items: Sequence[Item]) -> dict[ValueId, tuple[ValueId, ...]]:
    """For each input, and each shared value, the inputs from which it is made."""
    origins: dict[ValueId, tuple[ValueId, ...]] = {i.value: (i.value,) for i in graph.inputs}
    for item in items:
        if item.shared and item.phase is not Phase.UPDATE:
            known = itertools.chain(*(origins.get(i, ()) for i in item.inputs))
            origins |= dict.fromkeys(item.outputs, tuple(dict.fromkeys(known)))
    return origins


def place_update(
    graph: Graph,
    items: Sequence[Item],
    update: Sequence[int],
    stages: list[StageId],
    made_by: Mapping[ValueId, StageId],
    homes: Mapping[ValueId, StageId],
) -> dict[ValueId, StageId]:
    """Write the stages of update items into `stages`, and return the homes of inputs.

    Arrays that the same update item reads or makes belong together, on the first stage that uses
    their parameter. Items that involve only scalars and constants are shared, also where they make
    arrays.

    Args:
        update: positions of the items to place.
        made_by: for each value that forward and backward items make, its stage, or `SHARED`.
        homes: for each input that forward and backward items read, the first stage that does.
    """
    groups: DisjointSets[int] = DisjointSets()
    # What every stage has, or makes for itself.
    shared = [math.prod(v.shape) <= 1 or k in graph.constants for k, v in enumerate(graph.values)]
    arrays: dict[int, list[int]] = {}
    for k in update:
        item = items[k]
        if not isinstance(item.op_or_call, Call) and all(shared[i] for i in item.inputs):
            for o in item.outputs:
                shared[o] = True
        arrays[k] = [v for v in (*item.inputs, *item.outputs) if not shared[v]]
        for v in arrays[k][1:]:
            groups.join(arrays[k][0], v)
    kept = {}
    for i in graph.inputs:
        if i.role is not Role.BATCH and not shared[i.value]:
            kept[i.value] = i.role
    votes: dict[int, tuple[int, StageId]] = {}
    # Any vote wins over this default, and without votes all stages serve equally well.
    nobody = 9, StageId(0)

    def vote(value: ValueId, rank: int, stage: StageId) -> None:
        group = groups.root(value)
        votes[group] = min(votes.get(group, nobody), (rank, stage))

    for value, stage in homes.items():
        if value in kept:
            vote(value, 0 if kept[value] is Role.PARAMETER else 1, stage)
    for value, stage in made_by.items():
        if stage != SHARED:
            vote(value, 2, stage)
    for k in update:
        if arrays[k] and any(not shared[i] for i in items[k].inputs):
            stages[k] = votes.get(groups.root(arrays[k][0]), nobody)[1]
    return {value: votes.get(groups.root(value), nobody)[1] for value in kept}
