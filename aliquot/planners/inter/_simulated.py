"""Simulation of the best few plans by closed form, as closed forms leave out some waits and
transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ...cost import AbstractChain, ChainPlan, simulate_stages

_ROUNDING = 1e-9


def worth_simulating(
    plans: Iterable[tuple[ChainPlan, AbstractChain]], most: int, known: Iterable[ChainPlan] = ()
) -> list[ChainPlan]:
    """The first `most` different plans of each schedule, without those that are known.

    Args:
        plans: each with its chain, best first.
        most: at least 1.
    """
    num_chosen: Counter[str] = Counter()
    seen: set[object] = set()
    known_keys = {_key(plan) for plan in known}
    chosen = []
    # Each schedule has its own best plans, as closed forms of different schedules err differently.
    for plan, _ in plans:
        key = _key(plan)
        if key in seen or num_chosen[plan.schedule] == most:
            continue
        seen.add(key)
        num_chosen[plan.schedule] += 1
        if key not in known_keys:
            chosen.append(plan)
    return chosen


def _key(plan: ChainPlan) -> object:
    return plan.stages, plan.schedule, plan.num_micro_batches, plan.num_submeshes


def simulated(chains: Sequence[AbstractChain], plan: ChainPlan) -> ChainPlan:
    """The plan, of one of the chains, with its step time by simulation."""
    (chain,) = (c for c in chains if c.num_micro_batches == plan.num_micro_batches)
    result, peak_bytes = simulate_stages(chain, plan)
    # Closed forms bound memory from above, so that what they let pass must fit.
    assert peak_bytes <= chain.memory_limit_bytes * (1 + _ROUNDING), (
        "bounds on what is in flight were too low"
    )
    return result


def fastest(plans: Sequence[ChainPlan]) -> ChainPlan | None:
    """The plan of least step time, the first of equals; None if there are no plans."""
    return min(plans, key=lambda plan: plan.step_time_s, default=None)
