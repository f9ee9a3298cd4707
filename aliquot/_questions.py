"""Questions about a step that one plan does not answer: which method, which cluster, which batch, how many hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ._api import plan as make_plan
from .cluster import Cluster
from .core import InfeasibleError, InputError
from .planners import AbstractMethod, PipeshardParallel, Progress, method_by_name
from .plans import ModelReference
from .report import Candidate, Comparison, sorted_candidates

Method: TypeAlias = AbstractMethod | PipeshardParallel


def compare(
    step: Callable[..., Any],
    *args: Any,
    clusters: Cluster | Sequence[Cluster],
    methods: Mapping[str, Method] | Sequence[str] = (),
    num_micro_batches: int = 1,
    memory_limit_bytes: float | None = None,
    model: ModelReference | None = None,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Comparison:
    """Plan a step by several methods, or for several clusters, and say where each loses against the fastest.

    Args:
        step, *args, **kwargs: as for `aliquot.plan`.
        clusters: one or several.
        methods: names as on the command line, or methods under names of your own; by default the usual ones.
        num_micro_batches, memory_limit_bytes, model, progress: as for `aliquot.plan`.

    Raises:
        InputError: There is no such method, or nothing to compare.
    """
    where = [clusters] if isinstance(clusters, Cluster) else list(clusters)
    if not where:
        raise InputError("compare needs at least one cluster.")
    found = []
    for cluster in where:
        named = methods if isinstance(methods, Mapping) else _methods(methods or usual_methods(cluster, where))
        for name, method in named.items():
            if progress:
                progress(f"{name} on {cluster.name}", 0, 0)
            try:
                made = make_plan(
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
                found.append(_refused(name, cluster, error))
            else:
                found.append(Candidate(method=name, cluster=cluster.name, plan=made))
    name = model.name if model else getattr(step, "__name__", "step")
    return Comparison(model=name, candidates=sorted_candidates(found))


def usual_methods(cluster: Cluster, clusters: Sequence[Cluster] = ()) -> list[str]:
    """What is worth comparing: the automatic method alone for several clusters, else also those that people know."""
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
    from .core import format_bytes

    parts = tuple(sorted(error.parts.items(), key=lambda item: -item[1]))
    most = f", most of it {parts[0][0]} ({format_bytes(parts[0][1])})" if parts else ""
    limit = f" of {format_bytes(error.available_bytes)}" if error.available_bytes else ""
    return Candidate(
        method=name,
        cluster=cluster.name,
        refusal=f"does not fit: needs {format_bytes(error.required_bytes)}{limit} on each device{most}",
        required_bytes=error.required_bytes,
        available_bytes=error.available_bytes,
        memory_bytes=parts,
    )
