"""The grid: configurations whose stages all have the same number of devices, degrees and rule for
recomputation, as an expert would set them by hand, with cuts that balance the stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._configuration import Configuration, StageConfiguration
from ._problem import Incumbents, OnProgress, Progress, SearchProblem, SearchResult, space_name
from ._quotes import recompute_levels
from ._space import Floats, StageSpace

_LEVELS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Search over uniform configurations: micro-batch, number of stages, tensor and data degree,
    level of recomputation.

    Attributes:
        keep: number of distinct configurations to return.
        best_of: number of configurations, the fastest by balanced times, that are judged in full.
    """

    keep: int = 1
    best_of: int = 400

    def search(
        self,
        problem: SearchProblem,
        *,
        start: Sequence[Configuration] = (),
        on_progress: OnProgress | None = None,
    ) -> SearchResult:
        """Judge configurations of the grid, the fastest by their balanced times first."""
        began = time.perf_counter()
        best = Incumbents(problem, lambda: time.perf_counter() - began, keep=self.keep)
        for configuration in start:
            best.offer(configuration)
        points = sorted(_points(problem), key=lambda point: point[0])
        for estimate_us, configuration in points[: self.best_of]:
            # Balanced times leave out transfers and the filling of the pipeline, so no later point
            # is faster.
            if estimate_us >= best.worst_us:
                break
            best.offer(configuration)
            if on_progress is not None:
                on_progress(
                    Progress(
                        best_ms=best.best_us / 1000,
                        bound_ms=0.0,
                        scored=best.scored,
                        elapsed_s=time.perf_counter() - began,
                    )
                )
        return SearchResult(
            best=best.results(),
            lower_bound_ms=0.0,
            space=space_name(problem),
            scored=best.scored,
            search_s=time.perf_counter() - began,
            best_found_at_s=best.found_at_s,
            ended="every point of the grid was judged",
        )


def _points(problem: SearchProblem) -> Iterator[tuple[float, Configuration]]:
    """All configurations of the grid, each with the time of its balanced stages in
    microseconds.
    """
    for micro_batch in problem.micro_batches:
        for n, space in problem.spaces(micro_batch).items():
            if problem.num_devices % n or problem.num_devices // n > problem.max_stages:
                continue
            stages = problem.num_devices // n
            for state, (tensor, data, algorithm) in enumerate(space.states):
                if algorithm != space.states[0][2] or not space.valid[:, state].all():
                    continue
                for recompute in recompute_levels(space, state, _LEVELS):
                    cuts, slowest = balance(_times(space, state, recompute), stages)
                    configured = tuple(
                        StageConfiguration(
                            num_devices=n,
                            tensor=(tensor,) * (last - first),
                            data=(data,) * (last - first),
                            algorithm=(algorithm,) * (last - first),
                            recompute=tuple(recompute[first:last].tolist()),
                        )
                        for first, last in zip(cuts, cuts[1:], strict=False)
                    )
                    count = problem.num_micro_batches(micro_batch)
                    yield slowest * count, problem.configuration(micro_batch, configured)


def _times(space: StageSpace, state: int, recompute: NDArray[np.bool_]) -> Floats:
    kinds = space.kinds
    times: Floats = space.busy_us[kinds, state] + np.where(
        recompute, space.again_us[kinds, state], 0.0
    )
    return times


def balance(times: Floats, stages: int) -> tuple[list[int], float]:
    """Cuts that minimise the longest stage, by bisection over its time; also that time."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    low, high = max(float(times.max()), float(sums[-1]) / stages), float(sums[-1])
    for _ in range(40):
        middle = (low + high) / 2
        if len(_greedy(sums, middle)) <= stages + 1:
            high = middle
        else:
            low = middle
    cuts = _greedy(sums, high)
    while len(cuts) < stages + 1:
        widths = np.diff(cuts)
        at = int(widths.argmax())
        cuts.insert(at + 1, cuts[at] + int(widths[at]) // 2)
    return cuts, high


def _greedy(sums: Floats, longest: float) -> list[int]:
    cuts, num = [0], len(sums) - 1
    while cuts[-1] < num:
        end = int(np.searchsorted(sums, sums[cuts[-1]] + longest * (1 + 1e-12), side="right")) - 1
        cuts.append(max(min(end, num), cuts[-1] + 1))
    return cuts
