"""Remedies for a step for which no plan fits: changes that were tried, with the plans that they led
to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ._plan_options import PlanOptions
from ._variants import Method, Variant, Variants, plan_variants
from .cluster import Cluster
from .core import (
    AliquotError,
    CaptureError,
    InfeasibleError,
    InputError,
    TimeLimitError,
    format_bytes,
    format_seconds,
)
from .planners import (
    Auto,
    DataParallel,
    Megatron,
    PipeshardParallel,
    Progress,
    ShardParallel,
    WholeProgram,
    Zero2Parallel,
    Zero3Parallel,
    program_counts,
)
from .plans import ModelReference, Plan, examples_per_step, figures

# Limits of the searches for remedies, which are coarser than those of other plans.
_RELATIVE_GAP = 0.02
_NODE_LIMIT = 50
_MOST_DOUBLINGS = 5
_MOST_CLUSTERS = 3
_MOST_TIMES = 256
# Parts of a device's memory that no smaller batch makes smaller.
_STATE = ("parameters", "optimizer state", "other state", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A change to try.

    Attributes:
        change: the change in words, or as options of the command line.
        make: makes a plan with the change within the given seconds. Raises `InfeasibleError` if
            none fits, `InputError` if the change is impossible, `TimeLimitError` if no plan was
            complete in time.
    """

    change: str
    make: Callable[[float], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that was tried.

    Attributes:
        change: the change in words, or as options of the command line.
        plan: the plan with the change; None if none fits, or if that is not known.
        required_bytes: memory per device of the smallest plan if none fits.
        found_with: how that plan was found, such as "8 micro-batches, --recompute block".
        is_known: False if time ran out before it was known whether a plan fits.
    """

    change: str
    plan: Plan | None
    required_bytes: float | None = None
    found_with: str = ""
    is_known: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        needed = {} if self.plan else {"peak_memory_bytes": self.required_bytes}
        return {
            "change": self.change,
            "fits": self.plan is not None if self.is_known else None,
            **figures(self.plan),
            **needed,
        }


def find_remedies(
    step: Callable[..., Any],
    *args: Any,
    cluster: Cluster,
    method: Method | None = None,
    num_micro_batches: int | Literal["auto"] | None = None,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    model: ModelReference | None = None,
    others: Sequence[Sequence[Attempt]] = (),
    refused: InfeasibleError | None = None,
    budget_s: float = 25.0,
    progress: Progress | None = None,
    **kwargs: Any,
) -> tuple[Remedy, ...]:
    """Try changes that may make a step fit: independent micro-batches of a step that does not
    decompose, a state that a layout splits over more devices, more micro-batches, more hosts of the
    same kind, another method.

    Changes of one kind are tried from small to large until one fits. The searches stop at a gap of
    2 %, so a plan that is later made with the change may be a little faster.

    Args:
        step, *args, **kwargs, cluster, method, num_micro_batches, micro_batch_semantics,
        memory_limit_bytes, on_missing_rule, model, progress:
            as for `aliquot.plan`, which found no plan.
        others: further changes, kind by kind, which make the batch on a device smaller, or less of
            it kept.
        refused: what `aliquot.plan` raised; if it says that the state of a layout is too large by
            itself, neither micro-batches nor `others` are tried.
        budget_s: seconds after which the remedies known by then are returned.
    """
    return remedies_for(
        (Variant(step=step, args=args, kwargs=kwargs, model=model),),
        cluster=cluster,
        method=method,
        num_micro_batches=num_micro_batches,
        memory_limit_bytes=memory_limit_bytes,
        others=others,
        refused=refused,
        budget_s=budget_s,
        progress=progress,
        micro_batch_semantics=micro_batch_semantics,
        on_missing_rule=on_missing_rule,
    )


def remedies_for(
    variants: Variants,
    *,
    cluster: Cluster,
    others: Sequence[Sequence[Attempt]] = (),
    refused: InfeasibleError | None = None,
    budget_s: float = 25.0,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Remedy, ...]:
    """As `find_remedies`, for a step that may be built in several ways; `options` are those of
    `aliquot.plan`.
    """
    asked = PlanOptions(**options)
    method = asked.method

    def attempt(change: str, **changed: Any) -> Attempt:
        used = {"cluster": cluster, **options, **changed}
        used["method"] = coarser(used.get("method"))

        def make(time_limit_s: float) -> Plan:
            return plan_variants(variants, time_limit_s=time_limit_s, **used)

        return Attempt(change=change, make=make)

    task = variants[-1].task(cluster, memory_limit_bytes=asked.memory_limit_bytes)
    # All devices together must hold the state under any plan.
    may_fit = task.holds_state
    given = asked.num_micro_batches or getattr(method, "num_micro_batches", None)
    if given is None and isinstance(method, Megatron) and method.pipeline == 1:
        # All other methods search the number where none is given.
        given = 1
    is_auto = method is None or isinstance(method, Auto)
    kinds: list[Sequence[Attempt]] = []
    splits_more = dict(_splitting_more(method))
    # Where the state does not fit even if all devices share it evenly, only more devices can help.
    of_state = sum((refused.parts if refused else {}).get(part, 0.0) for part in _STATE)
    batch_helps = may_fit and not (splits_more and of_state > task.limit_bytes)
    counts = [given * 2**k for k in range(1, _MOST_DOUBLINGS + 1)] if isinstance(given, int) else []
    finest = program_counts(task.graph, cluster.num_devices)[-1]
    if batch_helps and asked.micro_batch_semantics == "exact" and not task.decomposes(finest):
        # No number of micro-batches helps then, unless each is a step of its own.
        change = "--micro-batch-semantics independent"
        kinds.append([attempt(change, micro_batch_semantics="independent")])
    if batch_helps:
        kinds.append([attempt(f"--micro-batches {n}", num_micro_batches=n) for n in counts])
        kinds += others
    if may_fit and splits_more:
        layouts = [attempt(f"--method {name}", method=each) for name, each in splits_more.items()]
        name, most = [*splits_more.items()][-1]
        layouts += [
            attempt(f"--method {name} --micro-batches {n}", method=most, num_micro_batches=n)
            for n in counts
            if not batch_helps
        ]
        kinds.append(layouts)
    hosts_needed = sum(task.state_bytes.values()) / task.limit_bytes / cluster.devices_per_host
    larger = dict(_larger(cluster, hosts_needed))
    # What data parallelism holds whole on each device, no other device takes.
    if not (isinstance(method, DataParallel) and of_state > task.limit_bytes):
        kinds.append([attempt(change, cluster=each) for change, each in larger.items()])
    left_out = _left_out(method)
    if may_fit and not (is_auto and not left_out):
        # Last, because it takes the longest.
        kinds.append([attempt(" ".join(["--method auto", *left_out]), method=Auto())])
    return tuple(_tried(kinds, time.perf_counter() + budget_s, progress))


def _splitting_more(method: Method | None) -> Iterator[tuple[str, Method]]:
    """A layout with more of its state split over devices, by names as they are typed, the least
    first; nothing of a method that chooses this itself.
    """
    if isinstance(method, Megatron) and method.data != 1:
        for stage in range(method.zero_stage + 1, 4):
            layout = replace(method, zero_stage=stage)
            yield layout.name, layout
    if isinstance(method, DataParallel):
        yield "zero2", Zero2Parallel()
    if isinstance(method, DataParallel | Zero2Parallel):
        yield "zero3", Zero3Parallel()


def _left_out(method: Method | None) -> list[str]:
    """Words that name the options of a method which method auto refuses, or must not have."""
    options = (
        ("mesh_shape", "--mesh"),
        ("num_stages", "--stages"),
        ("schedule", "--schedule"),
        ("layers", "--layers"),
    )
    given = [option for name, option in options if getattr(method, name, None) is not None]
    return [f"without {' and '.join(given)}"] if given else []


def _tried(
    kinds: Sequence[Sequence[Attempt]], until_s: float, progress: Progress | None
) -> Iterator[Remedy]:
    """Try the changes of each kind in turn until one fits. If time runs out after the first change
    was begun, the next change of each kind is listed as not known.
    """
    for number, kind in enumerate(kinds):
        for k, each in enumerate(kind):
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                if number or k:
                    yield from _unknown([kind[k:], *kinds[number + 1 :]])
                return
            if progress:
                progress(f"nothing fits; trying {each.change}", 0, 0)
            try:
                candidate = each.make(left_s)
            except TimeLimitError:
                yield from _unknown([kind[k:], *kinds[number + 1 :]])
                return
            except InfeasibleError as error:
                yield Remedy(
                    change=each.change,
                    plan=None,
                    required_bytes=error.required_bytes,
                    found_with=", ".join(error.found_with),
                )
            except (InputError, CaptureError):
                # For example the batch cannot be cut into so many micro-batches; then larger
                # changes of this kind are impossible, too.
                break
            else:
                yield Remedy(change=each.change, plan=candidate)
                break


def _unknown(kinds: Sequence[Sequence[Attempt]]) -> Iterator[Remedy]:
    """For each kind, its next change, for which no time was left."""
    for kind in kinds:
        for each in kind[:1]:
            yield Remedy(change=each.change, plan=None, is_known=False)


def coarser(method: Method | None) -> Method:
    """The method with the wider gap of searches for remedies, if it searches with a gap."""
    method = method or Auto()
    if isinstance(method, (Auto, PipeshardParallel, WholeProgram, ShardParallel)):
        return replace(
            method, intra=method.intra.coarser(relative_gap=_RELATIVE_GAP, node_limit=_NODE_LIMIT)
        )
    return method


def _larger(cluster: Cluster, hosts_needed: float) -> Iterator[tuple[str, Cluster]]:
    """Three clusters of the same hosts, each with twice as many as the one before, by the change to
    it: as it is typed where a preset is this cluster. The first has 2, 4, 8, ... times as many as
    `cluster`, so that they are at least as many as needed.
    """
    times = 2
    while cluster.num_hosts * times < hosts_needed and times <= _MOST_TIMES:
        times *= 2
    for hosts in (cluster.num_hosts * times * 2**k for k in range(_MOST_CLUSTERS)):
        name = f"{hosts}x{cluster.devices_per_host}x{cluster.device.name}"
        larger = replace(cluster, num_hosts=hosts, name=name)
        change = f"{hosts} hosts of the same kind and network"
        with contextlib.suppress(AliquotError):
            change = f"--cluster {name}" if Cluster.preset(name) == larger else change
        yield change, larger


def remedies_text(remedies: Sequence[Remedy]) -> str:
    """The remedies as text: changes that fit with their step times, the fastest first, then those
    that do not fit or are not known to.
    """
    fitting = [(each, each.plan.prediction) for each in remedies if each.plan is not None]
    fitting.sort(key=lambda pair: pair[1].step_time_s)
    width = max((len(each.change) for each in remedies if each.is_known), default=0)
    lines = ["Tried, and fits:"] if fitting else []
    batches = {examples_per_step(each.plan) for each in remedies if each.plan is not None}
    lines += [
        f"  {each.change:{width}}  {format_seconds(prediction.step_time_s)} a step"
        f"{f' of {examples_per_step(each.plan)}' if each.plan and len(batches) > 1 else ''}, "
        f"{format_bytes(prediction.peak_memory_bytes)} on each device"
        for each, prediction in fitting
    ]
    vain = [each for each in remedies if each.plan is None and each.is_known]
    lines += ["Tried, and does not fit:"] if vain else []
    lines += [
        f"  {each.change:{width}}"
        + (f"  needs {format_bytes(each.required_bytes)}" if each.required_bytes else "")
        + (f" at least: {each.found_with}" if each.found_with else "")
        for each in vain
    ]
    unknown = [each.change for each in remedies if not each.is_known]
    lines += ["Not tried to the end for lack of time, and may fit:"] if unknown else []
    lines += [f"  {change}" for change in unknown]
    return "\n".join(lines)
