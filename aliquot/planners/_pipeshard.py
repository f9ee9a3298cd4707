"""`PipeshardParallel`: an inter planner finds stages, an intra planner splits each of them, and
simulation gives the step time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, field, replace

from ..cluster import Cluster
from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Problem
from ..graph import OPERATORS, cut_layers
from ._base import Decision, Interrupted, Progress, Task, faster
from ._method import AbstractMethod
from ._methods import ShardParallel, WholeProgram, simple_plan
from ._pipelines import PipelineCounts, Pipelines
from ._programs import Programs
from ._quick_bounds import least_compute_s
from ._search import AbstractFamily, Hosts, Search
from ._tried import tried_decision
from .inter import AbstractInter, StageDP, StageLimits
from .intra import ILP, AbstractIntra, Restricted, Within


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
            `params.layers[*]`, "operators" for every product or convolution with what follows it,
            or None for every suitable place between layers. With "operators", a planner that
            searches also plans over layers, and the faster plan is the answer.
        within: restricts the search; None, or nothing in it, searches all plans. With restrictions
            of splits, the answer is a pipeline, perhaps of a single stage.
        pipelines: whether these are searched, where the answer may be one program.
        faster_than_s: plans that cannot take less are not searched in full; there may then be no
            answer.
    """

    inter: AbstractInter = field(default_factory=StageDP)
    intra: AbstractIntra = field(default_factory=ILP)
    num_stages: int | None = None
    num_micro_batches: int | None = None
    schedule: str | None = None
    layers: str | int | None = None
    within: Within | None = None
    pipelines: bool = True
    faster_than_s: float = math.inf

    def __post_init__(self) -> None:
        self.inter.check_limits(self.limits)
        imbalance = math.inf if self.within is None else self.within.imbalance
        if math.isfinite(imbalance) and not isinstance(self.inter, StageDP):
            raise InputError(
                f"imbalance={imbalance:g}: {type(self.inter).__name__} does not search among"
                " balanced stages. Use StageDP() (--method pipeshard), or leave it out."
            )
        if self.layers == OPERATORS and self.inter.of_whole_layers:
            raise InputError(
                f"layers={OPERATORS!r}: {self.inter.method} makes stages of equally many layers."
                " Leave `layers` (--layers) out, or take a planner that cuts anywhere, such as"
                " Bottleneck() (--method bottleneck) or StageDP() (--method pipeshard)."
            )

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

    def allows_program(self, cluster: Cluster) -> bool:
        """True if restrictions leave programs without stages on all of a cluster's devices: they
        allow that submesh and say nothing of splits, which stages alone keep to.
        """
        if self.within is None:
            return True
        return not self.within.restricts_splits and self.within.allows(
            (cluster.num_hosts, cluster.devices_per_host), (cluster.num_devices, 1)
        )

    @property
    def asked_stages(self) -> int | None:
        """The number of stages that is asked for, here or in the settings of the inter planner."""
        return self.inter.asked_stages if self.num_stages is None else self.num_stages

    def whole(self, mesh_shape: tuple[int, ...] | None = None) -> ShardParallel:
        """The method that plans the step as one program, on a given mesh or the best one."""
        return ShardParallel(intra=self.intra, mesh_shape=mesh_shape)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """The plan of one program, which is one stage."""
        return self.whole().solve(problem, progress)

    def decide(self, task: Task) -> Decision:
        """The fastest plan of the task: a pipeline, or one program where that is faster.

        Unless stages or a schedule are asked for, `WholeProgram` plans one program as well, with
        the given number of micro-batches or with 1, 2, 4, ... of them; see `Programs`. An inter
        planner that searches may leave hosts idle.
        """
        task.refuse_large_state()
        if self.within is not None and self.within.parts:
            return self._decide_within(task, self.within)
        return self._decide(task)

    def _decide_within(self, task: Task, within: Within) -> Decision:
        """The fastest pipeline that keeps to restrictions.

        Raises:
            InfeasibleError: none does; names the restrictions without which there is one.
        """
        restricted = replace(self, intra=Restricted(rest=self.intra, within=within))
        try:
            decision = restricted._decide(task)
            scope = decision.bound_holds_for
            if not scope or str(within) in scope:
                return decision
            return replace(decision, bound_holds_for=f"{scope}, {within}")
        except (InfeasibleError, InputError) as error:
            guilty = []
            for part in within.parts:
                with contextlib.suppress(InfeasibleError, InputError, CaptureError):
                    replace(self, within=within.without_part(part)).decide(task)
                    guilty.append(str(part))
            if not guilty:
                raise
            raise InfeasibleError(
                f"No pipeline is left within {within}. Without `{'`, or without `'.join(guilty)}`"
                f" there is one. What was found: {error}"
            ) from error

    def _decide(self, task: Task) -> Decision:
        count = self.num_micro_batches if task.num_micro_batches is None else task.num_micro_batches
        method = replace(self, num_micro_batches=count)
        if self.layers != OPERATORS or not self.inter.searches:
            return method._found(task)
        layered = replace(method, layers=None)
        if not cut_layers(task.graph, layers=OPERATORS).inner:
            # Every layer is an operator already.
            return layered._found(task)
        over_layers: Decision | None = None
        # What does not fit over layers, or has too few of them, may do over operators.
        with contextlib.suppress(InfeasibleError, InputError, CaptureError):
            over_layers = layered._found(task)
        try:
            over_operators = method._found(task, over_layers)
        except Interrupted as stopped:
            raise Interrupted(faster(over_layers, stopped.decision)) from stopped
        # The faster plan of two searches, with what both tried.
        if over_layers is None or over_layers is over_operators:
            return over_operators
        best, other = over_layers, over_operators
        if over_operators.step_time_s < over_layers.step_time_s:
            best, other = other, best
        more = (tried_decision(other, "slower"), *other.candidates[1:])
        # Both may have found the same stages.
        slower = [each for each in more if each.step_time_s != best.step_time_s]
        return replace(best, candidates=(*best.candidates, *slower))

    def _found(self, task: Task, known: Decision | None = None) -> Decision:
        """The fastest plan over units of one kind.

        Args:
            known: a plan over other units, which is the answer unless a pipeline is faster.
        """

        def families(task: Task) -> list[AbstractFamily]:
            # A wrong place of cuts is refused, though one program has none.
            pipelines = Pipelines(task=task, method=self, must_open=self.layers is not None)
            is_allowed = self.may_be_one_program and self.allows_program(task.cluster)
            if not is_allowed or known is not None:
                return [pipelines]
            program = WholeProgram(intra=self.intra)
            programs = Programs.of(
                task,
                program,
                self.num_micro_batches,
                pauses=True,
                simple=functools.partial(simple_plan, task),
                fits_elsewhere=math.isfinite(self.faster_than_s),
            )
            return [programs, pipelines] if self.pipelines else [programs]

        on_fewer = list[Hosts]()
        if self.inter.searches and task.cluster.num_hosts > 1:
            on_fewer = Hosts.below(task, families, least_compute_s(task.problem(1)))
        to_beat_s = min(self.faster_than_s, known.step_time_s if known is not None else math.inf)
        search = Search(task=task, faster_than_s=to_beat_s)
        decision = search.run([*families(task), *on_fewer], self.inter.method) or known
        if decision is None:
            raise search.refusal_of(Pipelines, PipelineCounts, Programs) or InfeasibleError(
                "No pipeline was found."
            )
        return decision
