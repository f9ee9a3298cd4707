"""Questions that one plan does not answer: which method, which cluster, which batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ._plan_graph import check_kinds, check_objective, written
from ._variants import Method, Variant, Variants, plan_variants
from .cluster import Cluster
from .core import CaptureError, InfeasibleError, InputError, format_bytes
from .planners import Auto, PipeshardParallel, Progress, method_by_name
from .plans import ModelReference
from .report import BatchSearch, BatchTrial, Candidate, Comparison, sorted_candidates

Made: TypeAlias = tuple[Callable[..., Any], Any, Any]

_MOST_DOUBLINGS = 16
# Batches that fit in more micro-batches are tried in larger steps, until one raises the throughput
# by less than this share.
_TIMES_WITH_MICRO_BATCHES = 4
# Share of a batch that does not fit once compiled at which the next is compiled.
_NEXT_SMALLER = 0.93
_LEAST_GAIN = 0.02


def compare(
    step: Callable[..., Any],
    *args: Any,
    clusters: Cluster | Sequence[Cluster],
    methods: Mapping[str, Method] | Sequence[str | Method] = (),
    num_micro_batches: int | Literal["auto"] | None = None,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    objective: str | None = None,
    model: ModelReference | None = None,
    tokens_per_step: int | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Comparison:
    """Plan a step by several methods, or for several clusters, and say in which parts of the step
    time each is slower than the fastest.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        clusters: one or several.
        methods: names as on the command line, methods, or methods under names of your own; by
            default those of `usual_methods`.
        num_micro_batches, micro_batch_semantics, memory_limit_bytes, on_missing_rule, model,
        tokens_per_step, progress:
            as for `aliquot.plan`.
        objective: as for `aliquot.plan`; with "throughput" the plan with the least time between
            calls comes first.

    Raises:
        InputError: There is no such method, or nothing to compare.
    """
    variants = (Variant(step=step, args=args, kwargs=kwargs, model=model),)
    return compare_built(
        lambda cluster: variants,
        clusters=[clusters] if isinstance(clusters, Cluster) else list(clusters),
        methods=methods,
        progress=progress,
        num_micro_batches=num_micro_batches,
        micro_batch_semantics=micro_batch_semantics,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
        objective=objective,
        tokens_per_step=tokens_per_step,
    )


def compare_built(
    build: Callable[[Cluster], Variants],
    *,
    clusters: Sequence[Cluster],
    methods: Mapping[str, Method] | Sequence[str | Method] = (),
    objective: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """As `compare`, for a step that may be built in several ways.

    Args:
        build: the ways to build the step for a cluster.
        options: those of `aliquot.plan`.
    """
    if not clusters:
        raise InputError("compare needs at least one cluster.")
    title, candidates = "", []
    for cluster in clusters:
        variants = build(cluster)
        title = variants[0].title
        # A step that cannot be traced, or have this objective, is no question of methods.
        check_objective(objective, variants[0].traced()[0])
        named: dict[str, Method] = {}
        if isinstance(methods, Mapping):
            named |= methods
        else:
            for each in methods or usual_methods(cluster, clusters):
                if isinstance(each, str):
                    named[each] = method_by_name(each)
                else:
                    named[written(each)] = each
        for name, method in named.items():
            check_kinds(method=method)
            if progress:
                progress(f"{name} on {cluster.name}", 0, 0)
            try:
                found = plan_variants(
                    variants, cluster=cluster, method=method, objective=objective, **options
                )
            except (InfeasibleError, InputError, CaptureError) as error:
                candidates.append(_refused(name, cluster, error))
            else:
                candidates.append(Candidate(method=name, cluster=cluster.name, plan=found))
    ordered = sorted_candidates(candidates, objective)
    left_out: tuple[str, ...] = ()
    if not methods and len({c.cluster for c in ordered}) == 1:
        left_out = (
            "Not compared: Megatron's layouts. --methods auto,grid adds the best of data x tensor x"
            " pipeline parallel degrees, --methods auto,megatron:dp2,tp4 one of your choice.",
        )
    return Comparison(model=title, candidates=ordered, objective=objective, left_out=left_out)


def usual_methods(cluster: Cluster, clusters: Sequence[Cluster] = ()) -> list[str]:
    """The methods that are compared by default: only `auto` for several clusters, else also the
    well-known ones.
    """
    if len(clusters) > 1:
        return ["auto"]
    hosts = ["hsdp"] if cluster.num_hosts > 1 and cluster.devices_per_host > 1 else []
    return ["auto", "ddp", "zero2", "fsdp", *hosts, "pipeshard"]


def _refused(
    name: str, cluster: Cluster, error: InfeasibleError | InputError | CaptureError
) -> Candidate:
    first = str(error).partition("\n")[0]
    if not isinstance(error, InfeasibleError) or error.required_bytes is None:
        return Candidate(method=name, cluster=cluster.name, refusal=first)
    parts = tuple(sorted(error.parts.items(), key=lambda item: -item[1]))
    most = f", {format_bytes(parts[0][1])} of it {parts[0][0]}" if parts else ""
    usable = format_bytes(error.available_bytes) if error.available_bytes else ""
    limit = f"; {usable} is usable" if usable else ""
    return Candidate(
        method=name,
        cluster=cluster.name,
        refusal=(
            f"does not fit: needs {format_bytes(error.required_bytes)} on each device{most}{limit}"
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
    unit: int | None = None,
    first: int | None = None,
    most: int = 1 << _MOST_DOUBLINGS,
    num_micro_batches: int | Literal["auto"] | None = None,
    micro_batch_semantics: str = "exact",
    memory_limit_bytes: float | None = None,
    on_missing_rule: str = "infer",
    model: Callable[[int], ModelReference] | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> BatchSearch:
    """The largest global batch that fits, and the one of highest throughput among those tried.

    Doubles the batch until it does not fit, then bisects down to a distance of `unit`. If a batch
    fits, smaller ones are taken to fit, too. Method `Auto` and pipelines search the number of
    micro-batches, and almost any batch fits in more of them: batches in several micro-batches are
    quadrupled until that gains less than 2 % of throughput. Other methods take the batch in one
    pass, unless `num_micro_batches` says otherwise.

    Args:
        make: makes `(step, state, batch)` for a global batch.
        unit: batches are multiples of it; by default the number of devices, times that of the
            micro-batches if it is given, so that they can be split evenly.
        first: the batch to begin with; by default one `unit`.
        most: the largest batch to try.
        model: makes the reference to the step of a batch that plan files hold.
        verify: whether to compile what is answered. Batches that do not fit by their compiler's
            account are refused, and smaller ones compiled until one fits. If the answer fits, the
            next larger batch is compiled, too, where it is predicted to need little more than there
            is, and so on until one does not fit.
        cluster, method, num_micro_batches, micro_batch_semantics, memory_limit_bytes,
        on_missing_rule, progress:
            as for `aliquot.plan`.

    Raises:
        InputError: The numbers make no sense, or the step cannot be planned for another reason than
            memory.
    """

    def build(size: int) -> Variants:
        step, state, batch = make(size)
        return (Variant(step=step, args=(state, batch), model=model(size) if model else None),)

    parts = num_micro_batches if isinstance(num_micro_batches, int) else 1
    return largest_batch_built(
        build,
        cluster=cluster,
        unit=parts * cluster.num_devices if unit is None else unit,
        first=first,
        most=most,
        verify=verify,
        progress=progress,
        method=method,
        num_micro_batches=num_micro_batches,
        micro_batch_semantics=micro_batch_semantics,
        memory_limit_bytes=memory_limit_bytes,
        on_missing_rule=on_missing_rule,
    )


def largest_batch_built(
    build: Callable[[int], Variants],
    *,
    cluster: Cluster,
    unit: int = 1,
    first: int | None = None,
    most: int = 1 << _MOST_DOUBLINGS,
    verify: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> BatchSearch:
    """As `largest_batch`, for a step that may be built in several ways.

    Args:
        build: the ways to build the step for a global batch.
        options: those of `aliquot.plan`.
    """
    if unit < 1 or most < unit:
        raise InputError(f"largest_batch needs 1 <= unit <= most, got unit={unit} and most={most}.")
    trials: dict[int, BatchTrial] = {}
    compiled: set[int] = set()
    name = "step"
    if not isinstance(options.get("method") or Auto(), (Auto, PipeshardParallel)):
        # Of these the largest batch of one pass is asked: in more passes almost any fits.
        options["num_micro_batches"] = options.get("num_micro_batches") or 1
    searches = not isinstance(options.get("num_micro_batches"), int)

    def fits(size: int, *, verify: bool = False) -> bool:
        nonlocal name
        if progress:
            progress(f"batch {size}, compiled" if verify else f"batch {size}", 0, 0)
        if verify:
            compiled.add(size)
        variants = build(size)
        name = variants[0].title
        try:
            found = plan_variants(variants, cluster=cluster, verify=verify, **options)
            trials[size] = BatchTrial(global_batch=size, plan=found)
        except InfeasibleError as error:
            trials[size] = BatchTrial(
                global_batch=size, plan=None, refusal=str(error).partition("\n")[0]
            )
        return trials[size].plan is not None

    good, bad = 0, 0
    size = max(unit, (first or unit) // unit * unit)
    while not bad and size <= most:
        if not fits(size):
            bad = size
        elif good and _only_more_micro_batches(trials[good], trials[size]):
            break
        else:
            times = (
                _TIMES_WITH_MICRO_BATCHES if searches and trials[size].num_micro_batches > 1 else 2
            )
            good, size = size, size * times
    good, bad = _bisected(good, bad, unit, fits)
    if verify:
        # Compiling takes long: only what is answered is compiled.
        while good and not fits(good, verify=True):
            bad, good = good, int(_NEXT_SMALLER * good) // unit * unit
        good, bad = _bisected(good, bad, unit, functools.partial(fits, verify=True))
        # What was predicted not to fit may fit by the compiler's account.
        while good and bad and bad not in compiled and bad <= most and fits(bad, verify=True):
            good, bad = bad, bad + unit

    def answer() -> BatchSearch:
        return BatchSearch(
            model=name,
            cluster=cluster.name,
            # Larger than what was compiled and fits, a prediction is no answer.
            trials=tuple(
                trials[size]
                for size in sorted(trials)
                if not (verify and size > good and trials[size].plan)
            ),
            unit=unit,
            is_limited=bad == good + unit,
        )

    while verify and (best := answer().fastest) and best.plan and best.plan.compiled is None:
        fits(best.global_batch, verify=True)
    return answer()


def _bisected(good: int, bad: int, unit: int, fits: Callable[[int], bool]) -> tuple[int, int]:
    """The largest batch that fits and the smallest that does not, between such batches."""
    while bad and bad - good > unit:
        middle = max((good + bad) // 2 // unit * unit, unit)
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good, bad


def _only_more_micro_batches(smaller: BatchTrial, larger: BatchTrial) -> bool:
    """True if the larger batch fits in more micro-batches, and gains little by it."""
    return (
        larger.num_micro_batches > smaller.num_micro_batches
        and larger.examples_per_s < smaller.examples_per_s * (1 + _LEAST_GAIN)
    )
