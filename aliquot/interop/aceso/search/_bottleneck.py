"""Bottleneck relief, the idea of Aceso: a move gives the stage that is slowest, or that needs too
much memory, less work or more devices; several moves in a row (hops) need not improve.

During the search, stages are uniform and quoted from prefix sums, all candidates of a hop at once;
recomputation is part of a quote. At the end the stages of the best few candidates are solved
operator by operator. The result is deterministic.

Reference: G. Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
Alleviation", EuroSys 2024.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._configuration import Configuration, StageConfiguration
from ._exact import as_stage
from ._moves import MOVES, Candidate, Neighbours, Score, with_moved
from ._problem import (
    MOST_OPERATORS,
    Clock,
    Incumbents,
    OnProgress,
    Progress,
    SearchProblem,
    SearchResult,
    space_name,
)
from ._quotes import UniformStages, quote_all
from ._space import BudgetSpent
from ._stage import StageAnswer, solve_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Local search by relief of bottlenecks.

    Attributes:
        max_steps: the most candidates that are expanded.
        max_hops: the most moves in a row that need not improve.
        starts: number of balanced uniform configurations to begin with, which differ in micro-batch
            or in the numbers of devices of their stages.
        polished: number of the best candidates whose stages are solved operator by operator.
        relieved: number of these in which operators are then moved between the solved stages.
        max_solved_operators: a limit on the operators of all solved stages together; once it is
            reached, no more operators are moved.
        keep: number of distinct configurations to return.
        budget_s: seconds after which the search ends.
    """

    max_steps: int = 200
    max_hops: int = 7
    starts: int = 10
    polished: int = 20
    relieved: int = 6
    max_solved_operators: int = 6_000
    keep: int = 1
    budget_s: float | None = None

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
    def __init__(
        self, planner: Bottleneck, problem: SearchProblem, on_progress: OnProgress | None
    ) -> None:
        self._planner, self._problem, self._on_progress = planner, problem, on_progress
        self._clock = Clock(budget_s=planner.budget_s)
        self._best = Incumbents(problem, self._clock.elapsed, keep=planner.keep)
        self._uniform: dict[int, dict[int, UniformStages]] = {}
        self._neighbours = Neighbours(problem, self._uniform)
        self._scores: dict[Candidate, Score] = {}
        self._answers: dict[tuple[int, ...], StageAnswer] = {}
        self._solved_operators = 0

    def run(self, start: Sequence[Configuration]) -> SearchResult:
        for configuration in start:
            self._best.offer(configuration)
        try:
            for size in self._problem.micro_batches:
                self._clock.check()
                self._uniform[size] = quote_all(self._problem, size)
            ended = self._search()
        except (KeyboardInterrupt, BudgetSpent) as error:
            ended = self._clock.ended(error)
            best = min(self._scores, key=lambda each: self._scores[each].key, default=None)
            if best is not None:
                self._best.offer(self._uniform_configuration(best))
        return SearchResult(
            best=self._best.results(),
            lower_bound_ms=0.0,
            space=space_name(self._problem),
            scored=self._best.scored + len(self._scores),
            search_s=self._clock.elapsed(),
            best_found_at_s=self._best.found_at_s,
            ended=ended,
        )

    def _search(self) -> str:
        """Relieve bottlenecks, then solve the stages of the best candidates; returns the reason why
        the search ended.
        """
        begin = list(self._neighbours.balanced())
        self._score(begin)
        begin.sort(key=lambda candidate: self._scores[candidate].key)
        expanded: set[Candidate] = set()
        # A heap with the best candidate first; those that hops reach besides the best are added.
        pool = [
            (self._scores[c].key, k, c) for k, c in enumerate(_spread(begin, self._planner.starts))
        ]
        heapq.heapify(pool)
        steps, order = 0, len(pool)
        while pool and steps < self._planner.max_steps:
            _, _, at = heapq.heappop(pool)
            for _ in range(self._planner.max_hops):
                if at in expanded or steps >= self._planner.max_steps:
                    break
                self._clock.check()
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
        return (
            "nothing was left to relieve"
            if not pool
            else f"the limit of {self._planner.max_steps} steps"
        )

    def _tell(self) -> None:
        if self._on_progress is not None:
            best = min((score for score in self._scores.values()), key=lambda score: score.key)
            self._on_progress(
                Progress(
                    best_ms=min(self._best.best_us, best.time_us if not best.excess_mb else np.inf)
                    / 1000,
                    bound_ms=0.0,
                    scored=len(self._scores),
                    elapsed_s=self._clock.elapsed(),
                )
            )

    def _relief(self, at: Candidate) -> list[Candidate]:
        """Candidates that one move of the worst stage leads to; if there are none, of the second
        worst.
        """
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

    def _score(self, candidates: Sequence[Candidate]) -> None:
        """Score the candidates that have no score yet; stages with the same micro-batch size and
        number of devices are quoted together.
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
                    (
                        index,
                        k,
                        stage.state,
                        first,
                        first + stage.operators,
                        held,
                        entered,
                        int(device % per_node == 0),
                    )
                )
                first += stage.operators
        figures = [np.zeros((len(c.stages), 4)) for c in new]
        for (size, devices), rows in groups.items():
            columns = np.array(rows).T
            quoted = self._uniform[size][devices].quote(
                columns[2],
                columns[3],
                columns[4],
                columns[5],
                columns[6:8].T,
                self._problem.memory_limit_mb,
            )
            for (index, k, *_), *values in zip(rows, *quoted, strict=True):
                figures[index][k] = values
        for candidate, table in zip(new, figures, strict=True):
            count = self._problem.num_micro_batches(candidate.micro_batch)
            times, memory, levels, shares = table.T
            self._scores[candidate] = Score(
                excess_mb=max(float(memory.max()) - self._problem.memory_limit_mb, 0.0),
                time_us=float(times.max() * (count - 1) + times.sum()),
                stage_us=tuple(times.tolist()),
                memory_mb=tuple(memory.tolist()),
                level=tuple(levels.astype(int).tolist()),
                share=tuple(shares.tolist()),
            )

    def _polish(self) -> None:
        """Solve the stages of the best candidates, and relieve the bottlenecks that remain."""
        ranked = sorted(self._scores, key=lambda candidate: self._scores[candidate].key)
        affordable = self._planner.max_solved_operators // len(self._problem.chain.operators)
        solved = max(min(self._planner.polished, affordable), 1)
        chosen = _spread(ranked, max(solved, self._planner.keep))
        for candidate in chosen:
            self._best.offer(self._uniform_configuration(candidate))
        if len(self._problem.chain.operators) > MOST_OPERATORS:
            # To solve one stage of so many operators takes seconds.
            return
        del chosen[solved:]
        chosen.sort(key=self._balanced_us)
        for rank, candidate in enumerate(chosen):
            if (
                rank < self._planner.relieved
                and self._solved_operators < self._planner.max_solved_operators
            ):
                candidate = self._relieved(candidate)
            answers = self._solved(candidate)
            if all(np.isfinite(answer.time_us) for answer in answers):
                self._best.offer(self._solved_configuration(candidate, answers))

    def _balanced_us(self, candidate: Candidate) -> float:
        """Iteration time if the work of the solved stages were spread evenly over the devices."""
        score = self._scores[candidate]
        times = [
            min(answer.time_us, quoted)
            for answer, quoted in zip(self._solved(candidate), score.stage_us, strict=True)
        ]
        work = sum(
            stage.devices * stage_us
            for stage, stage_us in zip(candidate.stages, times, strict=True)
        )
        return (
            self._problem.num_micro_batches(candidate.micro_batch)
            * work
            / self._problem.num_devices
        )

    def _relieved(self, at: Candidate) -> Candidate:
        """The candidate after moving operators away from the slowest stage, or from one that does
        not fit, in steps whose size is halved whenever they do not help.
        """
        count = max(sum(stage.operators for stage in at.stages) // (8 * len(at.stages)), 1)
        key = self._solved_key(at)
        while (
            count
            and len(at.stages) > 1
            and self._solved_operators < self._planner.max_solved_operators
        ):
            slow = int(np.argmax([answer.time_us for answer in self._solved(at)]))
            if at.stages[slow].operators > count:
                moves = [with_moved(at, slow, k, count) for k in range(len(at.stages)) if k != slow]
                best = min(moves, key=self._solved_key)
                if self._solved_key(best) < key:
                    at, key = best, self._solved_key(best)
                    continue
            count //= 2
        return at

    def _solved_key(self, candidate: Candidate) -> tuple[int, float, float]:
        """The order of solved candidates: by the number of operators in stages that do not fit,
        then by the time of the slowest stage, then by the sum of all times.
        """
        times = [answer.time_us for answer in self._solved(candidate)]
        over = sum(
            s.operators for s, t in zip(candidate.stages, times, strict=True) if not np.isfinite(t)
        )
        finite = [t for t in times if np.isfinite(t)]
        return over, max(finite, default=np.inf), sum(finite)

    def _solved(self, candidate: Candidate) -> list[StageAnswer]:
        """Solutions of a candidate's stages, from shortest paths alone."""
        answers, first, device = [], 0, 0
        per_node = self._problem.gpus_per_node
        for k, stage in enumerate(candidate.stages):
            last = first + stage.operators
            entered_between_nodes = int(device > 0 and device % per_node == 0)
            device += stage.devices
            left_between_nodes = int(device % per_node == 0)
            held = self._problem.in_flight(candidate.micro_batch, len(candidate.stages) - 1 - k)
            key = (
                candidate.micro_batch,
                stage.devices,
                first,
                last,
                held,
                entered_between_nodes,
                left_between_nodes,
            )
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
                    check=self._clock.check,
                )
            answers.append(self._answers[key])
            first = last
        return answers

    def _solved_configuration(
        self, candidate: Candidate, answers: Sequence[StageAnswer]
    ) -> Configuration:
        spaces = [
            self._uniform[candidate.micro_batch][stage.devices].space for stage in candidate.stages
        ]
        stages = tuple(
            as_stage(space, answer) for space, answer in zip(spaces, answers, strict=True)
        )
        return self._problem.configuration(candidate.micro_batch, stages)

    def _uniform_configuration(self, candidate: Candidate) -> Configuration:
        stages, first = [], 0
        score = self._scores[candidate]
        for stage, level, share in zip(candidate.stages, score.level, score.share, strict=True):
            uniform = self._uniform[candidate.micro_batch][stage.devices]
            recompute = uniform.flags(stage.state, level, share, first, first + stage.operators)
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


def _spread(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best candidates, one for each combination of micro-batch and numbers of devices of the
    stages.
    """
    chosen: dict[tuple[int, tuple[int, ...]], Candidate] = {}
    for candidate in ranked:
        chosen.setdefault(
            (candidate.micro_batch, tuple(s.devices for s in candidate.stages)), candidate
        )
        if len(chosen) >= count:
            break
    return list(chosen.values())
