"""Cuts for given submeshes where a transfer holds up both ends of its edge.

The closed forms count an edge at the end that receives, which a dynamic program over first units can search. Where stages
do not compute while arrays travel, the sender waits as well, and between hosts that is more than cuts usually differ by.
With the submeshes given, both ends of every edge are known, and cuts and options follow exactly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ....cost import Chain, ChainPlan, StageChoice, Stretches, chain_in_flight, judge_stages
from ._tables import Floats, Ints

# A slower slowest stage may allow for a shorter way through all of them.
_SLACKS = (0.0, 1e-3, 1e-2)


def two_sided_s(chain: Chain, plan: ChainPlan) -> float:
    """A plan's closed form with each edge counted at both its ends; the closed form itself where that is the same."""
    if chain.overlaps_transfers or plan.num_submeshes != len(plan.stages):
        return plan.closed_form_s
    times = np.array([f.forward_s + f.backward_s for f in plan.figures])
    edges = np.array([*(f.transfer_s for f in plan.figures), 0.0])
    received = times + 2 * edges[:-1]
    return plan.closed_form_s + (plan.num_micro_batches - 1) * float((received + 2 * edges[1:]).max() - received.max())


def recut(chain: Chain, plan: ChainPlan) -> ChainPlan:
    """A plan on the same submeshes with the best cuts and options by `two_sided_s`; the plan itself if it is no worse."""
    count = len(plan.stages)
    if chain.overlaps_transfers or plan.num_submeshes != count or count == 1:
        return plan
    costs, options = _stage_costs(chain, plan)
    slowest = _least_maximum(costs)
    best = plan
    for slack in _SLACKS if np.isfinite(slowest) else ():
        edges = _least_sum(np.where(costs <= slowest * (1 + slack) * (1 + 1e-12), costs, np.inf))
        stages = [
            replace(stage, first_unit=int(i), last_unit=int(j), option=int(options[k, i, j]))
            for k, (stage, i, j) in enumerate(zip(plan.stages, edges, edges[1:]))
        ]
        found = judge_stages(chain, stages, plan.schedule)
        if found.peak_bytes <= chain.memory_limit_bytes and two_sided_s(chain, found) < two_sided_s(chain, best):
            best = found
    return best


def _stage_costs(chain: Chain, plan: ChainPlan) -> tuple[Floats, Ints]:
    """[S, U + 1, U + 1]: what units [i, j) as stage k keep its submesh busy for, edges included, and the best option."""
    tables, units, count = Stretches.of(chain), chain.num_units, len(plan.stages)
    sums = tables.forward_s + tables.backward_s
    first, last = np.triu_indices(units + 1, 1)
    kept = chain_in_flight(plan.schedule, chain.num_micro_batches, count, count)
    edges = np.zeros((count + 1, units + 1))
    for k in range(1, count):
        edges[k, 1:units] = _edge_s(chain, plan.stages[k - 1], plan.stages[k])
    costs = np.full((count, units + 1, units + 1), np.inf)
    options = np.zeros(costs.shape, np.int64)
    for k, stage in enumerate(plan.stages):
        submesh = chain.options[stage.option].submesh
        alike = np.array([o for o, option in enumerate(chain.options) if option.submesh == submesh])[:, None]
        needed = tables.stage_bytes(alike, first, last, float(kept[k]))
        runs = (tables.last_end[alike, first] >= last) & (needed <= chain.memory_limit_bytes)
        times = np.where(runs, sums[alike, last] - sums[alike, first], np.inf)
        chosen = times.argmin(axis=0)
        costs[k, first, last] = times[chosen, np.arange(len(first))] + 2 * (edges[k, first] + edges[k + 1, last])
        options[k, first, last] = alike[chosen, 0]
    return costs, options


def _edge_s(chain: Chain, before: StageChoice, behind: StageChoice) -> Floats:
    """[U - 1], one way over the edge between two stages if it is cut in front of unit 1, 2, ..."""
    sender, receiver = (chain.options[stage.option].num_devices for stage in (before, behind))
    hosts = {
        device // chain.devices_per_host
        for stage, size in ((before, sender), (behind, receiver))
        for device in (stage.first_device, stage.first_device + size - 1)
    }
    return chain.transfer_s(chain.boundary_bytes[:-1], sender, receiver, len(hosts) > 1)


def _least_maximum(costs: Floats) -> float:
    reached = np.where(np.arange(costs.shape[1]) == 0, 0.0, np.inf)
    for stage in costs:
        reached = np.maximum(reached[:, None], stage).min(axis=0)
    return float(reached[-1])


def _least_sum(costs: Floats) -> list[int]:
    """Where stages begin and the last one ends, with the least sum of their costs."""
    reached = np.where(np.arange(costs.shape[1]) == 0, 0.0, np.inf)
    came = []
    for stage in costs:
        total = reached[:, None] + stage
        came.append(total.argmin(axis=0))
        reached = total.min(axis=0)
    edges = [costs.shape[1] - 1]
    for before in reversed(came):
        edges.append(int(before[edges[-1]]))
    return edges[::-1]
