"""Calls of a function without gradients that follow one another through the stages of a plan."""

from __future__ import annotations

from ._plan import Plan


def time_between_calls_s(plan: Plan) -> float:
    """Predicted seconds from the end of one call to the end of the next, if calls follow one
    another without a gap: a pipeline is as slow as its busiest submesh, or as its slowest link; one
    program takes its step time.
    """
    step_s = plan.prediction.step_time_s
    stages = [stage.prediction for stage in plan.stages]
    if len(stages) < 2:
        return step_s
    busy = [(1 - each.bubble) * step_s for each in stages if each is not None]
    sent = [plan.num_micro_batches * each.transfer_s for each in stages if each is not None]
    return min(step_s, max([*busy, *sent], default=step_s))


def has_gradients(plan: Plan) -> bool:
    """True if any stage of a pipeline has a backward pass; of one program nothing is known, and
    calls of it follow one another as steps do.
    """
    return any(s.prediction is not None and s.prediction.backward_s > 0 for s in plan.stages)
