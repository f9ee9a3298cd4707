"""The exact search: it computes lower bounds for every possible stage, finds the best cuts under
these bounds and solves the stages between the cuts, and repeats this until the best cuts consist of
solved stages or the bound is close enough.

For each size of micro-batch a table holds a lower bound on the time of every stretch of operators.
A dynamic program over cuts gives the stages with the least total bound, which no configuration
beats. Solving one of them raises its table entry, and the entries of the same stretch in other
layers. Once all of them have solutions, these make up a configuration.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._configuration import Configuration, StageConfiguration
from .._performance import Estimate
from ._cuts import Cut, Cuts, CutSearch
from ._evenly import longest_stage, possible_cuts, rate_range, spread_evenly_us
from ._layers import GroupedSpace, group_spaces
from ._problem import (
    Incumbents,
    OnProgress,
    Progress,
    SearchProblem,
    SearchResult,
    limit_of,
    space_name,
    why_ended,
)
from ._reach import least_step_us
from ._space import Floats, StageSpace
from ._stage import StageAnswer, Stretch, solve_stage
from ._tables import Period, PossibleStages, bound_stretches, find_period

_COARSE_RATES = 4
_FINE_RATES = 9
_MOST_SPLITS = 60
# Shares of `max_labels` with which a stage is solved the first time, the second time, ...; with 0
# only shortest paths are tried.
_EFFORTS = (0.0, 0.1, 0.4, 1.0)
# Longer stages keep fewer partial stages at each operator, so that all take about the same work.
_FEW_OPERATORS = 100
# Cuts within layers are moved until so many operators were solved anew.
_MOST_RECUT = 3_000
_CLOSE = "the bound is close enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Search over cuts, devices, degrees, algorithms, recomputed operators and micro-batches with a
    certified bound.

    Attributes:
        max_rounds: the most dynamic programs over cuts, summed over sizes of micro-batches.
        max_entries: the most table entries that these read, so that long chains get fewer rounds.
        max_labels: the most partial stages kept at each operator while the gap of a stage is closed
            by enumeration; fewer in long stages.
        gap: distance between bound and best time at which the search ends, as a share of the best
            time.
        budget_s: seconds after which the search ends; with None the result is deterministic.
        keep: number of distinct configurations to return.
    """

    max_rounds: int = 60
    max_entries: float = 4.5e7
    max_labels: int = 500
    gap: float = 0.005
    budget_s: float | None = None
    keep: int = 1

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Search from known configurations."""
        return _Search(self, problem, on_progress).run(start)


class _Search:
    def __init__(
        self, planner: Exact, problem: SearchProblem, on_progress: OnProgress | None
    ) -> None:
        self._planner, self._problem, self._on_progress = planner, problem, on_progress
        self._limit = limit_of(planner.budget_s)
        self._best = Incumbents(problem, self._limit, keep=planner.keep)
        # Number of table entries that dynamic programs over cuts have read.
        self._entries = 0
        # Bounds of micro-batch sizes that no further round can raise.
        self._exhausted: list[float] = []
        self._batches: list[_MicroBatch] = []

    def run(self, start: Sequence[Configuration]) -> SearchResult:
        queue: list[tuple[float, int, _MicroBatch]] = []
        try:
            for configuration in start:
                self._best.offer(configuration)
            self._limit.check()
            with self._limit.ringing():
                for size in self._problem.micro_batches:
                    self._batches.append(_MicroBatch.make(self._problem, size))
                queue += [(batch.bound_us, batch.size, batch) for batch in self._batches]
                heapq.heapify(queue)
                ended = self._search(queue)
                if any(batch.grouped for batch in self._batches):
                    self._solve_operators()
                    for batch in self._batches:
                        batch.bound_operators(self._problem, self._best.best_us)
                    if ended == _CLOSE and self._bound(queue) < self._enough_us:
                        ended = f"{_CLOSE} for cuts between layers, not for those within"
        except KeyboardInterrupt as error:
            ended = why_ended(error)
        bound = self._bound(queue)
        return SearchResult(
            best=self._best.results(),
            lower_bound_ms=bound / 1000 if np.isfinite(bound) else 0.0,
            space=space_name(self._problem),
            scored=self._best.scored,
            search_s=self._limit.elapsed_s,
            best_found_at_s=self._best.found_at_s,
            ended=ended,
        )

    @property
    def _enough_us(self) -> float:
        """A bound that is close enough to the best time to end the search."""
        return self._best.best_us * (1 - self._planner.gap)

    def _search(self, queue: list[tuple[float, int, _MicroBatch]]) -> str:
        """Run rounds until the bound is close enough; returns the reason why they ended."""
        rounds = 0
        while queue:
            bound, _, batch = queue[0]
            if bound >= self._enough_us:
                is_known = min([np.inf, *self._exhausted]) >= self._enough_us
                return _CLOSE if is_known else "what is left costs too much to search"
            if self._entries >= self._planner.max_entries:
                return f"the limit of {self._planner.max_entries:,.0f} table entries"
            if rounds >= self._planner.max_rounds:
                return f"the limit of {self._planner.max_rounds} rounds"
            self._limit.check()
            rounds += 1
            if self._improve(batch):
                heapq.heapreplace(queue, (batch.bound_us, batch.size, batch))
            else:
                # In this order, as no bound may be lost if the search is stopped between.
                self._exhausted.append(batch.bound_us)
                heapq.heappop(queue)
            self._tell(queue)
        return "nothing was left to search"

    def _solve_operators(self) -> None:
        """Solve the stages of the best configurations operator by operator, after a search layer by
        layer, and move the cuts of the best one within layers.
        """
        for configuration, _ in self._best.results():
            stages, first = list(configuration.stages), 0
            for k, stage in enumerate(configuration.stages):
                last = first + len(stage.tensor)
                stages[k] = self._solved(configuration, k, first, last) or stage
                first = last
            self._best.offer(self._problem.configuration(configuration.micro_batch, tuple(stages)))
        left = _MOST_RECUT
        while left > 0 and (results := self._best.results()):
            moved = self._recut(*results[0], most=left)
            left -= moved
            if self._best.results()[0] is results[0] or not moved:
                break

    def _recut(self, configuration: Configuration, estimate: Estimate, *, most: int) -> int:
        """Move operators from the slowest stage to a neighbour until a move helps, or stages with
        `most` operators were solved for that; how many it were.
        """
        times = [stage.busy_ms for stage in estimate.stages]
        ends = [0, *itertools.accumulate(len(stage.tensor) for stage in configuration.stages)]
        slowest, solved = times.index(max(times)), 0
        for other in sorted(
            {slowest - 1, slowest + 1} & {*range(len(times))}, key=times.__getitem__
        ):
            # As many as make both take the same time, if all operators took the same, and fewer.
            each = times[slowest] / len(configuration.stages[slowest].tensor)
            far = max(1, round((times[slowest] - times[other]) / (2 * each)))
            for count in dict.fromkeys((far, (far + 1) // 2, 1)):
                cuts, at = list(ends), max(slowest, other)
                cuts[at] += count if other < slowest else -count
                if solved >= most or not cuts[at - 1] < cuts[at] < cuts[at + 1]:
                    continue
                stages = list(configuration.stages)
                for k in (slowest, other):
                    solved += cuts[k + 1] - cuts[k]
                    stage = self._solved(configuration, k, cuts[k], cuts[k + 1])
                    if stage is None:
                        break
                    stages[k] = stage
                else:
                    made = self._problem.configuration(configuration.micro_batch, tuple(stages))
                    if self._best.offer(made):
                        return solved
        return solved

    def _solved(
        self, configuration: Configuration, k: int, first: int, last: int
    ) -> StageConfiguration | None:
        """Stage `k` of a configuration solved anew for these operators; None if they do not fit."""
        sizes = [stage.num_devices for stage in configuration.stages]
        device, space = sum(sizes[:k]), self._problem.spaces(configuration.micro_batch)[sizes[k]]
        stretch = Stretch(
            first=first,
            last=last,
            in_flight=self._problem.in_flight(configuration.micro_batch, len(sizes) - 1 - k),
            entered=int(device > 0 and device % self._problem.gpus_per_node == 0),
            left=int((device + sizes[k]) % self._problem.gpus_per_node == 0),
        )
        answer = solve_stage(
            space,
            stretch,
            memory_limit_mb=self._problem.memory_limit_mb,
            ceiling_us=np.inf,
            rate_us_per_mb=0.0,
            max_labels=0,
        )
        return as_stage(space, answer) if np.isfinite(answer.time_us) else None

    def _bound(self, queue: Sequence[tuple[float, int, _MicroBatch]]) -> float:
        if not queue and not self._exhausted:
            return 0.0
        if any(batch.grouped for batch in self._batches):
            # The tables hold for cuts between layers alone.
            return min([*(batch.least_us for batch in self._batches), self._best.best_us])
        return min([*(entry[0] for entry in queue), *self._exhausted, self._best.best_us])

    def _tell(self, queue: Sequence[tuple[float, int, _MicroBatch]]) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    best_ms=self._best.best_us / 1000,
                    bound_ms=self._bound(queue) / 1000,
                    scored=self._best.scored,
                    elapsed_s=self._limit.elapsed_s,
                )
            )

    def _improve(self, batch: _MicroBatch) -> bool:
        """One round: find the best cuts and solve their stages. False if no further round can
        improve this micro-batch size.
        """
        if batch.operators and np.isfinite(self._best.best_us):
            batch.bound_operators(self._problem, self._best.best_us)
            return True
        if not batch.tables:
            batch.bound_coarsely(self._problem, self._best.best_us)
        assert batch.search is not None
        cuts, bound = batch.search.solve(
            batch.count, tolerance=self._planner.gap / 4, max_splits=batch.max_splits
        )
        self._entries += sum(table.size for table in batch.tables.values())
        batch.bound_us = max(batch.bound_us, bound)
        if cuts is None:
            batch.bound_us = np.inf
            return True
        if batch.bound_us >= self._enough_us:
            # The best time only falls, so this micro-batch size is never searched again.
            batch.forget()
            return True
        values = [batch.entry(cut) for cut in cuts.stages]
        # Stages without a solution are solved first, by shortest paths. Once all stages have one,
        # their gaps are closed by enumeration.
        unsolved = [cut for cut in cuts.stages if batch.key(cut) not in batch.answers]
        if not unsolved:
            unsolved = [cut for cut in cuts.stages if batch.can_improve(cut)]
        for cut, value in zip(cuts.stages, values, strict=True):
            if cut in unsolved:
                ceiling = (self._best.best_us - (cuts.total_us - value)) / batch.count
                batch.solve(self._problem, cut, ceiling, self._planner.max_labels)
                self._best.scored += 1
        answers = [batch.answers[batch.key(cut)] for cut in cuts.stages]
        if all(np.isfinite(answer.time_us) for answer in answers):
            stages = tuple(
                batch.as_stage(cut, answer)
                for cut, answer in zip(cuts.stages, answers, strict=True)
            )
            if self._best.offer(self._problem.configuration(batch.size, stages)):
                for each in self._batches:
                    each.shorten(self._best.best_us)
        if not batch.refined:
            batch.refine(self._problem, cuts, self._best.best_us)
            return True
        if not unsolved and batch.max_splits < _MOST_SPLITS:
            batch.max_splits = _MOST_SPLITS
            return True
        return bool(unsolved)


def as_stage(space: StageSpace, answer: StageAnswer) -> StageConfiguration:
    """The configuration of a solved stage."""
    states = [space.states[k] for k in answer.states]
    tensor, data, algorithm = (tuple(column) for column in zip(*states, strict=True))
    return StageConfiguration(
        num_devices=space.num_devices,
        tensor=tensor,
        data=data,
        algorithm=algorithm,
        recompute=answer.recompute,
    )


@dataclass(slots=True, kw_only=True)
class _MicroBatch:
    """The search with one micro-batch size: its tables of bounds, the solved stages, and a lower
    bound on all its configurations.

    There is a table for each number of devices. A stage is known by its number of devices, the
    number of stages after it, the index of its links, its first operator and the end of its
    operators.

    Long chains are cut between layers alone, and the tables bound only such configurations. What
    bounds all is `least_us`, from the spaces of single operators (`operators`, emptied once it is
    known).
    """

    size: int
    count: int
    spaces: dict[int, StageSpace]
    grouped: dict[int, GroupedSpace]
    period: Period
    links: dict[int, tuple[tuple[int, int], ...]]
    tables: dict[int, Floats] = field(default_factory=dict)
    rates: dict[int, Floats] = field(default_factory=dict)
    chosen_rates: dict[int, NDArray[np.int8]] = field(default_factory=dict)
    operators: dict[int, StageSpace] = field(default_factory=dict)
    least_us: float = 0.0
    search: CutSearch | None = None
    rate_step: float = 1.0
    answers: dict[tuple[int, int, int, int, int], StageAnswer] = field(default_factory=dict)
    bound_us: float = 0.0
    refined: bool = False
    max_splits: int = 6
    efforts: dict[tuple[int, int, int, int, int], int] = field(default_factory=dict)

    @classmethod
    def make(cls, problem: SearchProblem, size: int) -> _MicroBatch:
        """The spaces of stages, and a bound that spreads work and memory evenly over all
        devices.
        """
        spaces = problem.spaces(size)
        count = problem.num_micro_batches(size)
        grouped, operators = group_spaces(spaces), spaces
        spaces = {n: each.space for n, each in grouped.items()} or spaces
        kinds = next(iter(spaces.values())).kinds
        return cls(
            size=size,
            count=count,
            spaces=spaces,
            grouped=grouped,
            operators=operators,
            period=find_period(kinds),
            links={n: tuple(_links(problem, n)) for n in spaces},
            bound_us=count
            * spread_evenly_us(
                spaces, num_devices=problem.num_devices, memory_limit_mb=problem.memory_limit_mb
            )
            / problem.num_devices,
        )

    def bound_operators(self, problem: SearchProblem, enough_us: float) -> None:
        """Bound all configurations of single operators, once."""
        if self.operators:
            self.least_us = least_step_us(problem, self.size, self.operators, enough_us)
            self.bound_us = max(self.bound_us, self.least_us)
            self.operators = {}

    def bound_coarsely(self, problem: SearchProblem, ceiling_us: float) -> None:
        """Compute the tables of bounds with few rates, far apart."""
        low, high = rate_range(self.spaces)
        rates = np.concatenate([[0.0], np.geomspace(low, high, _COARSE_RATES)])
        self.rate_step = (high / low) ** (1 / (_COARSE_RATES - 1))
        self._bound_stretches(problem, rates, ceiling_us)
        self.search = CutSearch(
            self.tables,
            self.links,
            num_operators=len(next(iter(self.spaces.values())).kinds),
            num_devices=problem.num_devices,
            gpus_per_node=problem.gpus_per_node,
            max_stages=problem.max_stages,
        )

    def _bound_stretches(self, problem: SearchProblem, rates: Floats, ceiling_us: float) -> None:
        """Compute the tables of bounds with these rates, or raise their bounds if there are some
        already.
        """
        places = possible_cuts(
            self.spaces,
            num_devices=problem.num_devices,
            memory_limit_mb=problem.memory_limit_mb,
            stage_us=ceiling_us / self.count,
        )
        for n, space in self.spaces.items():
            behind = range(min(problem.max_stages, problem.num_devices - n + 1))
            in_flight = [problem.in_flight(self.size, k) for k in behind]
            bounds = bound_stretches(
                space,
                self.period,
                in_flight=in_flight,
                rates_us_per_mb=rates / np.array(in_flight)[:, None],
                memory_limit_mb=problem.memory_limit_mb,
                links=self.links[n],
                may_be=PossibleStages(
                    longest=longest_stage(space, ceiling_us / self.count),
                    begins=np.logical_or.reduce(places[: len(places) - n, :-1]),
                    ends=np.logical_or.reduce(places[n:]),
                ),
            )
            if n in self.tables:
                # The ceiling has fallen since the last time, and stages may have fewer operators.
                width = bounds.bound_us.shape[-1]
                self.tables[n][..., width:] = np.inf
                np.maximum(
                    self.tables[n][..., :width], bounds.bound_us, out=self.tables[n][..., :width]
                )
            else:
                self.tables[n] = bounds.bound_us
                self.rates[n], self.chosen_rates[n] = bounds.rates_us_per_mb, bounds.rate

    def forget(self) -> None:
        """Free the tables, which are most of the memory of a search."""
        self.tables.clear()
        self.chosen_rates.clear()
        self.search = None

    def shorten(self, ceiling_us: float) -> None:
        """Drop the table entries of stages with more operators than fit below the ceiling."""
        for n, table in self.tables.items():
            self.tables[n] = table[..., : longest_stage(self.spaces[n], ceiling_us / self.count)]

    def refine(self, problem: SearchProblem, cuts: Cuts, ceiling_us: float) -> None:
        """Raise the bounds in the tables, with rates close to those that gave the bounds of these
        cuts.
        """
        self.refined = True
        memory_rates = []
        for cut in cuts.stages:
            k = self.chosen_rates[cut.num_devices][
                cut.behind, cut.links, cut.first, cut.last - cut.first - 1
            ]
            rate = self.rates[cut.num_devices][cut.behind, k]
            memory_rates.append(rate * problem.in_flight(self.size, cut.behind))
        positive = [rate for rate in memory_rates if rate > 0]
        if positive:
            spread = self.rate_step**0.75
            self._bound_stretches(
                problem,
                np.geomspace(min(positive) / spread, max(positive) * spread, _FINE_RATES),
                ceiling_us,
            )
        self.chosen_rates.clear()

    def as_stage(self, cut: Cut, answer: StageAnswer) -> StageConfiguration:
        """The configuration of a solved stage."""
        if self.grouped:
            return self.grouped[cut.num_devices].as_stage(cut.first, answer)
        return as_stage(self.spaces[cut.num_devices], answer)

    def key(self, cut: Cut) -> tuple[int, int, int, int, int]:
        """The key of a stage in `answers`."""
        return cut.num_devices, cut.behind, cut.links, cut.first, cut.last

    def entry(self, cut: Cut) -> float:
        """The bound of a stage in its table."""
        return float(
            self.tables[cut.num_devices][cut.behind, cut.links, cut.first, cut.last - cut.first - 1]
        )

    def can_improve(self, cut: Cut) -> bool:
        """True if more effort may close the gap of a solved stage."""
        key = self.key(cut)
        return not self.answers[key].is_exact and self.efforts[key] < len(_EFFORTS)

    def solve(self, problem: SearchProblem, cut: Cut, ceiling_us: float, max_labels: int) -> None:
        """Solve a stage, and raise its entry of the table and those of the same stretch in other
        layers.

        Every call for the same stage takes more effort than the call before.
        """
        effort = self.efforts.get(self.key(cut), 0)
        entered, left = self.links[cut.num_devices][cut.links]
        rates = self.rates[cut.num_devices][cut.behind]
        stretch = Stretch(
            first=cut.first,
            last=cut.last,
            in_flight=problem.in_flight(self.size, cut.behind),
            entered=entered,
            left=left,
        )
        answer = solve_stage(
            self.spaces[cut.num_devices],
            stretch,
            memory_limit_mb=problem.memory_limit_mb,
            ceiling_us=ceiling_us,
            rate_us_per_mb=float(rates[len(rates) // 2]),
            max_labels=math.ceil(
                _EFFORTS[effort] * max_labels * min(1.0, _FEW_OPERATORS / (cut.last - cut.first))
            ),
        )
        previous = self.answers.get(self.key(cut))
        if previous is not None:
            answer = previous.improved(answer)
        table = self.tables[cut.num_devices]
        num = table.shape[2]
        for shift in self._shifts(cut, num):
            key = cut.num_devices, cut.behind, cut.links, cut.first + shift, cut.last + shift
            self.answers[key], self.efforts[key] = answer, effort + 1
            at = cut.behind, cut.links, cut.first + shift, cut.last - cut.first - 1
            table[at] = max(table[at], answer.bound_us)

    def _shifts(self, cut: Cut, num: int) -> list[int]:
        """Numbers of operators by which the stretch can be shifted and remain the same."""
        period = self.period
        inside = period.count and cut.first >= period.first and cut.last <= period.end
        if not inside or cut.first == 0 or cut.last == num:
            return [0]
        back = (cut.first - period.first) // period.length
        ahead = (period.end - cut.last) // period.length
        shifts = [k * period.length for k in range(-back, ahead + 1)]
        return [s for s in shifts if cut.first + s > 0 and cut.last + s < num]


def _links(problem: SearchProblem, num_devices: int) -> list[tuple[int, int]]:
    """The possible links of a stage of so many devices: pairs that say whether the transfers into
    and out of it cross nodes.
    """
    if problem.num_nodes == 1:
        return [(0, 0), (0, 1)] if num_devices < problem.gpus_per_node else [(0, 1)]
    if num_devices == problem.gpus_per_node:
        return [(0, 1), (1, 1)]
    return [(0, 0), (0, 1), (1, 0)]
