"""The grid: configurations whose stages all have the same number of devices, degrees and rule for
recomputation, as an expert would set them by hand, with cuts that balance the stages as far as
their memory allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._configuration import Configuration, StageConfiguration
from ._problem import (
    Incumbents,
    OnProgress,
    SearchProblem,
    SearchResult,
    judge_each,
    space_name,
)
from ._quotes import recompute_levels, stage_memory_mb
from ._space import Floats, StageSpace

_LEVELS = 7
# Bisections end when the slowest stage is known to this share.
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Search over uniform configurations: micro-batch, number of stages, tensor and data degree,
    level of recomputation.

    Attributes:
        keep: number of distinct configurations to return.
        best_of: number of configurations, the fastest by balanced times, that are judged in full.
        budget_s: seconds after which the search ends.
    """

    keep: int = 1
    best_of: int = 400
    budget_s: float | None = None

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Judge configurations of the grid, the fastest by their balanced times first."""
        points = sorted(_points(problem), key=lambda point: point.least_us)[: self.best_of]

        def configurations(best: Incumbents) -> Iterator[Configuration]:
            for point in points:
                # Times spread evenly leave out transfers and the filling of the pipeline, so no
                # later point is faster.
                if point.least_us >= best.worst_us:
                    return
                cuts = point.cuts(problem)
                if cuts is not None:
                    yield point.configuration(problem, cuts)

        return judge_each(
            problem,
            configurations,
            space=space_name(problem),
            start=start,
            keep=self.keep,
            budget_s=self.budget_s,
            on_progress=on_progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Point:
    """A point of the grid.

    Attributes:
        micro_batch, space, state, recompute: the same for all stages.
        stages: their number.
        times: time of each operator for one micro-batch.
        least_us: time of a step if the times were spread evenly over the stages.
    """

    micro_batch: int
    space: StageSpace
    state: int
    recompute: NDArray[np.bool_]
    stages: int
    times: Floats
    least_us: float

    def cuts(self, problem: SearchProblem) -> list[int] | None:
        """The cuts that minimise the longest stage and let each stage fit, by bisection over its
        time; None if there are none.
        """
        sums = np.concatenate([[0.0], np.cumsum(self.times)])
        best = self._greedy(problem, sums, np.inf)
        if best is None:
            return None
        low, high = float(self.times.max()), float(np.diff(sums[best]).max())
        while high > low * (1 + _CLOSE):
            cuts = self._greedy(problem, sums, (low + high) / 2)
            if cuts is None:
                low = (low + high) / 2
            else:
                best, high = cuts, float(np.diff(sums[cuts]).max())
        return best

    def _greedy(self, problem: SearchProblem, sums: Floats, longest: float) -> list[int] | None:
        """Cuts that give each stage as many operators as it has time and memory for, the first
        stage first; None if operators are left over.

        Later stages hold fewer micro-batches, so no other cuts leave less to them.
        """
        cuts, num = [0], len(self.times)
        for behind in range(self.stages - 1, -1, -1):
            first = cuts[-1]
            in_flight = problem.in_flight(self.micro_batch, behind)
            memory_mb = stage_memory_mb(self.space, self.state, self.recompute, first, in_flight)
            fits = (sums[first + 1 :] - sums[first] <= longest * (1 + 1e-12)) & (
                memory_mb <= problem.memory_limit_mb
            )
            # Every later stage needs an operator, too. A longer stage may need less memory: what
            # its last operator keeps is not recomputed.
            lengths = np.flatnonzero(fits[: num - behind - first])
            if not len(lengths):
                return None
            cuts.append(first + int(lengths[-1]) + 1)
        return cuts if cuts[-1] == num else None

    def configuration(self, problem: SearchProblem, cuts: Sequence[int]) -> Configuration:
        """The point's configuration with these cuts."""
        tensor, data, algorithm = self.space.states[self.state]
        return problem.configuration(
            self.micro_batch,
            tuple(
                StageConfiguration(
                    num_devices=self.space.num_devices,
                    tensor=(tensor,) * (last - first),
                    data=(data,) * (last - first),
                    algorithm=(algorithm,) * (last - first),
                    recompute=tuple(self.recompute[first:last].tolist()),
                )
                for first, last in itertools.pairwise(cuts)
            ),
        )


def _points(problem: SearchProblem) -> Iterator[_Point]:
    for micro_batch in problem.micro_batches:
        for n, space in problem.spaces(micro_batch).items():
            if problem.num_devices % n or problem.num_devices // n > problem.max_stages:
                continue
            stages = problem.num_devices // n
            for state, (*_, algorithm) in enumerate(space.states):
                if algorithm != space.states[0][2] or not space.valid[:, state].all():
                    continue
                for recompute in recompute_levels(space, state, _LEVELS):
                    times = space.busy_us[space.kinds, state] + np.where(
                        recompute, space.again_us[space.kinds, state], 0.0
                    )
                    slowest = max(float(times.max()), float(times.sum()) / stages)
                    yield _Point(
                        micro_batch=micro_batch,
                        space=space,
                        state=state,
                        recompute=recompute,
                        stages=stages,
                        times=times,
                        least_us=slowest * problem.num_micro_batches(micro_batch),
                    )
