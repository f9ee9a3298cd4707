"""`PipeshardParallel`: stages by an inter planner, splits inside each by an intra planner, judged by simulation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..cluster import Cluster, target_for
from ..core import CaptureError, InfeasibleError
from ..cost import (
    Chain,
    ChainPlan,
    PhaseCosts,
    PipelineTimes,
    Problem,
    StageCosts,
    StageOption,
    make_problem,
    phase_costs,
    simulate,
)
from ..graph import (
    Graph,
    Role,
    operators_with_effects,
    same_structure,
    scans_over_layers,
    source_line,
    split_scans,
)
from ..plans import Schedule, make_schedule
from ..sharding import LayeredStep, StagedStep, layer_step, sketch_step, stage_step
from ._base import Decision, Progress
from ._helper import HelperProcess
from ._layer_costs import build_chains, price_option, subcluster
from ._methods import ShardParallel
from ._one_program import OneProgram, as_one_program, fewer_micro_batches, is_too_large
from ._race import Entry, race
from ._stage_cache import StageCache
from .inter import AbstractInter, StageDP, StageLimits
from .intra import ILP, AbstractIntra, Space, fixed

_ROUNDS = 4
_MOST_MICRO_BATCHES = 1024
# Smaller steps are searched before a helper process is ready.
_MANY_OPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeshardParallel:
    """Cut the step into stages, give each a submesh, split its operators, and run micro-batches through them.

    Attributes:
        inter: finds the stages.
        intra: finds the splits inside each stage.
        num_stages: None searches; one stage is a possible outcome.
        num_micro_batches: None searches among divisors of the batch.
        schedule: a name of `SCHEDULES`; None searches.
        layers: where stages may be cut: a number of layers, a pattern of parameter paths such as `params.layers[*]`, or
            None for every good place.
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

    def whole(self, mesh_shape: tuple[int, ...]) -> ShardParallel:
        """The method for a search that came out as one stage, on its mesh."""
        return ShardParallel(intra=self.intra, mesh_shape=mesh_shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageDecision:
    """One stage: the problem that was solved, its solution, and what it costs.

    `first_layer` and `last_layer` (exclusive) are its layers; `like` is the earlier stage with the same operators under the
    same option, whose solution it has.
    """

    problem: Problem
    decision: Decision
    costs: PhaseCosts
    option: StageOption
    first_layer: int
    last_layer: int
    first_device: int
    like: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineDecision:
    """A pipeline with what is known about it; `program` is what the step would take without stages, if that was asked."""

    layered: LayeredStep
    staged: StagedStep
    stages: tuple[StageDecision, ...]
    chain: Chain
    chain_plan: ChainPlan
    schedule: Schedule
    times: PipelineTimes
    stage_costs: StageCosts
    transfer_s: tuple[float, ...]
    method: str
    planner: str
    program: OneProgram | None = None

    @property
    def step_time_s(self) -> float:
        """By simulation."""
        return self.times.step_time_s


def solve_pipeline(
    method: PipeshardParallel,
    graph: Graph,
    cluster: Cluster,
    *,
    semantics: str = "exact",
    on_missing_rule: str = "infer",
    memory_limit_bytes: float | None = None,
    progress: Progress | None = None,
) -> PipelineDecision:
    """The best pipeline for a step on a cluster.

    Raises:
        InfeasibleError: nothing fits.
        InputError: what is wanted cannot be done, such as more stages than layers.
        CaptureError: the step does not decompose into micro-batches.
    """
    _refuse_effects(graph)
    limit = (
        target_for(cluster.device).usable_bytes(cluster.device) if memory_limit_bytes is None else memory_limit_bytes
    )
    task = _Task(
        method=method,
        graph=graph,
        cluster=cluster,
        limit_bytes=limit,
        semantics=semantics,
        on_missing_rule=on_missing_rule,
        progress=progress,
    )
    groups = [counts for counts in _counts(method, graph, cluster) if counts]
    with HelperProcess(wanted=len(graph.ops) >= _MANY_OPS) as helper:
        for number, counts in enumerate(groups):
            try:
                return _solve_with(task, counts, helper)
            except InfeasibleError:
                if number == len(groups) - 1:
                    raise
    raise AssertionError("there is always a number of micro-batches to try")


def _refuse_effects(graph: Graph) -> None:
    """Stages run what their results need: an effect would be lost."""
    found = operators_with_effects(graph)
    if found:
        shown = ", ".join(dict.fromkeys(f"`{op.name}` {source_line(op)}".rstrip() for op in found[:3]))
        raise CaptureError(
            f"{graph.name} does more than compute its results: {shown}{', ...' if len(found) > 3 else ''}. A pipeline cannot run "
            "that as often as the plain step does. Take it out (return what it prints as a metric), or plan one program: "
            "--method auto, method=Auto()."
        )


def solve_one_program(
    method: PipeshardParallel,
    pipeline: PipelineDecision,
    problem_with: Callable[[int], Problem],
    progress: Progress | None = None,
) -> Decision | None:
    """The step as one program with fewer micro-batches than stages want, or None if that is no faster.

    Args:
        problem_with: the step's problem for a number of micro-batches.

    Raises:
        Interrupted: Ctrl-C.
    """
    if pipeline.program is None or pipeline.program.least_s >= pipeline.step_time_s:
        return None
    return fewer_micro_batches(
        method.whole(pipeline.program.mesh_shape),
        problem_with,
        most=pipeline.chain_plan.num_micro_batches,
        faster_than_s=pipeline.step_time_s,
        is_hopeless=is_too_large,
        progress=progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """The arguments of `solve_pipeline`; `limit_bytes` is on each device."""

    method: PipeshardParallel
    graph: Graph
    cluster: Cluster
    limit_bytes: float
    semantics: str
    on_missing_rule: str
    progress: Progress | None


def _solve_with(task: _Task, counts: list[int], helper: HelperProcess) -> PipelineDecision:
    """The best pipeline with one of some numbers of micro-batches."""
    method, graph, limit = task.method, task.graph, task.limit_bytes
    # The largest micro-batch allows every submesh.
    first = counts[0]
    length = _scan_length(graph) if method.layers is None else 0
    sketched = split_scans(graph, _few_ranges(length)).graph if length else graph
    sketch = sketch_step(sketched, first, layers=method.layers, on_missing_rule=task.on_missing_rule)
    chains, kinds = build_chains(
        sketch,
        task.cluster,
        intra=method.intra,
        counts=counts,
        memory_limit_bytes=limit,
        copies=_copies(length),
        on_missing_rule=task.on_missing_rule,
        progress=task.progress,
        helper=helper,
    )
    layered: LayeredStep | None = None
    inter = method.inter
    shrink, needed = 1.0, 0.0
    cut, cache = graph, StageCache()
    proposal: ChainPlan | None = None
    for _ in range(_ROUNDS):
        if proposal is not None and proposal.peak_bytes <= limit * shrink:
            # It already fits the tighter limit, so the search would return it again.
            shrink *= min(0.97, limit / needed)
            continue
        within = [replace(chain, memory_limit_bytes=limit * shrink) for chain in chains]
        proposal = inter.solve(within, limits=method.limits, helper=helper)
        bounds = (*(s.first_unit for s in proposal.stages), length)
        if length and (layered is None or layered.graph.split is None or layered.graph.split.bounds != bounds):
            layered, cut = None, split_scans(graph, bounds).graph if len(bounds) > 2 else graph
        if layered is None or proposal.num_micro_batches != layered.num_micro_batches:
            layered = layer_step(
                cut if length else graph,
                proposal.num_micro_batches,
                layers=None if length else sketch.layers,
                semantics=task.semantics,
                on_missing_rule=task.on_missing_rule,
            )
            cache = StageCache()
        (chain,) = (c for c in chains if c.num_micro_batches == proposal.num_micro_batches)
        result = _solve_stages(task, layered, chain, proposal, kinds, cache)
        if isinstance(result, PipelineDecision):
            free = method.num_stages in (None, 1) and method.schedule is None and method.num_micro_batches is None
            return replace(result, program=as_one_program(chains) if free and inter.searches else None)
        needed = result
        shrink *= min(0.97, limit / needed)
    raise InfeasibleError(
        f"No pipeline was found that fits {task.cluster.name}: the stages that the search proposed need "
        f"{needed / limit:.2f} times the memory of a device when they are looked at closely.\n"
        "  It could fit with more micro-batches, a smaller batch, or more devices.",
        required_bytes=int(needed),
        available_bytes=int(limit),
        parts={},
    )


def _scan_length(graph: Graph) -> int:
    """Layers in the loop over layers with most of them; 0 if there is none."""
    return max((scan.length for scan in scans_over_layers(graph) if scan.length > 1), default=0)


def _few_ranges(length: int) -> tuple[int, ...]:
    """Ranges with a first, an inner and a last layer by themselves: all others are like the inner one."""
    return tuple(sorted({0, 1, 2, length - 1, length} & set(range(length + 1))))


def _copies(length: int) -> tuple[int, ...]:
    """For each layer of a loop the range of `_few_ranges` that it is like."""
    last = len(_few_ranges(length)) - 2
    return tuple(0 if k == 0 else last if k == length - 1 else 1 for k in range(length))


def _counts(method: PipeshardParallel, graph: Graph, cluster: Cluster) -> list[list[int]]:
    """Numbers of micro-batches to try, and those to try if nothing fits with the first."""
    sizes = [
        graph.values[i.value].shape[0] for i in graph.inputs if i.role is Role.BATCH and graph.values[i.value].shape
    ]
    if method.num_micro_batches is not None:
        return [[method.num_micro_batches]]
    if not sizes:
        return [[1]]
    size = math.gcd(*sizes)
    # Fewer cannot keep stages busy, and a micro-batch should be worth splitting over a host; where memory is short, smaller
    # ones may be all that fits.
    divisors = [n for n in range(1, min(size, _MOST_MICRO_BATCHES) + 1) if size % n == 0]
    usual = [n for n in divisors if n * cluster.devices_per_host <= size] or [1]
    return [usual[-2:], [n for n in divisors if n > usual[-1]][-2:]]


def _solve_stages(
    task: _Task,
    layered: LayeredStep,
    chain: Chain,
    proposal: ChainPlan,
    kinds: Sequence[int],
    cache: StageCache,
) -> PipelineDecision | float:
    """Each stage solved as a whole, equal ones once; what the fullest device needs if that is too much.

    Args:
        cache: solved stages of this step from earlier proposals.
    """
    limit = task.limit_bytes
    schedule = make_schedule(
        proposal.schedule, len(proposal.stages), proposal.num_micro_batches, proposal.num_submeshes
    )
    in_ranges = layered.graph.split is not None
    staged = stage_step(layered, [k if in_ranges else s.first_unit for k, s in enumerate(proposal.stages)])
    options = [chain.options[s.option] for s in proposal.stages]
    solved: dict[int, tuple[Problem, Decision, PhaseCosts]] = {}
    groups = _alike(proposal, kinds, options, staged)
    for number, members in enumerate(groups):
        first = members[0]
        if task.progress:
            task.progress(f"stage {first} on {options[first].name}", number, len(groups))
        # What the others in flight hold is not there for the one that runs.
        held = [proposal.figures[k].held_bytes * (1 - 1 / max(1.0, proposal.figures[k].in_flight)) for k in members]
        stage = cache.of(
            staged.extracts[first],
            lambda graph: make_problem(
                graph,
                task.cluster,
                num_micro_batches=layered.num_micro_batches,
                on_missing_rule=task.on_missing_rule,
            ),
        )
        problem = replace(
            stage.problem,
            cluster=subcluster(task.cluster, options[first].submesh),
            memory_limit_bytes=limit - max(held),
        )
        try:
            decision, phases = stage.solved(problem, options[first], functools.partial(_solve_stage, task.method))
        except InfeasibleError as error:
            return float(limit + max((error.required_bytes or 0) - problem.memory_limit_bytes, 0.03 * limit))
        solved |= dict.fromkeys(members, (problem, decision, phases))
    first_of = {k: members[0] for members in groups for k in members}
    stages = [
        StageDecision(
            problem=solved[k][0],
            decision=solved[k][1],
            costs=solved[k][2],
            option=options[k],
            first_layer=choice.first_unit,
            last_layer=choice.last_unit,
            first_device=choice.first_device,
            like=first_of[k] if first_of[k] != k else None,
        )
        for k, choice in enumerate(proposal.stages)
    ]
    transfer = [f.transfer_s for f in proposal.figures[1:]]
    costs = _stage_costs(stages, transfer, chain)
    times = simulate(schedule, costs)
    peak = float(times.peak_bytes.max())
    if peak > limit:
        return peak
    return PipelineDecision(
        layered=layered,
        staged=staged,
        stages=tuple(stages),
        chain=chain,
        chain_plan=proposal,
        schedule=schedule,
        times=times,
        stage_costs=costs,
        transfer_s=tuple(transfer),
        method=task.method.inter.method,
        planner=f"{type(task.method.inter).__name__} over {task.method.intra.name}",
    )


def _alike(
    proposal: ChainPlan, kinds: Sequence[int], options: Sequence[StageOption], staged: StagedStep
) -> list[list[int]]:
    """Stages in groups of equal operators and options, each in order."""
    groups: dict[object, list[int]] = {}
    for k, (choice, option) in enumerate(zip(proposal.stages, options, strict=True)):
        own = (option.submesh, option.mesh_shape, option.recompute)
        key: object = (*own, tuple(kinds[choice.first_unit : choice.last_unit]))
        first = groups.get(key, [k])[0]
        if not same_structure(staged.extracts[first], staged.extracts[k]):
            key = (*own, k)
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def _solve_stage(method: PipeshardParallel, problem: Problem, option: StageOption) -> tuple[Decision, PhaseCosts]:
    priced = price_option(problem, option.mesh_shape)
    if priced is None:
        raise InfeasibleError("a stage's batch cannot be split as its layers' can", required_bytes=0, available_bytes=0)
    intra = method.intra.coarser(relative_gap=1e-2, node_limit=50)
    space = Space(name=option.name, priced=priced, allowed=fixed.everything(priced))
    decision = race(
        problem,
        [Entry(space=space, intra=intra)],
        method="pipeshard",
        planner=intra.name,
        relative_gap=intra.relative_gap,
        exact_space=False,
    )
    return decision, phase_costs(priced, decision.picks, problem.graph)


def _stage_costs(stages: Sequence[StageDecision], transfer: Sequence[float], chain: Chain) -> StageCosts:
    again = np.array([s.option.recompute == "stage" for s in stages])
    forward = np.array([s.costs.forward_s for s in stages])
    backward = np.array([s.costs.backward_s for s in stages])
    weights = np.where(again, 0.0, [s.costs.deferrable_s for s in stages])
    backward = np.where(again, backward + forward, backward)
    state = np.array([s.costs.state_bytes for s in stages])
    kept = np.array([s.costs.in_flight_bytes for s in stages])
    crossing = np.concatenate(([0.0], chain.boundary_bytes))
    entering = np.array([crossing[s.first_layer] / (s.option.dp or 1) for s in stages])
    return StageCosts(
        forward_s=forward,
        backward_input_s=backward - weights,
        backward_weight_s=weights,
        update_s=np.array([s.costs.once_s for s in stages]),
        transfer_s=np.array(transfer),
        state_bytes=np.where(again, state + kept, state),
        in_flight_bytes=np.where(again, entering, kept),
        working_bytes=np.array([s.costs.working_bytes for s in stages]),
        overlaps_transfers=chain.overlaps_transfers,
    )
