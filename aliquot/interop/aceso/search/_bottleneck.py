"""Bottleneck relief, the idea of Aceso: the stage that is slowest, or that needs too much memory,
is given less work or more devices, in several hops, by moves from one table.

During the search stages are uniform and quoted from prefix sums, all candidates of a hop at once;
recomputation is part of a quote. At the end the stages of the best few are solved operator by
operator. The result is deterministic.

Reference: G. Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
Alleviation", EuroSys 2024.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .._configuration import Configuration, StageConfiguration
from ._exact import as_stage
from ._grid import balance
from ._problem import (
    INTERRUPTED,
    MOST_OPERATORS,
    Incumbents,
    OnProgress,
    Progress,
    SearchProblem,
    SearchResult,
    space_name,
)
from ._quotes import UniformStages, quote_all
from ._stage import StageAnswer, solve_stage


@dataclass(frozen=True, slots=True)
class _Stage:
    """A uniform stage: devices, row of its state, and operators."""

    devices: int
    state: int
    operators: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A configuration of uniform stages."""

    micro_batch: int
    stages: tuple[_Stage, ...]


@dataclass(frozen=True, slots=True)
class _Score:
    """The order of candidates: first by memory beyond the limit, then by time.

    Attributes:
        excess_mb: memory beyond the limit, of the stage that needs most.
        time_us: of an iteration.
        stage_us, memory_mb, level: of each stage.
    """

    excess_mb: float
    time_us: float
    stage_us: tuple[float, ...]
    memory_mb: tuple[float, ...]
    level: tuple[int, ...]

    @property
    def key(self) -> tuple[float, float]:
        return self.excess_mb, self.time_us


_Move = Callable[["_Neighbours", _Candidate, int, _Score], Iterator[_Candidate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Local search by relief of bottlenecks.

    Attributes:
        max_steps: number of candidates that are expanded.
        max_hops: number of moves in a row that need not improve.
        starts: number of balanced uniform configurations to begin with.
        polished: number of the best candidates whose stages are solved operator by operator.
        relieved: number of these between whose solved stages operators are moved further.
        max_solved_operators: summed over all solved stages; once it is reached, no operators are
            moved.
        keep: number of distinct configurations to return.
    """

    max_steps: int = 200
    max_hops: int = 7
    starts: int = 6
    polished: int = 20
    relieved: int = 6
    max_solved_operators: int = 10_000
    keep: int = 1

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Search from balanced uniform configurations; those of `start` are only offered as
        answers.
        """
        return _Search(self, problem, on_progress).run(start)


class _Search:
    def __init__(self, planner: Bottleneck, problem: SearchProblem, on_progress: OnProgress | None) -> None:
        self._planner, self._problem, self._on_progress = planner, problem, on_progress
        self._began = time.perf_counter()
        self._best = Incumbents(problem, self._elapsed, keep=planner.keep)
        self._uniform = {size: quote_all(problem, size) for size in problem.micro_batches}
        self._neighbours = _Neighbours(problem, self._uniform)
        self._scores: dict[_Candidate, _Score] = {}
        self._answers: dict[tuple[int, ...], StageAnswer] = {}
        self._solved_operators = 0

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def run(self, start: Sequence[Configuration]) -> SearchResult:
        for configuration in start:
            self._best.offer(configuration)
        try:
            ended = self._search()
        except KeyboardInterrupt:
            ended = INTERRUPTED
        return SearchResult(
            best=self._best.results(),
            lower_bound_ms=0.0,
            space=space_name(self._problem),
            scored=self._best.scored + len(self._scores),
            search_s=self._elapsed(),
            best_found_at_s=self._best.found_at_s,
            ended=ended,
        )

    def _search(self) -> str:
        """Relieve bottlenecks, then solve the best; returns the reason why the search ended."""
        begin = list(self._neighbours.balanced())
        self._score(begin)
        begin.sort(key=lambda candidate: self._scores[candidate].key)
        expanded: set[_Candidate] = set()
        # The best first; candidates that hops reached without improvement come later.
        pool = [(self._scores[c].key, k, c) for k, c in enumerate(_spread(begin, self._planner.starts))]
        heapq.heapify(pool)
        steps, order = 0, len(pool)
        while pool and steps < self._planner.max_steps:
            _, _, at = heapq.heappop(pool)
            for _ in range(self._planner.max_hops):
                if at in expanded or steps >= self._planner.max_steps:
                    break
                expanded.add(at)
                steps += 1
                reached = [c for c in self._relief(at) if c not in expanded]
                if not reached:
                    break
                reached.sort(key=lambda c: self._scores[c].key)
                for other in reached[1:6]:
                    order += 1
                    heapq.heappush(pool, (self._scores[other].key, order, other))
                at = reached[0]
            self._tell()
        self._polish()
        return "nothing was left to relieve" if not pool else f"the limit of {self._planner.max_steps} steps"

    def _tell(self) -> None:
        if self._on_progress is not None:
            best = min((score for score in self._scores.values()), key=lambda score: score.key)
            self._on_progress(
                Progress(
                    best_ms=min(self._best.best_us, best.time_us if not best.excess_mb else np.inf) / 1000,
                    bound_ms=0.0,
                    scored=len(self._scores),
                    elapsed_s=self._elapsed(),
                )
            )

    def _relief(self, at: _Candidate) -> list[_Candidate]:
        """Candidates one move at the worst stage away; if there are none, at the second worst."""
        score = self._scores[at]
        figures = score.memory_mb if score.excess_mb else score.stage_us
        for worst in np.argsort(figures)[::-1][:2].tolist():
            moves = [move for move, relieves in MOVES if not score.excess_mb or relieves]
            candidates = [c for move in moves for c in move(self._neighbours, at, worst, score)]
            candidates = list(dict.fromkeys(candidates))
            self._score(candidates)
            if candidates:
                return candidates
        return []

    def _score(self, candidates: Sequence[_Candidate]) -> None:
        """Score the new ones; stages of one micro-batch size and number of devices are quoted
        together.
        """
        new = [c for c in dict.fromkeys(candidates) if c not in self._scores]
        groups: dict[tuple[int, int], list[tuple[int, int, int, int, int, int, int, int]]] = {}
        per_node = self._problem.gpus_per_node
        for index, candidate in enumerate(new):
            first = device = 0
            for k, stage in enumerate(candidate.stages):
                entered = int(device > 0 and device % per_node == 0)
                device += stage.devices
                behind = len(candidate.stages) - 1 - k
                held = self._problem.in_flight(candidate.micro_batch, behind)
                groups.setdefault((candidate.micro_batch, stage.devices), []).append(
                    (index, k, stage.state, first, first + stage.operators, held, entered, int(device % per_node == 0))
                )
                first += stage.operators
        figures = [np.zeros((len(c.stages), 3)) for c in new]
        for (size, devices), rows in groups.items():
            columns = np.array(rows).T
            times, memory, level = self._uniform[size][devices].quote(
                columns[2], columns[3], columns[4], columns[5], columns[6:8].T, self._problem.memory_limit_mb
            )
            for (index, k, *_), *values in zip(rows, times, memory, level, strict=True):
                figures[index][k] = values
        for candidate, table in zip(new, figures, strict=True):
            count = self._problem.num_micro_batches(candidate.micro_batch)
            times, memory, levels = table.T
            self._scores[candidate] = _Score(
                excess_mb=max(float(memory.max()) - self._problem.memory_limit_mb, 0.0),
                time_us=float(times.max() * (count - 1) + times.sum()),
                stage_us=tuple(times.tolist()),
                memory_mb=tuple(memory.tolist()),
                level=tuple(levels.astype(int).tolist()),
            )

    def _polish(self) -> None:
        """Solve the stages of the best candidates, and relieve the bottlenecks that remain."""
        ranked = sorted(self._scores, key=lambda candidate: self._scores[candidate].key)
        # Half of the effort goes into solving them as they are, the rest into moving operators.
        affordable = self._planner.max_solved_operators // (2 * len(self._problem.chain.operators))
        chosen = _spread(ranked, max(min(self._planner.polished, affordable), self._planner.keep, 1))
        for candidate in chosen:
            self._best.offer(self._uniform_configuration(candidate))
        if len(self._problem.chain.operators) > MOST_OPERATORS:
            # One stage of so many operators takes seconds.
            return
        chosen.sort(key=self._balanced_us)
        for rank, candidate in enumerate(chosen):
            if rank < self._planner.relieved and self._solved_operators < self._planner.max_solved_operators:
                candidate = self._relieved(candidate)
            answers = self._solved(candidate)
            if all(np.isfinite(answer.time_us) for answer in answers):
                self._best.offer(self._solved_configuration(candidate, answers))

    def _balanced_us(self, candidate: _Candidate) -> float:
        """Iteration time if the work of the solved stages were spread evenly over the devices."""
        score = self._scores[candidate]
        times = [
            min(answer.time_us, quoted) for answer, quoted in zip(self._solved(candidate), score.stage_us, strict=True)
        ]
        work = sum(stage.devices * stage_us for stage, stage_us in zip(candidate.stages, times, strict=True))
        return self._problem.num_micro_batches(candidate.micro_batch) * work / self._problem.num_devices

    def _relieved(self, at: _Candidate) -> _Candidate:
        """Move operators away from the slowest stage, or from one that does not fit, in steps that
        halve.
        """
        count = max(sum(stage.operators for stage in at.stages) // (8 * len(at.stages)), 1)
        key = self._solved_key(at)
        while count and len(at.stages) > 1 and self._solved_operators < self._planner.max_solved_operators:
            slow = int(np.argmax([answer.time_us for answer in self._solved(at)]))
            if at.stages[slow].operators > count:
                moves = [_with_moved(at, slow, k, count) for k in range(len(at.stages)) if k != slow]
                best = min(moves, key=self._solved_key)
                if self._solved_key(best) < key:
                    at, key = best, self._solved_key(best)
                    continue
            count //= 2
        return at

    def _solved_key(self, candidate: _Candidate) -> tuple[int, float, float]:
        """Number of operators in stages that do not fit, then the slowest stage, then the sum of
        all.
        """
        times = [answer.time_us for answer in self._solved(candidate)]
        over = sum(s.operators for s, t in zip(candidate.stages, times, strict=True) if not np.isfinite(t))
        finite = [t for t in times if np.isfinite(t)]
        return over, max(finite, default=np.inf), sum(finite)

    def _solved(self, candidate: _Candidate) -> list[StageAnswer]:
        """Solutions of the stages, from shortest paths."""
        answers, first, device = [], 0, 0
        per_node = self._problem.gpus_per_node
        for k, stage in enumerate(candidate.stages):
            last = first + stage.operators
            entered_between_nodes = int(device > 0 and device % per_node == 0)
            device += stage.devices
            left_between_nodes = int(device % per_node == 0)
            held = self._problem.in_flight(candidate.micro_batch, len(candidate.stages) - 1 - k)
            key = candidate.micro_batch, stage.devices, first, last, held, entered_between_nodes, left_between_nodes
            if key not in self._answers:
                self._solved_operators += last - first
                self._answers[key] = solve_stage(
                    self._uniform[candidate.micro_batch][stage.devices].space,
                    first,
                    last,
                    in_flight=held,
                    entered=entered_between_nodes,
                    left=left_between_nodes,
                    memory_limit_mb=self._problem.memory_limit_mb,
                    ceiling_us=np.inf,
                    rate_us_per_mb=0.0,
                    max_labels=0,
                )
            answers.append(self._answers[key])
            first = last
        return answers

    def _solved_configuration(self, candidate: _Candidate, answers: Sequence[StageAnswer]) -> Configuration:
        spaces = [self._uniform[candidate.micro_batch][stage.devices].space for stage in candidate.stages]
        stages = tuple(as_stage(space, answer) for space, answer in zip(spaces, answers, strict=True))
        return self._problem.configuration(candidate.micro_batch, stages)

    def _uniform_configuration(self, candidate: _Candidate) -> Configuration:
        stages, first = [], 0
        for stage, level in zip(candidate.stages, self._scores[candidate].level, strict=True):
            uniform = self._uniform[candidate.micro_batch][stage.devices]
            recompute = uniform.recompute[stage.state, level, first : first + stage.operators]
            tensor, data, algorithm = uniform.space.states[uniform.states[stage.state]]
            stages.append(
                StageConfiguration(
                    num_devices=stage.devices,
                    tensor=(tensor,) * stage.operators,
                    data=(data,) * stage.operators,
                    algorithm=(algorithm,) * stage.operators,
                    recompute=tuple(recompute.tolist()),
                )
            )
            first += stage.operators
        return self._problem.configuration(candidate.micro_batch, tuple(stages))


def _spread(ranked: Sequence[_Candidate], count: int) -> list[_Candidate]:
    """The best candidates, one for each combination of micro-batch and numbers of devices of the
    stages.
    """
    chosen: dict[tuple[int, tuple[int, ...]], _Candidate] = {}
    for candidate in ranked:
        chosen.setdefault((candidate.micro_batch, tuple(s.devices for s in candidate.stages)), candidate)
        if len(chosen) >= count:
            break
    return list(chosen.values())


class _Neighbours:
    """Candidates that can be run; what the moves need to know of a problem."""

    def __init__(self, problem: SearchProblem, uniform: dict[int, dict[int, UniformStages]]) -> None:
        self.problem, self.uniform = problem, uniform

    def balanced(self) -> Iterator[_Candidate]:
        """For each micro-batch, number of equal stages and state: cuts that balance the stages."""
        for size, by_devices in self.uniform.items():
            for devices, uniform in by_devices.items():
                stages = self.problem.num_devices // devices
                if self.problem.num_devices % devices or stages > self.problem.max_stages:
                    continue
                for row in range(len(uniform.states)):
                    cuts, _ = balance(np.diff(uniform.work_us[row, 0]), stages)
                    yield _Candidate(size, tuple(_Stage(devices, row, n) for n in np.diff(cuts).tolist()))

    def can_run(self, candidate: _Candidate) -> bool:
        """True if every stage has operators and measurements and lies within a node."""
        device, per_node = 0, self.problem.gpus_per_node
        by_devices = self.uniform.get(candidate.micro_batch, {})
        for stage in candidate.stages:
            if stage.operators < 1 or stage.devices not in by_devices:
                return False
            if stage.state >= len(by_devices[stage.devices].states):
                return False
            if device // per_node != (device + stage.devices - 1) // per_node:
                return False
            device += stage.devices
        return device == self.problem.num_devices and len(candidate.stages) <= self.problem.max_stages

    def states(self, candidate: _Candidate, devices: int) -> range:
        """Rows of the states that a stage of so many devices can have."""
        uniform = self.uniform[candidate.micro_batch].get(devices)
        return range(len(uniform.states) if uniform else 0)


def _with(candidate: _Candidate, changes: dict[int, _Stage]) -> _Candidate:
    return replace(candidate, stages=tuple(changes.get(k, stage) for k, stage in enumerate(candidate.stages)))


def _with_moved(at: _Candidate, source: int, target: int, count: int) -> _Candidate:
    """The candidate with so many operators fewer in one stage and more in another; stages between
    are shifted.
    """
    one, two = at.stages[source], at.stages[target]
    return _with(
        at,
        {
            source: replace(one, operators=one.operators - count),
            target: replace(two, operators=two.operators + count),
        },
    )


def _move_operators(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Move operators to another stage, through all stages between."""
    most = at.stages[worst].operators - 1
    for partner in range(len(at.stages)):
        for count in (1, 2, 3, 5, 8, 13, 26, 52):
            if partner != worst and count <= most:
                yield _with_moved(at, worst, partner, count)


def _exchange_degrees(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Change tensor and data degree on the same devices."""
    stage = at.stages[worst]
    for state in around.states(at, stage.devices):
        if state != stage.state:
            yield _with(at, {worst: replace(stage, state=state)})


def _take_devices(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Exchange devices with another stage that has twice as many."""
    stage = at.stages[worst]
    for partner, other in enumerate(at.stages):
        if other.devices != 2 * stage.devices:
            continue
        for state in around.states(at, other.devices):
            for less in around.states(at, stage.devices):
                candidate = _with(
                    at,
                    {
                        worst: _Stage(other.devices, state, stage.operators),
                        partner: _Stage(stage.devices, less, other.operators),
                    },
                )
                if around.can_run(candidate):
                    yield candidate


def _give_operators_for_devices(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Merge two neighbours into one stage with the devices of both."""
    for first in (worst - 1, worst):
        if first < 0 or first + 1 >= len(at.stages):
            continue
        one, two = at.stages[first : first + 2]
        for state in around.states(at, one.devices + two.devices):
            merged = _Stage(one.devices + two.devices, state, one.operators + two.operators)
            candidate = replace(at, stages=(*at.stages[:first], merged, *at.stages[first + 2 :]))
            if around.can_run(candidate):
                yield candidate


def _split_stage(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Split a stage into two with half of its devices each."""
    for k, stage in enumerate(at.stages):
        half = stage.devices // 2
        if stage.devices % 2 or stage.operators < 2:
            continue
        for state in around.states(at, half):
            front = _Stage(half, state, stage.operators // 2)
            back = _Stage(half, state, stage.operators - stage.operators // 2)
            candidate = replace(at, stages=(*at.stages[:k], front, back, *at.stages[k + 1 :]))
            if around.can_run(candidate):
                yield candidate


def _change_micro_batch(around: _Neighbours, at: _Candidate, worst: int, score: _Score) -> Iterator[_Candidate]:
    """Take the next larger or smaller micro-batch for all stages; tensor degrees stay if possible."""
    sizes = sorted(around.uniform)
    k = sizes.index(at.micro_batch)
    for size in (*sizes[max(k - 1, 0) : k], *sizes[k + 1 : k + 2]):
        stages = []
        for stage in at.stages:
            old = around.uniform[at.micro_batch][stage.devices]
            new = around.uniform[size].get(stage.devices)
            if new is None:
                break
            degree = old.space.states[old.states[stage.state]][0]
            rows = [r for r, s in enumerate(new.states) if new.space.states[s][0] == degree]
            stages.append(replace(stage, state=rows[0] if rows else 0))
        else:
            yield _Candidate(size, tuple(stages))


MOVES: tuple[tuple[_Move, bool], ...] = (
    (_move_operators, True),
    (_exchange_degrees, True),
    (_take_devices, True),
    (_give_operators_for_devices, True),
    (_split_stage, False),
    (_change_micro_batch, True),
)
"""Every move, and whether it can relieve memory. Recomputation is part of each quote."""
