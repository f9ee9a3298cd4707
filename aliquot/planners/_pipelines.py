"""Families of plans that are pipelines.

Layers are priced with the fewest and with the most micro-batches, and figures for the numbers
between are interpolated. The number whose stages promise to be fastest is then priced and solved on
its own, which also improves the figures of the numbers around it. This goes on until the others
promise nothing faster than what was found.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Chain, ChainPlan
from ..graph import Layers, operators_with_effects, source_line
from ..sharding import plan_micro_batches
from ._base import Candidate, Decision, Task, faster
from ._counts import MANY_DEVICES, counts_to_try, drawn_between
from ._helper import HelperProcess
from ._layer_costs import PricedLayers, price_layers
from ._programs import FewerMicroBatches, as_one_program
from ._quick_bounds import cannot_fit, least_compute_s
from ._search import AbstractFamily, Search
from ._solve_stages import solve_with
from ._tried import listed, tried_counts
from .inter import NoFasterStages

if TYPE_CHECKING:
    from ._pipeshard import PipeshardParallel

# At most so many numbers of micro-batches are priced and solved on their own.
_MOST_COUNTS = 4
# A stage solved as a whole takes up to this share less than the sum of its layers promises.
_LESS_AS_WHOLES = 0.03
# Fewer operators make a step of which every pipeline is worth solving.
_FEW_OPS = 5000
# Promises of small steps may exceed the time to beat by so much, as other numbers of stages follow.
_PATIENCE_IF_SMALL = 0.02
# More than any step takes, but finite.
_ANY_S = sys.float_info.max
# With one micro-batch half of the devices or more are idle: a step then mostly takes at least so
# many times its compute, shared evenly by all devices.
_IDLE_WITH_ONE = 2.0
# Gradients of weights, a third of the compute, fill what other stages wait for in a zero-bubble
# schedule.
_IDLE_WITH_ONE_FILLED = 4 / 3
# Units times options times devices: up to so many, other numbers of stages are solved as well.
_SMALL = 10_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipelines(AbstractFamily):
    """The pipelines of a step, with different numbers of micro-batches unless one is asked for.

    Attributes:
        method: how pipelines are found.
        groups: numbers of micro-batches; the next group is tried if nothing fits with the first. By
            default the one that is asked for, or those of `counts_to_try`.
        refusal: why the step cannot be planned with other numbers, which were left out, or why
            none of them fits.
        most_devices: on more devices pipelines are searched only if no plan is known.
    """

    task: Task
    method: PipeshardParallel
    lower_bound_s: float = 0.0
    expected_s: float = 0.0
    groups: Sequence[Sequence[int]] = ()
    refusal: InfeasibleError | CaptureError | InputError | None = None
    most_devices: float = math.inf
    must_open: bool = False

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        """Price layers with the fewest and the most micro-batches.

        Raises:
            InfeasibleError: nothing fits.
            InputError: the settings cannot be followed, such as more stages than layers.
            CaptureError: the step has effects, or does not decompose into micro-batches.
        """
        task, method, groups = self.task, self.method, self.groups
        if task.cluster.num_devices > self.most_devices and math.isfinite(search.to_beat_s(task)):
            search.mention(self._not_searched, task)
            return ()
        if not groups:
            # Stages run only operators that their results need.
            if effects := operators_with_effects(task.graph):
                shown = ", ".join(
                    dict.fromkeys(f"`{op.name}` {source_line(op)}".rstrip() for op in effects[:3])
                )
                raise CaptureError(
                    f"{task.graph.name} does more than compute its results:"
                    f" {shown}{', ...' if len(effects) > 3 else ''}. A pipeline cannot run that as"
                    " often as the plain step does. Take it out (return what it prints as a"
                    " metric), or plan one program: --method program, method=WholeProgram()."
                )
            given = method.num_micro_batches
            groups = counts_to_try(task.graph, task.cluster) if given is None else [[given]]
            groups = [group for group in groups if group]
            method = replace(method, inter=method.inter.for_one_search())
        opened = replace(self, method=method, groups=groups)
        try:
            # Pricing takes longer than to find that a step does not decompose.
            count = groups[0][-1]
            if count > 1:
                plan_micro_batches(
                    task.graph,
                    count,
                    semantics=task.semantics,
                    on_missing_rule=task.on_missing_rule,
                )
            priced = _price_ends(method, task, groups[0], search.helper)
        except (InfeasibleError, CaptureError, InputError) as error:
            return opened.without(error, search)
        return (PipelineCounts.of(opened, priced, search),)

    @property
    def _not_searched(self) -> Candidate:
        return Candidate(
            name="pipelines",
            lower_bound_s=self.lower_bound_s,
            outcome=(
                f"not searched: more than {self.most_devices:,} devices; --method pipeshard"
                " searches them"
            ),
        )

    def without(
        self, error: InfeasibleError | CaptureError | InputError, search: Search
    ) -> Iterable[AbstractFamily]:
        """The pipelines with other numbers of micro-batches, once those of the first group cannot
        be planned.

        Raises:
            InfeasibleError, InputError, CaptureError: there are no other numbers; says why.
        """
        task, counts = self.task, self.groups[0]
        if self.method.num_micro_batches is not None:
            raise error
        if isinstance(error, InfeasibleError):
            if len(self.groups) > 1:
                return (replace(self, groups=self.groups[1:]),)
            if self.refusal is None and 1 not in counts and self._one_may_fit(search):
                return (replace(self, groups=[[1]], refusal=error),)
            # All numbers were tried.
            because = f"\n{self.refusal}" if self.refusal else ""
            if isinstance(self.refusal, InfeasibleError):
                # More micro-batches, which were tried first, mostly need less memory than one.
                error, because = self.refusal, ""
            advice = [each for each in error.advice if not each.startswith("more micro-batches")]
            raise error.reworded(f"{error.message}{because}", advice)
        kept: list[int] = []
        refused: list[int] = []
        for n in sorted(counts):
            # Joined in groups, parts of the batch are larger parts: no multiple decomposes, either.
            decomposes = n == 1 or (all(n % m for m in refused) and task.decomposes(n))
            (kept if decomposes else refused).append(n)
        if self.refusal is not None or kept == list(counts):
            raise error
        if not kept and search.best is not None and not self._one_may_do(search):
            raise error
        left_out = listed([n for n in counts if n not in kept])
        name = f"{self.method.inter.method}, {left_out} micro-batches"
        search.mention(Candidate(name=name, outcome="the step does not decompose"), task)
        return (replace(self, groups=[kept or [1]], refusal=error),)

    def _one_may_fit(self, search: Search) -> bool:
        """Whether one micro-batch, which needs no buffers for sums of gradients, may fit where none
        of the other numbers does.
        """
        return not cannot_fit(self.task.problem(1)) and self._one_may_do(search)

    def _one_may_do(self, search: Search) -> bool:
        """Whether a pipeline of a single micro-batch, the last resort, may be fast enough."""
        least_s = least_compute_s(self.task.problem(1))
        to_beat_s = search.to_beat_s(self.task)
        return _one_micro_batch_may_do(self.task, least_s, to_beat_s, _IDLE_WITH_ONE)


@dataclass(kw_only=True, eq=False)
class PipelineCounts(AbstractFamily):
    """Pipelines with any of some numbers of micro-batches; opened once for each number.

    Attributes:
        opened: the family that this is a part of.
        priced: layers, by the numbers that were priced.
        chains: one for each number, with figures that were priced or interpolated.
        untried: numbers that were not solved on their own, in rising order.
        is_small: whether the step is so small that other numbers of stages are solved as well.
        patience: pipelines are solved even if they promise to take longer than the best plan by
            this share: other numbers of stages or one micro-batch are tried, too, of which no
            promise speaks.
        promised: the best stages of the untried numbers, by the chains; None if not looked for.
        best: the fastest pipeline of the numbers that were solved.
        refusals: why others have none.
        ratios: for each pipeline its step time, as a multiple of what the chains promised.
    """

    task: Task
    opened: Pipelines
    priced: dict[int, PricedLayers]
    chains: Sequence[Chain]
    untried: list[int]
    is_small: bool
    patience: float
    least_s: float
    must_open: bool
    expected_s: float
    promised: ChainPlan | None = None
    best: Decision | None = None
    refusals: list[InfeasibleError] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, opened: Pipelines, priced: dict[int, PricedLayers], search: Search
    ) -> PipelineCounts:
        """The numbers of the first group, none of them solved yet."""
        task, first = opened.task, priced[opened.groups[0][0]]
        least_s, to_beat_s = first.least_compute_s, search.to_beat_s(task)
        is_small = _is_small(first.chains[0])
        patience = _PATIENCE_IF_SMALL if is_small else 0.0
        if is_small and len(task.graph.ops) < _FEW_OPS:
            patience = math.inf
        if _one_micro_batch_may_do(task, least_s, to_beat_s, _IDLE_WITH_ONE):
            patience = math.inf
        return cls(
            task=task,
            opened=opened,
            priced=priced,
            chains=_drawn(first.chains, priced),
            untried=list(opened.groups[0]),
            is_small=is_small,
            patience=patience,
            least_s=least_s,
            expected_s=opened.expected_s,
            must_open=opened.must_open,
        )

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        """Solve the number that promises to be fastest, if it promises
        to be faster than the best plan.
        """
        try:
            count = self._next_count(search)
            if count is not None:
                self._solve(count, search)
                return (self,)
            if self.best is None and (self.refusals or self.promised is None):
                return self.opened.without(self.refusals[0], search)
        except (CaptureError, InputError) as error:
            return self.opened.without(error, search)
        return self._rest(search)

    def _next_count(self, search: Search) -> int | None:
        """The number of micro-batches to solve next; None if no other promises to be faster."""
        method = self.opened.method
        to_beat_s = search.to_beat_s(self.task) * (1 + self.patience)
        if not self.untried:
            return None
        # Searches for stages on many devices take long.
        if self.task.cluster.num_devices > MANY_DEVICES and self.best is not None:
            # No promise is known of those left out.
            self.promised = None
            return None
        if len(self.chains) == 1 and math.isinf(to_beat_s):
            return self.untried[0]
        left = [chain for chain in self.chains if chain.num_micro_batches in self.untried]
        limits = method.limits
        is_read = self.best is None and len(self.opened.groups) == 1
        if not is_read or isinstance(self.opened.refusal, InfeasibleError):
            # Without a limit, refusals say how much memory is missing, which takes long to find and
            # is of interest only if nothing is left to try.
            limits = replace(limits, faster_than_s=_ANY_S)
        try:
            self.promised = method.inter.solve(left, limits=limits, helper=search.helper)
        except InfeasibleError as error:
            self.refusals.append(error)
            return None
        is_last = len(self.ratios) + len(self.refusals) >= _MOST_COUNTS
        fastest_s = min(to_beat_s, self.best.step_time_s if self.best else math.inf)
        if is_last or self.promised.step_time_s * self._least_ratio >= fastest_s:
            return None
        self.expected_s = self.promised.step_time_s
        return self.promised.num_micro_batches

    @property
    def _least_ratio(self) -> float:
        """The least that a pipeline may take of what its layers promise, by those found so far."""
        ratios = [] if self.is_small else self.ratios
        return max(1 - _LESS_AS_WHOLES, min(1.0, *ratios)) if ratios else 1 - _LESS_AS_WHOLES

    def _solve(self, count: int, search: Search) -> None:
        """Price a number of micro-batches, and find its best pipeline, if it may be the best plan
        now that its price is known.
        """
        method, last = self.opened.method, self.priced[self.opened.groups[0][-1]]
        self.untried.remove(count)
        if count not in self.priced:
            self.priced[count] = price_layers(
                self.task,
                [count],
                intra=method.intra,
                layers=_layers_of(method, last),
                helper=search.helper,
            )
            self.chains = _drawn(self.chains, self.priced)
        fastest_s = self.best.step_time_s if self.best else math.inf
        to_beat_s = search.to_beat_s(self.task) * (1 + self.patience)
        fastest_s = min(fastest_s, to_beat_s / self._least_ratio)
        try:
            found = solve_with(method, self.task, self.priced[count], search.helper, fastest_s)
        except NoFasterStages:
            return
        except InfeasibleError as error:
            self.refusals.append(error)
            return
        promised = self.promised.step_time_s if self.promised else found.step_time_s
        self.ratios.append(found.step_time_s / promised)
        self.best = faster(self.best, found)
        _add(found, self.task, search)

    def _rest(self, search: Search) -> Iterable[AbstractFamily]:
        """What is left once no other number promises to be faster."""
        task, opened, best = self.task, self.opened, self.best
        method = opened.method
        if self.untried:
            than_s = best.step_time_s if best else search.to_beat_s(task)
            tried = tried_counts(self.promised, method.inter.method, than_s, self.untried)
            search.mention(tried, task)
        is_open = method.num_micro_batches is None
        if best is None:
            if is_open and self.fewest_promise_most:
                yield _OneMicroBatch(task=task, counts=self)
            return
        other_stages = method.asked_stages is None and method.inter.searches
        if other_stages and self.is_small:
            priced = self.priced[best.num_micro_batches]
            yield _OtherStages(task=task, method=method, priced=priced, known=best)
        if is_open and 1 not in self.priced:
            yield _OneMicroBatch(task=task, counts=self)
        program = as_one_program(self.chains) if is_open and method.may_be_one_program else None
        if not method.allows_program(task.cluster):
            return
        if program is not None or len(best.stages) == 1:
            yield FewerMicroBatches.than(best, task, method.whole, program)

    @property
    def fewest_promise_most(self) -> bool:
        """Whether the fewest micro-batches of those that were priced promise the most, so that one
        may promise more.
        """
        found = self.best.num_micro_batches if self.best else None
        if found is None and self.promised is not None:
            found = self.promised.num_micro_batches
        return 1 not in self.priced and found == min(c.num_micro_batches for c in self.chains)


@dataclass(frozen=True, kw_only=True, eq=False)
class _OneMicroBatch(AbstractFamily):
    """Pipelines of one micro-batch, if they may be faster than the best with more: one stage at a
    time is busy, but collectives stay within a stage and happen once.
    """

    task: Task
    counts: PipelineCounts
    expected_s: float = 0.0

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        task, counts, method = self.task, self.counts, self.counts.opened.method
        to_beat_s = search.to_beat_s(task)
        if counts.best is not None:
            # A pipeline of a single stage is not among the plans yet.
            to_beat_s = min(to_beat_s, counts.best.step_time_s)
        idle = _IDLE_WITH_ONE_FILLED if counts.fewest_promise_most else _IDLE_WITH_ONE
        if not (counts.is_small or _one_micro_batch_may_do(task, counts.least_s, to_beat_s, idle)):
            return
        last = counts.priced[counts.opened.groups[0][-1]]
        priced = price_layers(
            task, [1], intra=method.intra, layers=_layers_of(method, last), helper=search.helper
        )
        promised = method.inter.solve(priced.chains, limits=method.limits, helper=search.helper)
        if promised.step_time_s * (1 - _LESS_AS_WHOLES) >= to_beat_s:
            return
        found = solve_with(method, task, priced, search.helper)
        _add(found, task, search)
        if len(found.stages) == 1 and method.allows_program(task.cluster):
            yield FewerMicroBatches.than(found, task, method.whole, None)
        other_stages = method.asked_stages is None and method.inter.searches
        if other_stages and _is_small(priced.chains[0]):
            yield _OtherStages(task=task, method=method, priced=priced, known=found)


@dataclass(frozen=True, kw_only=True, eq=False)
class _OtherStages(AbstractFamily):
    """Pipelines of small steps with one stage more than a known one, and with fewer for as long as
    their layers promise less than the best plan takes: the number of stages that is fastest by sums
    of layers need not be the fastest when stages are solved as wholes.
    """

    task: Task
    method: PipeshardParallel
    priced: PricedLayers
    known: Decision
    expected_s: float = 0.0

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        around = len(self.known.stages)
        for count in (around + 1, *range(around - 1, 1, -1)):
            fixed = replace(self.method, num_stages=count)
            to_beat_s = min(search.to_beat_s(self.task), self.known.step_time_s)
            try:
                promised = fixed.inter.solve(
                    self.priced.chains[:1], limits=fixed.limits, helper=search.helper
                )
                if promised.step_time_s * (1 - _LESS_AS_WHOLES) < to_beat_s:
                    _add(
                        solve_with(fixed, self.task, self.priced, search.helper), self.task, search
                    )
                elif count < around:
                    break
            except (InfeasibleError, InputError):
                continue
        return ()


def _add(found: Decision, task: Task, search: Search) -> None:
    """Add a pipeline. One of a single stage is one program, and solved as such later."""
    if len(found.stages) > 1:
        search.add(found, task)


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


def _is_small(chain: Chain) -> bool:
    """True if a step is so small that other numbers of stages are solved as well."""
    return chain.num_units * len(chain.options) * chain.num_devices <= _SMALL


def _one_micro_batch_may_do(task: Task, least_s: float, best_s: float, idle: float) -> bool:
    """True if a pipeline of one micro-batch may take less than `best_s`, and devices are few enough
    to search it.

    Args:
        least_s: of the step's compute, shared evenly by all devices.
        idle: how many times that such a pipeline takes at least.
    """
    return task.cluster.num_devices <= MANY_DEVICES and best_s > idle * least_s
