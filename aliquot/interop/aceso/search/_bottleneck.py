"""Bottleneck relief over a measured database: the search is that of `planners.inter.bottleneck`,
over stages whose operators all have the same degrees. At the end the stages of the best few
candidates are solved operator by operator. The result is deterministic.

Reference: G. Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck
Alleviation", EuroSys 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....planners.inter.bottleneck import Candidate, Neighbours, Relief, Variant, with_moved
from .._configuration import Configuration
from ._exact import as_stage
from ._measured_chain import MeasuredChain
from ._problem import (
    MOST_OPERATORS,
    Incumbents,
    OnProgress,
    Progress,
    SearchProblem,
    SearchResult,
    limit_of,
    space_name,
    why_ended,
)
from ._stage import StageAnswer, Stretch, solve_stage

_SCHEDULE = "1f1b"


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
        self._limit = limit_of(planner.budget_s)
        self._best = Incumbents(problem, self._limit, keep=planner.keep)
        self._chains: list[MeasuredChain] = []
        self._relief = self._begun()
        self._answers: dict[tuple[int, ...], StageAnswer] = {}
        self._solved_operators = 0

    def run(self, start: Sequence[Configuration]) -> SearchResult:
        for configuration in start:
            self._best.offer(configuration)
        try:
            self._limit.check()
            with self._limit.ringing():
                for size in self._problem.micro_batches:
                    self._chains.append(MeasuredChain.make(self._problem, size))
                ended = self._search()
        except KeyboardInterrupt as error:
            ended = why_ended(error)
            for best in self._relief.ranked()[:1]:
                self._best.offer(self._uniform_configuration(best))
        return SearchResult(
            best=self._best.results(),
            lower_bound_ms=0.0,
            space=space_name(self._problem),
            scored=self._best.scored + len(self._relief.scores),
            search_s=self._limit.elapsed_s,
            best_found_at_s=self._best.found_at_s,
            ended=ended,
        )

    def _begun(self) -> Relief:
        """The relief of the chains so far."""
        variants = [
            Variant(number=k, chain=chain, schedule=_SCHEDULE)
            for k, chain in enumerate(self._chains)
        ]
        around = Neighbours(variants, most_stages=self._problem.max_stages)
        return Relief(around, in_flight=self._in_flight)

    def _search(self) -> str:
        """Relieve bottlenecks, then solve the stages of the best candidates; returns the reason why
        the search ended.
        """
        self._relief = self._begun()
        is_done = self._relief.run(
            starts=self._planner.starts,
            max_steps=self._planner.max_steps,
            max_hops=self._planner.max_hops,
            tell=self._tell,
        )
        self._polish()
        return (
            "nothing was left to relieve"
            if is_done
            else f"the limit of {self._planner.max_steps} steps"
        )

    def _in_flight(self, candidate: Candidate) -> list[float]:
        size = self._chains[candidate.variant].micro_batch
        count = len(candidate.options)
        return [self._problem.in_flight(size, count - 1 - k) for k in range(count)]

    def _tell(self) -> None:
        self._limit.check()
        if self._on_progress is not None:
            best = min(self._relief.scores.values(), key=lambda score: score.key)
            best_us = np.inf if best.excess_bytes else 1e6 * best.step_s
            self._on_progress(
                Progress(
                    best_ms=min(self._best.best_us, best_us) / 1000,
                    bound_ms=0.0,
                    scored=len(self._relief.scores),
                    elapsed_s=self._limit.elapsed_s,
                )
            )

    def _polish(self) -> None:
        """Solve the stages of the best candidates, and relieve the bottlenecks that remain."""
        ranked = self._relief.ranked()
        affordable = self._planner.max_solved_operators // len(self._problem.chain.operators)
        solved = max(min(self._planner.polished, affordable), 1)
        chosen = self._relief.spread(ranked, max(solved, self._planner.keep))
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
        chain, quoted_s = self._chains[candidate.variant], self._relief.scores[candidate].stage_s
        work = sum(
            chain.rows[option][0] * min(answer.time_us, 1e6 * quoted)
            for option, answer, quoted in zip(
                candidate.options, self._solved(candidate), quoted_s.tolist(), strict=True
            )
        )
        return float(chain.num_micro_batches * work / chain.num_devices)

    def _relieved(self, at: Candidate) -> Candidate:
        """The candidate after moving operators away from the slowest stage, or from one that does
        not fit, in steps whose size is halved whenever they do not help.
        """
        num_stages = len(at.units)
        count = max(sum(at.units) // (8 * num_stages), 1)
        key = self._solved_key(at)
        while (
            count and num_stages > 1 and self._solved_operators < self._planner.max_solved_operators
        ):
            slow = int(np.argmax([answer.time_us for answer in self._solved(at)]))
            if at.units[slow] > count:
                moves = [with_moved(at, slow, k, count) for k in range(num_stages) if k != slow]
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
        over = sum(n for n, t in zip(candidate.units, times, strict=True) if not np.isfinite(t))
        finite = [t for t in times if np.isfinite(t)]
        return over, max(finite, default=np.inf), sum(finite)

    def _solved(self, candidate: Candidate) -> list[StageAnswer]:
        """Solutions of a candidate's stages, from shortest paths alone."""
        chain, answers, first, device = self._chains[candidate.variant], [], 0, 0
        for option, units, held in zip(
            candidate.options, candidate.units, self._in_flight(candidate), strict=True
        ):
            devices, last = chain.rows[option][0], first + units
            entered, left = chain.links(np.array([device]), devices)[0].tolist()
            key = (chain.micro_batch, devices, first, last, int(held), entered, left)
            if key not in self._answers:
                self._solved_operators += units
                stretch = Stretch(
                    first=first, last=last, in_flight=int(held), entered=entered, left=left
                )
                self._answers[key] = solve_stage(
                    chain.uniform[devices].space,
                    stretch,
                    memory_limit_mb=self._problem.memory_limit_mb,
                    ceiling_us=np.inf,
                    rate_us_per_mb=0.0,
                    max_labels=0,
                )
            answers.append(self._answers[key])
            first, device = last, device + devices
        return answers

    def _solved_configuration(
        self, candidate: Candidate, answers: Sequence[StageAnswer]
    ) -> Configuration:
        chain = self._chains[candidate.variant]
        stages = tuple(
            [
                as_stage(chain.uniform[chain.rows[option][0]].space, answer)
                for option, answer in zip(candidate.options, answers, strict=True)
            ]
        )
        return self._problem.configuration(chain.micro_batch, stages)

    def _uniform_configuration(self, candidate: Candidate) -> Configuration:
        chain = self._chains[candidate.variant]
        stages = [chain.configured(stage) for stage in self._relief.proposed(candidate)]
        return self._problem.configuration(chain.micro_batch, tuple(stages))
