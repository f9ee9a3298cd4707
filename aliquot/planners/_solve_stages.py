"""Solution of the stages that an inter planner proposes, each as a whole; if they do not fit in
memory, others are proposed, which often have stages in common.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..cluster import subcluster
from ..core import InfeasibleError, InputError, format_bytes
from ..cost import (
    Chain,
    ChainPlan,
    Priced,
    PricedStage,
    Problem,
    StageOption,
    judge_stages,
    make_problem,
    predict_stages,
    price_stage,
)
from ..graph import Extract, OpId, same_structure, split_scans
from ..plans import make_schedule
from ..sharding import LayeredStep, NodeId, StagedStep, layer_step, stage_step
from ._base import Decision, PipelineParts, StageDecision, Task
from ._helper import HelperProcess
from ._layer_costs import PricedLayers, price_option
from ._race import Entry, Race
from ._recompute_levels import chain_with_levels, recompute_levels, repeated_nodes
from .inter import NoFasterStages, StageLimits
from .intra import Space

if TYPE_CHECKING:
    from ._pipeshard import PipeshardParallel

_ROUNDS = 4
# More than any stage needs, but finite.
_AMPLE_BYTES = 1e18
Solved = tuple[StageDecision, PricedStage]


def solve_with(
    method: PipeshardParallel,
    task: Task,
    priced: PricedLayers,
    helper: HelperProcess,
    to_beat_s: float = math.inf,
) -> Decision:
    """The best pipeline with the number of micro-batches at which layers were priced.

    If memory constrains the choice of stages, a second search allows selective recomputation, and
    the faster pipeline is returned.

    Args:
        to_beat_s: stages that promise to take this long are not solved, and selective
            recomputation is not tried where it cannot take less.

    Raises:
        InfeasibleError: nothing fits.
        NoFasterStages: no stages promise to take less than `to_beat_s`.
    """
    found: Decision | None = None
    refusal: InfeasibleError | None = None
    chain = priced.chains[0]
    stages = _Stages(method=method, task=task, priced=priced, helper=helper)
    faster_than_s = math.inf
    try:
        found, first = stages.fit(chain, (), to_beat_s)
        faster_than_s = first.step_time_s
        if first.num_submeshes < len(first.stages):
            # The search leaves out stages by their closed form, which exceeds the simulation where
            # the stages on a submesh differ.
            faster_than_s = max(faster_than_s, first.closed_form_s)
        # Solved as wholes, stages take less than the sums of their layers.
        as_wholes = min(found.step_time_s / first.step_time_s, 1.0)
        worth_s = min(faster_than_s, to_beat_s / as_wholes)
        # Stages recompute only to save memory.
        is_short = math.isinf(to_beat_s) and any(s.recompute != "none" for s in found.stages)
        if not (is_short or stages.may_beat(chain, worth_s)):
            return found
    except InfeasibleError as error:
        too_slow = isinstance(error, NoFasterStages)
        if too_slow and not stages.may_beat(chain, to_beat_s):
            raise
        refusal, faster_than_s = error, to_beat_s
    # Not for a loop over layers: its layers share one body, so all would recompute the same.
    if method.inter.searches and not priced.length and task.recomputes:
        more, repeated = chain_with_levels(priced.costs, recompute_levels(priced.costs), chain)
        with contextlib.suppress(InfeasibleError):
            selective, _ = stages.fit(more, repeated, faster_than_s)
            if found is None or selective.step_time_s < found.step_time_s:
                return selective
    if found is None:
        assert refusal is not None
        if task.recomputes or isinstance(refusal, NoFasterStages):
            raise refusal
        raise refusal.reworded(
            f"{refusal.message}\n  No stage may recompute (recompute none): leave this out, and"
            " stages that are short of memory recompute in the backward pass.",
            refusal.advice,
        )
    return found


@dataclass(slots=True, kw_only=True)
class _Stages:
    """The stages of a step at one number of micro-batches.

    Attributes:
        method: the planner that finds stages, its limits, and the planner that splits each stage.
        priced: the layers of the step.
        bounds, layered: the step, cut at the bounds of the stages that were proposed last; only
            loops over layers have to be cut anew for other stages.
        known: problems of stages, each with its solutions by submesh, mesh and memory limit.
    """

    method: PipeshardParallel
    task: Task
    priced: PricedLayers
    helper: HelperProcess
    bounds: tuple[int, ...] = field(default=(), init=False)
    layered: LayeredStep | None = field(default=None, init=False)
    known: dict[object, tuple[Problem, dict[object, Solved]]] = field(
        default_factory=dict, init=False
    )

    def at(self, proposal: ChainPlan) -> LayeredStep:
        """The step in layers, cut for these stages."""
        task, length = self.task, self.priced.length
        bounds = (*(s.first_unit for s in proposal.stages), length)
        if self.layered is not None and (not length or bounds == self.bounds):
            return self.layered
        # If the units are iterations of a loop, the loop must be cut where stages begin.
        graph = split_scans(task.graph, bounds).graph if length and len(bounds) > 2 else task.graph
        self.bounds = bounds
        self.layered = layer_step(
            graph,
            proposal.num_micro_batches,
            layers=None if length else self.priced.sketch.layers,
            semantics=task.semantics,
            on_missing_rule=task.on_missing_rule,
        )
        # Another cut has other operators, so that no known stage applies.
        self.known = {}
        return self.layered

    def may_beat(self, chain: Chain, faster_than_s: float) -> bool:
        """Whether stages would take less than a time if devices had any amount of memory."""
        ample = replace(chain, memory_limit_bytes=_AMPLE_BYTES)
        limits = replace(self.method.limits, faster_than_s=faster_than_s)
        try:
            return (
                self.method.inter.solve([ample], limits=limits, helper=self.helper).step_time_s
                < faster_than_s
            )
        except NoFasterStages:
            return False

    def fit(
        self, chain: Chain, repeated: Sequence[frozenset[OpId]], faster_than_s: float = math.inf
    ) -> tuple[Decision, ChainPlan]:
        """The best pipeline of a chain, with the stages that the planner proposed for it.

        Args:
            repeated: for each option, the operators of the step that a backward pass may recompute.
            faster_than_s: proposed stages are solved only if they promise to take less.

        Raises:
            InfeasibleError: nothing fits, or nothing that promises less.
        """
        task, method, helper = self.task, self.method, self.helper
        limit = task.limit_bytes
        shrink, just_below, least_needed = 1.0, 0.0, math.inf
        proposal: ChainPlan | None = None
        refusal: InfeasibleError | None = None
        limits = replace(method.limits, faster_than_s=faster_than_s)
        for _ in range(_ROUNDS):
            tighter = replace(chain, memory_limit_bytes=limit * shrink)
            try:
                start = self.over_layers(tighter, limits)
                proposal = method.inter.solve([tighter], limits=limits, helper=helper, start=start)
            except InfeasibleError as error:
                if proposal is not None and shrink < just_below:
                    # Between this limit and the last proposal there may be others.
                    shrink = just_below
                    continue
                # This error states the tighter limit; the one below states the real limit, and what
                # solved stages need.
                if proposal is not None:
                    break
                if method.inter.searches:
                    raise
                # Solved as wholes, given stages may need less than the sums of their layers.
                refusal = error
                ample = replace(chain, memory_limit_bytes=_AMPLE_BYTES)
                proposal = method.inter.solve([ample], limits=limits, helper=helper)
            if proposal.step_time_s >= faster_than_s:
                raise NoFasterStages("no stages promise less than those that were found")
            result = self.solve(chain, proposal, repeated)
            if isinstance(result, Decision):
                return result, proposal
            if refusal is not None:
                raise refusal
            least_needed = min(least_needed, result)
            # By 3% or more, until the search cannot return this proposal again.
            tighten, just_below = min(0.97, limit / result), 0.999 * proposal.peak_bytes / limit
            shrink *= tighten
            while shrink > just_below > 0:
                shrink *= tighten
        raise InfeasibleError(
            f"No pipeline was found that fits {task.cluster.name}: the stages that the search"
            f" proposed need at least {least_needed / limit:.2f} times the {format_bytes(limit)}"
            " usable on each device when they are looked at closely.",
            advice=["more micro-batches", "a smaller batch", "more devices"],
            required_bytes=int(least_needed),
            available_bytes=int(limit),
            parts={},
        )

    def over_layers(self, chain: Chain, limits: StageLimits) -> ChainPlan | None:
        """Where units are operators, the stages that the planner finds over their layers, which are
        far fewer: a search over operators begins with them. None if there are none.
        """
        whole = self.priced.costs.whole
        if whole is None or not self.method.inter.searches:
            return None
        over_layers = whole.chain(chain.num_micro_batches, chain.memory_limit_bytes)
        try:
            found = self.method.inter.solve([over_layers], limits=limits, helper=self.helper)
        except (InfeasibleError, InputError):
            return None
        inner, units = self.priced.sketch.layers.inner, chain.num_units
        bounds = [k for k in range(units + 1) if k not in inner]
        stages = []
        for s in found.stages:
            stages.append(
                replace(s, first_unit=bounds[s.first_unit], last_unit=bounds[s.last_unit])
            )
        return judge_stages(chain, stages, found.schedule, num_submeshes=found.num_submeshes)

    def solve(
        self, chain: Chain, proposal: ChainPlan, repeated: Sequence[frozenset[OpId]]
    ) -> Decision | float:
        """The decision with every stage solved as a whole, equal stages only once; or, if a
        device's memory is too small, the bytes that it would need.

        Args:
            repeated: see `fit`.
        """
        task, method, layered = self.task, self.method, self.at(proposal)
        limit = task.limit_bytes
        schedule = make_schedule(
            proposal.schedule,
            len(proposal.stages),
            proposal.num_micro_batches,
            proposal.num_submeshes,
        )
        split = layered.graph.split
        staged = stage_step(
            layered, [s.first_unit if split is None else k for k, s in enumerate(proposal.stages)]
        )
        options = [chain.options[s.option] for s in proposal.stages]
        solved: dict[int, Solved] = {}
        first_of: dict[int, int] = {}
        for members in _alike(proposal, self.priced.kinds, options, staged):
            first = members[0]
            if task.progress:
                task.progress(f"stage {first} on {options[first].name}", len(solved), len(options))
            # Activations of the other micro-batches in flight reduce the memory left to the one
            # that runs.
            other_bytes = []
            for k in members:
                other_bytes.append(
                    proposal.figures[k].held_bytes
                    * (1 - 1 / max(1.0, proposal.figures[k].in_flight))
                )
            solution = self.solve_whole(
                staged.extracts[first],
                options[first],
                # Equal stages share one solution, so the one with the most in flight sets the
                # limit.
                memory_limit_bytes=limit - max(other_bytes),
                step_ops=repeated[proposal.stages[first].option] if repeated else frozenset(),
            )
            if isinstance(solution, float):
                return solution
            solved |= dict.fromkeys(members, solution)
            first_of |= dict.fromkeys(members, first)
        prediction = predict_stages(
            [
                replace(solved[k][1], first_device=choice.first_device)
                for k, choice in enumerate(proposal.stages)
            ],
            schedule,
            task.cluster,
            crossing=staged.crossing,
            memory_limit_bytes=limit,
            overlaps_transfers=chain.overlaps_transfers,
            may_update_early=staged.early_updates,
        )
        peak = float(prediction.times.peak_bytes.max())
        if peak > limit:
            return peak
        return Decision(
            method=method.inter.method,
            planner=f"{type(method.inter).__name__}, each stage by {method.intra.name}",
            stages=tuple(
                replace(
                    solved[k][0],
                    first_device=choice.first_device,
                    first_layer=choice.first_unit,
                    layer_names=chain.unit_names[choice.first_unit : choice.last_unit],
                    recompute=options[k].recompute,
                    like=first_of[k] if first_of[k] != k else None,
                )
                for k, choice in enumerate(proposal.stages)
            ),
            step_time_s=prediction.step.step_time_s,
            lower_bound_s=proposal.lower_bound_s,
            gap=proposal.gap,
            bound_holds_for=proposal.bound_holds_for,
            status=proposal.status,
            pipeline=PipelineParts(
                layered=layered,
                staged=staged,
                schedule=prediction.schedule,
                overlaps_transfers=chain.overlaps_transfers,
                prediction=prediction,
            ),
            combine=layered.combine,
        )

    def solve_whole(
        self,
        extract: Extract,
        option: StageOption,
        memory_limit_bytes: float,
        step_ops: frozenset[OpId],
    ) -> Solved | float:
        """A stage solved as a whole; or, if it does not fit, the bytes of a device that the search
        should assume for it.

        Args:
            memory_limit_bytes: what the other micro-batches in flight leave of a device.
            step_ops: with selective recomputation, the operators that may be recomputed.
        """
        task, graph = self.task, extract.graph
        assert self.layered is not None
        # Found by its operators: in another proposal, the same layers may have other operators,
        # such as those of the update.
        inputs = tuple([(item.path, item.value, item.role, item.output) for item in graph.inputs])
        outputs = tuple([output.path for output in graph.outputs])
        deferrable = tuple([op.deferrable for op in graph.ops])
        of_stage = extract.ops, extract.values, inputs, outputs, deferrable
        if of_stage not in self.known:
            made = make_problem(
                graph,
                task.cluster,
                num_micro_batches=self.layered.num_micro_batches,
                on_missing_rule=task.on_missing_rule,
                semantics=task.semantics,
                of_stage=True,
            )
            self.known[of_stage] = made, {}
        problem, solutions = self.known[of_stage]
        # The memory limit depends on how many micro-batches are in flight.
        key = option.submesh, option.mesh_shape, memory_limit_bytes
        try:
            if key not in solutions:
                on_submesh = replace(
                    problem,
                    cluster=subcluster(task.cluster, option.submesh),
                    memory_limit_bytes=memory_limit_bytes,
                )
                solutions[key] = _solve_stage(self.method, on_submesh, option)
            solution = solutions[key]
        except InfeasibleError as error:
            # The limit plus what the stage lacks, at least 3%, so that the next search has a
            # tighter limit.
            limit = task.limit_bytes
            return float(
                limit + max((error.required_bytes or 0) - memory_limit_bytes, 0.03 * limit)
            )
        if option.recompute == "none":
            return solution
        # It recomputes all or some of its operators.
        found, repeat = solution[0], frozenset[NodeId]()
        if option.recompute == "operators":
            repeat = repeated_nodes(found.problem.nodes, extract.ops, step_ops)
        priced = price_stage(found.picked, found.problem.graph, option.recompute, repeat)
        return replace(found, repeat=repeat), priced


def _alike(
    proposal: ChainPlan, kinds: Sequence[int], options: Sequence[StageOption], staged: StagedStep
) -> Iterator[list[int]]:
    """Groups of stages with equal operators and options, in order within each group. Stages are
    extracted only once their group is asked for.
    """
    groups: dict[object, list[int]] = {}
    for k, (choice, option) in enumerate(zip(proposal.stages, options, strict=True)):
        layers = tuple(kinds[choice.first_unit : choice.last_unit])
        key = (option.submesh, option.mesh_shape, option.recompute, choice.option, layers)
        groups.setdefault(key, []).append(k)
    for first, *others in groups.values():
        # Stages of equal layers may still differ in the arrays that enter and leave them.
        equal = [k for k in others if same_structure(staged.extracts[first], staged.extracts[k])]
        yield [first, *equal]
        yield from ([k] for k in others if k not in equal)


def _solve_stage(method: PipeshardParallel, problem: Problem, option: StageOption) -> Solved:
    priced = price_option(problem, option.mesh_shape, method.intra)
    if priced is None:
        raise InfeasibleError(
            "a stage's batch cannot be split as its layers' can",
            required_bytes=0,
            available_bytes=0,
        )
    best = _split_stage(method, problem, option, priced)
    if _sums_over_tokens(problem, best.stages[0]):
        # Fixed splits of the batch over all devices leave no axis for the sequence.
        with contextlib.suppress(InfeasibleError, InputError):
            waiting = price_option(problem, option.mesh_shape, method.intra, splits_sequence=True)
            if waiting is not None:
                most_s = best.step_time_s
                other = _split_stage(method, problem, option, waiting, faster_than_s=most_s)
                best = other if other.step_time_s < most_s else best
    stage = best.stages[0]
    return stage, price_stage(stage.picked, problem.graph)


def _split_stage(
    method: PipeshardParallel,
    problem: Problem,
    option: StageOption,
    priced: Priced,
    faster_than_s: float = math.inf,
) -> Decision:
    # Many stages are solved, and a gap of 1% is close enough.
    intra = method.intra.coarser(relative_gap=1e-2, node_limit=50)
    space = Space.whole(option.name, priced)
    race = Race(problem=problem, method="pipeshard", intra=intra)
    return race.best([Entry(space=space, intra=intra)], faster_than_s)


def _sums_over_tokens(problem: Problem, stage: StageDecision) -> bool:
    """True if products that are gradients are summed over the last axis in each micro-batch, which
    may wait if that axis splits nothing but the sequence.
    """
    priced, axis = stage.priced, len(stage.priced.axis_sizes) - 1
    # Independent micro-batches sum gradients of their own.
    if priced.repeats == 1 or problem.semantics == "independent":
        return False
    if priced.use.context_axes or axis in priced.use.data_axes:
        return False
    return any(
        sum(port is not None for port in token_sum.operands) > 1
        and token_sum.is_split(stage.picked.choices, axis)
        for token_sum in problem.nodes.token_sums
    )
