"""The timeline that a pipeline's plan predicts, from the figures of its stages and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..core import InputError, printable, shortened
from ..plans import Plan, TaskKind, Trace, TraceEvent, headline, submesh_names

if TYPE_CHECKING:
    from ..cost import StageCosts


def planned_trace(plan: Plan) -> Trace:
    """The predicted timeline of every submesh.

    Raises:
        InputError: The plan has no stages with predictions, so there is nothing to lay out.
    """
    # Importing the cost model imports JAX, which no other report needs.
    from ..cost import simulate

    predicted = [stage.prediction for stage in plan.stages]
    if not plan.is_pipeline or not predicted or None in predicted:
        raise InputError(
            f"this plan ({shortened(printable(plan.method, keep=''), 60)}) is no pipeline with"
            " predicted stages, so it has no schedule to trace. Make one with: aliquot plan ..."
            " --method pipeshard"
        )
    schedule = plan.tasks
    costs = _costs(plan)
    times = simulate(schedule, costs)
    events = []
    for submesh, tasks in enumerate(schedule.lists):
        for task, start, end in zip(tasks, times.start_s[submesh], times.end_s[submesh]):
            events.append(
                TraceEvent(
                    kind=task.kind,
                    lane="compute",
                    submesh=submesh,
                    stage=task.stage,
                    micro_batch=task.micro_batch,
                    start_s=float(start),
                    end_s=float(end),
                )
            )
    for sent in times.transfers:
        events.append(
            TraceEvent(
                kind=sent.kind,
                lane="transfers" if sent.kind is TaskKind.FORWARD else "transfers back",
                submesh=sent.sender,
                stage=sent.stage,
                micro_batch=sent.micro_batch,
                start_s=sent.start_s,
                end_s=sent.end_s,
            )
        )
    for stage, (start, seconds) in enumerate(zip(times.update_start_s, costs.update_s)):
        events.append(
            TraceEvent(
                kind="update",
                lane="compute",
                submesh=schedule.submesh_of(stage),
                stage=stage,
                micro_batch=-1,
                start_s=float(start),
                end_s=float(start + seconds),
            )
        )
    return Trace(
        title=headline(plan),
        source="predicted",
        submeshes=submesh_names(plan),
        events=tuple(events),
    )


def _costs(plan: Plan) -> StageCosts:
    """The predicted costs of a plan's stages, for the simulation."""
    from ..cost import StageCosts

    rows = []
    for p in (stage.prediction for stage in plan.stages):
        if p:
            back_s = p.transfer_s if p.transfer_back_s is None else p.transfer_back_s
            input_s = max(p.backward_s - p.weight_gradient_s, 0.0)
            gradients_s = input_s, p.weight_gradient_s
            rows.append((p.forward_s, *gradients_s, p.update_s, p.transfer_s, back_s))
    forward_s, input_s, weight_s, update_s, transfer_s, back_s = np.array(rows).T
    # A timeline shows no memory.
    nothing = np.zeros(len(rows))
    return StageCosts(
        forward_s=forward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        update_s=update_s,
        transfer_s=transfer_s[:-1],
        transfer_back_s=back_s[:-1],
        state_bytes=nothing,
        in_flight_bytes=nothing,
        working_bytes=nothing,
        overlaps_transfers=plan.overlaps_transfers,
    )
