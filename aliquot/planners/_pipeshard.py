"""`PipeshardParallel`: an inter planner finds stages, an intra planner splits each of them, and
simulation gives the step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, replace

from ..core import CaptureError, InfeasibleError, InputError, format_seconds
from ..cost import Problem
from ._base import AbstractMethod, Decision, Interrupted, Progress, Task, faster
from ._counts import MOST_MICRO_BATCHES, batch_size
from ._fewer_hosts import fastest_on_any_hosts
from ._methods import ShardParallel, WholeProgram
from ._one_program import (
    Found,
    OneProgram,
    add_first_program,
    fewer_micro_batches,
    one_program_by_doubling,
)
from ._pipeline_search import LazySearch, PipelineSearch, StoppedSearch, pipeline_s
from ._scopes import one_program_scope
from ._search_counts import solve_pipeline
from ._tried import tried_pipeline, tried_programs
from .inter import AbstractInter, StageDP, StageLimits
from .intra import ILP, AbstractIntra


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeshardParallel(AbstractMethod):
    """Cut the step into stages, give each a submesh, split its operators, and run micro-batches
    through them.

    Attributes:
        inter: finds the stages.
        intra: finds the splits inside each stage.
        num_stages: None searches; the answer may be a single stage.
        num_micro_batches: None searches among divisors of the batch.
        schedule: a name of `SCHEDULES`; None searches.
        layers: where stages may be cut: a number of layers, a pattern of parameter paths such as
            `params.layers[*]`, or None for every suitable place.
    """

    inter: AbstractInter = field(default_factory=StageDP)
    intra: AbstractIntra = field(default_factory=ILP)
    num_stages: int | None = None
    num_micro_batches: int | None = None
    schedule: str | None = None
    layers: str | int | None = None

    def __post_init__(self) -> None:
        self.inter.check_limits(self.limits)

    @property
    def limits(self) -> StageLimits:
        """Limits that the inter planner must keep to."""
        return StageLimits(num_stages=self.num_stages, schedule=self.schedule)

    @property
    def may_be_one_program(self) -> bool:
        """True if the answer may be one program: neither several stages nor a schedule is asked
        for, and the inter planner searches.
        """
        return self.asked_stages in (None, 1) and self.schedule is None and self.inter.searches

    @property
    def asked_stages(self) -> int | None:
        """The number of stages that is asked for, here or in the settings of the inter planner."""
        return self.inter.asked_stages if self.num_stages is None else self.num_stages

    def whole(self, mesh_shape: tuple[int, ...] | None = None) -> ShardParallel:
        """The method that plans the step as one program, on a given mesh or the best one."""
        return ShardParallel(intra=self.intra, mesh_shape=mesh_shape)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """See `AbstractMethod.solve`: one program is one stage."""
        return self.whole().solve(problem, progress)

    def decide(self, task: Task) -> Decision:
        """See `AbstractMethod.decide`: a pipeline, or one program where that is faster.

        Unless stages or a schedule are asked for, `WholeProgram` plans one program as well, with
        the given number of micro-batches or with 1, 2, 4, ... of them; see
        `one_program_by_doubling`. The program with the fewest micro-batches is searched first, so
        that only pipelines that may be faster are searched closely; but if memory makes that search
        long, pipelines come first. An inter planner that searches may leave hosts idle.
        """
        on_all = self._decide(task)
        return fastest_on_any_hosts(task, on_all, self._decide) if self.inter.searches else on_all

    def _decide(self, task: Task, faster_than_s: float = math.inf) -> Decision:
        pipelines = self.lazy_search(task, faster_than_s)
        try:
            return self.decide_with(task, {}, pipelines, faster_than_s)
        except Interrupted as interrupted:
            interrupted.decision = faster(interrupted.decision, pipelines.best)
            raise

    def _with_count(self, task: Task) -> PipeshardParallel:
        asked = task.num_micro_batches
        return self if asked is None else replace(self, num_micro_batches=asked)

    def lazy_search(self, task: Task, most_s: float) -> LazySearch:
        """A search for pipelines that take less than `most_s`, which runs when its result is first
        needed.
        """
        method = self._with_count(task)
        return LazySearch(
            lambda faster_than_s: solve_pipeline(method, task, min(most_s, faster_than_s))
        )

    def decide_with(
        self,
        task: Task,
        programs: MutableMapping[int, Found],
        pipelines: LazySearch,
        faster_than_s: float,
    ) -> Decision:
        """The decision of `decide` on all hosts of the task, with the help of earlier results.

        Args:
            programs: what is known of the step as one program, by number of micro-batches; results
                found here are added.
            pipelines: the search for pipelines, run or not.
            faster_than_s: plans that take this long or longer need not be found; `InfeasibleError`
                may then be raised.
        """
        method = self._with_count(task)
        if method.may_be_one_program:
            one_program = WholeProgram(intra=method.intra, faster_than_s=faster_than_s)
            count = method.num_micro_batches or 1
            add_first_program(one_program, task, count, programs, pipelines.fastest_s)
        best: Decision | None = None
        search: PipelineSearch | None = None
        refusal: InfeasibleError | InputError | CaptureError | None = None
        try:
            search = pipelines.search(_to_beat_s(method, programs))
        except InfeasibleError as error:
            if not method.may_be_one_program:
                raise
            refusal = error
        except (InputError, CaptureError) as error:
            # A step that cannot be cut may still be one program. But if `layers`, which says where
            # to cut, is wrong, the user is told so.
            if not method.may_be_one_program or method.layers is not None:
                raise
            refusal = error
        except KeyboardInterrupt as stopped:
            # Other interruptions come from the search of a single stage: what they carry is no plan
            # of the whole step.
            raise Interrupted(
                stopped.decision if isinstance(stopped, StoppedSearch) else None
            ) from stopped
        pipeline = search.decision if search else None
        if pipeline is not None and len(pipeline.stages) > 1:
            best = pipeline
        programs_solved: list[Decision] = []
        try:
            for single in _one_programs(
                method,
                task,
                pipeline,
                search.program if search else None,
                programs,
                faster_than_s,
            ):
                programs_solved.append(single)
                if best is None or single.step_time_s < best.step_time_s:
                    best = replace(
                        single,
                        method=method.inter.method,
                        combine=task.combine(single.num_micro_batches),
                        bound_holds_for=one_program_scope(single),
                    )
        except Interrupted as interrupted:
            interrupted.decision = faster(best, interrupted.decision)
            raise
        if best is None:
            raise refusal or InfeasibleError(
                f"No pipeline takes less than {format_seconds(faster_than_s)}."
            )
        tried = search.tried if search else ()
        if best is pipeline:
            slower = tried_programs(programs_solved, search.program if search else None)
            return replace(best, candidates=(tried_pipeline(best), *slower, *tried))
        if pipeline is not None and len(pipeline.stages) > 1:
            tried = (tried_pipeline(pipeline, "slower than one program"), *tried)
        return replace(best, candidates=(*best.candidates, *tried))


def _to_beat_s(method: PipeshardParallel, programs: MutableMapping[int, Found]) -> float:
    """The step time that pipelines must beat: that of the fastest known program if the answer may
    be one program, else infinity.
    """
    if not method.may_be_one_program:
        return math.inf
    decisions = [found for found in programs.values() if isinstance(found, Decision)]
    return min((decision.step_time_s for decision in decisions), default=math.inf)


def _one_programs(
    method: PipeshardParallel,
    task: Task,
    pipeline: Decision | None,
    program: OneProgram | None,
    known: MutableMapping[int, Found],
    faster_than_s: float,
) -> Iterator[Decision]:
    """Plans of the step as one program: first by doubling the number of micro-batches; if that is
    not as fast as the pipeline, then with fewer micro-batches than the pipeline has, or else, for a
    pipeline of one stage, on the mesh of that stage.

    Raises:
        Interrupted: Ctrl-C.
    """
    by_doubling: Decision | None = None
    if method.may_be_one_program:
        given = method.num_micro_batches
        most = min(batch_size(task.graph), MOST_MICRO_BATCHES) if given is None else given
        # Where memory is short, each search takes long; once a pipeline fits, more micro-batches
        # need not be tried only to make one program fit.
        by_doubling = one_program_by_doubling(
            WholeProgram(intra=method.intra, faster_than_s=faster_than_s),
            task,
            first=given or 1,
            most=most,
            until_it_fits=pipeline is None,
            known=known,
            faster_than_s=pipeline_s(pipeline),
        )
        if by_doubling is not None:
            yield by_doubling
    if pipeline is None or (
        by_doubling is not None and by_doubling.step_time_s <= pipeline.step_time_s
    ):
        return
    fewer = _with_fewer_micro_batches(method, task, pipeline, program)
    if fewer is not None:
        yield fewer
    elif len(pipeline.stages) == 1:
        # A single stage becomes one program, on the mesh of that stage.
        one_mesh = method.whole(pipeline.priced.mesh.shape)
        yield one_mesh.solve(task.problem(pipeline.num_micro_batches), task.progress)


def _with_fewer_micro_batches(
    method: PipeshardParallel, task: Task, pipeline: Decision, program: OneProgram | None
) -> Decision | None:
    """The step as one program with fewer micro-batches than the pipeline, or None if that is no
    faster.

    Raises:
        Interrupted: Ctrl-C.
    """
    if program is None or program.least_s >= pipeline.step_time_s:
        return None
    most = pipeline.num_micro_batches
    return fewer_micro_batches(
        method.whole(program.mesh_shape),
        task.problem,
        most=most,
        faster_than_s=pipeline.step_time_s,
        # If none is faster, a single stage becomes a program, for which the problem is needed.
        known=task.problem(most) if len(pipeline.stages) == 1 else None,
        progress=task.progress,
    )
