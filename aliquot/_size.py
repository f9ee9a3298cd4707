"""How many hosts a training run needs, and which are the cheapest in time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ._variants import Method, Variant, Variants, plan_variants
from .cluster import Cluster, HostPrice, wire
from .core import InfeasibleError, InputError
from .graph import Role
from .planners import Progress, Task, least_compute_s
from .plans import ModelReference, examples_per_step, tokens_per_step
from .report import ClusterOption, Sizing, sorted_options

_MOST_HOSTS = 1024
SLOWEST = 1.5
"""Hosts are added until the deadline is met even if steps take so many times the predicted
time."""
_SLACK = 1.05
"""Devices of another number of hosts may compute that much faster than those of its neighbours."""


def size(
    step: Callable[..., Any],
    *args: Any,
    hosts: Sequence[tuple[str, int] | HostPrice],
    tokens: float,
    by_s: float,
    prices: str = "",
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

    Numbers of hosts that divide the batch are tried: first the fewest that could be in time if
    their devices computed all the time, then twice as many and so on, until training meets the
    deadline with a margin (`SLOWEST`) or more hosts take no less time; then those between.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        hosts: kinds of hosts, as `(device, devices per host)` or with a price.
        tokens: number of tokens to train on; of examples if the batch has no tokens.
        by_s: seconds within which training must be done.
        prices: where the prices come from, as a note for readers.
        max_hosts: the most hosts to try.
        method, num_micro_batches, micro_batch_semantics, memory_limit_bytes, on_missing_rule,
        model, tokens_per_step, progress:
            as for `aliquot.plan`.

    Raises:
        InputError: The numbers make no sense.
        KeyboardInterrupt: On Ctrl-C; its `sizing` has the clusters that are planned by then, if
            there are any.
    """
    variants = (Variant(step=step, args=args, kwargs=kwargs, model=model),)
    return size_built(
        lambda cluster: variants,
        hosts=hosts,
        tokens=tokens,
        by_s=by_s,
        prices=prices,
        max_hosts=max_hosts,
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
    *,
    hosts: Sequence[tuple[str, int] | HostPrice],
    tokens: float,
    by_s: float,
    prices: str = "",
    max_hosts: int = 64,
    progress: Progress | None = None,
    found: Callable[[ClusterOption], None] | None = None,
    **options: Any,
) -> Sizing:
    """As `size`, for a step that may be built in several ways.

    Args:
        build: the ways to build the step for a cluster.
        found: is called with each cluster as soon as it is planned.
        options: those of `aliquot.plan`.
    """
    if not (tokens > 0 and by_s > 0 and 1 <= max_hosts <= _MOST_HOSTS and hosts):
        raise InputError(
            f"size needs hosts, tokens and a time above 0, and 1 to {_MOST_HOSTS} hosts at most;"
            f" got tokens={tokens}, by_s={by_s}, max_hosts={max_hosts}."
        )

    def planned(
        device: str, each: int, price_per_hour: float | None, num_hosts: int
    ) -> ClusterOption:
        cluster = wire(f"{num_hosts}x{each}x{device}", device, num_hosts, each)
        if progress:
            progress(cluster.name, 0, 0)
        plan, training_s, refusal = None, None, ""
        try:
            plan = plan_variants(build(cluster), cluster=cluster, **options)
        except (InfeasibleError, InputError) as error:
            refusal = str(error).partition("\n")[0]
        else:
            steps = tokens / (tokens_per_step(plan) or examples_per_step(plan) or 1)
            training_s = steps * plan.prediction.step_time_s
        option = ClusterOption(
            cluster=cluster.name,
            num_hosts=num_hosts,
            devices_per_host=each,
            plan=plan,
            training_s=training_s,
            price_per_hour=None if price_per_hour is None else price_per_hour * num_hosts,
            refusal=refusal,
        )
        rows.append(option)
        if found:
            found(option)
        return option

    rows: list[ClusterOption] = []

    def sizing(*, complete: bool) -> Sizing:
        plans = [option.plan for option in rows if option.plan]
        return Sizing(
            model=variant.title,
            tokens=tokens,
            by_s=by_s,
            global_batch=examples_per_step(plans[0]) if plans else 0,
            options=sorted_options(rows),
            prices=prices,
            currency=next((h.currency for h in hosts if isinstance(h, HostPrice)), ""),
            max_hosts=max_hosts,
            is_complete=complete,
        )

    for host in hosts:
        device, each = (host.device, host.devices_per_host) if isinstance(host, HostPrice) else host
        hourly = host.price_per_hour if isinstance(host, HostPrice) else None
        variant = build(wire(f"1x{each}x{device}", device, 1, each))[0]
        counts = _counts(variant, device, each, max_hosts, tokens, by_s)
        try:
            _try(counts, by_s, functools.partial(planned, device, each, hourly))
        except KeyboardInterrupt as stopped:
            if rows:
                stopped.sizing = sizing(complete=False)  # type: ignore[attr-defined]
            raise
    return sizing(complete=True)


def _counts(
    variant: Variant, device: str, each: int, max_hosts: int, tokens: float, by_s: float
) -> list[int]:
    """Numbers of hosts that divide the batch and would be in time if their devices computed all the
    time; the largest number if none would.
    """
    graph, _ = variant.traced()
    batch = [graph.values[i.value] for i in graph.inputs if i.role is Role.BATCH]
    shapes = {v.shape for v in batch if len(v.shape) == 2 and "int" in v.dtype}
    examples = max((v.shape[0] for v in batch if v.shape), default=0)
    steps = tokens / (sum(map(math.prod, shapes)) or examples or 1)
    alone = Task(graph=graph, cluster=wire(f"1x1x{device}", device, 1, 1))
    one_host_s = steps * least_compute_s(alone.problem(1)) / each
    divide = [n for n in range(1, max_hosts + 1) if not examples or examples % n == 0]
    return [n for n in divide if one_host_s / n <= by_s] or divide[-1:]


def _try(counts: Sequence[int], by_s: float, planned: Callable[[int], ClusterOption]) -> None:
    """Plans for numbers of hosts: the fewest, and twice as many until the margin is met; then those
    between the most that are too slow or too small and the fewest that are in time, until these are
    neighbours. Left out are numbers whose devices would have to compute faster than those of both.
    """
    tried: dict[int, ClusterOption] = {}
    count, last_s = counts[0], math.inf
    while True:
        tried[count] = planned(count)
        took_s = tried[count].training_s
        larger = [n for n in counts if n > count]
        if not larger or (took_s is not None and (took_s <= by_s / SLOWEST or took_s >= last_s)):
            break
        last_s = last_s if took_s is None else took_s
        count = next((n for n in larger if n >= 2 * count), larger[-1])
    while enough := [n for n, o in tried.items() if o.training_s and o.training_s <= by_s]:
        fewest = min(enough)
        below = max((n for n in tried if n < fewest), default=0)
        times = [(n, tried[n].training_s) for n in (below, fewest) if n]
        work_s = min(n * seconds for n, seconds in times if seconds is not None)
        between = [n for n in counts if below < n < fewest and work_s / n <= by_s * _SLACK]
        if not between:
            break
        middle = between[(len(between) - 1) // 2]
        tried[middle] = planned(middle)
