"""The error when no stages fit: the smallest stages, the parts of their memory, and remedies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from ....core import InfeasibleError, counted, format_bytes
from ....cost import AbstractChain, Chain, ChainPlan, PrefixSums, judge_stages
from ....plans import Keeps, name_of_part, schedule_kind
from .._base import WorkLeft, no_layout
from ._devices import DeviceProgram
from ._rounds import RoundsProgram, round_counts
from ._tabulated import TabulatedProgram, tabulated_programs

_PRECISION = 1e-3


def nothing_fits(
    chains: Sequence[AbstractChain],
    schedules: Sequence[str],
    num_stages: int | None,
    work_limit: float,
) -> InfeasibleError:
    """The error to raise, with the smallest need over all chains and schedules, to within 0.1 %, or
    the smallest found within a limit on table entries.
    """
    work = WorkLeft(work_limit)
    # Begin with the chains of most, and so smallest, micro-batches.
    by_size = sorted(chains, key=lambda chain: -chain.num_micro_batches)
    plans = [
        (plan, chain)
        for chain in by_size
        for name in schedules
        if work.left > 0 and (plan := _smallest(chain, name, num_stages, work))
    ]
    of_stages = "" if num_stages is None else f" of {num_stages} stages"
    if not plans:
        return InfeasibleError(no_layout(chains[0], num_stages))
    plan, chain = min(plans, key=lambda pair: pair[0].peak_bytes)
    k = max(range(len(plan.figures)), key=lambda k: plan.figures[k].peak_bytes)
    figures, stage = plan.figures[k], plan.stages[k]
    chunks = len(plan.stages) // plan.num_submeshes
    parts = {
        "state": chunks * figures.state_bytes,
        "activations in flight": chunks * figures.held_bytes,
        "working memory": chunks * figures.working_bytes,
    }
    listed = ", ".join(f"{format_bytes(v)} {name_of_part(name)}" for name, v in parts.items())
    limit = chain.memory_limit_bytes
    names = chain.unit_names[stage.first_unit], chain.unit_names[stage.last_unit - 1]
    first, state_bytes, advice = chains[0], parts["state"], []
    if schedule_kind(plan.schedule).keeps is not Keeps.ALL and state_bytes < limit:
        most = max(c.num_micro_batches for c in chains)
        advice.append(f"more micro-batches (now at most {most})")
    if all(option.recompute == "none" for option in first.options) and state_bytes < limit:
        advice.append("options that recompute in the backward pass")
    if num_stages is not None:
        advice.append("another number of stages")
    advice.append(f"more such devices (now {first.num_devices})")
    return InfeasibleError(
        f"No pipeline{of_stages} fits {chain.num_hosts}x{chain.devices_per_host} devices"
        f" ({format_bytes(limit)} usable on each).\n  The smallest found, {plan.schedule} with"
        f" {counted(len(plan.stages), 'stage')} and"
        f" {counted(plan.num_micro_batches, 'micro-batch')}, needs"
        f" {format_bytes(figures.peak_bytes)} on stage {k} ({names[0]} to {names[1]},"
        f" {chain.options[stage.option].name}): {listed}.",
        advice=advice,
        required_bytes=int(figures.peak_bytes),
        available_bytes=int(limit),
        parts=parts,
    )


def _smallest(
    chain: AbstractChain, schedule: str, num_stages: int | None, work: WorkLeft
) -> ChainPlan | None:
    """The stages of least peak memory under a schedule; None if no stages are possible."""
    if not (isinstance(chain, Chain) and chain.may_be_shorter):
        most_chunks = 2 if num_stages is None else chain.num_units
        make = functools.partial(
            tabulated_programs, chain, schedule, num_stages=num_stages, most_chunks=most_chunks
        )
        return _bisect(chain, schedule, lambda limit: make(limit_bytes=limit), work)
    tables = PrefixSums.of(chain)
    if not schedule_kind(schedule).interleaves:
        return _bisect(
            chain,
            schedule,
            lambda limit: [
                DeviceProgram(chain, tables, schedule, num_stages=num_stages, limit_bytes=limit)
            ],
            work,
        )
    # Two chunks are enough: more chunks keep more in flight.
    rounds = round_counts(chain, num_stages, 2 if num_stages is None else chain.num_units)
    plans = [
        _bisect(
            chain,
            schedule,
            lambda limit, n=n, v=v: [  # type: ignore[misc]
                RoundsProgram(chain, tables, schedule, num_submeshes=n, chunks=v, limit_bytes=limit)
            ],
            work,
        )
        for n, v in rounds
    ]
    return min((plan for plan in plans if plan), key=lambda plan: plan.peak_bytes, default=None)


def _bisect(
    chain: AbstractChain,
    schedule: str,
    make: Callable[[float], Sequence[DeviceProgram | RoundsProgram | TabulatedProgram]],
    work: WorkLeft,
) -> ChainPlan | None:
    """The stages of least peak memory, by bisection of the memory limit under which some program
    has a solution.
    """

    def under(limit_bytes: float) -> ChainPlan | None:
        plans = []
        for program in make(limit_bytes):
            before = program.work
            solution = program.solve((math.inf,) * len(program.weights))
            work.spend(program.work - before)
            if solution is not None:
                plans.append(
                    judge_stages(
                        chain, solution.stages, schedule, num_submeshes=program.num_submeshes
                    )
                )
        return min(plans, key=lambda plan: plan.peak_bytes, default=None)

    best = under(math.inf)
    if best is None:
        return None
    low, high = 0.0, best.peak_bytes
    while low < high * (1 - _PRECISION) and work.left > 0:
        middle = (low + high) / 2
        smaller = under(middle)
        if smaller is None:
            low = middle
            continue
        # Programs bound the memory of stages from above, so the judge may find less memory than a
        # program does, and even more under a smaller limit than under a larger one.
        high = min(middle, smaller.peak_bytes)
        if smaller.peak_bytes < best.peak_bytes:
            best = smaller
    return best
