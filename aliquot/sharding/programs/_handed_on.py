"""State that is handed on from one micro-batch to the next, in a pipeline.

A stage keeps it from one of its forward programs to the next. It never crosses between stages: the
first stage would wait for the last before it could begin another micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core import CaptureError
from ...graph import SHARED, Graph, Phase, Role, StageId, Staging, ValueId, items_of
from ._micro_batch_graphs import MicroBatchGraphs


def written_in_place(parts: MicroBatchGraphs, graph: Graph, staging: Staging) -> MicroBatchGraphs:
    """The graphs of a step without gradients on its whole batch, in which stages hand on the state
    that they alone read and replace, such as a cache: its buffer is then that of its successor.
    """
    if any(op.phase is Phase.BACKWARD for op in graph.ops):
        return parts
    elsewhere = {i for part in (parts.early, parts.late) for k in items_of(part) for i in k.inputs}
    returned = [o.value for o in graph.outputs]
    pairs = []
    for item in graph.inputs:
        v, new = item.value, None if item.output is None else returned[item.output]
        if item.role is Role.BATCH or not isinstance(new, int) or new not in parts.crossing:
            continue
        before, after = graph.values[v], graph.values[new]
        users = {
            stage
            for each, stage in zip(staging.items, staging.stage, strict=True)
            if v in each.inputs or new in each.outputs
        }
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
    stage_of = {
        o: s for item, s in zip(staging.items, staging.stage, strict=True) for o in item.outputs
    }
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
