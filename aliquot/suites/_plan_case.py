"""From a case to plans: the one that it gives, and ours."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._plan_graph import plan_graph
from ..cluster import Cluster, subcluster, target_for
from ..core import InfeasibleError, InputError, PlanMismatchError
from ..graph import Graph, capture, cut_layers
from ..planners import (
    AbstractMethod,
    Auto,
    ManualStages,
    Megatron,
    PipeshardParallel,
    Progress,
    ShardParallel,
    layer_starts,
)
from ..plans import ModelReference, Plan
from ..zoo import (
    Inference,
    LayersWorkload,
    MoEConfig,
    Workload,
    build,
    build_inference,
    build_layers,
)
from ._suite import Case

# Blocks of the zoo's models: Alpa's layers are equal groups of them.
_BLOCKS = "params.layers[*]"
_BLOCK_PARAMETER = re.compile(r".*\bparams\.layers\[(\d+)\]")
# More than any device has, but finite.
_AMPLE_BYTES = 1e15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltCase:
    """The step of a case, traced.

    Attributes:
        step: of a state and a batch: a training step, or of parameters alone the forward pass.
        state, batch: its arguments, as shapes.
        init: makes a real state of a key.
        reference: how to make a training step again, for plan files.
        build_s: seconds to build and trace it.
    """

    case: Case
    step: Callable[..., Any]
    state: Any
    batch: Mapping[str, Any]
    init: Callable[[Any], Any]
    num_parameters: int
    graph: Graph
    reference: ModelReference | None
    build_s: float


def build_case(case: Case) -> BuiltCase:
    """The step of a case. No array is made."""
    started = time.perf_counter()
    sizes = dict(case.overrides)
    made: Workload | LayersWorkload | Inference
    step: Callable[..., Any]
    state: Any
    init: Callable[[Any], Any]
    reference = None
    if case.forward_only and (isinstance(case.config, MoEConfig) or not case.embedding):
        # Neither generates text, so the forward pass is that of the loss.
        made, step, state, init = _loss_alone(case)
    elif case.forward_only:
        made = build_inference(
            case.model,
            case.global_batch,
            overrides=sizes,
            dtype=case.precision,
            params_dtype=case.precision,
        )
        step, state, init = made.forward, made.params, made.init
    else:
        made = build(
            case.model,
            case.global_batch,
            overrides=sizes,
            dtype=case.precision,
            recompute="block" if case.recompute else "none",
            optimizer=case.optimizer,
            momentum=case.momentum,
            attention="plain",
        )
        step, state, init = made.train_step, made.state, made.init
        reference = ModelReference(
            kind="zoo",
            name=made.config.name,
            settings=made.settings,
            flops_per_step=float(made.flops_per_step),
        )
    graph = capture(step, state, made.batch)
    return BuiltCase(
        case=case,
        step=step,
        state=state,
        batch=made.batch,
        init=init,
        num_parameters=made.num_parameters,
        graph=graph,
        reference=reference,
        build_s=time.perf_counter() - started,
    )


def _loss_alone(
    case: Case,
) -> tuple[Workload | LayersWorkload, Callable[..., Any], Any, Callable[[Any], Any]]:
    """A model of the zoo, or its layers, with the loss as a function of parameters in 16 bits,
    their shapes, and the function that makes them.
    """
    import jax

    made: Workload | LayersWorkload
    sizes = dict(case.overrides)
    if case.embedding:
        made = build(
            case.model,
            case.global_batch,
            overrides=sizes,
            dtype=case.precision,
            recompute="none",
            attention="plain",
        )
    else:
        made = build_layers(case.model, case.global_batch, overrides=sizes, dtype=case.precision)

    def narrow(params: Any) -> Any:
        return jax.tree.map(lambda array: array.astype(case.precision), params)

    def init(key: Any) -> Any:
        return narrow(made.init(key)["params"])

    def forward(params: Any, batch: Any) -> Any:
        return made.evaluate({"params": params}, batch)

    return made, forward, jax.eval_shape(narrow, made.state["params"]), init


def part_of(cluster: Cluster, num_devices: int) -> Cluster | None:
    """So many devices of a cluster: some of one host, or whole hosts; None if it has no such
    part.
    """
    hosts, rest = divmod(num_devices, cluster.devices_per_host)
    if num_devices <= cluster.devices_per_host:
        return subcluster(cluster, (1, num_devices))
    if rest or hosts > cluster.num_hosts:
        return None
    return subcluster(cluster, (hosts, cluster.devices_per_host))


def plan_given(
    built: BuiltCase,
    cluster: Cluster,
    progress: Progress | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The plan that a case gives; if it does not fit in the devices' memory, as if it did.

    On a mesh whose first axis need not split the batch Alpa's solver splits the batch in one
    operator and parameters in the next. Ours is told beforehand: all such stages together are taken
    for data or for tensor parallelism, whichever fits and is faster.

    Args:
        time_limit_s: for each way to take it.

    Raises:
        PlanMismatchError, InputError, CaptureError: it is no plan that we can make.
        TimeLimitError: none was made within the time.
    """
    found: list[Plan] = []
    refusal: PlanMismatchError | None = None
    for method in _given_methods(built):
        try:
            found.append(_plan(built, cluster, method, progress, time_limit_s))
        except PlanMismatchError as error:
            refusal = refusal or error
    if not found:
        assert refusal is not None
        raise refusal
    usable_bytes = target_for(cluster.device).usable_bytes(cluster.device)
    figures = [plan.prediction for plan in found]
    ranks = [(p.peak_memory_bytes > usable_bytes, p.step_time_s) for p in figures]
    return found[ranks.index(min(ranks))]


def plan_ours(
    built: BuiltCase,
    cluster: Cluster,
    progress: Progress | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The fastest plan that a search finds. A case that asks for a search says between how many
    layers stages are cut and how many micro-batches there are; otherwise all of that is open.

    Args:
        time_limit_s: after which the best plan so far is taken.

    Raises:
        InfeasibleError, InputError, CaptureError: there is none.
        TimeLimitError: none was found within the time.
    """
    case = built.case
    method: AbstractMethod = Auto()
    if case.searches and not case.forward_only:
        method = PipeshardParallel(
            num_micro_batches=case.num_micro_batches, layers=search_layers(built)
        )
    return planned(built, cluster, method, progress=progress, time_limit_s=time_limit_s)


def search_layers(built: BuiltCase) -> int | str | None:
    """Between what a search cuts stages: so many layers, or every block if the case asks for as
    many layers as there are blocks. Left to itself, a cut into as many falls inside blocks, too,
    which have fewer places for it.
    """
    paths = [item.path for item in built.graph.inputs]
    blocks = {found[1] for path in paths if (found := _BLOCK_PARAMETER.match(path))}
    layers = built.case.num_layers
    return _BLOCKS if layers and blocks and layers >= len(blocks) else layers


def _plan(
    built: BuiltCase,
    cluster: Cluster,
    method: AbstractMethod,
    progress: Progress | None,
    time_limit_s: float | None,
) -> Plan:
    make = functools.partial(
        planned,
        built,
        cluster,
        method,
        progress=progress,
        count=built.case.num_micro_batches,
        time_limit_s=time_limit_s,
    )
    try:
        return make()
    except InfeasibleError:
        return make(memory_limit_bytes=_AMPLE_BYTES)


def planned(
    built: BuiltCase,
    cluster: Cluster,
    method: AbstractMethod,
    *,
    progress: Progress | None = None,
    count: int | None = None,
    memory_limit_bytes: float | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The plan of a case by a method, with so many micro-batches, or as many as it finds; within
    `time_limit_s` seconds of the search, if that is given.
    """
    return plan_graph(
        built.graph,
        started=time.perf_counter(),
        trace_s=built.build_s,
        cluster=cluster,
        method=method,
        num_micro_batches=count,
        micro_batch_semantics=built.case.semantics,
        memory_limit_bytes=memory_limit_bytes,
        time_limit_s=time_limit_s,
        model=built.reference,
        progress=progress,
    )


def _given_methods(built: BuiltCase) -> Iterator[AbstractMethod]:
    case = built.case
    if case.layout is not None:
        data, tensor, pipeline = case.layout
        zero = 2 if case.reduce_scatter and data > 1 and not case.forward_only else 0
        yield Megatron(data=data, tensor=tensor, pipeline=pipeline, zero_stage=zero)
        return
    if case.mesh_shape is not None or len(case.stages) == 1:
        yield ShardParallel(mesh_shape=case.mesh_shape or case.stages[0].mesh)
        return
    if not case.stages:
        raise InputError(f"{case.suite}, case {case.number}, gives no plan: it asks for a search.")
    names = cut_layers(built.graph, layers=_BLOCKS).names
    bounds = stage_bounds([stage.layers for stage in case.stages], names)
    ways = [[stage.mesh for stage in case.stages]]
    if not all(stage.forced for stage in case.stages):
        ways.append([s.mesh if s.forced else s.mesh[::-1] for s in case.stages])
    for meshes in ways:
        stages = ManualStages(
            boundaries=bounds,
            options=tuple(f"dp{first} tp{second}" for first, second in meshes),
            num_micro_batches=case.num_micro_batches,
        )
        yield PipeshardParallel(
            inter=stages, num_micro_batches=case.num_micro_batches, layers=_BLOCKS
        )


def stage_bounds(groups: Sequence[int], unit_names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """The units [first, last) of each stage: blocks are shared out as the numbers of layers say;
    what comes before them belongs to the first stage, what comes behind them to the last.

    >>> stage_bounds([1, 1, 2], ["embed", "layers[0]", "layers[1]", "layers[2]", "layers[3]"])
    ((0, 2), (2, 3), (3, 5))

    Raises:
        InputError: there are more stages than blocks.
    """
    blocks = layer_starts(unit_names)
    if len(groups) > len(blocks):
        raise InputError(f"{len(groups)} stages need as many blocks, and there are {len(blocks)}.")
    firsts, done, least = [0], 0, 1
    for k, group in enumerate(groups[:-1], 1):
        done += group
        wanted = round(done * len(blocks) / sum(groups))
        block = min(max(wanted, least), len(blocks) - (len(groups) - k))
        firsts.append(blocks[block])
        least = block + 1
    return tuple(zip(firsts, [*firsts[1:], len(unit_names)], strict=True))
