"""The task that a method receives and the decision that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..cluster import Cluster, subcluster, target_for
from ..core import InfeasibleError, format_bytes
from ..cost import CATEGORY_OF_ROLE, Picked, PipelinePrediction, Priced, Problem, make_problem
from ..graph import Graph, Memory, Role
from ..plans import Plan, Schedule
from ..sharding import (
    SEMANTICS,
    LayeredStep,
    NodeId,
    StagedStep,
    plan_micro_batches,
    runs_in_groups,
)

_STAYS = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.STATE)
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as `progress(what, done, of)` while a method searches."""


# Parts of a state of which less than this share is made, such as counters, are not listed.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One mesh (or method) that was tried: its bound and, if it was solved, its step time."""

    name: str
    mesh: str = ""
    lower_bound_s: float | None = None
    step_time_s: float | None = None
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageDecision:
    """A choice for every node of one stage, or of a whole step that stays one program.

    Attributes:
        problem: the problem that was solved.
        picked: all choices with their prices, and those that were made.
        first_device: the stage's first device in the cluster; the stage takes as many consecutive
            devices as its mesh has.
        first_layer, layer_names: the number of its first layer and the names of its layers; none
            without a pipeline.
        recompute: see `StagePlan`.
        repeat: with `recompute="operators"`, the nodes of the products that the backward pass
            repeats.
        folded: whether equal layers share one set of choices.
        like: an earlier stage with the same operators and choices, or None.
    """

    problem: Problem
    picked: Picked
    first_device: int = 0
    first_layer: int = 0
    layer_names: tuple[str, ...] = ()
    recompute: str = "none"
    repeat: frozenset[NodeId] = frozenset()
    folded: bool = True
    like: int | None = None

    @property
    def priced(self) -> Priced:
        """All choices with their prices."""
        return self.picked.priced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineParts:
    """A step cut into the stages of a pipeline, with its predicted costs."""

    layered: LayeredStep
    staged: StagedStep
    schedule: Schedule
    overlaps_transfers: bool
    prediction: PipelinePrediction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Choices for every stage of a step, with a lower bound where one was proved.

    Attributes:
        method, planner: names of the method and of the planner that decided.
        stages: one for each stage; a single one if the step stays one program.
        pipeline: how the step was cut into stages; None for one program.
        combine: how the outputs of micro-batches combine; see `MicroBatchPlan`.
        idle_hosts: number of hosts of the task's cluster that the plan leaves idle: the last ones.
        notes: what the method says about the plan, such as what it could not split.
        step_time_s: the predicted step time.
        lower_bound_s: a lower bound that holds for every plan of the space that `bound_holds_for`
            names; None if nothing is proved.
        gap: relative distance from that bound to the value that the search minimised, such as a
            closed form; by default, to the step time.
        status: how the search ended.
        candidates: the meshes or methods that were tried.
    """

    method: str
    planner: str
    stages: tuple[StageDecision, ...]
    step_time_s: float
    lower_bound_s: float | None
    bound_holds_for: str
    status: str
    gap: float | None = None
    candidates: tuple[Candidate, ...] = ()
    pipeline: PipelineParts | None = None
    combine: Mapping[str, str] = field(default_factory=dict)
    idle_hosts: int = 0
    notes: tuple[str, ...] = ()

    @property
    def picked(self) -> Picked:
        """The choices of the first stage."""
        return self.stages[0].picked

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches in a step."""
        return self.stages[0].problem.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A captured step that is to be planned for a cluster.

    Attributes:
        graph: the step on its whole batch.
        cluster: what it runs on.
        num_micro_batches: the number that the user asks for. None lets methods that search for the
            number choose it, and means the fewest that fit for the others, at least `own_turns`.
        own_turns: micro-batches of the step's own loop, without which `graph` is; 1 if it has none.
        tries_counts: whether the others go on to more micro-batches while the step gets faster.
        semantics: see `plan_micro_batches`.
        on_missing_rule: see `dim_rule`.
        memory_limit_bytes: on each device; by default what the device's runtime leaves to programs.
        may_idle: whether a plan may leave hosts idle if that makes the step faster.
        recomputes: whether stages of pipelines may recompute more than the step itself does.
        progress: called while a method searches.
    """

    graph: Graph
    cluster: Cluster
    num_micro_batches: int | None = None
    own_turns: int = 1
    tries_counts: bool = False
    semantics: str = "exact"
    on_missing_rule: str = "infer"
    memory_limit_bytes: float | None = None
    may_idle: bool = True
    recomputes: bool = True
    progress: Progress | None = None
    # Shared by tasks made from one another by `replace`, as the problems below.
    simple_plans: dict[tuple[Any, ...], Decision | None] = field(default_factory=dict, repr=False)
    # Problems take long to make and differ between clusters and limits only in these, so tasks made
    # from one another by `replace` share them.
    _made: dict[tuple[Any, ...], tuple[Problem, Mapping[str, str]]] = field(
        default_factory=dict, repr=False
    )
    _problems: dict[int, tuple[Problem, Mapping[str, str]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def limit_bytes(self) -> float:
        """Memory of each device that a plan may use."""
        device = self.cluster.device
        return (
            target_for(device).usable_bytes(device)
            if self.memory_limit_bytes is None
            else self.memory_limit_bytes
        )

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that stay in the memory of devices from one step to the next, by
        part, summed over all devices if each array is held once.
        """
        held = {CATEGORY_OF_ROLE[role]: 0 for role in _STAYS}
        for item in self.graph.inputs:
            value = self.graph.values[item.value]
            if item.role in _STAYS and value.memory is Memory.DEVICE:
                held[CATEGORY_OF_ROLE[item.role]] += value.num_bytes
        return held

    @property
    def holds_state(self) -> bool:
        """False if the state is too large even if all devices share it evenly, so that nothing
        fits, whatever the method and the number of micro-batches.
        """
        return sum(self.state_bytes.values()) <= self.limit_bytes * self.cluster.num_devices

    def refuse_large_state(self) -> None:
        """Check `holds_state`.

        Raises:
            InfeasibleError: it is false.
        """
        if self.holds_state:
            return
        devices, limit_bytes = self.cluster.num_devices, self.limit_bytes
        by_size = sorted(self.state_bytes.items(), key=lambda part: -part[1])
        parts = {name: size / devices for name, size in by_size if size}
        least_bytes = sum(parts.values())
        listed = ", ".join(
            f"{format_bytes(size)} {name}"
            for name, size in parts.items()
            if size > _NEGLIGIBLE * least_bytes
        )
        raise InfeasibleError(
            f"No plan fits {self.cluster.name} ({format_bytes(limit_bytes)} usable on each"
            " device).\n  What must stay in memory from step to step needs"
            f" {format_bytes(least_bytes)} on each, even if all devices share it evenly: {listed}.",
            advice=[f"at least {math.ceil(least_bytes * devices / limit_bytes)} devices"],
            required_bytes=int(least_bytes),
            available_bytes=int(limit_bytes),
            parts=parts,
        )

    def with_limit(self, memory_limit_bytes: float) -> Task:
        """The same step with a smaller memory limit."""
        return replace(self, memory_limit_bytes=memory_limit_bytes)

    def on_hosts(self, num_hosts: int) -> Task:
        """The same step on the first hosts of its cluster."""
        whole = self.cluster
        if num_hosts == whole.num_hosts:
            return self
        part = replace(
            subcluster(whole, (num_hosts, whole.devices_per_host)),
            name=f"{num_hosts} of the {whole.num_hosts} hosts of {whole.name}",
        )
        return replace(self, cluster=part)

    def decomposes(self, count: int) -> bool:
        """True if the step decomposes into so many micro-batches."""
        return count == 1 or runs_in_groups(
            self.graph, count, 1, semantics=self.semantics, on_missing_rule=self.on_missing_rule
        )

    def problem(self, num_micro_batches: int) -> Problem:
        """The problem of planning the step as one program, in the given number of micro-batches.
        Raises as `plan_micro_batches` and `make_problem` do.
        """
        return self._problem(num_micro_batches)[0]

    def combine(self, num_micro_batches: int) -> Mapping[str, str]:
        """For each output path, how its values from all micro-batches combine; see
        `MicroBatchPlan`.
        """
        return self._problem(num_micro_batches)[1]

    def _problem(self, count: int) -> tuple[Problem, Mapping[str, str]]:
        if count not in self._problems:
            key = count, self.semantics, self.on_missing_rule, self.cluster.device
            if key not in self._made:
                self._made[key] = self._make(count)
            problem, combine = self._made[key]
            of_task = replace(
                problem, cluster=self.cluster, memory_limit_bytes=float(self.limit_bytes)
            )
            self._problems[count] = of_task, combine
        return self._problems[count]

    def _make(self, count: int) -> tuple[Problem, Mapping[str, str]]:
        part, combine = self.graph, dict[str, str]()
        if count != 1 or self.semantics not in SEMANTICS:
            cut = plan_micro_batches(
                self.graph, count, semantics=self.semantics, on_missing_rule=self.on_missing_rule
            )
            part, combine = cut.part, cut.combine
        problem = make_problem(
            part,
            self.cluster,
            num_micro_batches=count,
            on_missing_rule=self.on_missing_rule,
            whole=self.graph,
            semantics=self.semantics,
        )
        return problem, combine


def faster(one: Decision | None, other: Decision | None) -> Decision | None:
    """The faster of two decisions; the first if they are equally fast."""
    if one is None or other is None:
        return one or other
    # Ties go to the first, so that the order of methods decides and not rounding.
    return other if other.step_time_s < one.step_time_s else one


class TooSlowError(InfeasibleError):
    """No plan takes less than the requested time. Whether a slower one fits was not searched
    closely.
    """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search; `decision` is the best so far, or None, and `plan` is its plan."""

    def __init__(self, decision: Decision | None) -> None:
        super().__init__("interrupted")
        self.decision = decision
        self.plan: Plan | None = None
