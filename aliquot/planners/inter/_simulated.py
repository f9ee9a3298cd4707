"""The last word among a few plans: a simulation, which knows what closed forms leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ...cost import AbstractChain, ChainPlan, simulate_stages

_ROUNDING = 1e-9


def worth_simulating(
    plans: Iterable[tuple[ChainPlan, AbstractChain]], most: int, known: Iterable[ChainPlan] = ()
) -> list[ChainPlan]:
    """The first `most` different plans of each schedule, less those that are known.

    Args:
        plans: each with its chain, best first.
        most: at least 1.
    """
    seen: Counter[str] = Counter()
    looked_at: set[object] = set()
    left_out = {_key(plan) for plan in known}
    chosen = []
    for plan, _ in plans:
        key = _key(plan)
        if key in looked_at or seen[plan.schedule] == most:
            continue
        looked_at.add(key)
        seen[plan.schedule] += 1
        if key not in left_out:
            chosen.append(plan)
    return chosen


def _key(plan: ChainPlan) -> object:
    return plan.stages, plan.schedule, plan.num_micro_batches, plan.num_submeshes


def simulated(chains: Sequence[AbstractChain], plan: ChainPlan) -> ChainPlan:
    """A plan of one of some chains with its step time by simulation."""
    (chain,) = (c for c in chains if c.num_micro_batches == plan.num_micro_batches)
    result, peak_bytes = simulate_stages(chain, plan)
    assert peak_bytes <= chain.memory_limit_bytes * (1 + _ROUNDING), "bounds on what is in flight were too low"
    return result


def fastest(plans: Sequence[ChainPlan]) -> ChainPlan | None:
    """The first of those with the least step time; None without plans."""
    return min(plans, key=lambda plan: plan.step_time_s, default=None)
