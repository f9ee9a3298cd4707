"""Questions about a step that one plan does not answer: which method, which cluster, which batch,
how many hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ._api import plan as make_plan
from .cluster import Cluster, HostPrice, wire
from .core import InfeasibleError, InputError, format_bytes
from .planners import AbstractMethod, Auto, PipeshardParallel, Progress, method_by_name
from .plans import ModelReference, Plan, examples_per_step, tokens_per_step
from .report import (
    BatchSearch,
    BatchTrial,
    Candidate,
    ClusterOption,
    Comparison,
    Sizing,
    sorted_candidates,
    sorted_options,
)

Method: TypeAlias = AbstractMethod | PipeshardParallel
Made: TypeAlias = tuple[Callable[..., Any], Any, Any]

_MOST_DOUBLINGS = 16
_MOST_HOSTS = 1024


def compare(
    step: Callable[..., Any],
    *args: Any,
    clusters: Cluster | Sequence[Cluster],
    methods: Mapping[str, Method] | Sequence[str] = (),
    num_micro_batches: int | None = None,
    memory_limit_bytes: float | None = None,
    model: ModelReference | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Comparison:
    """Plan a step by several methods, or for several clusters, and say in which parts of the step
    time each is slower than the fastest.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        clusters: one or several.
        methods: names as on the command line, or methods under names of your own; by default those
            of `usual_methods`.
        num_micro_batches, memory_limit_bytes, model, progress: as for `aliquot.plan`.

    Raises:
        InputError: There is no such method, or nothing to compare.
    """
    where = [clusters] if isinstance(clusters, Cluster) else list(clusters)
    if not where:
        raise InputError("compare needs at least one cluster.")
    candidates = []
    for cluster in where:
        named = (
            methods
            if isinstance(methods, Mapping)
            else _methods(methods or usual_methods(cluster, where))
        )
        for name, method in named.items():
            if progress:
                progress(f"{name} on {cluster.name}", 0, 0)
            try:
                plan_found = make_plan(
                    step,
                    *args,
                    cluster=cluster,
                    method=method,
                    num_micro_batches=num_micro_batches,
                    memory_limit_bytes=memory_limit_bytes,
                    model=model,
                    **kwargs,
                )
            except (InfeasibleError, InputError) as error:
                candidates.append(_refused(name, cluster, error))
            else:
                candidates.append(Candidate(method=name, cluster=cluster.name, plan=plan_found))
    name = model.name if model else getattr(step, "__name__", "step")
    return Comparison(model=name, candidates=sorted_candidates(candidates))


def usual_methods(cluster: Cluster, clusters: Sequence[Cluster] = ()) -> list[str]:
    """The methods that are compared by default: only `auto` for several clusters, else also the
    well-known ones.
    """
    if len(clusters) > 1:
        return ["auto"]
    hosts = ["hsdp"] if cluster.num_hosts > 1 and cluster.devices_per_host > 1 else []
    return ["auto", "ddp", "zero2", "fsdp", *hosts, "pipeshard"]


def _methods(names: Sequence[str]) -> dict[str, Method]:
    return {name: method_by_name(name) for name in names}


def _refused(name: str, cluster: Cluster, error: InfeasibleError | InputError) -> Candidate:
    first = str(error).partition("\n")[0]
    if not isinstance(error, InfeasibleError) or error.required_bytes is None:
        return Candidate(method=name, cluster=cluster.name, refusal=first)
    parts = tuple(sorted(error.parts.items(), key=lambda item: -item[1]))
    most = f", most of it {parts[0][0]} ({format_bytes(parts[0][1])})" if parts else ""
    limit = f" of {format_bytes(error.available_bytes)}" if error.available_bytes else ""
    return Candidate(
        method=name,
        cluster=cluster.name,
        refusal=(
            f"does not fit: needs {format_bytes(error.required_bytes)}{limit} on each device{most}"
        ),
        required_bytes=error.required_bytes,
        available_bytes=error.available_bytes,
        memory_bytes=parts,
    )


def largest_batch(
    make: Callable[[int], Made],
    *,
    cluster: Cluster,
    method: Method | None = None,
    unit: int = 1,
    first: int | None = None,
    most: int = 1 << _MOST_DOUBLINGS,
    num_micro_batches: int = 1,
    memory_limit_bytes: float | None = None,
    model: Callable[[int], ModelReference] | None = None,
    progress: Progress | None = None,
) -> BatchSearch:
    """The largest global batch that fits, and the one of highest throughput among those tried.

    Doubles the batch until it does not fit, then bisects down to a distance of `unit`. If a batch
    fits, smaller ones are taken to fit, too.

    Args:
        make: makes `(step, state, batch)` for a global batch.
        unit: batches are multiples of it; with a multiple of the number of devices they can be
            split evenly.
        first: the batch to begin with; by default one `unit`.
        most: the largest batch to try.
        model: makes the reference to the step of a batch that plan files hold.
        cluster, method, num_micro_batches, memory_limit_bytes, progress: as for `aliquot.plan`.

    Raises:
        InputError: The numbers make no sense, or the step cannot be planned for another reason than
            memory.
    """
    if unit < 1 or most < unit:
        raise InputError(f"largest_batch needs 1 <= unit <= most, got unit={unit} and most={most}.")
    trials: dict[int, BatchTrial] = {}
    name = "step"

    def fits(size: int) -> bool:
        nonlocal name
        if progress:
            progress(f"batch {size}", 0, 0)
        step, state, batch = make(size)
        reference = model(size) if model else None
        name = reference.name if reference else getattr(step, "__name__", "step")
        try:
            plan_found = make_plan(
                step,
                state,
                batch,
                cluster=cluster,
                method=method,
                num_micro_batches=num_micro_batches,
                memory_limit_bytes=memory_limit_bytes,
                model=reference,
            )
            trials[size] = BatchTrial(global_batch=size, plan=plan_found)
        except InfeasibleError as error:
            trials[size] = BatchTrial(
                global_batch=size, plan=None, refusal=str(error).partition("\n")[0]
            )
        return trials[size].plan is not None

    good, bad = 0, 0
    size = max(unit, (first or unit) // unit * unit)
    while not bad and size <= most:
        if fits(size):
            good, size = size, size * 2
        else:
            bad = size
    while bad and bad - good > unit:
        middle = (good + bad) // 2 // unit * unit
        if fits(max(middle, unit)):
            good = middle
        else:
            bad = max(middle, unit)
    found = tuple(trials[size] for size in sorted(trials))
    limited = bad == good + unit
    return BatchSearch(
        model=name, cluster=cluster.name, trials=found, unit=unit, is_limited=limited
    )


def size(
    step: Callable[..., Any],
    *args: Any,
    hosts: Sequence[tuple[str, int] | HostPrice],
    tokens: float,
    by_s: float,
    prices: str = "",
    method: Method | None = None,
    max_hosts: int = 64,
    memory_limit_bytes: float | None = None,
    model: ModelReference | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Sizing:
    """The fewest hosts on which a step fits, and the hosts that finish training in time: the
    cheapest of these if there are prices.

    The numbers of hosts 1, 2, 4, ... are tried until training meets the deadline with a margin
    (`SLOWEST`) or the next number takes no less time. If a step does not fit, it is planned again
    with micro-batches.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        hosts: kinds of hosts, as `(device, devices per host)` or with a price.
        tokens: number of tokens to train on; of examples if the batch has no tokens.
        by_s: seconds within which training must be done.
        prices: where the prices come from, as a note for readers.
        max_hosts: the most hosts to try.
        method, memory_limit_bytes, model, progress: as for `aliquot.plan`.

    Raises:
        InputError: The numbers make no sense.
    """
    if not (tokens > 0 and by_s > 0 and 1 <= max_hosts <= _MOST_HOSTS and hosts):
        raise InputError(
            f"size needs hosts, tokens and a time above 0, and 1 to {_MOST_HOSTS} hosts at most;"
            f" got tokens={tokens}, by_s={by_s}, max_hosts={max_hosts}."
        )
    options: list[ClusterOption] = []
    examples = 0
    for host in hosts:
        device, each = (host.device, host.devices_per_host) if isinstance(host, HostPrice) else host
        hourly = host.price_per_hour if isinstance(host, HostPrice) else None
        count, last_s = 1, float("inf")
        while count <= max_hosts:
            cluster = wire(f"{count}x{each}x{device}", device, count, each)
            if progress:
                progress(cluster.name, 0, 0)
            plan_found, refusal = _any_plan(
                step, args, kwargs, cluster, method, memory_limit_bytes, model
            )
            training_s = None
            if plan_found is not None:
                examples = examples_per_step(plan_found)
                steps = tokens / (tokens_per_step(plan_found) or examples or 1)
                training_s = steps * plan_found.prediction.step_time_s
            options.append(
                ClusterOption(
                    cluster=cluster.name,
                    num_hosts=count,
                    devices_per_host=each,
                    plan=plan_found,
                    training_s=training_s,
                    price_per_hour=None if hourly is None else hourly * count,
                    refusal=refusal,
                )
            )
            if training_s is not None and (training_s <= by_s / SLOWEST or training_s >= last_s):
                break
            last_s = training_s if training_s is not None else last_s
            count *= 2
    name = model.name if model else getattr(step, "__name__", "step")
    return Sizing(
        model=name,
        tokens=tokens,
        by_s=by_s,
        global_batch=examples,
        options=sorted_options(options),
        prices=prices,
    )


SLOWEST = 1.5
"""Hosts are added until the deadline is met even if steps take so many times the predicted
time."""


def _any_plan(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    method: Method | None,
    memory_limit_bytes: float | None,
    model: ModelReference | None,
) -> tuple[Plan | None, str]:
    """A plan that fits, with as few micro-batches as possible, or why there is none."""
    searches = method is None or isinstance(method, (Auto, PipeshardParallel))
    refusal, count = "", 1
    while count <= _MOST_MICRO_BATCHES:
        try:
            plan_found = make_plan(
                step,
                *args,
                cluster=cluster,
                method=method,
                num_micro_batches=None if searches else count,
                memory_limit_bytes=memory_limit_bytes,
                model=model,
                **kwargs,
            )
        except InfeasibleError as error:
            refusal = refusal or str(error).partition("\n")[0]
            if searches:
                return None, refusal
        except InputError as error:
            # The batch cannot be cut into so many micro-batches.
            return None, refusal or str(error).partition("\n")[0]
        else:
            return plan_found, ""
        count *= 4
    return None, refusal


_MOST_MICRO_BATCHES = 64
