"""Layers of a step -> chains: what every distinct layer costs on every submesh, each solved once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, LogicalMesh, subcluster
from ..cost import Chain, PhaseCosts, Priced, Problem, StageOption, evaluate, make_problem, phase_costs, price
from ..graph import Block, Graph, Phase, Staging, extract_stages, find_repeats, stage_layers
from ..sharding import LayeredStep, traces_in_groups
from ._base import Progress
from ._helper import HelperProcess
from .intra import AbstractIntra, Space, fixed

Floats = NDArray[np.float64]
# For what only the first layer of a stage keeps; stages are judged by themselves once they are known.
_LAYERS_PER_STAGE = 4


def submesh_options(cluster: Cluster, micro_batch_size: int) -> list[StageOption]:
    """Submeshes and their meshes (dp, tp): any part of a host that the batch or the host is a multiple of, or whole hosts.

    The first axis splits the batch alone, so that gradients wait for the last micro-batch; the second splits whatever is
    best. Tensor parallelism stays inside a host.
    """
    per_host, hosts = cluster.devices_per_host, cluster.num_hosts
    shapes = [(1, n) for n in range(1, per_host + 1) if per_host % n == 0 or micro_batch_size % n == 0]
    shapes += [(h, per_host) for h in range(2, hosts + 1) if hosts % h == 0 or micro_batch_size % (h * per_host) == 0]
    options: list[StageOption] = []
    for shape in shapes:
        size = math.prod(shape)
        for tp in range(1, per_host + 1):
            dp = size // tp
            if size % tp or micro_batch_size % dp or (shape[0] > 1 and per_host % tp):
                continue
            for recompute in ("none", "stage"):
                again = ", recompute" if recompute == "stage" else ""
                options.append(
                    StageOption(
                        name=f"dp{dp} tp{tp}{again}",
                        submesh=shape,
                        mesh_shape=(dp, tp),
                        recompute=recompute,
                        dp=dp,
                        tp=tp,
                    )
                )
    return options


def build_chains(
    step: LayeredStep,
    cluster: Cluster,
    *,
    intra: AbstractIntra,
    counts: Sequence[int],
    memory_limit_bytes: float,
    copies: Sequence[int] = (),
    on_missing_rule: str = "infer",
    progress: Progress | None = None,
    helper: HelperProcess | None = None,
) -> tuple[list[Chain], list[int]]:
    """Chains of a step, one for each number of micro-batches; and for each layer the number of its kind.

    Costs are worked out for the step's own number; passes, activations and what crosses scale with the size of a
    micro-batch for the others.

    Args:
        intra: finds the splits of each layer.
        counts: numbers of micro-batches.
        copies: for each unit of the chains the layer that it is a copy of; by default every layer is one.
        memory_limit_bytes: on each device.
        helper: takes calls off this process.
    """
    options = submesh_options(cluster, step.micro_batch_size)
    several = [count for count in counts if count > 1]
    groups = {o.mesh_shape[0] for o in options} - {1}
    runs = {n: all(traces_in_groups(step.graph, count, n) for count in several) for n in groups}
    options = [o for o in options if runs.get(o.mesh_shape[0], True)]
    staged = stage_layers(step.part, step.layers, range(len(step.layers)))
    by_layer = _kinds(step.part, staged)
    units = list(copies or range(len(step.layers)))
    numbers: dict[tuple[int, ...], int] = {}
    classes = [numbers.setdefault(by_layer[unit], len(numbers)) for unit in units]
    members = [units[classes.index(c)] for c in range(len(numbers))]
    meshes = sorted({(o.submesh, o.mesh_shape) for o in options})
    extracts = extract_stages(step.part, staged, step.batch_dims, members)
    shared = (helper or HelperProcess(wanted=False)).share(_solve_layer)
    for number, (unit, extract) in enumerate(zip(members, extracts, strict=True)):
        if progress:
            progress(f"layer {step.layers.names[unit]}", number, len(members))
        problem = make_problem(
            extract.graph, cluster, num_micro_batches=step.num_micro_batches, on_missing_rule=on_missing_rule
        )
        shared.add(_Layer(problem=_without_operators(problem), intra=intra, notes={}), meshes)
    answers = shared.answers((lambda done, of: progress("layers on meshes", done, of)) if progress else None)
    solved = [dict(zip(meshes, answers[k : k + len(meshes)], strict=True)) for k in range(0, len(answers), len(meshes))]
    costs = [[of[o.submesh, o.mesh_shape] for o in options] for of in solved]
    table = [costs[c] for c in classes]
    chains = [
        _chain(step, units, cluster, options, table, count, memory_limit_bytes) for count in dict.fromkeys(counts)
    ]
    return chains, classes


def _kinds(graph: Graph, staging: Staging) -> list[tuple[int, ...]]:
    """For each layer what it computes. Layers of one kind cost the same."""
    op_class = find_repeats(graph).op_class
    ops: list[list[int]] = [[] for _ in range(staging.num_stages)]
    for item, stage in zip(staging.items, staging.stage, strict=True):
        if stage >= 0 and item.phase is not Phase.UPDATE:
            ops[stage] += [int(op_class[k]) for k in item.ops]
    return [tuple(own) for own in ops]


def price_option(problem: Problem, shape: tuple[int, ...], intra: AbstractIntra) -> Priced | None:
    """A mesh (dp, tp) priced, with no other choices than its axes allow; None if the batch cannot be split so.

    The first axis splits the batch alone; over the second, parameters are split as far as they can, unless the intra
    planner says otherwise.
    """
    kept = [k for k, n in enumerate(shape) if n > 1] or [0]
    mesh = LogicalMesh(
        shape=tuple(shape[k] for k in kept),
        axis_names=tuple(intra.stage_axes[k] for k in kept),
        cluster=problem.cluster,
    )
    data_axes = frozenset(p for p, k in enumerate(kept) if k == 0 and shape[0] > 1)
    choices = intra.stage_choices(problem, mesh.shape, data_axes)
    if choices is None:
        kinds = fixed.kinds_of(problem.graph, problem.nodes)
        choices = fixed.regular_choices(problem.nodes, kinds, mesh.shape, data_axes)
    if not choices:
        return None
    return price(problem.nodes, mesh, repeats=problem.num_micro_batches, data_axes=data_axes, choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """A layer's problem, solved on mesh after mesh; `notes` are what the planner keeps from one mesh to the next."""

    problem: Problem
    intra: AbstractIntra
    notes: dict[str, Any]


def _without_operators(problem: Problem) -> Problem:
    """A problem with as much of its graph as prices depend on: what each pass reads."""
    graph, nodes = problem.graph, problem.nodes
    ops = [
        replace(op, inputs=tuple([i for i in op.inputs if isinstance(i, int)]), params={}, scope="", eqn=None)
        for op in graph.ops
        if op.phase is not Phase.UPDATE
    ]
    block = Block(inputs=(), items=(), outputs=())
    graph = replace(graph, values=(), ops=tuple(ops), body=block, constants={}, calling=None, split=None)
    return replace(problem, graph=graph, nodes=replace(nodes, sites=(), output_ports=(), op_class=(), loop_ports={}))


def _solve_layer(layer: _Layer, mesh: tuple[tuple[int, int], tuple[int, ...]]) -> PhaseCosts | None:
    """Costs of the best splits on a submesh as a mesh (dp, tp), memory aside; None if the batch cannot be split so."""
    submesh, shape = mesh
    problem = replace(layer.problem, cluster=subcluster(layer.problem.cluster, submesh))
    priced = price_option(problem, shape, layer.intra)
    if priced is None:
        return None
    if all(len(node.choices) == 1 for node in priced.nodes):
        # The batch alone is split: nothing is left to choose, if that can be done at all.
        picks = np.zeros(len(priced.nodes), np.int64)
        return phase_costs(priced, picks, problem.graph) if np.isfinite(evaluate(priced, picks).total_s) else None
    space = Space(name="layer", priced=priced, allowed=fixed.everything(priced))
    search = layer.intra.begin(problem, space, memory_limit_bytes=np.inf, notes=layer.notes)
    search.bound()
    return None if search.picks is None else phase_costs(priced, search.picks, problem.graph)


def _chain(
    step: LayeredStep,
    units: Sequence[int],
    cluster: Cluster,
    options: Sequence[StageOption],
    table: Sequence[Sequence[PhaseCosts | None]],
    count: int,
    limit_bytes: float,
) -> Chain:
    scale = step.num_micro_batches / count
    # A batch that an option can split at one size it may not at another.
    size = step.micro_batch_size * step.num_micro_batches // count
    runs = np.array([[c is not None and size % (o.dp or 1) == 0 for c, o in zip(row, options)] for row in table])

    def figures(name: str) -> Floats:
        rows = [[getattr(c, name) if c is not None else np.inf for c in row] for row in table]
        return np.where(runs, np.array(rows, np.float64), np.inf)

    again = np.array([o.recompute == "stage" for o in options])
    forward, backward = figures("forward_s") * scale, figures("backward_s") * scale
    kept = figures("in_flight_bytes") * scale
    boundary = np.array([step.layers.boundary_bytes[unit] for unit in units]) * scale
    entering = np.concatenate(([0.0], boundary[:-1]))
    dp = np.array([o.dp or 1 for o in options])
    state = figures("state_bytes")
    # What a stage works out again is all there at once, for one micro-batch; only what enters the stage is kept. A layer
    # does not know whether a stage begins with it.
    state = np.where(again, state + kept, state)
    kept = np.where(again, entering[:, None] / dp / _LAYERS_PER_STAGE, kept)
    backward = np.where(again, backward + forward, backward)
    # A stage that works everything out again does so once: its backward pass stays whole.
    weights = np.where(again & runs, 0.0, figures("deferrable_s") * scale)
    return Chain(
        unit_names=tuple(step.layers.names[unit] for unit in units),
        options=tuple(options),
        num_micro_batches=count,
        forward_s=forward,
        backward_s=backward,
        weight_gradient_s=weights,
        once_s=figures("once_s"),
        state_bytes=state,
        in_flight_bytes=kept,
        working_bytes=figures("working_bytes") * scale,
        boundary_bytes=boundary,
        memory_limit_bytes=limit_bytes,
        num_hosts=cluster.num_hosts,
        devices_per_host=cluster.devices_per_host,
        intra=cluster.intra,
        inter=cluster.inter,
    )
