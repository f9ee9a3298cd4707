"""Recomputation of only so many stages as memory calls for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...cost import AbstractChain, ChainPlan, StageOption, find_stage_faults, judge_stages


def recomputing_less(chain: AbstractChain, plan: ChainPlan) -> Iterator[ChainPlan]:
    """Plans that fit, with fewer stages that recompute than in a plan that fits; none if all of
    them have to.

    Stages that share a submesh share its memory. A stage with fewer micro-batches in flight frees
    less by recomputing, so the last stages of each submesh are the first that do not. In a second
    plan, stages that take turns on different submeshes recompute together, as unequal ones may
    wait for one another.
    """
    submeshes, limit = plan.num_submeshes, chain.memory_limit_bytes
    without = {
        k: other
        for k in {stage.option for stage in plan.stages}
        if (other := _without_recomputation(chain.options, k)) is not None
    }
    if not without:
        return
    plain = [
        replace(stage, option=without.get(stage.option, stage.option)) for stage in plan.stages
    ]
    plain_figures = judge_stages(chain, plain, plan.schedule, num_submeshes=submeshes).figures
    stages, figures = list(plan.stages), list(plan.figures)
    for k in reversed(range(len(stages))):
        if plain[k] == stages[k] or chain.find_fault(plain[k]):
            continue
        # The bytes of a stage do not depend on its neighbours.
        trial = [*figures[:k], plain_figures[k], *figures[k + 1 :]]
        if max(replace(plan, figures=tuple(trial)).submesh_bytes) <= limit:
            stages[k], figures = plain[k], trial
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


def _without_recomputation(options: Sequence[StageOption], option: int) -> int | None:
    """The first option that differs from one that recomputes in nothing else; None if there is
    none, or if it does not recompute.
    """

    def layout(each: StageOption) -> object:
        return each.submesh, each.mesh_shape, each.dp, each.tp

    chosen = options[option]
    if chosen.recompute == "none":
        return None
    return next(
        (
            k
            for k, each in enumerate(options)
            if each.recompute == "none" and layout(each) == layout(chosen)
        ),
        None,
    )
