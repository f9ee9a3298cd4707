"""PipelineDecision -> Plan."""

from __future__ import annotations

from typing import Any

from ..cluster import Cluster
from ..cost import collective_uses, encode_interior
from ..graph import Graph, Role, graph_fingerprint, interface_fingerprint
from ..plans import (
    ArrayInterface,
    CollectiveUse,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    StagePlan,
    StagePrediction,
    unranged,
)
from ..sharding import Spec, dims_of, project, without_partial
from ._notes import work_notes
from ._pipeshard import PipelineDecision, StageDecision
from ._write import written_rules

_Dims = tuple[tuple[str, ...], ...]


def write_pipeline(
    pipeline: PipelineDecision,
    full: Graph,
    cluster: Cluster,
    *,
    model: ModelReference,
    version: str,
    trace_s: float,
    search_s: float,
    memory_limit_bytes: float,
    semantics: str,
    layers: str | int | None,
) -> Plan:
    """The plan of a pipeline; `full` is the step on its whole batch."""
    stages = [_stage(pipeline, k) for k in range(len(pipeline.stages))]
    placed = {unranged(path) for stage in stages for path in stage[0]}
    made = {unranged(path) for stage in stages for path in stage[1]}
    # Scalars that nothing computes with, and results that are arguments: anywhere.
    for item in full.inputs:
        if item.path not in placed:
            stages[0][0][item.path] = ((),) * len(full.values[item.value].shape)
    for output in full.outputs:
        if output.path not in made:
            value = full.values[output.value] if isinstance(output.value, int) else output.value
            source = next((i.path for i in full.inputs if i.value == output.value), None)
            stages[0][1][output.path] = stages[0][0].get(source or "", ((),) * len(value.shape))
    plan, split = pipeline.chain_plan, pipeline.layered.graph.split
    return Plan(
        model=model,
        inputs=tuple(_interface(full, i.path, i.value, i.role) for i in full.inputs),
        outputs=tuple(_interface(full, o.path, o.value, None) for o in full.outputs),
        interface_fingerprint=interface_fingerprint(full),
        graph_fingerprint=graph_fingerprint(full),
        cluster=cluster.to_dict(),
        method=pipeline.method,
        num_micro_batches=plan.num_micro_batches,
        micro_batch_semantics=semantics,
        combine={unranged(path): how for path, how in pipeline.layered.combine.items()},
        schedule=plan.schedule,
        num_submeshes=plan.num_submeshes,
        layers="" if layers is None else str(layers),
        scan_bounds=split.bounds if split is not None else (),
        stages=tuple(
            StagePlan(
                mesh_shape=stage.decision.priced.mesh.shape,
                axis_names=stage.decision.priced.mesh.axis_names,
                shardings=shardings,
                outputs=outputs,
                interior=_interior(stage) if stage.like is None else (),
                like=stage.like,
                data_axes=tuple(
                    stage.decision.priced.mesh.axis_names[a] for a in sorted(stage.decision.priced.data_axes)
                ),
                first_device=stage.first_device,
                first_layer=stage.first_layer,
                layer_names=pipeline.chain.unit_names[stage.first_layer : stage.last_layer]
                if split is None
                else tuple(f"layers[{k}]" for k in range(stage.first_layer, stage.last_layer)),
                recompute=stage.option.recompute == "stage",
                prediction=_stage_prediction(pipeline, k),
            )
            for k, (stage, (shardings, outputs)) in enumerate(zip(pipeline.stages, stages, strict=True))
        ),
        inferred_rules=written_rules(full, pipeline.stages[0].decision.priced.graph.on_missing_rule),
        notes=work_notes([(s.decision.priced, s.decision.picks, s.problem.graph) for s in pipeline.stages]),
        prediction=_prediction(pipeline, memory_limit_bytes),
        provenance=Provenance(
            planner=pipeline.planner,
            version=version,
            trace_s=trace_s,
            search_s=search_s,
            lower_bound_s=plan.lower_bound_s,
            gap=plan.gap,
            bound_holds_for=plan.bound_holds_for,
            status=plan.status,
        ),
    )


def _choices(stage: StageDecision) -> list[tuple[int, ...]]:
    decision = stage.decision
    return [
        tuple(int(f) for f in table.choices[pick])
        for table, pick in zip(decision.priced.nodes, decision.picks.tolist(), strict=True)
    ]


def _interior(stage: StageDecision) -> Any:
    priced = stage.decision.priced
    return encode_interior(priced.graph, _choices(stage), priced.mesh.axis_names)


def _stage(pipeline: PipelineDecision, k: int) -> tuple[dict[str, _Dims], dict[str, _Dims]]:
    """Splits of what a stage keeps or reads of the batch, and of what it returns."""
    stage, extract = pipeline.stages[k], pipeline.staged.extracts[k]
    graph, priced = extract.graph, stage.decision.priced
    names, choices = priced.mesh.axis_names, _choices(stage)
    whole: Spec = (-1,) * len(names)
    home = pipeline.staged.staging.home
    named = {i.path for i in pipeline.staged.graph.inputs}
    returned = {o.path for o in pipeline.staged.graph.outputs}

    def dims(port: Any, rank: int) -> _Dims:
        spec = without_partial(project(choices[port.node], port.projection)) if port.node >= 0 else whole
        return dims_of(spec, names, rank)

    shardings = {
        item.path: dims(port, len(graph.values[item.value].shape))
        for item, port in zip(graph.inputs, stage.problem.nodes.input_ports, strict=True)
        if item.path in named and home.get(extract.values[item.value], k) == k
    }
    outputs = {}
    for output, port in zip(graph.outputs, stage.problem.nodes.output_ports, strict=True):
        if output.path in returned:
            shape = graph.values[output.value].shape if isinstance(output.value, int) else output.value.shape
            outputs[output.path] = dims(port, len(shape))
    for item in graph.inputs:
        if item.output is not None and item.path in shardings:
            outputs[graph.outputs[item.output].path] = shardings[item.path]
    return shardings, outputs


def _stage_prediction(pipeline: PipelineDecision, k: int) -> StagePrediction:
    stage, times = pipeline.stages[k], pipeline.times
    submesh = pipeline.schedule.submesh_of(k)
    costs = pipeline.stage_costs
    in_flight = int(times.in_flight[k])
    memory = {
        "state": float(costs.state_bytes[k]),
        "activations in flight": in_flight * float(costs.in_flight_bytes[k]),
        "working memory": float(costs.working_bytes[k]),
    }
    return StagePrediction(
        forward_s=float(costs.forward_s[k]),
        backward_s=float(costs.backward_input_s[k] + costs.backward_weight_s[k]),
        weight_gradient_s=float(costs.backward_weight_s[k]),
        update_s=float(costs.update_s[k]),
        transfer_s=float(pipeline.transfer_s[k]) if k < len(pipeline.transfer_s) else 0.0,
        bubble=float(times.bubble_share[submesh]),
        in_flight=in_flight,
        peak_memory_bytes=sum(memory.values()),
        memory_bytes=memory,
        collectives=collective_uses(stage.decision.priced, stage.decision.picks),
    )


def _prediction(pipeline: PipelineDecision, limit: float) -> Prediction:
    """The figures of the busiest stage, and the memory of the fullest."""
    times, costs = pipeline.times, pipeline.stage_costs
    submesh = int(times.busy_s.argmax())
    mine = [k for k in range(len(pipeline.stages)) if pipeline.schedule.submesh_of(k) == submesh]
    count = pipeline.chain_plan.num_micro_batches
    gradient = sum(pipeline.stages[k].costs.gradient_s for k in mine)
    communication = sum(pipeline.stages[k].costs.communication_s for k in mine)
    passes = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
    busy = sum(count * float(passes[k]) + float(costs.update_s[k]) for k in mine)
    fullest = max(range(len(pipeline.stages)), key=lambda k: _stage_prediction(pipeline, k).peak_memory_bytes)
    memory = dict.fromkeys(_stage_prediction(pipeline, fullest).memory_bytes, 0.0)
    for k in range(len(pipeline.stages)):
        if pipeline.schedule.submesh_of(k) == pipeline.schedule.submesh_of(fullest):
            for part, num_bytes in _stage_prediction(pipeline, k).memory_bytes.items():
                memory[part] += num_bytes
    collectives: list[CollectiveUse] = []
    for k in range(len(pipeline.stages)):
        collectives += _stage_prediction(pipeline, k).collectives
    return Prediction(
        step_time_s=times.step_time_s,
        compute_s=busy - gradient - communication,
        communication_s=communication,
        gradient_s=gradient,
        hidden_s=0.0,
        bubble_s=times.step_time_s - busy,
        peak_memory_bytes=sum(memory.values()),
        memory_limit_bytes=limit,
        memory_bytes=memory,
        peak_moment=f"stage {fullest}, with {int(times.in_flight[fullest])} micro-batches in flight",
        collectives=tuple(sorted(collectives, key=lambda c: -c.seconds)),
    )


def _interface(graph: Graph, path: str, operand: Any, role: Role | None) -> ArrayInterface:
    value = graph.values[operand] if isinstance(operand, int) else operand
    return ArrayInterface(path=path, shape=tuple(value.shape), dtype=value.dtype, role=role.value if role else "")
