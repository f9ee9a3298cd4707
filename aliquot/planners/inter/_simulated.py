"""The last word among a few plans: a simulation, which knows what closed forms leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...cost import Chain, ChainPlan, simulate_stages

_ROUNDING = 1e-9


def fastest_simulated(plans: Iterable[tuple[ChainPlan, Chain]], most: int) -> ChainPlan | None:
    """The fastest in simulation of the first `most` different plans of each schedule; None without plans.

    Args:
        plans: each with its chain, best first; the first of equally fast ones wins.
        most: at least 1.
    """
    best: ChainPlan | None = None
    seen: Counter[str] = Counter()
    known: set[tuple[object, ...]] = set()
    for plan, chain in plans:
        key = (plan.stages, plan.schedule, plan.num_micro_batches, plan.num_submeshes)
        if key in known or seen[plan.schedule] == most:
            continue
        known.add(key)
        seen[plan.schedule] += 1
        simulated, peak_bytes = simulate_stages(chain, plan)
        assert peak_bytes <= chain.memory_limit_bytes * (1 + _ROUNDING), "bounds on what is in flight were too low"
        if best is None or simulated.step_time_s < best.step_time_s:
            best = simulated
    return best
