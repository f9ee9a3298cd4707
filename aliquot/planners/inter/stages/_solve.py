"""`StageDP`: the best stages over schedules and numbers of micro-batches, with a bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....core import InputError, nearest
from ....cost import CHAIN_SCHEDULES, Chain, ChainPlan, StageChoice, Stretches, judge_stages
from ..._second import SecondProcess
from .._base import AbstractInter, check_chains
from .._simulated import fastest, simulated, worth_simulating
from ..grid import layouts
from ._boxes import Outcome, minimise
from ._devices import DeviceProgram
from ._infeasible import nothing_fits
from ._recut import best_cut, recuts, two_sided_s
from ._rounds import RoundsProgram, round_counts

_RECUTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDP(AbstractInter):
    """Alpa's dynamic program over stages, exact for the closed forms of `schedule_form`.

    Searched are all cuts between units, all options for each stage, all submeshes that take consecutive devices and
    together use all of them, the schedules named here, and the given chains' numbers of micro-batches. With interleaved
    schedules, submeshes are equal and each chunk fits into an equal share of its device's memory.

    Attributes:
        schedules: to choose from. gpipe is never faster than 1f1b in closed form and keeps more; it is there to compare.
        num_stages: wanted (chunks counted), or None for any number.
        most_chunks: on one submesh.
        simulated: how many of each schedule's best plans by closed form are simulated; the fastest is the answer. Where
            transfers do not overlap, so are as many of the best when an edge counts at both its ends. 1 simulates the
            least closed form alone.
        relative_gap: improvements below it are not looked for; the bound accounts for them.
        solve_limit: dynamic programs for each chain and schedule; after it the bound is less tight.

    Reference: Zheng et al., Alpa: automating inter- and intra-operator parallelism for distributed deep learning, OSDI
        2022, section 5.2.
    """

    schedules: tuple[str, ...] = ("1f1b", "zero-bubble", "interleaved-1f1b")
    num_stages: int | None = None
    most_chunks: int = 4
    simulated: int = 3
    relative_gap: float = 1e-4
    solve_limit: int = 2000

    def __post_init__(self) -> None:
        if not self.schedules:
            raise InputError(f"No schedule to choose from. Known: {', '.join(CHAIN_SCHEDULES)}.")
        for name in self.schedules:
            if name not in CHAIN_SCHEDULES:
                raise InputError(f"Unknown schedule {name!r}: {nearest(name, CHAIN_SCHEDULES)}")
        if self.simulated < 1:
            raise InputError(f"{self.simulated} plans are to be simulated; the answer is one of them, so at least 1.")
        if self.num_stages is not None and self.num_stages < 1:
            raise InputError(f"{self.num_stages} stages were asked for; a pipeline has at least 1.")

    def solve(self, chains: Sequence[Chain], second: SecondProcess | None = None) -> ChainPlan:
        """See `AbstractInter.solve`; `second` takes part.

        The bound is one of closed forms and holds for everything that this planner may choose; so does the status, which
        says how well the least closed form is known. The answer's own closed form may lie above that where simulation
        prefers it.
        """
        check_chains(chains)
        _check_count(chains[0], self.num_stages)
        searched = self._search(chains, second)
        if not searched.plans:
            raise nothing_fits(chains, self.schedules, self.num_stages)
        shared = (second or SecondProcess(wanted=False)).share(simulated)
        first = worth_simulating(searched.plans, self.simulated)
        shared.add(chains, first)
        if self.simulated > 1:
            shared.add(chains, worth_simulating(self._more(chains, searched), self.simulated, first))
        best = fastest(shared.answers())
        assert best is not None, "what fits by the bounds on micro-batches in flight fits when simulated"
        best_s = searched.plans[0][0].closed_form_s
        bound_s = min(best_s, searched.bound_s)
        proved = "optimal" if best_s - bound_s <= 1e-9 * bound_s else "optimal within the gap"
        return replace(
            best,
            lower_bound_s=bound_s,
            bound_holds_for="closed forms of all stages on consecutive submeshes with the given options",
            status=proved if searched.complete else "solve limit",
        )

    def _search(self, chains: Sequence[Chain], second: SecondProcess | None) -> _Searched:
        """All runs, those with the smallest bounds first."""
        shared = (second or SecondProcess(wanted=False)).share(_search_schedule)
        shared.add(
            _Wanted(planner=self, tables=tuple((chain, Stretches.of(chain)) for chain in chains)), self.schedules
        )
        runs = sorted([run for found in shared.answers() for run in found], key=lambda run: run.order)
        plans = [(plan, chains[run.chain]) for run in runs for plan in run.plans]
        plans.sort(key=lambda entry: entry[0].closed_form_s)
        return _Searched(
            plans=tuple(plans),
            bound_s=min([run.bound_s for run in runs], default=math.inf),
            complete=all(run.complete for run in runs),
        )

    def _more(self, chains: Sequence[Chain], searched: _Searched) -> list[tuple[ChainPlan, Chain]]:
        """Where a transfer holds up the stage that sends, too, which closed forms leave out: what else may be fast.

        What was found, regular layouts, and both cut again for their submeshes; best first by a form that does count it.
        """
        waiting = [chain for chain in chains if not chain.overlaps_transfers]
        known = list(searched.plans) if waiting else []
        if "1f1b" in self.schedules:
            known += [
                (plan, chain)
                for chain in waiting
                for plan in layouts(chain)
                if plan.peak_bytes <= chain.memory_limit_bytes and self.num_stages in (None, len(plan.stages))
            ]
        known.sort(key=lambda entry: two_sided_s(entry[1], entry[0]))
        again, seen = list(known), Counter[str]()
        cut: dict[object, tuple[ChainPlan, ...]] = {}
        tables = {chain.num_micro_batches: Stretches.of(chain) for chain in waiting}
        for plan, chain in known:
            seen[plan.schedule] += 1
            if seen[plan.schedule] <= _RECUTS:
                count = chain.num_micro_batches
                # Cuts and options are found anew: plans of the same submeshes come to the same.
                key = plan.schedule, count, tuple(chain.options[stage.option].submesh for stage in plan.stages)
                if key not in cut:
                    cut[key] = recuts(chain, tables[count], plan)
                again.append((best_cut(chain, plan, cut[key]), chain))
        return sorted(again, key=lambda entry: two_sided_s(entry[1], entry[0]))

    def programs(self, chain: Chain, tables: Stretches, schedule: str) -> list[DeviceProgram | RoundsProgram]:
        """What is to be minimised for a chain under a schedule."""
        limit = chain.memory_limit_bytes
        if schedule != "interleaved-1f1b":
            return [DeviceProgram(chain, tables, schedule, num_stages=self.num_stages, limit_bytes=limit)]
        return [
            RoundsProgram(chain, tables, num_submeshes=n, chunks=v, limit_bytes=limit)
            for n, v in round_counts(chain, self.num_stages, self.most_chunks)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    """Plans that were found, best first, each with its chain."""

    plans: tuple[tuple[ChainPlan, Chain], ...]
    bound_s: float
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    """What is searched: chains with their tables, by a planner's limits."""

    planner: StageDP
    tables: tuple[tuple[Chain, Stretches], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """One program to search: a chain, by its number, under a schedule."""

    program: DeviceProgram | RoundsProgram
    schedule: str
    chain: int

    @property
    def floor_s(self) -> float:
        sum_low, lows = self.program.lows()
        return sum_low + sum(w * low for w, low in zip(self.program.weights, lows))

    def search(self, cutoff_s: float, planner: StageDP) -> Outcome:
        sum_low, lows = self.program.lows()
        return minimise(
            self.program.solve,
            self.program.weights,
            lows,
            sum_low=sum_low,
            cutoff_s=cutoff_s,
            relative_gap=planner.relative_gap,
            solve_limit=planner.solve_limit,
        )

    def judged(self, stages: Sequence[StageChoice]) -> ChainPlan:
        return judge_stages(
            self.program.chain,
            stages,
            self.schedule,
            num_submeshes=self.program.num_submeshes if isinstance(self.program, RoundsProgram) else None,
            tables=self.program.tables,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """What came of a program; `order` is its place among all."""

    order: tuple[float, int, int, int]
    chain: int
    plans: tuple[ChainPlan, ...]
    bound_s: float
    complete: bool


def _search_schedule(wanted: _Wanted, schedule: str) -> list[_Run]:
    """All programs of a schedule.

    Each schedule has a cutoff of its own: closed forms are not equally far from the simulation that has the last word.
    """
    planner = wanted.planner
    programs = [
        ((entry.floor_s, number, planner.schedules.index(schedule), k), entry)
        for number, (chain, tables) in enumerate(wanted.tables)
        for k, program in enumerate(planner.programs(chain, tables, schedule))
        for entry in [_Program(program=program, schedule=schedule, chain=number)]
    ]
    best_s, runs = math.inf, []
    for order, entry in sorted(programs, key=lambda known: known[0]):
        outcome = entry.search(best_s, planner)
        plans = tuple(entry.judged(found.stages) for found in outcome.found[: planner.simulated])
        best_s = min([best_s, *(plan.closed_form_s for plan in plans)])
        runs.append(
            _Run(order=order, chain=entry.chain, plans=plans, bound_s=outcome.bound_s, complete=outcome.complete)
        )
    return runs


def _check_count(chain: Chain, num_stages: int | None) -> None:
    if num_stages is None:
        return
    if num_stages > chain.num_units:
        raise InputError(
            f"{num_stages} stages were asked for, but the step has {chain.num_units} layers to cut between.\n"
            f"  Ask for at most {chain.num_units} stages, or name more layers by a pattern of parameter paths."
        )
