"""`StageDP`: the best stages over schedules and numbers of micro-batches, with a bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ....core import InfeasibleError, InputError, format_seconds, nearest
from ....cost import (
    AbstractChain,
    Chain,
    ChainPlan,
    PrefixSums,
    judge_stages,
)
from ....plans import schedule_kind, training_schedules
from ..._helper import HelperProcess
from .._base import (
    NO_LIMITS,
    AbstractInter,
    NoFasterStages,
    StageLimits,
    WorkLeft,
    check_chains,
    check_num_stages,
    starts_in,
)
from .._less_recomputed import recomputing_less
from .._simulated import fastest, simulated, worth_simulating
from ..bottleneck import Bottleneck
from ..grid import GRID_SCHEDULE, layouts
from ._boxes import BoxSearch, StageSolution, first_solution
from ._devices import DeviceProgram
from ._infeasible import nothing_fits
from ._recut import best_cut, recuts, two_sided_s
from ._rounds import RoundsProgram, round_counts
from ._tabulated import TabulatedProgram, tabulated_programs

# For each schedule, the most plans for whose submeshes new cuts are sought, which takes time.
_MOST_RECUTS = 12
# The share of the limit on work that each solve of a search may use, however much is spent.
_LEAST_SHARE = 0.1
# The bottleneck is relieved where the simulation exceeds the bound on closed forms by more than
# this share.
_WORTH_RELIEF = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDP(AbstractInter):
    """Alpa's dynamic program over stages, exact for schedules' closed forms on a `Chain`.

    The search covers all cuts between units, all options for each stage, all submeshes of
    consecutive devices that together use every device, `schedules`, and the given chains' numbers
    of micro-batches. For interleaved schedules, submeshes are equal and each chunk fits into an
    equal share of its device's memory. On a chain of another class, the planner asks for quotes of
    all stretches of units and proves no bound.

    "Program" in this module is a dynamic program: the stages of one chain under one schedule that
    minimise the closed form.

    Attributes:
        schedules: names of the schedules to choose from. gpipe is left out by default: it is never
            faster than 1f1b in closed form and keeps more memory.
        num_stages: the number of stages (each chunk counts as one), or None for any.
        most_chunks: the most stages on one submesh, in interleaved schedules.
        simulated: the number of each schedule's plans, best by closed form first, that are
            simulated; the answer is the fastest in simulation. If transfers do not overlap, as many
            of the best with transfers counted at both ends are simulated, too. Where the fastest
            exceeds the bound by more than 3 %, its bottleneck is relieved as `Bottleneck` does.
            With 1, the only plan simulated is the one of least closed form.
        relative_gap: smaller improvements are not searched for; the bound accounts for them.
        solve_limit: the most times that a program is solved, for each chain and schedule; a search
            that reaches it ends with a looser bound.
        work_limit: the most table entries, over all chains, schedules and solves of one search; a
            search that reaches it also ends with a looser bound. Some 120 million take a second. A
            solve may always use a tenth of it.
        work: what is left of the limit, in a search that solves several times; see
            `for_one_search`.

    Reference: L. Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for
    Distributed Deep Learning", OSDI 2022, section 5.2.
    """

    schedules: tuple[str, ...] = ("1f1b", "zero-bubble", "interleaved-1f1b")
    num_stages: int | None = None
    most_chunks: int = 4
    simulated: int = 3
    relative_gap: float = 1e-4
    solve_limit: int = 2000
    work_limit: float = 1e9
    work: WorkLeft | None = field(default=None, repr=False, compare=False)

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

    searches = True

    @property
    def asked_stages(self) -> int | None:
        return self.num_stages

    def for_one_search(self) -> StageDP:
        return replace(self, work=WorkLeft(self.work_limit))

    def check_limits(self, limits: StageLimits) -> None:
        """This planner supports all of them."""

    def solve(
        self,
        chains: Sequence[AbstractChain],
        *,
        limits: StageLimits = NO_LIMITS,
        helper: HelperProcess | None = None,
        start: ChainPlan | None = None,
    ) -> ChainPlan:
        """The bound is below the closed forms of all plans that this planner may choose, and the
        status tells whether the least closed form is proved to be the least. The closed form of the
        answer may be larger, because the answer is chosen by simulation.
        """
        schedules = (limits.schedule,) if limits.schedule else self.schedules
        planner = replace(
            self, num_stages=limits.num_stages or self.num_stages, schedules=schedules
        )
        check_chains(chains)
        check_num_stages(chains[0], planner.num_stages)
        helper = helper or HelperProcess(wanted=False)
        return planner._solve(chains, helper, start, limits.faster_than_s)

    def _solve(
        self,
        chains: Sequence[AbstractChain],
        helper: HelperProcess,
        start: ChainPlan | None,
        faster_than_s: float,
    ) -> ChainPlan:
        """Search, then simulate the best few plans and attach the bound to the fastest."""
        searched = self._search(chains, helper, faster_than_s)
        starts = starts_in(chains, start, self.schedules, self.num_stages)
        if not searched.plans and not starts:
            if math.isfinite(faster_than_s):
                raise NoFasterStages(
                    f"no stages were found that take less than {format_seconds(faster_than_s)}"
                )
            if not searched.complete:
                raise self._limit_reached(chains[0])
            raise nothing_fits(chains, self.schedules, self.num_stages, self.work_limit)
        # Closed forms leave out some waits and transfers, so the best few plans are simulated. The
        # plan to start from is among them, so the answer is no slower than it.
        queue = helper.share(simulated)
        first = worth_simulating(searched.plans, self.simulated)
        # The search gives each chunk of a submesh an equal part of its memory.
        chain_of = {chain.num_micro_batches: chain for chain in chains}
        joint: list[ChainPlan] = []
        for plan in first:
            if plan.num_submeshes < len(plan.stages):
                joint.extend(recomputing_less(chain_of[plan.num_micro_batches], plan))
        queue.add(chains, starts)
        queue.add(chains, [*first, *joint])
        if self.simulated > 1:
            by_both_ends = [
                (plan, chain)
                for plan, chain in self._ranked_by_both_ends(chains, searched)
                if plan.closed_form_s < faster_than_s
            ]
            queue.add(chains, worth_simulating(by_both_ends, self.simulated, first))
        best = fastest(queue.answers())
        assert best is not None, (
            "what fits by the bounds on micro-batches in flight fits when simulated"
        )
        near_bound_s = (1 + _WORTH_RELIEF) * searched.bound_s
        if self.simulated > 1 and best.step_time_s > near_bound_s > 0:
            best = self._relieved(best, chain_of[best.num_micro_batches])
        # The bound is on closed forms, so it is compared with the least closed form, not with the
        # plan that the simulation chose.
        best_s = min(
            plan.closed_form_s
            for plan in [best, *starts, *joint, *(plan for plan, _ in searched.plans[:1])]
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

    def _relieved(self, best: ChainPlan, chain: AbstractChain) -> ChainPlan:
        """The fastest plan that relief of the bottleneck finds when it goes on from the best one.

        Closed forms leave out some waits, and count a transfer at one of its ends alone. Relief
        scores whole pipelines, where it keeps both ends busy.
        """
        relief = Bottleneck(
            schedules=self.schedules, num_stages=self.num_stages, most_chunks=self.most_chunks
        )
        return relief.solve([chain], start=best)

    def _limit_reached(self, chain: AbstractChain) -> InfeasibleError:
        return InfeasibleError(
            f"No pipeline was found on {chain.num_hosts}x{chain.devices_per_host} devices within"
            f" the limits of the search ({self.work_limit:,.0f} table entries,"
            f" {self.solve_limit:,} solves of each program); one may fit.\n  Search longer with"
            " StageDP(work_limit=...), or leave less to search: a number of stages, of"
            " micro-batches, or a schedule."
        )

    def _search(
        self, chains: Sequence[AbstractChain], helper: HelperProcess, faster_than_s: float
    ) -> _SearchResult:
        """Search all schedules. Plans are sorted by closed form, best first."""
        queue = helper.share(_search_schedule)
        work = self.work or WorkLeft(self.work_limit)
        share = max(work.left, _LEAST_SHARE * self.work_limit) / len(self.schedules)
        task = _SearchTask(
            planner=self, chains=tuple(chains), work_limit=share, faster_than_s=faster_than_s
        )
        queue.add(task, self.schedules)
        runs = sorted(
            [run for answer in queue.answers() for run in answer], key=lambda run: run.order
        )
        work.spend(sum(run.work for run in runs))
        plans = [
            (plan, chains[run.chain].under(plan.schedule)) for run in runs for plan in run.plans
        ]
        plans.sort(key=lambda entry: entry[0].closed_form_s)
        return _SearchResult(
            plans=tuple(plans),
            bound_s=min([run.bound_s for run in runs], default=math.inf),
            complete=all(run.complete for run in runs),
        )

    def _ranked_by_both_ends(
        self, chains: Sequence[AbstractChain], searched: _SearchResult
    ) -> list[tuple[ChainPlan, AbstractChain]]:
        """Plans sorted by a form that counts transfers at both ends, best first.

        A transfer that does not overlap with tasks keeps both stages busy, while closed forms count
        it at one alone, the stage behind the edge. The plans are those of the search, the regular
        layouts of the grid planner, and both with new cuts for the same submeshes. Empty if
        transfers overlap in all chains.
        """
        # Closed forms agree with the simulation where transfers overlap: nothing to rank again.
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
        candidates, num_seen = list(plans), Counter[str]()
        cuts_of: dict[object, tuple[ChainPlan, ...]] = {}
        for plan, chain in plans:
            num_seen[plan.schedule] += 1
            if (
                num_seen[plan.schedule] <= _MOST_RECUTS
                and isinstance(chain, Chain)
                and chain.may_be_shorter
            ):
                count = chain.num_micro_batches
                # New cuts and options depend on the submeshes alone, which many plans share.
                key = (
                    plan.schedule,
                    count,
                    tuple(chain.options[stage.option].submesh for stage in plan.stages),
                )
                if key not in cuts_of:
                    cuts_of[key] = recuts(chain, PrefixSums.of(chain), plan)
                candidates.append((best_cut(chain, plan, cuts_of[key]), chain))
        return sorted(candidates, key=lambda entry: two_sided_s(entry[1], entry[0]))

    def programs(self, chain: AbstractChain, schedule: str) -> list[_AnyProgram]:
        """The dynamic programs that together cover all plans of a chain under a schedule."""
        chain = chain.under(schedule)
        limit = chain.memory_limit_bytes
        if not (isinstance(chain, Chain) and chain.may_be_shorter):
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
        found: list[_AnyProgram] = []
        for n, v in round_counts(chain, self.num_stages, self.most_chunks):
            found.append(
                RoundsProgram(chain, tables, schedule, num_submeshes=n, chunks=v, limit_bytes=limit)
            )
        return found


_AnyProgram: TypeAlias = DeviceProgram | RoundsProgram | TabulatedProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchResult:
    """The result of a search over all schedules and chains.

    Attributes:
        plans: sorted by closed form, best first, each with its chain.
        bound_s: a lower bound on all closed forms.
        complete: false if some program reached a limit.
    """

    plans: tuple[tuple[ChainPlan, AbstractChain], ...]
    bound_s: float
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SearchTask:
    """A planner, the chains to search, the most table entries for each schedule, and the closed
    form that plans must stay below, as passed to the helper process.
    """

    planner: StageDP
    chains: tuple[AbstractChain, ...]
    work_limit: float
    faster_than_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ProgramResult:
    """The result of a program; results are sorted by `order`."""

    order: tuple[float, int, int, int]
    chain: int
    plans: tuple[ChainPlan, ...]
    bound_s: float
    complete: bool
    work: float


def _search_schedule(task: _SearchTask, schedule: str) -> list[_ProgramResult]:
    """Search all programs of a schedule.

    Each schedule has a cutoff of its own, since closed forms of different schedules are not equally
    far from the simulation that decides.
    """
    planner, work_limit = task.planner, task.work_limit
    turns = []
    for number, chain in enumerate(task.chains):
        for k, program in enumerate(planner.programs(chain, schedule)):
            sum_low, lows = program.lows()
            # A lower bound on the closed form that needs no search comes first.
            least_s = sum_low + sum(w * low for w, low in zip(program.weights, lows))
            order = least_s, number, planner.schedules.index(schedule), k
            gap = planner.relative_gap
            search = BoxSearch(
                program.solve, program.weights, lows, sum_low=sum_low, relative_gap=gap
            )
            turns.append(_Turn(program=program, schedule=schedule, search=search, order=order))
    turns.sort(key=lambda turn: turn.order)
    best_s, spent = task.faster_than_s, 0.0
    # First a quick solution of each large program, for a best to prune with.
    for turn in turns:
        if spent < work_limit and isinstance(turn.program, DeviceProgram):
            spent, best_s = turn.take(turn.first, best_s, spent)
    # Then the program with the lowest bound is always the next.
    while spent < work_limit:
        is_open = [
            turn
            for turn in turns
            if turn.search.is_open(best_s) and turn.search.num_solves < planner.solve_limit
        ]
        if not is_open:
            break
        lowest = min(is_open, key=lambda turn: (turn.search.open_s, turn.order))
        spent, best_s = lowest.take(lowest.search.advance, best_s, spent)
    return [turn.result(best_s, planner.simulated) for turn in turns]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turn:
    """A program that takes turns with the others in the search for the best plan of all.

    Attributes:
        search: for its least closed form.
        order: its lower bound, and what tells programs of equal ones apart.
        solutions: found so far.
    """

    program: _AnyProgram
    schedule: str
    search: BoxSearch
    order: tuple[float, int, int, int]
    solutions: list[StageSolution] = field(default_factory=list)

    def first(self, cutoff_s: float) -> StageSolution | None:
        """A solution below `cutoff_s` that is quick to find; see `first_solution`."""
        sum_low, lows = self.program.lows()
        return first_solution(
            self.program.solve, self.program.weights, lows, sum_low=sum_low, cutoff_s=cutoff_s
        )

    def take(
        self, solve: Callable[[float], StageSolution | None], best_s: float, spent: float
    ) -> tuple[float, float]:
        """Solve once; returns the work that all programs have spent by then, and the best closed
        form.
        """
        before = self.program.work
        found = solve(best_s)
        if found is not None:
            self.solutions.append(found)
            best_s = min(best_s, found.total_s(self.program.weights))
        return spent + self.program.work - before, best_s

    def result(self, best_s: float, most: int) -> _ProgramResult:
        """The best few plans of the program, and a lower bound on all of its plans."""
        program = self.program
        solutions = sorted(self.solutions, key=lambda found: found.total_s(program.weights))
        plans = [
            judge_stages(
                program.chain, found.stages, self.schedule, num_submeshes=program.num_submeshes
            )
            for found in solutions[:most]
        ]
        return _ProgramResult(
            order=self.order,
            chain=self.order[1],
            plans=tuple(plans),
            bound_s=min(self.search.bound_s, best_s) if program.proves else 0.0,
            complete=not self.search.is_open(best_s),
            work=program.work,
        )
