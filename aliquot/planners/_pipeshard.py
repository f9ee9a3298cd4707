"""`PipeshardParallel`: stages by an inter planner, the splits of each by an intra planner, judged
by simulation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from ..core import CaptureError, InfeasibleError, InputError, format_seconds
from ..cost import Chain, ChainPlan, Problem
from ..graph import (
    Graph,
    operators_with_effects,
    source_line,
)
from ._base import AbstractMethod, Decision, Interrupted, Progress, Task, faster
from ._counts import MANY_DEVICES, MOST_MICRO_BATCHES, batch_size, chains_between, counts_to_try
from ._fewer_hosts import fastest_on_any_hosts
from ._helper import HelperProcess
from ._methods import ShardParallel, WholeProgram
from ._one_program import (
    Found,
    OneProgram,
    add_first_program,
    as_one_program,
    fewer_micro_batches,
    is_too_large,
    one_program_by_doubling,
    one_program_scope,
)
from ._pipeline_search import LazySearch, PipelineSearch, StoppedSearch, pipeline_s
from ._priced_layers import PricedLayers, price_layers
from ._solve_stages import solve_with
from ._tried import tried_counts, tried_pipeline, tried_programs
from .inter import AbstractInter, StageDP, StageLimits
from .intra import ILP, AbstractIntra

# At most so many numbers of micro-batches are priced and solved on their own.
_MOST_COUNTS = 4
# A stage solved as a whole takes up to this share less than the sum of its layers promises.
_LESS_AS_WHOLES = 0.03
# With one micro-batch half of the devices or more are idle: a step then mostly takes at least so
# many times its compute, shared evenly by all devices.
_IDLE_WITH_ONE = 2.0
# Units times options times devices: up to so many, other numbers of stages are solved as well.
_SMALL = 10_000
# The search of a step with fewer operators ends before a helper process is ready.
_MANY_OPS = 1000


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
        """True if one program is an answer: neither several stages nor a schedule is asked for, and
        the inter planner searches.
        """
        return self.num_stages in (None, 1) and self.schedule is None and self.inter.searches

    def whole(self, mesh_shape: tuple[int, ...] | None = None) -> ShardParallel:
        """The method that plans the step as one program, on a mesh."""
        return ShardParallel(intra=self.intra, mesh_shape=mesh_shape)

    def solve(self, problem: Problem, progress: Progress | None = None) -> Decision:
        """See `AbstractMethod.solve`: one program is one stage."""
        return self.whole().solve(problem, progress)

    def decide(self, task: Task) -> Decision:
        """See `AbstractMethod.decide`: a pipeline, or one program where that is faster.

        Unless stages or a schedule are asked for, `WholeProgram` plans one program as well, with
        the given number of micro-batches or with 1, 2, 4, ... of them; see
        `one_program_by_doubling`. The program of the fewest micro-batches comes first, so that only
        pipelines that may be faster are searched closely; but where memory makes its own search
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
        """The search for pipelines that take less than `most_s`, made when it is first asked
        for.
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
        """As `decide` on all hosts.

        Args:
            programs: the known ones, by their numbers of micro-batches; others are added.
            pipelines: the search for pipelines.
            faster_than_s: what takes as long need not be found; `InfeasibleError` may then be
                raised.
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
            # Other interruptions come from inside a stage: what they carry is no plan of the step.
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
    """The step time that pipelines must beat: that of the fastest known program, where one program
    is an answer.
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
    """Plans of the step as one program: by doubling the number of micro-batches; if none of these
    is as fast as the pipeline, with fewer than the pipeline has, or on the mesh of its only stage.

    Raises:
        Interrupted: Ctrl-C.
    """
    by_doubling: Decision | None = None
    if method.may_be_one_program:
        given = method.num_micro_batches
        most = min(batch_size(task.graph), MOST_MICRO_BATCHES) if given is None else given
        # Where memory is short a search takes long; with stages that fit, it need not go on.
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


def solve_pipeline(
    method: PipeshardParallel, task: Task, faster_than_s: float = math.inf
) -> PipelineSearch:
    """The best pipeline for a step on a cluster.

    Args:
        faster_than_s: numbers of micro-batches with which the layers promise no less are not priced
            and solved on their own.

    Raises:
        InfeasibleError: nothing fits.
        InputError: the settings cannot be followed, such as more stages than layers.
        CaptureError: the step does not decompose into micro-batches.
    """
    _refuse_effects(task.graph)
    method = replace(method, inter=method.inter.for_one_search())
    given = method.num_micro_batches
    groups = (
        [[given]]
        if given is not None
        else [g for g in counts_to_try(task.graph, task.cluster) if g]
    )
    with HelperProcess(wanted=len(task.graph.ops) >= _MANY_OPS) as helper:
        for attempt, counts in enumerate(groups, 1):
            try:
                return _search_counts(method, task, counts, helper, faster_than_s)
            except InfeasibleError:
                if attempt == len(groups):
                    raise
    raise AssertionError("there is always a number of micro-batches to try")


def _search_counts(
    method: PipeshardParallel,
    task: Task,
    counts: list[int],
    helper: HelperProcess,
    faster_than_s: float,
) -> PipelineSearch:
    """The best pipeline with any of these numbers of micro-batches.

    Layers are priced with the fewest and with the most micro-batches; chains of the numbers between
    are drawn from both. Numbers whose stages are fastest by those chains are then priced and solved
    on their own, until what the others promise is no faster than what was found.

    Raises:
        InfeasibleError: nothing fits with any of them.
    """
    price = functools.partial(
        price_layers, task, intra=method.intra, layers=method.layers, helper=helper
    )
    priced = {counts[0]: price(counts)}
    chains = priced[counts[0]].chains
    if len(counts) > 1:
        fine = priced[counts[-1]] = price(counts[-1:])
        if len(fine.kinds) != len(priced[counts[0]].kinds):
            # Small micro-batches may be cut into other layers: take those of the large ones.
            fine = price(counts[-1:], layers=priced[counts[0]].sketch.layers)
        chains = chains_between(chains, fine.chains[0])
    least_s = priced[counts[0]].least_compute_s
    if _is_small(chains[0]) or _one_micro_batch_may_do(task, least_s, faster_than_s):
        # Other numbers of stages or one micro-batch are tried, too, of which no promise speaks.
        faster_than_s = math.inf
    decisions: list[Decision] = []
    refusals: list[InfeasibleError] = []
    untried = list(chains)
    promised: ChainPlan | None = None
    # Searches for stages on many devices take long.
    most_counts = 1 if task.cluster.num_devices > MANY_DEVICES else _MOST_COUNTS
    try:
        while untried:
            if len(decisions) == most_counts == 1:
                # No promise is known of those left out.
                promised = None
                break
            count = untried[0].num_micro_batches
            if len(counts) > 1 or math.isfinite(faster_than_s):
                try:
                    promised = method.inter.solve(untried, limits=method.limits, helper=helper)
                except InfeasibleError as error:
                    refusals.append(error)
                    break
                fastest_s = min([faster_than_s, *(decision.step_time_s for decision in decisions)])
                searched = len(decisions) + len(refusals)
                if (
                    promised.step_time_s * (1 - _LESS_AS_WHOLES) >= fastest_s
                    or searched == _MOST_COUNTS
                ):
                    break
                count = promised.num_micro_batches
            untried = [chain for chain in untried if chain.num_micro_batches != count]
            if count not in priced:
                priced[count] = price([count])
            try:
                decisions.append(solve_with(method, task, priced[count], helper))
            except InfeasibleError as error:
                refusals.append(error)
    except KeyboardInterrupt as stopped:
        raise StoppedSearch.beside(_fastest(decisions), stopped) from stopped
    best = _fastest(decisions)
    if best is None:
        if refusals or promised is None:
            raise refusals[0]
        others = [chain.num_micro_batches for chain in untried]
        slower = tried_counts(promised, method.inter.method, faster_than_s, others)
        return PipelineSearch(decision=None, tried=(slower,))
    if method.num_stages is None and method.inter.searches:
        decisions += _with_other_numbers_of_stages(
            method, task, priced[best.num_micro_batches], best, len(best.stages), helper
        )
        best = _fastest(decisions)
        assert best is not None
    leaves_out_one = method.num_micro_batches is None and 1 not in priced
    if leaves_out_one and _one_micro_batch_may_do(task, least_s, best.step_time_s):
        try:
            decisions += _with_one_micro_batch(method, task, price([1]), best, helper)
        except KeyboardInterrupt as stopped:
            raise StoppedSearch.beside(best, stopped) from stopped
        best = _fastest(decisions)
        assert best is not None
    tried = [tried_pipeline(each, "slower") for each in decisions if each is not best]
    if untried:
        others = [chain.num_micro_batches for chain in untried]
        tried.append(tried_counts(promised, best.method, best.step_time_s, others))
    is_open = method.may_be_one_program and method.num_micro_batches is None
    program = as_one_program(chains) if is_open else None
    return PipelineSearch(decision=best, program=program, tried=tuple(tried))


def _is_small(chain: Chain) -> bool:
    """True if a step is so small that other numbers of stages are solved as well."""
    return chain.num_units * len(chain.options) * chain.num_devices <= _SMALL


def _one_micro_batch_may_do(task: Task, least_s: float, best_s: float) -> bool:
    """True if a pipeline of one micro-batch may take less than `best_s`, and devices are few enough
    to search it.

    Args:
        least_s: of the step's compute, shared evenly by all devices.
    """
    return task.cluster.num_devices <= MANY_DEVICES and best_s > _IDLE_WITH_ONE * least_s


def _with_one_micro_batch(
    method: PipeshardParallel,
    task: Task,
    priced: PricedLayers,
    best: Decision,
    helper: HelperProcess,
) -> list[Decision]:
    """Pipelines of one micro-batch, if they may be faster than the best with more: one stage at a
    time is busy, but collectives stay within a stage and happen once.
    """
    try:
        promised = method.inter.solve(priced.chains, limits=method.limits, helper=helper)
        if promised.step_time_s * (1 - _LESS_AS_WHOLES) >= best.step_time_s:
            return []
        found = solve_with(method, task, priced, helper)
    except (InfeasibleError, InputError):
        return []
    if method.num_stages is not None or not method.inter.searches:
        return [found]
    others = _with_other_numbers_of_stages(method, task, priced, best, len(found.stages), helper)
    return [found, *others]


def _with_other_numbers_of_stages(
    method: PipeshardParallel,
    task: Task,
    priced: PricedLayers,
    best: Decision,
    around: int,
    helper: HelperProcess,
) -> list[Decision]:
    """Pipelines of small steps with one stage more than `around`, and with fewer for as long as
    their layers promise less than `best` takes: the number of stages that is fastest by sums of
    layers need not be the fastest when stages are solved as wholes.
    """
    chain = priced.chains[0]
    if not _is_small(chain):
        return []
    found = []
    for count in (around + 1, *range(around - 1, 1, -1)):
        fixed = replace(method, num_stages=count)
        try:
            promised = method.inter.solve([chain], limits=fixed.limits, helper=helper)
            if promised.step_time_s * (1 - _LESS_AS_WHOLES) < best.step_time_s:
                found.append(solve_with(fixed, task, priced, helper))
            elif count < around:
                break
        except (InfeasibleError, InputError):
            continue
        except KeyboardInterrupt as stopped:
            raise StoppedSearch(_fastest([best, *found])) from stopped
    return found


def _fastest(found: Sequence[Decision]) -> Decision | None:
    return min(found, key=lambda decision: decision.step_time_s, default=None)


def _refuse_effects(graph: Graph) -> None:
    """Raise `CaptureError` if the step has effects: stages run only operators that their results
    need.
    """
    effects = operators_with_effects(graph)
    if effects:
        shown = ", ".join(
            dict.fromkeys(f"`{op.name}` {source_line(op)}".rstrip() for op in effects[:3])
        )
        raise CaptureError(
            f"{graph.name} does more than compute its results:"
            f" {shown}{', ...' if len(effects) > 3 else ''}. A pipeline cannot run that as often as"
            " the plain step does. Take it out (return what it prints as a metric), or plan one"
            " program: --method program, method=WholeProgram()."
        )


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
    return fewer_micro_batches(
        method.whole(program.mesh_shape),
        task.problem,
        most=pipeline.num_micro_batches,
        faster_than_s=pipeline.step_time_s,
        is_hopeless=is_too_large,
        progress=task.progress,
    )
