"""How many hosts a training run needs, and which are the cheapest in time."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._variants import Method, Variant, Variants, plan_variants
from .cluster import Cluster, HostPrice, wire
from .core import InfeasibleError, InputError, counted
from .graph import Role
from .planners import Progress, least_compute_s
from .plans import ModelReference, examples_per_step, tokens_per_step
from .report import ClusterOption, Sizing, sorted_options

_MOST_HOSTS = 1024
SLOWEST = 1.5
"""Hosts are added until the deadline is met even if steps take so many times the predicted
time."""
MOST_CHANGE_OF_BATCH = 0.12
"""A batch may change by this share, so that hosts can be planned that do not divide it."""
# Between a power of two and the next, so many numbers of hosts with another batch are planned.
_BETWEEN = 4
_SLACK = 1.05
"""Devices of another number of hosts may compute that much faster than those of its neighbours."""
_TIMES_ITS_COMPUTE = 2.0
"""How long training is expected to take before anything is planned, in times of its compute."""


class SizingInterrupted(KeyboardInterrupt):
    """Ctrl-C during `size`; `sizing` has the clusters that were planned by then, at least one."""

    def __init__(self, sizing: Sizing) -> None:
        super().__init__("interrupted")
        self.sizing = sizing


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How far a search has come.

    Attributes:
        done, of: clusters that are planned, and about how many will be.
        left_s: about how long the others take; None before one is planned.
    """

    done: int
    of: int
    left_s: float | None

    def __str__(self) -> str:
        if self.done == self.of:
            return ""
        return ", ".join(
            filter(None, (f"{self.done} of about {counted(self.of, 'cluster')}", self.time))
        )

    @property
    def time(self) -> str:
        """The time left, in words; empty if it is not known."""
        if self.left_s is None:
            return ""
        minutes = round(self.left_s / 60)
        return f"about {counted(minutes, 'minute')} left" if minutes else "less than a minute left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What training is to reach, and with what; attributes are arguments of `size`."""

    hosts: Sequence[tuple[str, int] | HostPrice]
    tokens: float
    by_s: float
    prices: str = ""
    goodput: float = 1.0
    max_hosts: int = 64


def size(
    step: Callable[..., Any],
    *args: Any,
    hosts: Sequence[tuple[str, int] | HostPrice],
    tokens: float,
    by_s: float,
    prices: str = "",
    goodput: float = 1.0,
    method: Method | None = None,
    num_micro_batches: int | Literal["auto"] | None = None,
    micro_batch_semantics: str = "exact",
    max_hosts: int = 64,
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    model: ModelReference | None = None,
    tokens_per_step: int | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Sizing:
    """The hosts that finish training in time: the cheapest of these if there are prices, else the
    fewest.

    Kinds of hosts come in the order of what training costs, or of how many hosts it needs, if their
    devices compute all the time. Of each kind, numbers that divide the batch are tried: first the
    fewest that could be in time then, twice as many and so on, until training meets the deadline
    with a margin (`SLOWEST`) or more hosts take no less time; then those between.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        hosts: kinds of hosts, as `(device, devices per host)` or with a price.
        tokens: number of tokens to train on; of examples if the batch has no tokens.
        by_s: seconds within which training must be done.
        prices: where the prices come from, as a note for readers.
        goodput: the share of the time in which training moves on, without failures and restarts.
        max_hosts: the most hosts to try.
        method, num_micro_batches, micro_batch_semantics, memory_limit_bytes, on_missing_rule,
        model, tokens_per_step, progress:
            as for `aliquot.plan`.

    Raises:
        InputError: The numbers make no sense.
        SizingInterrupted: On Ctrl-C, once a cluster is planned.
    """
    variants = (Variant(step=step, args=args, kwargs=kwargs, model=model),)
    goal = Goal(
        hosts=hosts,
        tokens=tokens,
        by_s=by_s,
        prices=prices,
        goodput=goodput,
        max_hosts=max_hosts,
    )
    return size_built(
        lambda cluster: variants,
        goal,
        progress=progress,
        method=method,
        num_micro_batches=num_micro_batches,
        micro_batch_semantics=micro_batch_semantics,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
        tokens_per_step=tokens_per_step,
    )


def size_built(
    build: Callable[[Cluster], Variants],
    goal: Goal,
    *,
    progress: Progress | None = None,
    found: Callable[[ClusterOption, Outlook], None] | None = None,
    rebuild: Callable[[Cluster, int], Variants] | None = None,
    **options: Any,
) -> Sizing:
    """As `size`, for a step that may be built in several ways.

    Args:
        build: the ways to build the step for a cluster.
        rebuild: the same for another global batch. Then numbers of hosts are planned, too, that
            divide no batch but one up to `MOST_CHANGE_OF_BATCH` larger or smaller.
        found: is called with each cluster as soon as it is planned, and with what is left.
        options: those of `aliquot.plan`.
    """
    hosts, tokens, by_s, goodput = goal.hosts, goal.tokens, goal.by_s, goal.goodput
    if not 0 < goodput <= 1:
        raise InputError(
            f"goodput is the share of the time in which a run moves on, above 0 and at most 1, such"
            f" as 0.9; got {goodput:g}."
        )
    if not (tokens > 0 and by_s > 0 and 1 <= goal.max_hosts <= _MOST_HOSTS and hosts):
        raise InputError(
            f"size needs hosts, tokens and a time above 0, and 1 to {_MOST_HOSTS} hosts at most;"
            f" got tokens={tokens}, by_s={by_s}, max_hosts={goal.max_hosts}."
        )

    rows: list[ClusterOption] = []
    kinds: list[_Kind] = []
    started_s = time.monotonic()

    def outlook() -> Outlook:
        slower = max((kind.slower for kind in kinds), default=0.0) or _TIMES_ITS_COMPUTE
        of = sum(kind.num_expected(by_s, slower) for kind in kinds)
        each_s = (time.monotonic() - started_s) / len(rows) if rows else None
        left_s = None if each_s is None else each_s * (of - len(rows))
        return Outlook(done=len(rows), of=of, left_s=left_s)

    def planned(kind: _Kind, num_hosts: int) -> float | None:
        device, each, hourly = kind.device, kind.each, kind.price_per_hour
        cluster = wire(f"{num_hosts}x{each}x{device}", device, num_hosts, each)
        if progress:
            left = outlook()
            progress(", ".join(filter(None, (cluster.name, left.time))), left.done, left.of)
        plan, training_s, refusal = None, None, ""
        try:
            batch = batch_for(kind.examples, num_hosts, each) if rebuild else None
            variants = build(cluster)
            if rebuild is not None and batch and batch != kind.examples:
                variants = rebuild(cluster, batch)
            plan = plan_variants(variants, cluster=cluster, **options)
        except (InfeasibleError, InputError) as error:
            refusal = str(error).partition("\n")[0]
        else:
            steps = tokens / (tokens_per_step(plan) or examples_per_step(plan) or 1)
            training_s = steps * plan.prediction.step_time_s / goodput
        option = ClusterOption(
            cluster=cluster.name,
            num_hosts=num_hosts,
            devices_per_host=each,
            plan=plan,
            training_s=training_s,
            price_per_hour=None if hourly is None else hourly * num_hosts,
            refusal=refusal,
        )
        rows.append(option)
        kind.tried[num_hosts] = training_s
        if found:
            found(option, outlook())
        return training_s

    def sizing(*, complete: bool) -> Sizing:
        return Sizing(
            model=kinds[0].model,
            tokens=tokens,
            by_s=by_s,
            global_batch=kinds[0].examples,
            goodput=goodput,
            options=sorted_options(rows, [kind.device for kind in kinds]),
            prices=goal.prices,
            currency=next((h.currency for h in hosts if isinstance(h, HostPrice)), ""),
            max_hosts=goal.max_hosts,
            is_complete=complete,
        )

    try:
        for number, host in enumerate(hosts):
            kinds.append(_kind(build, host, goal.max_hosts, tokens, by_s * goodput, bool(rebuild)))
            if progress:
                progress("comparing the compute of devices", number + 1, len(hosts))
        started_s = time.monotonic()
        for kind in sorted(kinds, key=lambda kind: kind.promise(by_s)):
            _try(kind.counts, by_s, functools.partial(planned, kind))
    except KeyboardInterrupt:
        if not rows:
            raise
        raise SizingInterrupted(sizing(complete=False)) from None
    return sizing(complete=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """Hosts of one kind.

    Attributes:
        model: what tables call the model.
        each: devices of a host.
        examples: of a batch; 0 if it has none.
        counts: numbers of hosts that may be planned.
        least_s: of training on one host whose devices compute all the time.
        tried: seconds of training on the numbers of hosts that are planned; None where it does not
            fit.
    """

    model: str
    device: str
    each: int
    examples: int = 0
    price_per_hour: float | None
    counts: Sequence[int]
    least_s: float
    tried: dict[int, float | None] = field(default_factory=dict)

    def promise(self, by_s: float) -> tuple[bool, bool, float, float]:
        """Less for kinds that may be better: that can be in time, have a price, and cost less, or
        else are fewer hosts, if their devices compute all the time.
        """
        is_late = self.least_s / self.counts[-1] > by_s
        price = self.price_per_hour
        cost = self.counts[0] if price is None else price * self.least_s
        return is_late, price is None, cost, self.least_s

    @property
    def slower(self) -> float:
        """How many times the compute training takes, as planned so far; 0 if nothing is."""
        done = [n * seconds for n, seconds in self.tried.items() if seconds is not None]
        return min(done) / self.least_s if done and self.least_s else 0.0

    def num_expected(self, by_s: float, slower: float) -> int:
        """Numbers of hosts that will be planned, if training on the others takes `slower` times its
        compute, or as many times as on those that are planned.
        """
        asked: set[int] = set()

        def guess(count: int) -> float | None:
            asked.add(count)
            guessed_s = (self.slower or slower) * self.least_s / count
            return self.tried.get(count, guessed_s)

        _try(self.counts, by_s, guess)
        return len(asked | set(self.tried))


def _kind(
    build: Callable[[Cluster], Variants],
    host: tuple[str, int] | HostPrice,
    max_hosts: int,
    tokens: float,
    by_s: float,
    varies: bool,
) -> _Kind:
    device, each = (host.device, host.devices_per_host) if isinstance(host, HostPrice) else host
    variant = build(wire(f"1x{each}x{device}", device, 1, each))[0]
    counts, least_s = _counts(variant, device, each, max_hosts, tokens, by_s, varies)
    return _Kind(
        model=variant.title,
        device=device,
        each=each,
        examples=_batch(variant)[0],
        price_per_hour=host.price_per_hour if isinstance(host, HostPrice) else None,
        counts=counts,
        least_s=least_s,
    )


def batch_for(examples: int, num_hosts: int, each: int) -> int | None:
    """The global batch for a number of hosts: the one that was asked for if they divide it, or else
    the nearest that they divide, with their devices if possible. None if that is none, or changes
    it by more than `MOST_CHANGE_OF_BATCH`.
    """
    if not examples or examples % num_hosts == 0:
        return examples
    # A finer grid would take many plans to be searched.
    if num_hosts % max(2 ** (num_hosts.bit_length() - 1) // _BETWEEN, 1):
        return None
    for unit in (num_hosts * each, num_hosts):
        near = round(examples / unit) * unit
        if near and abs(near / examples - 1) <= MOST_CHANGE_OF_BATCH:
            return near
    return None


def _batch(variant: Variant) -> tuple[int, set[tuple[int, ...]]]:
    """Examples in the batch of a step, and the shapes of its arrays of tokens."""
    graph, _ = variant.traced()
    batch = [graph.values[i.value] for i in graph.inputs if i.role is Role.BATCH]
    shapes = {tuple(v.shape) for v in batch if len(v.shape) == 2 and "int" in v.dtype}
    return max((v.shape[0] for v in batch if v.shape), default=0), shapes


def _counts(
    variant: Variant,
    device: str,
    each: int,
    max_hosts: int,
    tokens: float,
    by_s: float,
    varies: bool = False,
) -> tuple[list[int], float]:
    """Numbers of hosts that divide the batch, or one near it if it `varies`, and would be in time
    if their devices computed all the time, the largest number if none would; and the seconds that
    one host would take.
    """
    examples, shapes = _batch(variant)
    of_step = sum(map(math.prod, shapes)) or examples or 1
    if tokens < of_step:
        what = "tokens" if shapes else "examples"
        raise InputError(
            f"{tokens:g} {what} were asked for, and one step takes {of_step}. Give those of the"
            " whole training run, such as --tokens 2T."
        )
    steps = tokens / of_step
    alone = variant.task(wire(f"1x1x{device}", device, 1, 1))
    one_host_s = steps * least_compute_s(alone.problem(1)) / each
    divide = [
        n
        for n in range(1, max_hosts + 1)
        if not examples or examples % n == 0 or (varies and batch_for(examples, n, each))
    ]
    return [n for n in divide if one_host_s / n <= by_s] or divide[-1:], one_host_s


def _try(counts: Sequence[int], by_s: float, planned: Callable[[int], float | None]) -> None:
    """Plans for numbers of hosts: the fewest, and twice as many until the margin is met; then those
    between the most that are too slow or too small and the fewest that are in time, until these are
    neighbours. Left out are numbers whose devices would have to compute faster than those of both.
    """
    tried: dict[int, float | None] = {}
    count, last_s = counts[0], math.inf
    while True:
        took_s = tried[count] = planned(count)
        larger = [n for n in counts if n > count]
        if not larger or (took_s is not None and (took_s <= by_s / SLOWEST or took_s >= last_s)):
            break
        last_s = last_s if took_s is None else took_s
        count = next((n for n in larger if n >= 2 * count), larger[-1])
    while enough := [n for n, seconds in tried.items() if seconds and seconds <= by_s]:
        fewest = min(enough)
        below = max((n for n in tried if n < fewest), default=0)
        times = [(n, tried[n]) for n in (below, fewest) if n]
        work_s = min(n * seconds for n, seconds in times if seconds is not None)
        between = [n for n in counts if below < n < fewest and work_s / n <= by_s * _SLACK]
        if not between:
            break
        middle = between[(len(between) - 1) // 2]
        tried[middle] = planned(middle)
