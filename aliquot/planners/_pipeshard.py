"""`PipeshardParallel`: stages by an inter planner, the splits of each by an intra planner, judged
by simulation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cluster import subcluster
from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Chain, ChainPlan, Problem, StageOption, make_problem, predict_stages, price_stage
from ..graph import (
    Graph,
    operators_with_effects,
    same_structure,
    source_line,
    split_scans,
)
from ..plans import make_schedule
from ..sharding import LayeredStep, StagedStep, layer_step, stage_step
from ._base import AbstractMethod, Candidate, Decision, Interrupted, PipelineParts, Progress, Task
from ._counts import MOST_MICRO_BATCHES, batch_size, chains_between, counts_to_try
from ._helper import HelperProcess
from ._layer_costs import price_option
from ._methods import ShardParallel, WholeProgram
from ._one_program import OneProgram, as_one_program, fewer_micro_batches, is_too_large, one_program_by_doubling
from ._priced_layers import PricedLayers, price_layers
from ._race import Entry, race
from ._stage_cache import Solved, StageCache
from ._tried import tried_counts, tried_pipeline
from .inter import AbstractInter, StageDP, StageLimits
from .intra import ILP, AbstractIntra, Space, fixed

_ROUNDS = 4
# Numbers of micro-batches that are searched on their own.
_MOST_COUNTS = 4
# Stages that are solved as wholes take up to so much less than their layers one by one.
_LESS_AS_WHOLES = 0.03
# Smaller steps are searched before a helper process is ready.
_MANY_OPS = 1000
_ONE_PROGRAM_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": " that split equal layers equally",
    "gap_within_neighbourhood": " with choices near the solutions of coarser meshes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeshardParallel(AbstractMethod):
    """Cut the step into stages, give each a submesh, split its operators, and run micro-batches
    through them.

    Attributes:
        inter: finds the stages.
        intra: finds the splits inside each stage.
        num_stages: None searches; one stage is a possible outcome.
        num_micro_batches: None searches among divisors of the batch.
        schedule: a name of `SCHEDULES`; None searches.
        layers: where stages may be cut: a number of layers, a pattern of parameter paths such as
            `params.layers[*]`, or None for every good place.
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
        """Whether one program is an answer: no stages and no schedule are asked for."""
        return self.num_stages in (None, 1) and self.schedule is None and self.inter.searches

    def whole(self, mesh_shape: tuple[int, ...] | None = None) -> ShardParallel:
        """The method that plans the step as one program, on a mesh."""
        return ShardParallel(intra=self.intra, mesh_shape=mesh_shape)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """See `AbstractMethod.solve`: one program is one stage."""
        return self.whole().solve(problem, progress)

    def decide(self, task: Task) -> Decision:
        """See `AbstractMethod.decide`: a pipeline, or one program where that is faster.

        Unless stages or a schedule are asked for, `WholeProgram` plans one program as well, with the given
        number of micro-batches or with 1, 2, 4, ... of them; see `one_program_by_doubling`.
        """
        return self.decide_with(task, {})

    def decide_with(self, task: Task, programs: Mapping[int, Decision | None]) -> Decision:
        """As `decide`, with the programs that are known by their numbers of micro-batches; None
        where none fits.
        """
        asked = task.num_micro_batches
        method = self if asked is None else replace(self, num_micro_batches=asked)
        best: Decision | None = None
        found: PipelineSearch | None = None
        refusal: InfeasibleError | InputError | CaptureError | None = None
        try:
            found = solve_pipeline(method, task)
        except InfeasibleError as error:
            if not method.may_be_one_program:
                raise
            refusal = error
        except (InputError, CaptureError) as error:
            # Where stages may be cut was said wrongly, or the step cannot be cut; it may still run whole.
            if not method.may_be_one_program or method.layers is not None:
                raise
            refusal = error
        pipeline = found.decision if found else None
        if pipeline is not None and len(pipeline.stages) > 1:
            best = pipeline
        try:
            for single in _one_programs(method, task, pipeline, found.program if found else None, programs):
                if best is None or single.step_time_s < best.step_time_s:
                    best = replace(
                        single,
                        method=method.inter.method,
                        combine=task.combine(single.num_micro_batches),
                        bound_holds_for=one_program_scope(single),
                    )
        except Interrupted as interrupted:
            interrupted.decision = best
            raise
        if best is None:
            assert refusal is not None
            raise refusal
        tried = found.tried if found else ()
        if best is pipeline:
            program = _tried_program(found.program) if found else ()
            return replace(best, candidates=(*program, tried_pipeline(best), *tried))
        if pipeline is not None and len(pipeline.stages) > 1:
            tried = (tried_pipeline(pipeline, "slower than one program"), *tried)
        return replace(best, candidates=(*best.candidates, *tried))


def _one_programs(
    method: PipeshardParallel,
    task: Task,
    pipeline: Decision | None,
    program: OneProgram | None,
    known: Mapping[int, Decision | None],
) -> Iterator[Decision]:
    """The step as one program, found in several ways.

    Raises:
        Interrupted: Ctrl-C.
    """
    found: Decision | None = None
    if method.may_be_one_program:
        given = method.num_micro_batches
        most = min(batch_size(task.graph), MOST_MICRO_BATCHES) if given is None else given
        # Searches where memory is short take long, and there are stages that fit.
        found = one_program_by_doubling(
            WholeProgram(intra=method.intra),
            task,
            first=given or 1,
            most=most,
            until_it_fits=pipeline is None,
            known=known,
        )
        if found is not None:
            yield found
    if pipeline is None or (found is not None and found.step_time_s <= pipeline.step_time_s):
        return
    fewer = _solve_one_program(method, task, pipeline, program)
    if fewer is not None:
        yield fewer
    elif len(pipeline.stages) == 1:
        # A single stage becomes one program, on the mesh of that stage.
        whole = method.whole(pipeline.priced.mesh.shape)
        yield whole.solve(task.problem(pipeline.num_micro_batches), task.progress)


def one_program_scope(decision: Decision) -> str:
    """The plans among which the bound of one program holds; pipelines, searched too, are none."""
    if not decision.bound_holds_for:
        return ""
    count = decision.num_micro_batches
    shown = "plans of one program" if count == 1 else f"plans of one program in {count} micro-batches"
    return shown + _ONE_PROGRAM_SCOPES.get(decision.bound_holds_for, f", {decision.bound_holds_for}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSearch:
    """The best pipeline for a step on a cluster.

    Attributes:
        decision: the pipeline.
        program: an estimate of the step as one program, if the method allows one.
        tried: what else was looked at.
    """

    decision: Decision
    program: OneProgram | None = None
    tried: tuple[Candidate, ...] = ()


def solve_pipeline(method: PipeshardParallel, task: Task) -> PipelineSearch:
    """The best pipeline for a step on a cluster.

    Raises:
        InfeasibleError: nothing fits.
        InputError: the settings cannot be followed, such as more stages than layers.
        CaptureError: the step does not decompose into micro-batches.
    """
    _refuse_effects(task.graph)
    given = method.num_micro_batches
    groups = [[given]] if given is not None else [g for g in counts_to_try(task.graph, task.cluster) if g]
    with HelperProcess(wanted=len(task.graph.ops) >= _MANY_OPS) as helper:
        for number, counts in enumerate(groups):
            try:
                return _search_counts(method, task, counts, helper)
            except InfeasibleError:
                if number == len(groups) - 1:
                    raise
    raise AssertionError("there is always a number of micro-batches to try")


def _search_counts(method: PipeshardParallel, task: Task, counts: list[int], helper: HelperProcess) -> PipelineSearch:
    """The best pipeline with any of these numbers of micro-batches.

    Layers are priced with the fewest and with the most micro-batches; chains of the numbers between
    are drawn from both. Numbers whose stages are fastest by those chains are then priced and solved
    on their own, until what the others promise is no faster than what was found.

    Raises:
        InfeasibleError: nothing fits with any of them.
    """
    price = functools.partial(price_layers, task, intra=method.intra, layers=method.layers, helper=helper)
    priced = {counts[0]: price(counts)}
    chains = priced[counts[0]].chains
    if len(counts) > 1:
        fine = priced[counts[-1]] = price(counts[-1:])
        if len(fine.kinds) != len(priced[counts[0]].kinds):
            # Small micro-batches may have other layers.
            fine = price(counts[-1:], layers=priced[counts[0]].sketch.layers)
        chains = chains_between(chains, fine.chains[0])
    found: list[Decision] = []
    refusals: list[InfeasibleError] = []
    left = list(chains)
    promised: ChainPlan | None = None
    while left:
        count = left[0].num_micro_batches
        if len(counts) > 1:
            try:
                promised = method.inter.solve(left, limits=method.limits, helper=helper)
            except InfeasibleError as error:
                refusals.append(error)
                break
            fastest_s = min((decision.step_time_s for decision in found), default=math.inf)
            searched = len(found) + len(refusals)
            if promised.step_time_s * (1 - _LESS_AS_WHOLES) >= fastest_s or searched == _MOST_COUNTS:
                break
            count = promised.num_micro_batches
        left = [chain for chain in left if chain.num_micro_batches != count]
        if count not in priced:
            priced[count] = price([count])
        try:
            found.append(_solve_with(method, task, priced[count], helper))
        except InfeasibleError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    best = min(found, key=lambda decision: decision.step_time_s)
    tried = [tried_pipeline(each, "slower") for each in found if each is not best]
    if left and promised is not None:
        tried.append(tried_counts(promised, best, [chain.num_micro_batches for chain in left]))
    is_open = method.num_stages in (None, 1) and method.schedule is None and method.num_micro_batches is None
    program = as_one_program(chains) if is_open and method.inter.searches else None
    return PipelineSearch(decision=best, program=program, tried=tuple(tried))


def _refuse_effects(graph: Graph) -> None:
    """Raise `CaptureError` if the step has effects: stages run only operators that their results
    need.
    """
    effects = operators_with_effects(graph)
    if effects:
        shown = ", ".join(dict.fromkeys(f"`{op.name}` {source_line(op)}".rstrip() for op in effects[:3]))
        raise CaptureError(
            f"{graph.name} does more than compute its results: {shown}{', ...' if len(effects) > 3 else ''}. A pipeline cannot run "
            "that as often as the plain step does. Take it out (return what it prints as a metric), or plan one program: "
            "--method program, method=WholeProgram()."
        )


def _tried_program(program: OneProgram | None) -> tuple[Candidate, ...]:
    """One program that was not faster, of which a bound is known."""
    if program is None:
        return ()
    mesh = "x".join(map(str, program.mesh_shape))
    bound_s = program.least_s
    outcome = "no faster"
    return (Candidate(name="one program", mesh=mesh, lower_bound_s=bound_s, step_time_s=None, outcome=outcome),)


def _solve_one_program(
    method: PipeshardParallel, task: Task, pipeline: Decision, program: OneProgram | None
) -> Decision | None:
    """The step as one program with fewer micro-batches than the pipeline, or None if that is no
    faster.

    Raises:
        Interrupted: Ctrl-C.
    """
    if program is None or program.least_s >= pipeline.step_time_s:
        return None
    return fewer_micro_batches(
        method.whole(program.mesh_shape),
        task.problem,
        most=pipeline.num_micro_batches,
        faster_than_s=pipeline.step_time_s,
        is_hopeless=is_too_large,
        progress=task.progress,
    )


def _solve_with(method: PipeshardParallel, task: Task, priced: PricedLayers, helper: HelperProcess) -> Decision:
    """The best pipeline with the number of micro-batches at which layers were priced."""
    graph, limit, length = task.graph, task.limit_bytes, priced.length
    chain = priced.chains[0]
    layered: LayeredStep | None = None
    shrink, needed = 1.0, 0.0
    cut, cache = graph, StageCache()
    proposal: ChainPlan | None = None
    for _ in range(_ROUNDS):
        if proposal is not None and proposal.peak_bytes <= limit * shrink:
            # It already fits the tighter limit, so the search would return it again.
            shrink *= min(0.97, limit / needed)
            continue
        tighter = replace(chain, memory_limit_bytes=limit * shrink)
        proposal = method.inter.solve([tighter], limits=method.limits, helper=helper)
        bounds = (*(s.first_unit for s in proposal.stages), length)
        if length and (layered is None or layered.graph.split is None or layered.graph.split.bounds != bounds):
            layered, cut = None, split_scans(graph, bounds).graph if len(bounds) > 2 else graph
        if layered is None:
            layered = layer_step(
                cut if length else graph,
                proposal.num_micro_batches,
                layers=None if length else priced.sketch.layers,
                semantics=task.semantics,
                on_missing_rule=task.on_missing_rule,
            )
            cache = StageCache()
        result = _solve_stages(method, task, layered, chain, proposal, priced.kinds, cache)
        if isinstance(result, Decision):
            return result
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


def _solve_stages(
    method: PipeshardParallel,
    task: Task,
    layered: LayeredStep,
    chain: Chain,
    proposal: ChainPlan,
    kinds: Sequence[int],
    cache: StageCache,
) -> Decision | float:
    """The stages, each solved as a whole and equal ones once; or the peak memory of a device if
    that is too large.

    Args:
        cache: solved stages of this step from earlier proposals.
    """
    limit = task.limit_bytes
    schedule = make_schedule(
        proposal.schedule, len(proposal.stages), proposal.num_micro_batches, proposal.num_submeshes
    )
    split = layered.graph.split
    staged = stage_step(layered, [s.first_unit if split is None else k for k, s in enumerate(proposal.stages)])
    options = [chain.options[s.option] for s in proposal.stages]
    solved: dict[int, Solved] = {}
    groups = _alike(proposal, kinds, options, staged)
    for number, members in enumerate(groups):
        first = members[0]
        if task.progress:
            task.progress(f"stage {first} on {options[first].name}", number, len(groups))
        # Activations of the other micro-batches in flight reduce the memory of the one that runs.
        other_bytes = [
            proposal.figures[k].held_bytes * (1 - 1 / max(1.0, proposal.figures[k].in_flight)) for k in members
        ]
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
            memory_limit_bytes=limit - max(other_bytes),
        )
        try:
            solution = stage.solved(problem, options[first], functools.partial(_solve_stage, method))
        except InfeasibleError as error:
            return float(limit + max((error.required_bytes or 0) - problem.memory_limit_bytes, 0.03 * limit))
        solved |= dict.fromkeys(members, solution)
    prediction = predict_stages(
        [
            replace(solved[k][1], first_device=choice.first_device, recompute=option.recompute)
            for k, (choice, option) in enumerate(zip(proposal.stages, options, strict=True))
        ],
        schedule,
        task.cluster,
        boundary_bytes=layered.boundary_bytes([s.last_unit for s in proposal.stages[:-1]]),
        memory_limit_bytes=limit,
        overlaps_transfers=chain.overlaps_transfers,
    )
    peak = float(prediction.times.peak_bytes.max())
    if peak > limit:
        return peak
    first_of = {k: members[0] for members in groups for k in members}
    names = chain.unit_names if split is None else [f"layers[{k}]" for k in range(chain.num_units)]
    return Decision(
        method=method.inter.method,
        planner=f"{type(method.inter).__name__} over {method.intra.name}",
        stages=tuple(
            replace(
                solved[k][0],
                first_device=choice.first_device,
                first_layer=choice.first_unit,
                layer_names=tuple(names[choice.first_unit : choice.last_unit]),
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
            schedule=schedule,
            overlaps_transfers=chain.overlaps_transfers,
            prediction=prediction,
        ),
        combine=layered.combine,
    )


def _alike(
    proposal: ChainPlan, kinds: Sequence[int], options: Sequence[StageOption], staged: StagedStep
) -> list[list[int]]:
    """Stages in groups of equal operators and options, each in order."""
    groups: dict[object, list[int]] = {}
    for k, (choice, option) in enumerate(zip(proposal.stages, options, strict=True)):
        option_key = (option.submesh, option.mesh_shape, option.recompute)
        key: object = (*option_key, tuple(kinds[choice.first_unit : choice.last_unit]))
        first = groups.get(key, [k])[0]
        if not same_structure(staged.extracts[first], staged.extracts[k]):
            key = (*option_key, k)
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def _solve_stage(method: PipeshardParallel, problem: Problem, option: StageOption) -> Solved:
    priced = price_option(problem, option.mesh_shape, method.intra)
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
    return decision.stages[0], price_stage(priced, decision.picks, problem.graph)
