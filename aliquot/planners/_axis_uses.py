"""What each mesh axis of a stage splits of its work: the facts behind "data parallel", "ZeRO-3",
"tensor parallel" and the other names of a plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ..cost import waits_over
from ..graph import Phase, Role
from ..plans import AxisUse, names_experts
from ..sharding import PARTIAL, Edge, NodeId, Projection, project
from ._base import StageDecision


def axis_uses(stage: StageDecision) -> dict[str, AxisUse]:
    """What each axis of more than one device splits of a stage's work, by its name."""
    mesh, reads = stage.priced.mesh, _parameter_reads(stage)
    # Under `vmap` over models the batch dim of products is one of their parameters' as well.
    models = any(
        edge.target_projection[factor] >= 0
        for edge in reads
        for factor in stage.priced.graph.batch_factors[edge.target]
    )
    return {
        name: _axis_use(stage, axis, reads, models=models)
        for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True))
        if size > 1
    }


def _parameter_reads(stage: StageDecision) -> dict[Edge, bool]:
    """The edges by which products of the forward pass read parameters, or what is made of these
    alone, and whether these are parameters of experts.
    """
    nodes = stage.priced.graph
    parameters, experts = set[tuple[NodeId, Projection, int]](), set[NodeId]()
    for item, port in zip(stage.problem.graph.inputs, nodes.input_ports, strict=True):
        if item.role is Role.PARAMETER:
            num_bytes = stage.problem.graph.values[item.value].num_bytes
            parameters.add((port.node, port.projection, num_bytes))
            if names_experts(item.path):
                experts.add(port.node)
    made = defaultdict[NodeId, list[NodeId]](list)
    for edge in nodes.edges:
        if edge.parameter and nodes.nodes[edge.target].kind != "product":
            made[edge.source].append(edge.target)
            # A loop over steps carries parameters in a node of its own.
            parameters.add((edge.target, edge.target_projection, edge.num_bytes))
    pending = list(experts)
    while pending:
        new = set(made[pending.pop()]) - experts
        experts |= new
        pending += new
    reads = {}
    for edge in nodes.edges:
        reader = nodes.nodes[edge.target]
        is_parameter = edge.parameter or (
            (edge.source, edge.source_projection, edge.num_bytes) in parameters
        )
        is_read = edge.kind == "operand" and reader.kind == "product"
        if is_read and is_parameter and reader.phase is Phase.FORWARD:
            reads[edge] = edge.source in experts
    return reads


def _axis_use(
    stage: StageDecision, axis: int, parameter_reads: dict[Edge, bool], *, models: bool
) -> AxisUse:
    nodes, choices = stage.priced.graph, stage.choices
    of_batch = _of_batch(stage, axis, models)
    reads, expert_reads, gradients = Counter[str](), Counter[str](), Counter[str]()
    for edge, is_expert in parameter_reads.items():
        factor = choices[edge.target][axis]
        what = "nothing"
        if factor >= 0:
            is_of_batch = factor in nodes.batch_factors[edge.target]
            # The batch dim of each of several models is the second one.
            is_of_batch |= models and "positions" not in of_batch
            if edge.target_projection[factor] >= 0:
                what = "models" if factor in nodes.batch_factors[edge.target] else "pieces"
            else:
                what = "examples" if is_of_batch else "positions"
        (expert_reads if is_expert else reads)[what] += edge.num_bytes * edge.count
    dims = _dims_of_parameters(stage)
    for edge in nodes.edges:
        # Of gradients of examples one by one, an axis may split a dim that no parameter has.
        factor = choices[edge.target][axis]
        of_parameter = factor < 0 or factor in dims.get(edge.target, {factor})
        if edge.gradient and edge.phase is not Phase.UPDATE and of_parameter:
            gradients[_kept(stage, edge, axis)] += edge.num_bytes * edge.count
    return AxisUse(
        reads=dict(sorted(reads.items())),
        expert_reads=dict(sorted(expert_reads.items())),
        gradients=dict(sorted(gradients.items())),
        batch=of_batch,
        exchanges=_exchanges(stage, axis),
    )


def _of_batch(stage: StageDecision, axis: int, models: bool) -> tuple[str, ...]:
    """What an axis splits of the batch's arrays."""
    nodes, found = stage.priced.graph, set[str]()
    for item, port in zip(stage.problem.graph.inputs, nodes.input_ports, strict=True):
        if item.role is not Role.BATCH or port.node < 0:
            continue
        factor = stage.choices[port.node][axis]
        dim = port.projection[factor] if factor >= 0 else -1
        if dim >= 0:
            is_example = factor in nodes.batch_factors[port.node] or (models and dim == 1)
            found.add("examples" if is_example else "positions")
    return tuple(sorted(found))


def _dims_of_parameters(stage: StageDecision) -> dict[NodeId, set[int]]:
    """For each node of new parameters, the factors that are dims of these."""
    nodes, found = stage.priced.graph, dict[NodeId, set[int]]()
    for item in stage.problem.graph.inputs:
        if item.role is Role.PARAMETER and item.output is not None:
            port = nodes.output_ports[item.output]
            factors = {f for f, dim in enumerate(port.projection) if dim >= 0}
            found.setdefault(port.node, set()).update(factors)
    return found


def _kept(stage: StageDecision, edge: Edge, axis: int) -> str:
    """How an axis splits a gradient; see `AxisUse.gradients`."""
    priced, choices = stage.priced, stage.choices
    made = project(choices[edge.source], edge.source_projection)[axis]
    if project(choices[edge.target], edge.target_projection)[axis] < 0:
        return "whole"
    waiting = waits_over(edge, priced.data_axes, priced.context_axes)
    waits = priced.repeats > 1 and axis in waiting and made <= PARTIAL
    return "split at last" if waits else "split"


def _exchanges(stage: StageDecision, axis: int) -> bool:
    """Whether devices along an axis exchange activations: arrays with the batch dim or, where a
    batch of one row has none, any arrays but parameters, gradients and scalars.
    """
    nodes, choices = stage.priced.graph, stage.choices
    any_batch = any(nodes.batch_factors)
    for edge in nodes.edges:
        if edge.parameter or edge.gradient or edge.phase is Phase.UPDATE:
            continue
        made = project(choices[edge.source], edge.source_projection)[axis]
        read = project(choices[edge.target], edge.target_projection)[axis]
        has_batch = any(edge.source_projection[f] >= 0 for f in nodes.batch_factors[edge.source])
        # A whole array may be cut anywhere without asking anybody.
        if made not in (read, -1) and (has_batch or not (any_batch or edge.rank == 0)):
            return True
    for node, choice in zip(nodes.nodes, choices, strict=True):
        for collective in node.collectives:
            if collective.gradient or collective.phase is Phase.UPDATE:
                continue
            has_batch = any(collective.split_by[f] for f in nodes.batch_factors[node.index])
            is_array = any(collective.split_by) and not any_batch
            if choice[axis] in collective.factors and (has_batch or is_array):
                return True
    return False
