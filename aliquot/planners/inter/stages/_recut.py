"""The best cuts for given submeshes if a transfer keeps both its ends busy.

The closed forms count a transfer at the receiving stage alone, so that a dynamic program over first
units can search them. If stages do not compute during transfers, the sender waits as well, and
between hosts that is more than cuts usually differ by. For given submeshes both ends of every
transfer are known, and the best cuts and options are found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ....cost import (
    AbstractChain,
    Chain,
    ChainPlan,
    PrefixSums,
    StageChoice,
    chain_in_flight,
    judge_stages,
)
from ._limits import Floats, Ints, last_within, memory_ends

# Allowances for the slowest stage: if it may be a little slower, the sum over all stages may be
# smaller.
_SLACKS = (0.0, 1e-3, 1e-2)


def two_sided_s(chain: AbstractChain, plan: ChainPlan) -> float:
    """A plan's closed form with each transfer counted at both its ends; if transfers overlap or
    stages are interleaved, the closed form itself.
    """
    if chain.overlaps_transfers or plan.num_submeshes != len(plan.stages):
        return plan.closed_form_s
    received = [f.forward_s + f.backward_s + 2 * f.transfer_s for f in plan.figures]
    return plan.closed_form_s + (plan.num_micro_batches - 1) * (max(_busy_s(plan)) - max(received))


def _busy_s(plan: ChainPlan) -> list[float]:
    """Time for which a micro-batch keeps each stage's submesh busy, with the transfers at both
    ends.
    """
    behind = [*(f.transfer_s for f in plan.figures[1:]), 0.0]
    return [
        f.forward_s + f.backward_s + 2 * f.transfer_s + 2 * b for f, b in zip(plan.figures, behind)
    ]


def best_cut(chain: Chain, plan: ChainPlan, others: Sequence[ChainPlan]) -> ChainPlan:
    """The plan of least `two_sided_s` among a plan and others, the first one on ties."""
    return min((plan, *others), key=lambda candidate: two_sided_s(chain, candidate))


def recuts(chain: Chain, tables: PrefixSums, plan: ChainPlan) -> tuple[ChainPlan, ...]:
    """The best cuts and options on a plan's submeshes, for a few allowances for the slowest stage;
    only those that fit.
    """
    if chain.overlaps_transfers or plan.num_submeshes != len(plan.stages) or len(plan.stages) == 1:
        return ()
    costs, ends = _stage_costs(chain, tables, plan)
    # The least cost of the costliest stage over all cuts; infinite if there are none.
    reached = np.where(np.arange(len(costs[0])) == 0, 0.0, np.inf)
    for stage in costs:
        reached = np.maximum(_windows(reached[:-1], stage.shape[1], np.inf), stage).min(axis=1)
    slowest = float(reached[-1])
    cuts = []
    for slack in _SLACKS if np.isfinite(slowest) else ():
        edges = _least_sum(
            [np.where(c <= slowest * (1 + slack) * (1 + 1e-12), c, np.inf) for c in costs]
        )
        stages = [
            replace(stage, first_unit=i, last_unit=j, option=_fastest(tables, reach, i, j))
            for stage, reach, i, j in zip(plan.stages, ends, edges, edges[1:])
        ]
        judged = judge_stages(chain, stages, plan.schedule)
        if judged.peak_bytes <= chain.memory_limit_bytes:
            cuts.append(judged)
    return tuple(cuts)


# The options of a stage's submesh, and the furthest end of the stage by option and first unit,
# [options, U].
_Ends: TypeAlias = tuple[Ints, Ints]


def _stage_costs(
    chain: Chain, tables: PrefixSums, plan: ChainPlan
) -> tuple[list[Floats], list[_Ends]]:
    """For each stage, the time for which a stretch of units keeps its submesh busy, transfers
    included: [U + 1, B], by end and first unit.

    Column b of row j is for the units [j - B + b, j). B is the largest number of units worth
    considering: no stage of a better plan takes longer than the slowest stage of a plan that fits,
    plus an allowance.
    """
    units, count = chain.num_units, len(plan.stages)
    in_flight = chain_in_flight(plan.schedule, chain.num_micro_batches, count, count)
    edges = np.zeros((count + 1, units + 1))
    for k in range(1, count):
        edges[k, 1:units] = _edge_s(chain, plan.stages[k - 1], plan.stages[k])
    most_s = np.inf
    if plan.peak_bytes <= chain.memory_limit_bytes:
        most_s = float(max(_busy_s(plan))) * (1 + _SLACKS[-1]) * (1 + 1e-9)
    times_of: dict[tuple[tuple[int, int], float], tuple[Floats, _Ends]] = {}
    costs, ends = [], []
    for k, stage in enumerate(plan.stages):
        key = chain.options[stage.option].submesh, float(in_flight[k])
        if key not in times_of:
            times_of[key] = _stage_times(chain, tables, *key, most_s)
        times, reach = times_of[key]
        before = _windows(edges[k, :-1], times.shape[1], 0.0)
        costs.append(times + 2 * (before + edges[k + 1][:, None]))
        ends.append(reach)
    return costs, ends


def _stage_times(
    chain: Chain, tables: PrefixSums, submesh: tuple[int, int], kept: float, most_s: float
) -> tuple[Floats, _Ends]:
    """The costs of `_stage_costs` for one submesh, without transfers, under the fastest option that
    fits.
    """
    alike = np.array([o for o, option in enumerate(chain.options) if option.submesh == submesh])
    sums = (tables.forward_s + tables.backward_s)[alike]
    (within,) = memory_ends(chain, tables, alike, [kept], chain.memory_limit_bytes)
    ends = np.minimum(tables.last_end[alike], within)
    ends = np.minimum(
        ends, last_within(sums, np.full(ends.shape, most_s)) if np.isfinite(most_s) else ends
    )
    width = max(int((ends - np.arange(chain.num_units)).max()), 1)
    lasts = np.arange(chain.num_units + 1)[:, None]
    best = np.full((chain.num_units + 1, width), np.inf)
    for row, reach in zip(sums, ends):
        times = row[:, None] - _windows(row[:-1], width, 0.0)
        np.minimum(best, times, out=best, where=lasts <= _windows(reach, width, 0))
    best[0] = np.inf
    return best, (alike, ends)


def _fastest(tables: PrefixSums, ends: _Ends, first: int, last: int) -> int:
    """The fastest option of a stage for its units."""
    alike, reach = ends
    sums = tables.forward_s + tables.backward_s
    times = np.where(reach[:, first] >= last, sums[alike, last] - sums[alike, first], np.inf)
    return int(alike[times.argmin()])


def _windows(values: NDArray[Any], width: int, outside: float) -> NDArray[Any]:
    """[U + 1, width], row j holding `values[j - width : j]` of U values."""
    return sliding_window_view(
        np.concatenate((np.full(width, outside, values.dtype), values)), width
    )


def _edge_s(chain: Chain, before: StageChoice, behind: StageChoice) -> Floats:
    """[U - 1], the transfer between two stages in one direction, for a cut before unit 1, 2, ..."""
    sender, receiver = (chain.options[stage.option].num_devices for stage in (before, behind))
    hosts = set()
    for stage, size in ((before, sender), (behind, receiver)):
        for device in (stage.first_device, stage.first_device + size - 1):
            hosts.add(device // chain.devices_per_host)
    return chain.transfer_s(chain.boundary_bytes[:-1], sender, receiver, len(hosts) > 1)


def _least_sum(costs: Sequence[Floats]) -> list[int]:
    """First units of the stages of least total cost, and the end of the last one."""
    reached = np.where(np.arange(len(costs[0])) == 0, 0.0, np.inf)
    first_units = []
    for stage in costs:
        total = _windows(reached[:-1], stage.shape[1], np.inf) + stage
        first_units.append(np.arange(len(total)) - stage.shape[1] + total.argmin(axis=1))
        reached = total.min(axis=1)
    edges = [len(costs[0]) - 1]
    for before in reversed(first_units):
        edges.append(int(before[edges[-1]]))
    return edges[::-1]
