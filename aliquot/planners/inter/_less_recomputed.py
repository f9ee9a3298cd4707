"""Recomputation of only so many stages as memory calls for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...cost import AbstractChain, ChainPlan, find_stage_faults, judge_stages


def recomputing_less(chain: AbstractChain, plan: ChainPlan) -> Iterator[ChainPlan]:
    """Plans that fit, with fewer stages that recompute than in a plan that fits; none if all of
    them have to.

    Stages that share a submesh share its memory. A stage with fewer micro-batches in flight frees
    less by recomputing, so the last stages of each submesh are the first that do not. In a second
    plan, stages that take turns on different submeshes recompute together, as unequal ones may
    wait for one another.
    """
    submeshes = plan.num_submeshes
    plain = [replace(option, name="", recompute="none") for option in chain.options]
    # For each option the same without recomputation, the first one of several.
    without = [
        next((k for k in range(len(plain)) if replace(chain.options[k], name="") == each), None)
        for each in plain
    ]
    stages = list(plan.stages)
    for k in reversed(range(len(stages))):
        option = without[stages[k].option]
        if option is not None and option != stages[k].option:
            stages[k] = replace(stages[k], option=option)
            if find_stage_faults(chain, stages, plan.schedule, num_submeshes=submeshes):
                stages[k] = plan.stages[k]
    turns = [range(k, min(k + submeshes, len(stages))) for k in range(0, len(stages), submeshes)]
    together = [
        (plan.stages if any(stages[k] == plan.stages[k] for k in turn) else stages)[k]
        for turn in turns
        for k in turn
    ]
    for chosen in (stages, together) if together != stages else (stages,):
        if chosen != list(plan.stages) and not find_stage_faults(
            chain, chosen, plan.schedule, num_submeshes=submeshes
        ):
            yield judge_stages(chain, chosen, plan.schedule, num_submeshes=submeshes)
