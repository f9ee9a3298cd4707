"""The method `auto`: one program or a pipeline, whichever is faster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ..core import CaptureError, InfeasibleError, InputError, format_bytes
from ..cost import Problem
from ._base import AbstractMethod, Candidate, Decision, Interrupted, Progress, Task, faster
from ._counts import MOST_MICRO_BATCHES, batch_size
from ._fewer_hosts import fastest_on_any_hosts
from ._methods import WholeProgram
from ._one_program import Found, one_program_by_doubling, program_beside
from ._pipeline_search import LazySearch
from ._pipeshard import PipeshardParallel
from ._quick_bounds import least_compute_s
from ._scopes import one_program_scope
from .intra import ILP, AbstractIntra

# On more devices the search for stages takes too long.
_MOST_DEVICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(AbstractMethod):
    """Search for the step as one program and for pipelines, with different numbers of micro-batches
    unless one is given, and take the fastest plan that fits.

    Both searches keep to the limits of `intra` and of `StageDP`, which are amounts of work and not
    seconds, so the same step has the same plan everywhere. Pipelines are not searched on one
    device, on a given mesh, or if one program takes no longer than the compute of the step alone,
    shared evenly by all devices. On more than 128 devices fewer numbers of micro-batches are
    searched. On more than 4,096 devices pipelines are searched only if one program with the fewest
    micro-batches does not fit. Plans say what was not searched.

    A plan may leave hosts idle: both searches are repeated on fewer hosts if these could compute
    the step in less time than the best plan for all hosts takes. Where memory makes the search of
    one program long, pipelines are searched first, and only programs that may be faster are then
    searched in full.

    Args:
        intra: finds the splits.
        mesh_shape: the only mesh of all devices that is searched; pipelines then are not.
        pipelines: whether these are searched, too.
        faster_than_s: plans that cannot take less are not searched in full; the answer may then be
            any plan that fits, or `InfeasibleError`.
    """

    intra: AbstractIntra = field(default_factory=ILP)
    mesh_shape: tuple[int, ...] | None = None
    pipelines: bool = True
    faster_than_s: float = math.inf

    @property
    def program(self) -> WholeProgram:
        """The method that plans the step as one program."""
        return WholeProgram(intra=self.intra, mesh_shape=self.mesh_shape)

    @property
    def pipeshard(self) -> PipeshardParallel:
        """The method that plans pipelines."""
        return PipeshardParallel(intra=self.intra)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """See `AbstractMethod.solve`: the step as one program."""
        return replace(self.program.solve(problem, progress), method="auto")

    def decide(self, task: Task) -> Decision:
        """See `AbstractMethod.decide`.

        Raises:
            InfeasibleError: neither a program nor a pipeline was found that fits; describes the one
                of the two that needs less memory.
        """
        try:
            decision = self._decide(task)
            if self.mesh_shape is not None:
                return decision
            return fastest_on_any_hosts(task, decision, self._decide)
        except Interrupted as interrupted:
            best = interrupted.decision
            interrupted.decision = best and self._as_auto(task, best)
            raise

    def _decide(self, task: Task, faster_than_s: float = math.inf) -> Decision:
        """The decision on all hosts of a task. On Ctrl-C, `Interrupted` carries the best of both
        searches.
        """
        faster_than_s = min(faster_than_s, self.faster_than_s)
        pipelines = self.pipeshard.lazy_search(task, faster_than_s)
        try:
            return self._decide_with(task, pipelines, faster_than_s)
        except Interrupted as interrupted:
            interrupted.decision = faster(interrupted.decision, pipelines.best)
            raise

    def _decide_with(self, task: Task, pipelines: LazySearch, faster_than_s: float) -> Decision:
        """As `_decide`; `pipelines` runs only if its result is needed."""
        asked = task.num_micro_batches
        count = 1 if asked is None else asked
        problem = task.problem(count)
        method = replace(self.program, faster_than_s=faster_than_s)
        wants_one_program = self.mesh_shape is not None or not self.pipelines
        has_pipelines = not wants_one_program and task.cluster.num_devices > 1
        are_devices_few = task.cluster.num_devices <= _MOST_DEVICES
        # If memory makes the search of the first program long, it calls for pipelines early.
        rival = pipelines.fastest_s if has_pipelines and are_devices_few else None
        first = program_beside(method, problem, task.progress, rival)
        programs: dict[int, Found] = {count: first}
        if not has_pipelines:
            return self._one_program(task, count, programs, method)
        program = first if isinstance(first, Decision) else None
        if program is not None and program.step_time_s * (
            1 - self.intra.relative_gap
        ) <= least_compute_s(problem):
            return self._as_auto(task, program)
        # On many devices pipelines are searched only if no plan is known.
        has_plan = program is not None or math.isfinite(faster_than_s)
        if has_plan and not are_devices_few:
            decision = self._one_program(task, count, programs, method)
            left_out = _not_searched(least_compute_s(problem))
            return replace(decision, candidates=(*decision.candidates, left_out))
        try:
            decision = self.pipeshard.decide_with(task, programs, pipelines, faster_than_s)
        except (InfeasibleError, InputError, CaptureError) as refusal:
            # A caller that gives `faster_than_s` has a plan already and needs no message.
            if program is None and math.isfinite(faster_than_s):
                raise
            try:
                return self._one_program(task, count, programs, method)
            except InfeasibleError as error:
                if not isinstance(refusal, InfeasibleError):
                    raise
                smaller = min(error, refusal, key=_required_bytes)
                raise _for_both_searches(smaller, task) from None
        except Interrupted as interrupted:
            best = program and replace(program, bound_holds_for=one_program_scope(program))
            interrupted.decision = faster(best, interrupted.decision)
            raise
        return self._as_auto(task, decision)

    def _one_program(
        self, task: Task, count: int, programs: dict[int, Found], method: WholeProgram
    ) -> Decision:
        """The step as one program: with `count` micro-batches or, if that does not fit and no
        number is given, with more.

        Args:
            count: the fewest micro-batches.
            programs: the known programs, by their numbers of micro-batches.

        Raises:
            InfeasibleError: none fits; describes what the fewest micro-batches need.
        """
        most = (
            count
            if task.num_micro_batches is not None
            else min(batch_size(task.graph), MOST_MICRO_BATCHES)
        )
        decision = one_program_by_doubling(
            method, task, first=count, most=most, until_it_fits=True, known=programs
        )
        if decision is None and isinstance(error := programs[count], InfeasibleError):
            raise error
        # If the arrays alone are too large, nothing was searched yet: this error says how much they
        # need.
        decision = decision or method.solve(task.problem(count), task.progress)
        return self._as_auto(task, replace(decision, bound_holds_for=one_program_scope(decision)))

    def _as_auto(self, task: Task, decision: Decision) -> Decision:
        combine = decision.combine or task.combine(decision.num_micro_batches)
        return replace(decision, method="auto", combine=combine)


def _not_searched(least_s: float) -> Candidate:
    """The candidate that stands for all pipelines if none were searched; they take at least
    `least_s`.
    """
    return Candidate(
        name="pipelines",
        mesh="",
        lower_bound_s=least_s,
        step_time_s=None,
        outcome=(
            f"not searched: more than {_MOST_DEVICES:,} devices; --method pipeshard searches them"
        ),
    )


def _for_both_searches(error: InfeasibleError, task: Task) -> InfeasibleError:
    """The error of the search with the smaller plan, worded as the answer of both searches."""
    claim, _, rest = error.message.partition("\n")
    if claim.startswith("No "):
        claim = (
            f"No plan fits {task.cluster.name} ({format_bytes(task.limit_bytes)} usable on each"
            " device), neither as one program nor as a pipeline."
        )
    return error.reworded(f"{claim}\n{rest}", _untried(error, task))


def _untried(error: InfeasibleError, task: Task) -> list[str]:
    """The advice of one search that the other has not followed in vain."""
    if task.num_micro_batches is not None:
        return list(error.advice)
    return [each for each in error.advice if "micro-batch" not in each and "method" not in each]


def _required_bytes(error: InfeasibleError) -> float:
    return error.required_bytes or math.inf
