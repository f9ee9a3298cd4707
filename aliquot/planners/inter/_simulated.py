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
    """Of the first `most` different plans of each schedule, those that are not known yet.

    Args:
        plans: each with its chain, the best first.
        most: at least 1.
    """
    num_chosen: Counter[str] = Counter()
    seen: set[object] = set()
    known_keys = {_key(plan) for plan in known}
    chosen = []
    # Counted for each schedule, because closed forms of different schedules err differently.
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
    """A plan of one of the chains, with its step time by simulation."""
    (chain,) = (c for c in chains if c.num_micro_batches == plan.num_micro_batches)
    result, peak_bytes = simulate_stages(chain, plan)
    # Plans come here only if an upper bound on their memory fits.
    assert peak_bytes <= chain.memory_limit_bytes * (1 + _ROUNDING), (
        "bounds on what is in flight were too low"
    )
    return result


def fastest(plans: Sequence[ChainPlan]) -> ChainPlan | None:
    """The plan with the least step time, the first one on ties; None if there are no plans."""
    return min(plans, key=lambda plan: plan.step_time_s, default=None)
