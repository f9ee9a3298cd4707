"""The last word among a few plans: a simulation, which knows what closed forms leave out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...cost import Chain, ChainPlan, simulate_stages

_ROUNDING = 1e-9


def fastest_simulated(
    plans: Iterable[tuple[ChainPlan, Chain]], most: int, known: dict[object, ChainPlan] | None = None
) -> ChainPlan | None:
    """The fastest in simulation of the first `most` different plans of each schedule; None without plans.

    Args:
        plans: each with its chain, best first; the first of equally fast ones wins.
        most: at least 1.
        known: plans that were simulated before; those that are now join them.
    """
    best: ChainPlan | None = None
    seen: Counter[str] = Counter()
    looked_at: set[object] = set()
    known = {} if known is None else known
    for plan, chain in plans:
        key = (plan.stages, plan.schedule, plan.num_micro_batches, plan.num_submeshes)
        if key in looked_at or seen[plan.schedule] == most:
            continue
        looked_at.add(key)
        seen[plan.schedule] += 1
        if key not in known:
            known[key], peak_bytes = simulate_stages(chain, plan)
            assert peak_bytes <= chain.memory_limit_bytes * (1 + _ROUNDING), "bounds on what is in flight were too low"
        simulated = known[key]
        if best is None or simulated.step_time_s < best.step_time_s:
            best = simulated
    return best
