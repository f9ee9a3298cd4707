"""Chains from the layers of a step, written out or in a loop: every distinct layer is solved once
on every submesh.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ..cluster import Cluster, LogicalMesh, subcluster, target_for
from ..cost import (
    Chain,
    MeshUse,
    PhaseCosts,
    Picked,
    Priced,
    Problem,
    StageOption,
    evaluate,
    make_problem,
    phase_costs,
    price,
)
from ..graph import (
    Block,
    Layers,
    OpId,
    Phase,
    StageExtracts,
    Staging,
    find_repeats,
    scans_over_layers,
    split_scans,
    stage_layers,
    whole_layers,
)
from ..sharding import Crossing, LayeredStep, find_crossing, sketch_step, traces_in_groups
from ._base import Task
from ._helper import HelperProcess
from .intra import AbstractIntra, Space, fixed

Floats = NDArray[np.float64]
# Layers of a typical stage. A stage that recomputes keeps its input for each micro-batch in flight,
# and each layer is charged for an input divided by this number, until stages are known and priced
# exactly.
_LAYERS_PER_STAGE = 4


def submesh_options(
    cluster: Cluster, micro_batch_size: int, beside_tensor: int = 1, *, recomputes: bool = True
) -> list[StageOption]:
    """Ways to run a stage: submeshes with their meshes (dp, tp). A submesh is a part of one host or
    several whole hosts; it must divide the host (or the number of hosts), or its devices the
    micro-batch.

    The first axis splits only the batch, so that gradients are reduced once, after the last
    micro-batch; the second splits whatever is best. Tensor parallelism stays inside a host.

    Args:
        beside_tensor: see `AbstractIntra.ways_beside_tensor`.
        recomputes: whether stages may recompute.
    """
    per_host, hosts = cluster.devices_per_host, cluster.num_hosts
    shapes = [
        (1, n) for n in range(1, per_host + 1) if per_host % n == 0 or micro_batch_size % n == 0
    ]
    for h in range(2, hosts + 1):
        if hosts % h == 0 or micro_batch_size % (h * per_host) == 0:
            shapes.append((h, per_host))
    options: list[StageOption] = []
    for shape in shapes:
        size = math.prod(shape)
        # Tensor parallelism needs the fast links of a host.
        inside = range(1, per_host + 1)
        for tp in sorted({*inside, *(n * beside_tensor for n in inside)}):
            dp = size // tp
            if size % tp or micro_batch_size % dp:
                continue
            # A group of tensor parallelism stays within one host.
            if shape[0] > 1 and per_host % tp and per_host % (tp / beside_tensor):
                continue
            # Each mesh is offered with and without recomputation, because which stages are short of
            # memory is known only later.
            for recompute in ("none", "stage") if recomputes else ("none",):
                suffix = ", recompute" if recompute == "stage" else ""
                options.append(
                    StageOption(
                        name=f"dp{dp} tp{tp}{suffix}",
                        submesh=shape,
                        mesh_shape=(dp, tp),
                        recompute=recompute,
                        dp=dp,
                        tp=tp,
                    )
                )
    return options


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSolution:
    """The best splits of a layer on a mesh, and what they cost. `picks` are among the choices of
    `price_option`.
    """

    costs: PhaseCosts
    picks: NDArray[np.int64]


_Mesh: TypeAlias = tuple[tuple[int, int], tuple[int, ...]]
# A submesh and its mesh.
ONE_DEVICE: _Mesh = ((1, 1), (1, 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Every distinct layer of a step, solved on every submesh.

    Attributes:
        step: the step at the number of micro-batches that costs are for.
        units: for each unit of the chains, the layer that it is a copy of.
        kinds: for each unit, the number of its kind; units of one kind have equal operators.
        problems, ops: for each kind, the problem of its first layer, and the number in the step of
            each operator of that layer.
        solutions: for each kind, the solution on each submesh and mesh; None where the layer cannot
            run, such as where the mesh does not divide the batch.
        crossing: the arrays that layers exchange if each is a stage of its own.
        options: ways to run a stage.
        whole: where units are operators, the costs of their layers as wholes; otherwise None.
    """

    step: LayeredStep
    cluster: Cluster
    intra: AbstractIntra
    units: Sequence[int]
    kinds: Sequence[int]
    problems: Sequence[Problem]
    ops: Sequence[Sequence[int]]
    solutions: Sequence[Mapping[_Mesh, LayerSolution | None]]
    crossing: Crossing
    options: Sequence[StageOption]
    whole: LayerCosts | None = None

    @property
    def least_compute_s(self) -> float:
        """Seconds of all layers for a whole batch on a single device, without communication."""
        if self.whole is not None:
            return self.whole.least_compute_s
        alone = [solved[ONE_DEVICE] for solved in self.solutions]
        seconds = []
        for costs in alone:
            seconds.append(
                0.0
                if costs is None
                else self.step.num_micro_batches * (costs.costs.forward_s + costs.costs.backward_s)
                + costs.costs.once_s
            )
        return sum(seconds[kind] for kind in self.kinds)

    def chain(self, count: int, memory_limit_bytes: float) -> Chain:
        """The chain for a number of micro-batches. For numbers other than the step's own, passes,
        activations and transfers are scaled with the size of a micro-batch.
        """
        step, units, cluster, options = self.step, self.units, self.cluster, self.options
        # Time and activations of a micro-batch grow with its size.
        scale = step.num_micro_batches / count
        # An option that divides micro-batches of one size may not divide those of another.
        micro_batch_size = step.micro_batch_size * step.num_micro_batches // count
        divides = np.array([micro_batch_size % (o.dp or 1) == 0 for o in options])
        can_run = np.isfinite(self.figures("forward_s")) & divides

        def figures(name: str) -> Floats:
            return np.where(can_run, self.figures(name), np.inf)

        recomputes = np.array([o.recompute == "stage" for o in options])
        forward, backward = figures("forward_s") * scale, figures("backward_s") * scale
        activation_bytes = figures("in_flight_bytes") * scale
        leaving_bytes = np.array([*self.crossing.forward_bytes, 0.0])[list(units)] * scale
        returning_bytes = np.array([*self.crossing.backward_bytes, 0.0])[list(units)] * scale
        entering_bytes = np.concatenate(([0.0], leaving_bytes[:-1]))
        dp = np.array([o.dp or 1 for o in options])
        # A stage that recomputes has the activations of one micro-batch while its backward pass
        # runs, and keeps only its input for each. Which layers begin a stage is not known yet, so
        # each layer is charged a share of an input. Operators inside of layers are charged none, as
        # their layer is.
        inner = np.array([unit in step.layers.inner for unit in units])
        begun_bytes = np.where(inner, 0.0, entering_bytes)
        recomputed_bytes = np.where(can_run, self.figures("recomputed_bytes") * scale, 0.0)
        recomputed_bytes += np.where(recomputes & can_run, activation_bytes, 0.0)
        activation_bytes = np.where(
            recomputes, begun_bytes[:, None] / dp / _LAYERS_PER_STAGE, activation_bytes
        )
        backward = np.where(recomputes, backward + forward, backward)
        # With recomputation, a backward pass is not split into input and weight gradients: the
        # latter cannot be deferred.
        weight_gradient = np.where(recomputes & can_run, 0.0, figures("deferrable_s") * scale)
        # Operators' shares of both may round differently.
        weight_gradient = np.minimum(weight_gradient, backward)
        deferred_bytes = np.where(recomputes & can_run, 0.0, figures("deferred_bytes") * scale)
        # Names of the layers that others are copies of would not tell these apart.
        are_copies = len(set(units)) < len(units)
        return Chain(
            unit_names=tuple(
                f"layers[{k}]" if are_copies else step.layers.names[unit]
                for k, unit in enumerate(units)
            ),
            options=tuple(options),
            most_imbalance=self.intra.stage_imbalance,
            num_micro_batches=count,
            forward_s=forward,
            backward_s=backward,
            weight_gradient_s=weight_gradient,
            once_s=figures("once_s"),
            state_bytes=figures("state_bytes"),
            in_flight_bytes=activation_bytes,
            deferred_bytes=deferred_bytes,
            recomputed_bytes=recomputed_bytes,
            working_bytes=figures("working_bytes") * scale,
            # Every micro-batch crosses a cut once in each direction.
            boundary_bytes=(
                (leaving_bytes + returning_bytes) / 2 if returning_bytes.any() else leaving_bytes
            ),
            memory_limit_bytes=memory_limit_bytes,
            num_hosts=cluster.num_hosts,
            devices_per_host=cluster.devices_per_host,
            intra=cluster.transfer_links[0],
            inter=cluster.transfer_links[1],
            overlaps_transfers=target_for(cluster.device).overlaps_transfers,
        )

    def figures(self, name: str) -> Floats:
        """[U, O], a figure of `PhaseCosts` of each unit under each option; infinite where it cannot
        run.

        What operators cost alone leaves out what lies between them (conversions of layouts,
        collectives behind the compute of their neighbours). So those of a layer share what the
        layer costs as a whole, in proportion to what they cost alone.
        """
        of_kind = []
        for solved in self.solutions:
            of_kind.append(
                [
                    getattr(found.costs, name) if found is not None else np.inf
                    for found in (solved[o.submesh, o.mesh_shape] for o in self.options)
                ]
            )
        alone = np.array([of_kind[kind] for kind in self.kinds], np.float64)
        if self.whole is None:
            return alone
        starts = [k for k in range(len(alone)) if k not in self.step.layers.inner]
        gather = np.maximum if name == "working_bytes" else np.add
        layer = np.cumsum([k in starts for k in range(len(alone))]) - 1
        sums, wanted = (
            gather.reduceat(alone, starts, axis=0)[layer],
            self.whole.figures(name)[layer],
        )
        can_share = np.isfinite(sums) & np.isfinite(wanted) & (sums > 0)
        ratio = np.divide(wanted, sums, out=np.ones_like(sums), where=can_share)
        # What a layer has beside operators that have none of it belongs to the first of them.
        begins = np.isin(np.arange(len(alone)), starts)[:, None]
        shared = np.where(begins & (sums == 0), wanted, alone * ratio)
        return np.where(np.isfinite(wanted), shared, np.inf)


def solve_layers(
    step: LayeredStep,
    task: Task,
    *,
    intra: AbstractIntra,
    counts: Sequence[int],
    copies: Sequence[int] = (),
    helper: HelperProcess | None = None,
) -> LayerCosts:
    """Costs of every distinct layer of a step on every submesh, for the step's own number of
    micro-batches.

    Args:
        intra: finds the splits of each layer.
        counts: numbers of micro-batches that chains are made for.
        copies: for each unit of the chains the layer that it is a copy of; by default each layer is
            a unit.
        helper: a second process that solves some of the layers.
    """
    cluster, progress = task.cluster, task.progress
    beside_tensor, recomputes = intra.ways_beside_tensor, task.recomputes
    options = submesh_options(cluster, step.micro_batch_size, beside_tensor, recomputes=recomputes)
    counts_above_1 = [count for count in counts if count > 1]
    groups = {o.mesh_shape[0] for o in options} - {1}
    # n data-parallel groups trace a micro-batch as n smaller ones: options for which the step
    # cannot be traced that way are left out.
    # All devices share an independent micro-batch.
    if step.semantics == "independent":
        groups = set()
    can_be_cut = functools.cache(lambda parts: traces_in_groups(step.graph, parts, 1))
    can_trace = {}
    for n in groups:
        can_trace[n] = all(can_be_cut(count * n) for count in counts_above_1)
    options = [o for o in options if can_trace.get(o.mesh_shape[0], True)]
    staged = stage_layers(step.part, step.layers, range(len(step.layers)))
    op_class = find_repeats(step.part).op_class
    by_layer = []
    for ops in ops_of_layers(staged):
        by_layer.append(tuple([int(op_class[k]) for k in ops]))
    units = list(copies or range(len(step.layers)))
    numbers: dict[tuple[int, ...], int] = {}
    # Kinds are numbered in the order of the units, so that chains do not depend on the order of
    # sets.
    classes = [numbers.setdefault(by_layer[unit], len(numbers)) for unit in units]
    representatives = [units[classes.index(c)] for c in range(len(numbers))]
    meshes = sorted({(o.submesh, o.mesh_shape) for o in options})
    every = StageExtracts(step.part, staged, step.batch_dims)
    extracts = [every[unit] for unit in representatives]
    queue = (helper or HelperProcess(wanted=False)).share(_solve_layer)
    problems = []
    for number, (unit, extract) in enumerate(zip(representatives, extracts, strict=True)):
        if progress:
            progress(f"layer {step.layers.names[unit]}", number, len(representatives))
        problem = make_problem(
            extract.graph,
            cluster,
            num_micro_batches=step.num_micro_batches,
            on_missing_rule=task.on_missing_rule,
            semantics=step.semantics,
            of_stage=True,
        )
        problems.append(problem)
        queue.add(_Layer(problem=_without_operators(problem), intra=intra, notes={}), meshes)
    answers = queue.answers(
        (lambda done, of: progress("layers on meshes", done, of)) if progress else None
    )
    return LayerCosts(
        step=step,
        cluster=cluster,
        intra=intra,
        units=units,
        kinds=classes,
        problems=problems,
        ops=[extract.ops for extract in extracts],
        solutions=[
            dict(zip(meshes, answers[k : k + len(meshes)], strict=True))
            for k in range(0, len(answers), len(meshes))
        ],
        crossing=find_crossing(step.part, staged),
        options=options,
    )


def ops_of_layers(staging: Staging) -> list[list[OpId]]:
    """For each layer, its operators in order, without those of the update."""
    ops: list[list[OpId]] = [[] for _ in range(staging.num_stages)]
    for item, stage in zip(staging.items, staging.stage, strict=True):
        if stage >= 0 and item.phase is not Phase.UPDATE:
            ops[stage] += item.ops
    return ops


def price_option(
    problem: Problem, shape: tuple[int, ...], intra: AbstractIntra, *, splits_sequence: bool = False
) -> Priced | None:
    """Prices on a mesh (dp, tp) of the choices that its axes allow; None if there are none, such as
    where dp does not divide the batch.

    The first axis splits only the batch; over the second, parameters are split as far as possible,
    unless the intra planner says otherwise.

    Args:
        splits_sequence: whether the second axis is a context axis: of what is computed for each
            micro-batch it splits nothing but the sequence.
    """
    # An axis of one device splits nothing, and is left out.
    axes = intra.stage_axes(shape)
    split_axes = [axis for axis in axes if axis[1] > 1] or [axes[0]]
    names, sizes = zip(*split_axes, strict=True)
    mesh = LogicalMesh(shape=sizes, axis_names=names, cluster=problem.cluster)
    # A planner may make several axes of those devices.
    reached = itertools.accumulate(sizes, operator.mul)
    data_axes = frozenset(k for k, devices in enumerate(reached) if 1 < devices <= shape[0])
    context_axes = frozenset(k for k, name in enumerate(names) if name == fixed.CONTEXT)
    choices = intra.stage_choices(problem, mesh.shape, data_axes)
    if choices is None:
        kinds = fixed.kinds_of(problem)
        choices = fixed.regular_choices(problem.nodes, kinds, mesh.shape, data_axes)
        if choices and splits_sequence:
            context_axes = frozenset({len(names) - 1})
            split = fixed.context_split(problem.graph, problem.nodes, kinds)
            choices = split.on_axis(len(names) - 1, problem.nodes, kinds, choices)
    if not choices or not all(map(len, choices)):
        return None
    use = MeshUse(
        mesh=mesh,
        data_axes=data_axes,
        context_axes=context_axes,
        gathers_once=intra.gathers_once,
    )
    return intra.as_allowed(price(problem, use, repeats=problem.num_micro_batches, choices=choices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """A layer's problem, solved on one mesh after the other; the planner keeps `notes` from mesh to
    mesh.
    """

    problem: Problem
    intra: AbstractIntra
    notes: dict[str, Any]


def _without_operators(problem: Problem) -> Problem:
    """The problem without the parts of its graph that prices do not depend on, so that sending it
    to the helper process is quick.
    """
    graph, nodes = problem.graph, problem.nodes
    ops = []
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            ops.append(
                structs.replace(
                    op,
                    inputs=tuple([i for i in op.inputs if isinstance(i, int)]),
                    params={},
                    scope="",
                    eqn=None,
                )
            )
    block = Block(inputs=(), items=(), outputs=())
    graph = replace(
        graph, values=(), ops=tuple(ops), body=block, constants={}, calling=None, split=None
    )
    return replace(
        problem,
        graph=graph,
        made={},
        nodes=replace(nodes, sites=(), output_ports=(), op_class=(), loop_ports={}),
    )


def _solve_layer(layer: _Layer, mesh: _Mesh) -> LayerSolution | None:
    """The best splits on a submesh as a mesh (dp, tp), without a memory limit; None if dp
    does not divide the batch.
    """
    submesh, shape = mesh
    problem = replace(layer.problem, cluster=subcluster(layer.problem.cluster, submesh))
    priced = price_option(problem, shape, layer.intra)
    if priced is None:
        return None
    # With one choice for each node, there is nothing to search.
    if all(len(node.choices) == 1 for node in priced.nodes):
        # Only the batch is split, which may still be impossible.
        only = Picked.first(priced)
        if not np.isfinite(evaluate(only).total_s):
            return None
        return LayerSolution(costs=phase_costs(only, problem.graph), picks=only.picks)
    space = Space.whole("layer", priced)
    # No memory limit: how many micro-batches a stage has in flight depends on its place in the
    # pipeline, which is not known yet.
    search = layer.intra.begin(problem, space, memory_limit_bytes=np.inf, notes=layer.notes)
    search.bound()
    if (best := search.picked) is None:
        return None
    return LayerSolution(costs=phase_costs(best, problem.graph), picks=best.picks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayers:
    """Layers of a step with their costs at a number of micro-batches.

    Attributes:
        chains: the chain of that number first, then those of other numbers, scaled from it.
        kinds: for each unit, the number of its kind.
        length: iterations of the loop over layers, each of them a unit; 0 if there is no loop.
        costs: the costs of each kind of layer, from which the chains are made.
    """

    sketch: LayeredStep
    costs: LayerCosts
    chains: Sequence[Chain]
    kinds: Sequence[int]
    length: int

    @property
    def least_compute_s(self) -> float:
        """Seconds of the layers for a whole batch on a single device, without communication,
        divided by the number of devices.
        """
        return self.costs.least_compute_s / self.costs.cluster.num_devices


def price_layers(
    task: Task,
    counts: Sequence[int],
    *,
    intra: AbstractIntra,
    layers: str | int | Layers | None,
    helper: HelperProcess,
) -> PricedLayers:
    """The layers of a step, priced at the first of some numbers of micro-batches, with chains for
    all of them. The fewest come first, as the largest micro-batch can be split over every submesh.

    Args:
        counts: numbers of micro-batches.
        intra: finds the splits of each layer.
        layers: where stages may be cut; see `PipeshardParallel`; or the layers themselves.
    """
    graph = task.graph
    length = (
        max((scan.length for scan in scans_over_layers(graph) if scan.length > 1), default=0)
        if layers is None
        else 0
    )
    sketched = split_scans(graph, _few_ranges(length)).graph if length else graph
    sketch = sketch_step(
        sketched,
        counts[0],
        layers=layers,
        semantics=task.semantics,
        on_missing_rule=task.on_missing_rule,
    )
    last = len(_few_ranges(length)) - 2
    copies = tuple(0 if k == 0 else last if k == length - 1 else 1 for k in range(length))
    solve = functools.partial(
        solve_layers, task=task, intra=intra, counts=counts, copies=copies, helper=helper
    )
    costs = solve(sketch)
    if sketch.layers.inner:
        whole = solve(replace(sketch, layers=whole_layers(sketch.layers)))
        costs = replace(costs, whole=whole)
    chains = [costs.chain(count, task.limit_bytes) for count in dict.fromkeys(counts)]
    return PricedLayers(sketch=sketch, costs=costs, chains=chains, kinds=costs.kinds, length=length)


def _few_ranges(length: int) -> tuple[int, ...]:
    """Bounds of ranges that single out the first, an inner and the last layer; all other layers
    equal the inner one.
    """
    return tuple(sorted({0, 1, 2, length - 1, length} & set(range(length + 1))))
