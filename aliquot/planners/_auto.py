"""The method `auto`: one program or a pipeline, whichever is faster."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from ..core import InfeasibleError, format_bytes
from ..cost import Problem
from ._base import Decision, Progress, Task
from ._method import AbstractMethod
from ._methods import WholeProgram, simple_plan
from ._pipelines import PipelineCounts, Pipelines
from ._pipeshard import PipeshardParallel
from ._programs import Programs
from ._quick_bounds import least_compute_s
from ._search import AbstractFamily, Hosts, Search
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

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """The plan of the step as one program."""
        return replace(self.program.solve(problem, progress), method="auto")

    def decide(self, task: Task) -> Decision:
        """The fastest plan of the task: one program or a pipeline.

        Raises:
            InfeasibleError: neither a program nor a pipeline was found that fits; describes the one
                of the two that needs less memory.
        """
        task.refuse_large_state()
        asked = task.num_micro_batches
        problem = task.problem(1 if asked is None else asked)
        pipeshard = PipeshardParallel(intra=self.intra, num_micro_batches=asked)
        searches_pipelines = self.pipelines and self.mesh_shape is None
        compute_s = least_compute_s(problem) * task.cluster.num_devices

        def families(task: Task) -> list[AbstractFamily]:
            devices = task.cluster.num_devices
            pauses = searches_pipelines and 1 < devices <= _MOST_DEVICES
            simple = functools.partial(simple_plan, task)
            programs = Programs.of(task, self.program, asked, pauses=pauses, simple=simple)
            if not searches_pipelines or devices == 1:
                return [programs]
            pipelines = Pipelines(
                task=task,
                method=pipeshard,
                lower_bound_s=compute_s / devices,
                most_devices=_MOST_DEVICES,
            )
            return [programs, pipelines]

        search = Search(
            task=task,
            relative_gap=self.intra.relative_gap,
            faster_than_s=self.faster_than_s,
        )
        on_fewer = list[Hosts]()
        if self.mesh_shape is None:
            on_fewer = Hosts.below(task, families, compute_s / task.cluster.num_devices)
        decision = search.run([*families(task), *on_fewer], "auto")
        return decision or self._refused(search, problem)

    def _refused(self, search: Search, problem: Problem) -> Decision:
        """Say why nothing fits, after a search if arrays alone are too large for one program."""
        of_pipelines = search.refusal_of(Pipelines, PipelineCounts)
        try:
            if (of_programs := search.refusal_of(Programs)) is not None:
                raise of_programs
            return self.program.solve(problem, search.task.progress)
        except InfeasibleError as error:
            if not isinstance(of_pipelines, InfeasibleError):
                raise
            smaller = min(error, of_pipelines, key=lambda each: each.required_bytes or math.inf)
            # The error of the search with the smaller plan, worded as the answer of both searches.
            claim, _, rest = smaller.message.partition("\n")
            if claim.startswith("No "):
                limit = format_bytes(search.task.limit_bytes)
                claim = (
                    f"No plan fits {search.task.cluster.name} ({limit} usable on each device),"
                    " neither with a pipeline nor without."
                )
            advice = list(smaller.advice)
            if search.task.num_micro_batches is None:
                # The other search has followed this advice in vain.
                tried = ("micro-batch", "method")
                advice = [each for each in advice if not any(word in each for word in tried)]
            raise smaller.reworded(f"{claim}\n{rest}", advice) from None
