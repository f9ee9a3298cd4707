"""`StageDP`: the best stages over schedules and numbers of micro-batches, with a bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ....core import InputError, nearest
from ....cost import (
    AbstractChain,
    Chain,
    ChainPlan,
    PrefixSums,
    StageChoice,
    find_stage_faults,
    judge_stages,
)
from ....plans import schedule_kind, training_schedules
from ..._helper import HelperProcess
from .._base import NO_LIMITS, AbstractInter, StageLimits, check_chains
from .._simulated import fastest, simulated, worth_simulating
from ..grid import GRID_SCHEDULE, layouts
from ._boxes import Outcome, minimise
from ._devices import DeviceProgram
from ._infeasible import nothing_fits
from ._recut import best_cut, recuts, two_sided_s
from ._rounds import RoundsProgram, round_counts
from ._tabulated import TabulatedProgram, tabulated_programs

_RECUTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDP(AbstractInter):
    """Alpa's dynamic program over stages, exact for schedules' closed forms on a `Chain`.

    Searched are all cuts between units, all options for each stage, all submeshes that take
    consecutive devices and together use all of them, the schedules named here, and the given
    chains' numbers of micro-batches. With interleaved schedules, submeshes are equal and each chunk
    fits into an equal share of its device's memory. On any other chain it uses quotes of all
    stretches and proves no bound.

    Attributes:
        schedules: to choose from. gpipe is never faster than 1f1b in closed form and keeps more; it
            is there to compare.
        num_stages: their number (chunks counted), or None for any.
        most_chunks: on one submesh.
        simulated: number of each schedule's best plans by closed form that are simulated; the
            fastest is the answer. If transfers do not overlap, as many of the best with transfers
            counted at both ends are simulated, too. 1 simulates the least closed form alone.
        relative_gap: smaller improvements are not searched for; the bound accounts for them.
        solve_limit: number of dynamic programs for each chain and schedule; beyond it the bound is
            less tight.
        work_limit: number of table entries for each schedule and all chains, likewise; some 120
            million take a second.

    Reference: L. Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for
    Distributed Deep Learning", OSDI 2022, section 5.2.
    """

    schedules: tuple[str, ...] = ("1f1b", "zero-bubble", "interleaved-1f1b")
    num_stages: int | None = None
    most_chunks: int = 4
    simulated: int = 3
    relative_gap: float = 1e-4
    solve_limit: int = 2000
    work_limit: float = 6e8

    def __post_init__(self) -> None:
        if not self.schedules:
            raise InputError(
                f"No schedule to choose from. Known: {', '.join(training_schedules())}."
            )
        for name in self.schedules:
            if name not in training_schedules():
                raise InputError(
                    f"Unknown schedule {name!r}: {nearest(name, training_schedules())}"
                )
        if self.simulated < 1:
            raise InputError(
                f"{self.simulated} plans are to be simulated; the answer is one of them, so at"
                " least 1."
            )
        if self.num_stages is not None and self.num_stages < 1:
            raise InputError(f"{self.num_stages} stages were asked for; a pipeline has at least 1.")

    @property
    def searches(self) -> bool:
        """See `AbstractInter.searches`."""
        return True

    def check_limits(self, limits: StageLimits) -> None:
        """See `AbstractInter.check_limits`: it keeps to all of them."""

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """See `AbstractInter.solve`.

        The bound is one of closed forms and holds for all stages that this planner may choose. The
        status tells whether the least closed form is proved. The closed form of the answer may be
        larger, as simulation chooses it.
        """
        schedules = (limits.schedule,) if limits.schedule else self.schedules
        planner = replace(
            self, num_stages=limits.num_stages or self.num_stages, schedules=schedules
        )
        check_chains(chains)
        _check_count(chains[0], planner.num_stages)
        return planner._solve(chains, helper or HelperProcess(wanted=False), start)

    def _solve(
        self, chains: Sequence[AbstractChain], helper: HelperProcess, start: ChainPlan | None
    ) -> ChainPlan:
        searched = self._search(chains, helper)
        starts = [start] if start is not None and self._may_choose(chains, start) else []
        if not searched.plans and not starts:
            raise nothing_fits(chains, self.schedules, self.num_stages)
        # Closed forms leave out some waits and transfers, so that the best few are simulated. The
        # plan to start from is among them: the answer is then never slower.
        queue = helper.share(simulated)
        first = worth_simulating(searched.plans, self.simulated)
        queue.add(chains, starts)
        queue.add(chains, first)
        if self.simulated > 1:
            queue.add(chains, worth_simulating(self._more(chains, searched), self.simulated, first))
        best = fastest(queue.answers())
        assert best is not None, (
            "what fits by the bounds on micro-batches in flight fits when simulated"
        )
        # The bound is one of closed forms, whatever the simulation chose.
        best_s = min(
            plan.closed_form_s for plan in [*starts, *(plan for plan, _ in searched.plans[:1])]
        )
        bound_s = min(best_s, searched.bound_s)
        if bound_s <= 0:
            return best
        proved = "optimal" if best_s - bound_s <= 1e-9 * bound_s else "optimal within the gap"
        return replace(
            best,
            lower_bound_s=bound_s,
            bound_holds_for=(
                "closed forms of all stages on consecutive submeshes with the given options"
            ),
            status=proved if searched.complete else "solve limit",
        )

    def _may_choose(self, chains: Sequence[AbstractChain], start: ChainPlan) -> bool:
        """True if a plan to start from lies in the space of the search."""
        its_chains = [
            chain for chain in chains if chain.num_micro_batches == start.num_micro_batches
        ]
        if (
            not its_chains
            or start.schedule not in self.schedules
            or self.num_stages not in (None, len(start.stages))
        ):
            return False
        return not find_stage_faults(
            its_chains[0], start.stages, start.schedule, num_submeshes=start.num_submeshes
        )

    def _search(self, chains: Sequence[AbstractChain], helper: HelperProcess) -> _Searched:
        """Search all schedules; plans come best first by closed form."""
        queue = helper.share(_search_schedule)
        queue.add(_Wanted(planner=self, chains=tuple(chains)), self.schedules)
        runs = sorted(
            [run for answer in queue.answers() for run in answer], key=lambda run: run.order
        )
        plans = [
            (plan, chains[run.chain].under(plan.schedule)) for run in runs for plan in run.plans
        ]
        plans.sort(key=lambda entry: entry[0].closed_form_s)
        return _Searched(
            plans=tuple(plans),
            bound_s=min([run.bound_s for run in runs], default=math.inf),
            complete=all(run.complete for run in runs),
        )

    def _more(
        self, chains: Sequence[AbstractChain], searched: _Searched
    ) -> list[tuple[ChainPlan, AbstractChain]]:
        """More plans that may be fast if a transfer also keeps the sending stage busy, which closed
        forms leave out.

        These are the plans of the search, regular layouts, and both with new cuts for their
        submeshes; best first by a form that counts transfers at both ends.
        """
        # Where transfers run beside tasks, closed forms count them as the simulation does.
        serial = [chain for chain in chains if not chain.overlaps_transfers]
        plans = list(searched.plans) if serial else []
        if GRID_SCHEDULE in self.schedules:
            plans += [
                (plan, chain)
                for chain in serial
                for plan in layouts(chain)
                if plan.peak_bytes <= chain.memory_limit_bytes
                and self.num_stages in (None, len(plan.stages))
            ]
        plans.sort(key=lambda entry: two_sided_s(entry[1], entry[0]))
        candidates, seen = list(plans), Counter[str]()
        cut: dict[object, tuple[ChainPlan, ...]] = {}
        for plan, chain in plans:
            seen[plan.schedule] += 1
            if seen[plan.schedule] <= _RECUTS and isinstance(chain, Chain):
                count = chain.num_micro_batches
                # New cuts and options depend on the submeshes alone.
                key = (
                    plan.schedule,
                    count,
                    tuple(chain.options[stage.option].submesh for stage in plan.stages),
                )
                if key not in cut:
                    cut[key] = recuts(chain, PrefixSums.of(chain), plan)
                candidates.append((best_cut(chain, plan, cut[key]), chain))
        return sorted(candidates, key=lambda entry: two_sided_s(entry[1], entry[0]))

    def programs(self, chain: AbstractChain, schedule: str) -> list[_AnyProgram]:
        """The programs to minimise for a chain under a schedule."""
        chain = chain.under(schedule)
        limit = chain.memory_limit_bytes
        if not isinstance(chain, Chain):
            return [
                *tabulated_programs(
                    chain,
                    schedule,
                    num_stages=self.num_stages,
                    most_chunks=self.most_chunks,
                    limit_bytes=limit,
                )
            ]
        tables = PrefixSums.of(chain)
        if not schedule_kind(schedule).interleaves:
            return [
                DeviceProgram(
                    chain, tables, schedule, num_stages=self.num_stages, limit_bytes=limit
                )
            ]
        return [
            RoundsProgram(chain, tables, schedule, num_submeshes=n, chunks=v, limit_bytes=limit)
            for n, v in round_counts(chain, self.num_stages, self.most_chunks)
        ]


_AnyProgram: TypeAlias = DeviceProgram | RoundsProgram | TabulatedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    """Plans of a search, best first, each with its chain."""

    plans: tuple[tuple[ChainPlan, AbstractChain], ...]
    bound_s: float
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    """A planner with the chains that it searches."""

    planner: StageDP
    chains: tuple[AbstractChain, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """A program to search: of a chain, by its number, under a schedule."""

    program: _AnyProgram
    schedule: str
    chain: int

    @property
    def floor_s(self) -> float:
        sum_low, lows = self.program.lows()
        return sum_low + sum(w * low for w, low in zip(self.program.weights, lows))

    def search(self, cutoff_s: float, planner: StageDP, work_limit: float) -> Outcome:
        sum_low, lows = self.program.lows()
        return minimise(
            self.program.solve,
            self.program.weights,
            lows,
            sum_low=sum_low,
            cutoff_s=cutoff_s,
            relative_gap=planner.relative_gap,
            solve_limit=planner.solve_limit,
            may_go_on=lambda: self.program.work < work_limit,
        )

    def judged(self, stages: Sequence[StageChoice]) -> ChainPlan:
        return judge_stages(
            self.program.chain,
            stages,
            self.schedule,
            num_submeshes=self.program.num_submeshes,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """The result of a program; runs are sorted by `order`."""

    order: tuple[float, int, int, int]
    chain: int
    plans: tuple[ChainPlan, ...]
    bound_s: float
    complete: bool


def _search_schedule(wanted: _Wanted, schedule: str) -> list[_Run]:
    """Search all programs of a schedule.

    Each schedule has a cutoff of its own, since closed forms of different schedules are not equally
    far from the simulation that decides.
    """
    planner = wanted.planner
    programs = [
        ((entry.floor_s, number, planner.schedules.index(schedule), k), entry)
        for number, chain in enumerate(wanted.chains)
        for k, program in enumerate(planner.programs(chain, schedule))
        for entry in [_Program(program=program, schedule=schedule, chain=number)]
    ]
    # The program with the lowest bound first: its best plan is the cutoff for those that follow.
    best_s, runs, work_left = math.inf, [], planner.work_limit
    for order, entry in sorted(programs, key=lambda known: known[0]):
        outcome = entry.search(best_s, planner, work_left)
        work_left -= entry.program.work
        plans = tuple(
            entry.judged(solution.stages) for solution in outcome.solutions[: planner.simulated]
        )
        best_s = min([best_s, *(plan.closed_form_s for plan in plans)])
        runs.append(
            _Run(
                order=order,
                chain=entry.chain,
                plans=plans,
                bound_s=outcome.bound_s if entry.program.proves else 0.0,
                complete=outcome.complete,
            )
        )
    return runs


def _check_count(chain: AbstractChain, num_stages: int | None) -> None:
    if num_stages is None:
        return
    if num_stages > chain.num_units:
        layers = f"{chain.num_units} layer" + "s" * (chain.num_units > 1)
        raise InputError(
            f"{num_stages} stages were asked for, but the step has {layers}, and a stage holds one"
            f" at least.\n  Ask for num_stages={chain.num_units} or less, or name more layers by a"
            " pattern of parameter paths."
        )
