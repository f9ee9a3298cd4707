"""`plan_chain`: stages for a chain from elsewhere, such as from another system's measurements."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import PlanMismatchError
from ..cost import AbstractChain, ChainPlan, find_stage_faults
from .inter import NO_LIMITS, AbstractInter, StageDP, StageLimits, check_chains


def plan_chain(
    chain: AbstractChain | Sequence[AbstractChain],
    inter: AbstractInter | None = None,
    *,
    limits: StageLimits = NO_LIMITS,
    start: ChainPlan | None = None,
) -> ChainPlan:
    """Cut a chain into stages, and give each its devices and options. Needs no graph and touches no
    device.

    Args:
        chain: one chain, or one for each number of micro-batches to choose from, such as
            `aliquot.cost.Chain`.
        inter: how stages are found; by default `StageDP()`.
        limits: a number of stages or a schedule that the stages must have.
        start: stages to begin from.

    Returns:
        Stages with figures of each, the schedule, the number of micro-batches, and the step time by
        simulation.

    Raises:
        InfeasibleError: nothing fits; describes the stages that need the least memory.
        InputError: the chains do not go together, or the planner cannot keep to the limits.
        PlanMismatchError: the planner's stages cannot be run; lists all their faults.
    """
    chains = (chain,) if isinstance(chain, AbstractChain) else tuple(chain)
    inter = inter or StageDP()
    check_chains(chains)
    inter.check_limits(limits)
    plan = inter.solve(chains, limits=limits, start=start)
    # A planner from elsewhere may answer with a number of micro-batches that it was not given.
    its_chains = [c for c in chains if c.num_micro_batches == plan.num_micro_batches]
    faults = (
        find_stage_faults(
            its_chains[0], plan.stages, plan.schedule, num_submeshes=plan.num_submeshes
        )
        if its_chains
        else (f"it has {plan.num_micro_batches} micro-batches, for which there is no chain",)
    )
    if faults:
        name = type(inter).__name__
        raise PlanMismatchError(
            faults,
            asked=f"the stages that {name} found cannot be run",
            advice=f"This is a fault of {name}.",
        )
    return plan
