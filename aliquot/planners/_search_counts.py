"""The search for pipelines over numbers of micro-batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Chain, ChainPlan
from ..graph import Graph, Layers, operators_with_effects, source_line
from ..sharding import runs_in_groups
from ._base import Candidate, Decision, Task
from ._counts import MANY_DEVICES, counts_to_try, drawn_between
from ._helper import HelperProcess
from ._one_program import as_one_program
from ._pipeline_search import PipelineSearch, StoppedSearch
from ._priced_layers import PricedLayers, price_layers
from ._quick_bounds import least_compute_s
from ._solve_stages import solve_with
from ._tried import listed, tried_counts, tried_pipeline

if TYPE_CHECKING:
    from ._pipeshard import PipeshardParallel

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
            except InfeasibleError as error:
                if given is not None:
                    raise
                if attempt == len(groups):
                    raise _untried(error) from None
            except (CaptureError, InputError) as error:
                if given is not None:
                    raise
                return _search_what_decomposes(method, task, counts, helper, faster_than_s, error)
    raise AssertionError("there is always a number of micro-batches to try")


def _search_what_decomposes(
    method: PipeshardParallel,
    task: Task,
    counts: list[int],
    helper: HelperProcess,
    faster_than_s: float,
    refusal: CaptureError | InputError,
) -> PipelineSearch:
    """As `_search_counts`, with those of the numbers of micro-batches into which the step
    decomposes, or with a single one.

    Args:
        refusal: why the step cannot be planned with all of the numbers.

    Raises:
        CaptureError, InputError: the refusal, if it has another reason, or if a plan that takes
            less than a pipeline of a single micro-batch mostly does is known.
    """
    semantics, rules = task.semantics, task.on_missing_rule
    kept = [
        n
        for n in counts
        if n == 1 or runs_in_groups(task.graph, n, 1, semantics=semantics, on_missing_rule=rules)
    ]
    if kept == counts:
        raise refusal
    if not kept and math.isfinite(faster_than_s):
        least_s = least_compute_s(task.problem(1))
        if not _one_micro_batch_may_do(task, least_s, faster_than_s):
            raise refusal
    left_out = [n for n in counts if n not in kept]
    said = Candidate(
        name=f"{method.inter.method}, {listed(left_out)} micro-batches",
        mesh="",
        lower_bound_s=None,
        step_time_s=None,
        outcome="the step does not decompose",
    )
    try:
        found = _search_counts(method, task, kept or [1], helper, faster_than_s)
    except InfeasibleError as error:
        untried = _untried(error)
        raise untried.reworded(f"{untried.message}\n{refusal}", untried.advice) from None
    decision = found.decision
    if decision is not None:
        decision = replace(decision, candidates=(*decision.candidates, said))
    return replace(found, decision=decision, tried=(*found.tried, said))


def _untried(error: InfeasibleError) -> InfeasibleError:
    """The error without advice to use more micro-batches, of which all numbers were tried."""
    advice = [each for each in error.advice if not each.startswith("more micro-batches")]
    return error.reworded(error.message, advice)


@dataclass(slots=True, kw_only=True, eq=False)
class _CountSearch:
    """The state of a search over numbers of micro-batches.

    Attributes:
        priced: layers, by the numbers that were priced.
        chains: one for each number, with figures that were priced or interpolated.
        untried: numbers that were not solved on their own, in rising order.
        promised: the best stages of the untried numbers, by the chains; None if not looked for.
        decisions: the best pipelines of the numbers that were solved and fit.
        refusals: why others have none.
        ratios: for each decision its step time, as a multiple of what the chains promised.
    """

    priced: dict[int, PricedLayers]
    chains: list[Chain]
    untried: list[int]
    promised: ChainPlan | None = None
    decisions: list[Decision] = field(default_factory=list)
    refusals: list[InfeasibleError] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def _search_counts(
    method: PipeshardParallel,
    task: Task,
    counts: list[int],
    helper: HelperProcess,
    faster_than_s: float,
) -> PipelineSearch:
    """The best pipeline with any of these numbers of micro-batches.

    Layers are priced with the fewest and with the most micro-batches, and figures for the numbers
    between are interpolated. The number whose stages promise to be fastest is then priced and
    solved on its own, which also improves the figures of the numbers around it. This goes on until
    the others promise nothing faster than what was found.

    Raises:
        InfeasibleError: nothing fits with any of them.
    """
    priced = _price_ends(method, task, counts, helper)
    first, last = priced[counts[0]], priced[counts[-1]]
    price = functools.partial(
        price_layers, task, intra=method.intra, layers=_layers_of(method, last), helper=helper
    )
    search = _CountSearch(priced=priced, chains=_drawn(first.chains, priced), untried=list(counts))
    least_s = first.least_compute_s
    if _is_small(first.chains[0]) or _one_micro_batch_may_do(task, least_s, faster_than_s):
        # Other numbers of stages or one micro-batch are tried, too, of which no promise speaks.
        faster_than_s = math.inf
    try:
        while (count := _next_count(search, method, task, helper, faster_than_s)) is not None:
            _solve_count(search, count, method, task, price, helper)
    except KeyboardInterrupt as stopped:
        raise StoppedSearch.beside(_fastest(search.decisions), stopped) from stopped
    best = _fastest(search.decisions)
    if best is None:
        if search.refusals or search.promised is None:
            raise search.refusals[0]
        slower = tried_counts(search.promised, method.inter.method, faster_than_s, search.untried)
        return PipelineSearch(decision=None, tried=(slower,))
    decisions = list(search.decisions)
    if method.asked_stages is None and method.inter.searches:
        decisions += _with_other_numbers_of_stages(
            method, task, priced[best.num_micro_batches], best, len(best.stages), helper
        )
        best = _fastest(decisions) or best
    leaves_out_one = method.num_micro_batches is None and 1 not in priced
    if leaves_out_one and (
        _is_small(first.chains[0]) or _one_micro_batch_may_do(task, least_s, best.step_time_s)
    ):
        try:
            decisions += _with_one_micro_batch(method, task, price([1]), best, helper)
        except KeyboardInterrupt as stopped:
            raise StoppedSearch.beside(best, stopped) from stopped
        best = _fastest(decisions) or best
    tried = [tried_pipeline(each, "slower") for each in decisions if each is not best]
    if search.untried:
        tried.append(tried_counts(search.promised, best.method, best.step_time_s, search.untried))
    is_open = method.may_be_one_program and method.num_micro_batches is None
    program = as_one_program(search.chains) if is_open else None
    return PipelineSearch(decision=best, program=program, tried=tuple(tried))


def _next_count(
    search: _CountSearch,
    method: PipeshardParallel,
    task: Task,
    helper: HelperProcess,
    faster_than_s: float,
) -> int | None:
    """The number of micro-batches to solve next: the one whose stages promise to be fastest; None
    if the search is over.
    """
    if not search.untried:
        return None
    # Searches for stages on many devices take long.
    if task.cluster.num_devices > MANY_DEVICES and search.decisions:
        # No promise is known of those left out.
        search.promised = None
        return None
    if len(search.chains) == 1 and math.isinf(faster_than_s):
        return search.untried[0]
    left = [chain for chain in search.chains if chain.num_micro_batches in search.untried]
    try:
        search.promised = method.inter.solve(left, limits=method.limits, helper=helper)
    except InfeasibleError as error:
        search.refusals.append(error)
        return None
    fastest_s = min([faster_than_s, *(decision.step_time_s for decision in search.decisions)])
    least_ratio = 1 - _LESS_AS_WHOLES if _is_small(left[0]) else _least_ratio(search.ratios)
    is_last = len(search.decisions) + len(search.refusals) == _MOST_COUNTS
    if is_last or search.promised.step_time_s * least_ratio >= fastest_s:
        return None
    return search.promised.num_micro_batches


def _solve_count(
    search: _CountSearch,
    count: int,
    method: PipeshardParallel,
    task: Task,
    price: Callable[[Sequence[int]], PricedLayers],
    helper: HelperProcess,
) -> None:
    """Price a number of micro-batches, and find its best pipeline."""
    search.untried.remove(count)
    if count not in search.priced:
        search.priced[count] = price([count])
        search.chains = _drawn(search.chains, search.priced)
    fastest_s = min((decision.step_time_s for decision in search.decisions), default=math.inf)
    try:
        decision = solve_with(method, task, search.priced[count], helper, fastest_s)
    except InfeasibleError as error:
        search.refusals.append(error)
        return
    search.decisions.append(decision)
    if search.promised is not None:
        search.ratios.append(decision.step_time_s / search.promised.step_time_s)


def _price_ends(
    method: PipeshardParallel, task: Task, counts: Sequence[int], helper: HelperProcess
) -> dict[int, PricedLayers]:
    """Layers priced with the fewest and with the most micro-batches, cut at the same places.

    Small micro-batches may be cut into fewer layers, which are priced sooner. As many layers as
    devices are enough; where there are fewer, the cut with more of them counts.
    """
    price = functools.partial(price_layers, task, intra=method.intra, helper=helper)
    if len(counts) == 1:
        return {counts[0]: price(counts, layers=method.layers)}
    fine = price(counts[-1:], layers=method.layers)
    if len(fine.kinds) < task.cluster.num_devices:
        coarse = price(counts, layers=method.layers)
        if len(coarse.kinds) > len(fine.kinds):
            fine = price(counts[-1:], layers=_layers_of(method, coarse))
        if len(coarse.kinds) == len(fine.kinds):
            return {counts[0]: coarse, counts[-1]: fine}
    coarse = price(counts, layers=_layers_of(method, fine))
    return {counts[0]: coarse, counts[-1]: fine}


def _layers_of(method: PipeshardParallel, priced: PricedLayers) -> str | int | Layers | None:
    """Where to cut a step with another number of micro-batches, so that its units are those of
    `priced`. A loop over layers is cut in the same way anyway.
    """
    return method.layers if priced.length else priced.sketch.layers


def _drawn(chains: Sequence[Chain], priced: Mapping[int, PricedLayers]) -> list[Chain]:
    """The chains, with figures that were priced or lie between those that were."""
    return drawn_between(chains, {count: layers.chains[0] for count, layers in priced.items()})


def _least_ratio(ratios: Sequence[float]) -> float:
    """The least that a pipeline may take of what its layers promise, by the ratios that were found
    for other numbers of micro-batches.
    """
    return max(1 - _LESS_AS_WHOLES, min([1.0, *ratios])) if ratios else 1 - _LESS_AS_WHOLES


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
    if method.asked_stages is not None or not method.inter.searches:
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
