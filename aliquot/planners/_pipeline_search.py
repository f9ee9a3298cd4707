"""The result of a search for pipelines, and a search that runs when its result is first needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..core import CaptureError, InfeasibleError, InputError
from ._base import Candidate, Decision, Interrupted, faster
from ._one_program import OneProgram


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSearch:
    """The result of a search for pipelines for a step on a cluster.

    Attributes:
        decision: the best pipeline; None if none promises to be as fast as requested.
        program: an estimate of the step as one program, if the method allows one.
        tried: the other candidates.
    """

    decision: Decision | None
    program: OneProgram | None = None
    tried: tuple[Candidate, ...] = ()


class StoppedSearch(Interrupted):
    """Ctrl-C during a search for pipelines; its decision is the best pipeline so far, or
    None.
    """

    @classmethod
    def beside(cls, best: Decision | None, stopped: KeyboardInterrupt) -> StoppedSearch:
        """The interruption of a search nested in another, with the faster pipeline of the two. What
        the search of a single stage has found is no plan of the step, and is dropped.
        """
        within = stopped.decision if isinstance(stopped, StoppedSearch) else None
        return cls(faster(best, within))


class LazySearch:
    """A search for pipelines that runs once, when its result is first needed.

    Args:
        solve: searches for pipelines that take less than the given seconds.

    Attributes:
        best: the best pipeline of several stages that is known; after Ctrl-C the best plan so far,
            which may have a single stage.
    """

    def __init__(self, solve: Callable[[float], PipelineSearch]) -> None:
        self.best: Decision | None = None
        self._solve = solve
        self._known: PipelineSearch | InfeasibleError | InputError | CaptureError | None = None

    def search(self, faster_than_s: float) -> PipelineSearch:
        """The result of the search, which the first call runs. Later calls return it again,
        whatever `faster_than_s` they pass.

        Raises:
            InfeasibleError, InputError, CaptureError: as `solve` does; later calls raise the same
                error again.
            KeyboardInterrupt: Ctrl-C.
        """
        if self._known is None:
            try:
                self._known = self._solve(faster_than_s)
            except (InfeasibleError, InputError, CaptureError) as error:
                self._known = error
            except StoppedSearch as stopped:
                self.best = stopped.decision
                raise
        if not isinstance(self._known, PipelineSearch):
            raise self._known
        if math.isfinite(pipeline_s(self._known.decision)):
            self.best = self._known.decision
        return self._known

    def fastest_s(self, faster_than_s: float) -> float:
        """The step time of the best pipeline, infinite if there is none. The first call searches,
        as `search` does.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        try:
            return pipeline_s(self.search(faster_than_s).decision)
        except (InfeasibleError, InputError, CaptureError):
            return math.inf


def pipeline_s(pipeline: Decision | None) -> float:
    """The step time of a pipeline, which one program must beat; infinite for a single stage, which
    is one program itself, and for None.
    """
    if pipeline is None or len(pipeline.stages) == 1:
        return math.inf
    return pipeline.step_time_s
