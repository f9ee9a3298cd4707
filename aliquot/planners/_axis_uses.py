"""What each mesh axis of a stage splits of its work: the facts behind "data parallel", "ZeRO-3",
"tensor parallel" and the other names of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import Phase, Role
from ..plans import AxisUse, names_experts
from ..sharding import (
    PARTIAL,
    REPLICATED,
    Choice,
    Edge,
    NodeGraph,
    NodeId,
    Projection,
    project,
)
from ._base import StageDecision


def axis_uses(stage: StageDecision) -> dict[str, AxisUse]:
    """What each axis of more than one device splits of a stage's work, by its name."""
    mesh, work = stage.priced.mesh, _Work.of(stage)
    found = {}
    for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if size > 1:
            found[name] = AxisUse(
                **work.reads(axis),
                gradients=work.gradients(axis),
                batch=work.of_batch(axis),
                exchanges=work.exchanges(axis),
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A stage's work under its choices.

    Attributes:
        parameter_reads: the edges by which products of the forward pass read parameters, or what is
            made of these alone, and whether these are parameters of experts.
        models: whether several models train side by side, as under `vmap`: the batch dim of
            products is one of their parameters' as well.
        dims: for each node of new parameters, the factors that are dims of these.
    """

    stage: StageDecision
    nodes: NodeGraph
    choices: Sequence[Choice]
    parameter_reads: dict[Edge, bool]
    models: bool
    dims: dict[NodeId, set[int]]

    @staticmethod
    def of(stage: StageDecision) -> _Work:
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
        found = {}
        for edge in nodes.edges:
            reader = nodes.nodes[edge.target]
            is_parameter = edge.parameter or (
                (edge.source, edge.source_projection, edge.num_bytes) in parameters
            )
            is_read = edge.kind == "operand" and reader.kind == "product"
            if is_read and is_parameter and reader.phase is Phase.FORWARD:
                found[edge] = edge.source in experts
        dims = defaultdict[NodeId, set[int]](set)
        for item in stage.problem.graph.inputs:
            if item.role is Role.PARAMETER and item.output is not None:
                port = nodes.output_ports[item.output]
                dims[port.node].update(f for f, dim in enumerate(port.projection) if dim >= 0)
        return _Work(
            stage=stage,
            nodes=nodes,
            choices=stage.picked.choices,
            parameter_reads=found,
            models=any(
                edge.target_projection[factor] >= 0
                for edge in found
                for factor in nodes.batch_factors[edge.target]
            ),
            dims=dims,
        )

    def reads(self, axis: int) -> dict[str, dict[str, float]]:
        """The fields `reads` and `expert_reads` of an axis."""
        of_batch = self.of_batch(axis)
        # The batch dim of each of several models is the second one.
        more_examples = self.models and "positions" not in of_batch
        # Examples that the step draws itself have no dim of the batch; nor has a batch of one row.
        makes_own = of_batch == ("examples",) or not self.takes_batch
        amounts = {name: defaultdict[str, float](float) for name in ("reads", "expert_reads")}
        for edge, is_expert in self.parameter_reads.items():
            factor = self.choices[edge.target][axis]
            is_of_batch = factor in self.nodes.batch_factors[edge.target]
            is_drawn = makes_own and not self.nodes.batch_factors[edge.target]
            if factor < 0:
                what = "nothing"
            elif edge.target_projection[factor] >= 0:
                what = "models" if is_of_batch else "pieces"
            else:
                is_example = is_of_batch or more_examples or is_drawn
                what = "examples" if is_example else "positions"
            name = "expert_reads" if is_expert else "reads"
            amounts[name][what] += edge.num_bytes * edge.count
        return {name: dict(sorted(found.items())) for name, found in amounts.items()}

    @property
    def takes_batch(self) -> bool:
        """Whether any input of the step is of the batch."""
        return any(item.role is Role.BATCH for item in self.stage.problem.graph.inputs)

    def gradients(self, axis: int) -> dict[str, float]:
        """The field `gradients` of an axis."""
        priced, amounts = self.stage.priced, defaultdict[str, float](float)
        for edge in self.nodes.edges:
            factor = self.choices[edge.target][axis]
            # Of gradients of examples one by one, an axis may split a dim that no parameter has.
            is_of_parameter = factor < 0 or factor in self.dims.get(edge.target, {factor})
            if not edge.gradient or edge.phase is Phase.UPDATE or not is_of_parameter:
                continue
            made, read = self.splits(edge, axis)
            waiting = priced.use.waits_over(edge)
            waits = priced.repeats > 1 and axis in waiting and made <= PARTIAL
            how = "whole" if read < 0 else "split at last" if waits else "split"
            amounts[how] += edge.num_bytes * edge.count
        # Gradients of examples one by one are summed in the update, whole on every device.
        for node, choice in zip(self.nodes.nodes, self.choices, strict=True):
            for summed in node.collectives:
                is_over_examples = choice[axis] in self.nodes.batch_factors[node.index]
                if (
                    summed.phase is Phase.UPDATE
                    and is_over_examples
                    and choice[axis] in summed.factors
                ):
                    amounts["whole"] += summed.num_bytes * summed.count
        return dict(sorted(amounts.items()))

    def splits(self, edge: Edge, axis: int) -> tuple[int, int]:
        """The dims that an axis splits of an edge's array, as it is made and as it is read."""
        return (
            project(self.choices[edge.source], edge.source_projection)[axis],
            project(self.choices[edge.target], edge.target_projection)[axis],
        )

    def of_batch(self, axis: int) -> tuple[str, ...]:
        """The field `batch` of an axis."""
        found = set[str]()
        inputs = self.stage.problem.graph.inputs
        for item, port in zip(inputs, self.nodes.input_ports, strict=True):
            if item.role is not Role.BATCH or port.node < 0:
                continue
            factor = self.choices[port.node][axis]
            dim = port.projection[factor] if factor >= 0 else -1
            is_of_batch = factor in self.nodes.batch_factors[port.node]
            if dim >= 0:
                is_example = is_of_batch or (self.models and dim == 1)
                found.add("examples" if is_example else "positions")
        return tuple(sorted(found))

    def exchanges(self, axis: int) -> bool:
        """Whether devices along an axis exchange activations: arrays with the batch dim, results of
        products that read parameters or, where a batch of one row has none, any arrays but
        parameters, gradients and scalars.
        """
        batch = self.nodes.batch_factors
        any_batch = any(batch)
        # What a generator makes of a key alone has no batch dim, and is an activation all the same.
        readers = {edge.target for edge in self.parameter_reads}
        for edge in self.nodes.edges:
            if edge.parameter or edge.gradient or edge.phase is Phase.UPDATE:
                continue
            made, read = self.splits(edge, axis)
            has_batch = any(edge.source_projection[f] >= 0 for f in batch[edge.source])
            # A whole array may be cut anywhere without asking anybody.
            is_array = edge.rank > 0 and (not any_batch or edge.source in readers)
            if made not in (read, REPLICATED) and (has_batch or is_array):
                return True
        for node, choice in zip(self.nodes.nodes, self.choices, strict=True):
            for collective in node.collectives:
                if collective.gradient or collective.phase is Phase.UPDATE:
                    continue
                has_batch = any(collective.split_by[f] for f in batch[node.index])
                is_array = any(collective.split_by) and not any_batch
                if choice[axis] in collective.factors and (has_batch or is_array):
                    return True
        return False
