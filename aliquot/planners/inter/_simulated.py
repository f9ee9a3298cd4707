"""The last word among a few plans: a simulation, which knows what closed forms leave out."""

from __future__ import annotations

from collections.abc import Iterable

from ...cost import Chain, ChainPlan, simulate_stages

_ROUNDING = 1e-9


def fastest_simulated(plans: Iterable[tuple[ChainPlan, Chain]], most: int) -> ChainPlan | None:
    """The fastest in simulation of the first `most` different plans that fit when simulated; None if none does.

    Args:
        plans: each with its chain, best first; the first of equally fast ones wins.
        most: at least 1.
    """
    best: ChainPlan | None = None
    seen: set[tuple[object, ...]] = set()
    fitting = 0
    for plan, chain in plans:
        key = (plan.stages, plan.schedule, plan.num_micro_batches, plan.num_submeshes)
        if key in seen:
            continue
        seen.add(key)
        simulated, peak_bytes = simulate_stages(chain, plan)
        if peak_bytes > chain.memory_limit_bytes * (1 + _ROUNDING):
            continue
        fitting += 1
        if best is None or simulated.step_time_s < best.step_time_s:
            best = simulated
        if fitting == most:
            break
    return best
