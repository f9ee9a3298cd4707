"""`write_plan`: the plan of a decision."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from ..cluster import Cluster
from ..core import InfeasibleError, format_bytes
from ..cost import Problem, encode_interior, predict
from ..graph import (
    OPERATORS,
    Graph,
    Phase,
    graph_fingerprint,
    interface_fingerprint,
    named_places,
)
from ..plans import (
    SINGLE,
    ArrayInterface,
    InferredRule,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    StagePlan,
    unranged,
)
from ..sharding import (
    Choice,
    Spec,
    StagedStep,
    dims_of,
    inferred_rules,
    project,
    without_partial,
)
from ._axis_uses import axis_uses
from ._base import Decision, PipelineParts, StageDecision, Task
from ._notes import (
    block_notes,
    changed_state_note,
    crowded_note,
    idle_note,
    memory_note,
    notes,
    own_loop_note,
)

_Dims = tuple[tuple[str, ...], ...]
Shardings = tuple[dict[str, _Dims], dict[str, _Dims]]


def write_plan(
    decision: Decision,
    task: Task,
    *,
    model: ModelReference,
    version: str,
    trace_s: float,
    search_s: float,
    layers: str | int | None = None,
) -> Plan:
    """The plan of a decision.

    Args:
        task: the task that was decided; the plan describes its step's inputs and outputs.
        layers: the method's setting for the layers that a step is cut into.
    """
    full, pipeline = task.graph, decision.pipeline
    used_hosts = task.cluster.num_hosts - decision.idle_hosts
    split = pipeline.layered.graph.split if pipeline else None
    predictions = pipeline.prediction.stages if pipeline else (None,)
    shardings = shardings_of(
        full,
        [
            (each.problem, each.picked.choices, each.priced.mesh.axis_names)
            for each in decision.stages
        ],
        pipeline.staged if pipeline else None,
    )
    uses = {k: axis_uses(stage) for k, stage in enumerate(decision.stages) if stage.like is None}
    prediction, casts_once = _prediction(decision, task.limit_bytes)
    _refuse_full_hosts(prediction, task.cluster)
    inputs, outputs = array_interfaces(full)
    return Plan(
        model=_with_flops(model, task),
        inputs=inputs,
        outputs=outputs,
        interface_fingerprint=interface_fingerprint(full),
        graph_fingerprint=graph_fingerprint(full),
        cluster=task.on_hosts(used_hosts).cluster.to_dict(),
        idle_hosts=decision.idle_hosts,
        method=decision.method,
        recompute=how.name if (how := full.calling.recompute) else "none",
        num_micro_batches=decision.num_micro_batches,
        micro_batch_semantics=task.semantics,
        combine={unranged(path): how for path, how in decision.combine.items()},
        schedule=pipeline.schedule.name if pipeline else SINGLE,
        num_submeshes=pipeline.schedule.num_submeshes if pipeline else 1,
        overlaps_transfers=pipeline.overlaps_transfers if pipeline else False,
        layers=_layers(layers, pipeline),
        scan_bounds=split.bounds if split is not None else (),
        stages=tuple(
            StagePlan(
                mesh_shape=stage.priced.mesh.shape,
                axis_names=stage.priced.mesh.axis_names,
                shardings=kept,
                outputs=returned,
                interior=_interior(stage) if stage.like is None else (),
                like=stage.like,
                data_axes=stage.priced.mesh.names_of(stage.priced.use.data_axes),
                context_axes=stage.priced.mesh.names_of(stage.priced.use.context_axes),
                first_device=stage.first_device,
                first_layer=stage.first_layer,
                layer_names=stage.layer_names,
                recompute=stage.recompute,
                casts_once=once,
                gathers_once=stage.priced.use.gathers_once,
                updates_early=pipeline is not None and k in pipeline.schedule.early_updates,
                folded=stage.folded,
                prediction=predicted,
                parallelism=uses[k if stage.like is None else stage.like],
            )
            for k, (stage, (kept, returned), predicted, once) in enumerate(
                zip(decision.stages, shardings, predictions, casts_once, strict=True)
            )
        ),
        inferred_rules=_inferred_rules(full, task.on_missing_rule),
        notes=(
            *own_loop_note(decision, task.own_turns),
            *idle_note(decision, task.cluster),
            *crowded_note(prediction.peak_memory_bytes, task.cluster),
            *memory_note(full),
            *changed_state_note(full),
            *decision.notes,
            *block_notes(decision),
            *notes(decision.stages),
        ),
        prediction=prediction,
        provenance=Provenance(
            planner=decision.planner,
            version=version,
            trace_s=trace_s,
            search_s=search_s,
            lower_bound_s=decision.lower_bound_s,
            gap=_gap(decision, prediction.step_time_s),
            bound_holds_for=decision.bound_holds_for,
            status=decision.status,
            candidates=tuple(dataclasses.asdict(each) for each in decision.candidates),
            profiles=getattr(task.cluster.measured, "source", ""),
        ),
    )


def _prediction(
    decision: Decision, memory_limit_bytes: float
) -> tuple[Prediction, tuple[bool, ...]]:
    """What is predicted, and for each stage whether it casts its parameters once a step."""
    # The limit may be an int, but a plan read from a file has a float.
    memory_limit_bytes = float(memory_limit_bytes)
    if decision.pipeline is not None:
        found = decision.pipeline.prediction
        step = msgspec.structs.replace(found.step, memory_limit_bytes=memory_limit_bytes)
        return step, found.casts_once
    (stage,) = decision.stages
    once = stage.picked.casts_fit(memory_limit_bytes)
    return predict(stage.picked, memory_limit_bytes, stage.problem.graph, once), (once,)


def _refuse_full_hosts(prediction: Prediction, cluster: Cluster) -> None:
    """Raise `InfeasibleError` if the host memory that a plan needs is more than a host has."""
    each_bytes = sum(prediction.host_memory_bytes.values())
    needed_bytes, limit = each_bytes * cluster.devices_per_host, cluster.host.memory_bytes
    if limit is not None and needed_bytes > limit:
        parts = ", ".join(
            f"{format_bytes(size)} {name}" for name, size in prediction.host_memory_bytes.items()
        )
        raise InfeasibleError(
            f"the host memory of {cluster.name} does not hold what the step keeps there: it needs"
            f" {format_bytes(needed_bytes)} on each host ({format_bytes(each_bytes)} for each of"
            f" {cluster.devices_per_host} devices: {parts}), and a host has"
            f" {format_bytes(limit)}.\n  Keep less there, use more hosts, or split what is kept"
            " over more devices (for example method zero3). If the hosts have more, say so in a"
            " cluster file: [host] memory."
        )


def _gap(decision: Decision, step_time_s: float) -> float | None:
    bound = decision.lower_bound_s
    if bound is None or decision.gap is not None:
        return decision.gap
    return max(0.0, step_time_s / bound - 1.0)


def _interior(stage: StageDecision) -> Any:
    return encode_interior(
        stage.priced.graph, stage.picked.choices, stage.priced.mesh.axis_names, stage.repeat
    )


def shardings_of(
    full: Graph,
    stages: Sequence[tuple[Problem, Sequence[Choice], Sequence[str]]],
    staged: StagedStep | None,
) -> list[Shardings]:
    """Splits of the step's inputs that each stage keeps or, as with the batch, only reads, and of
    the step's outputs that it returns.

    Args:
        full: the step on its whole batch.
        stages: the problem of each, its choices, and the names of its mesh axes.
        staged: the step cut into them; None for one program.
    """
    found = [_shardings(*stage, staged, k) for k, stage in enumerate(stages)]
    if staged is not None:
        _add_anywhere(full, found)
    return found


def _shardings(
    problem: Problem,
    choices: Sequence[Choice],
    names: Sequence[str],
    staged: StagedStep | None,
    k: int,
) -> Shardings:
    # A stage that is like an earlier one shares its decision; its own inputs and outputs have the
    # same positions.
    graph, nodes = staged.extracts[k].graph if staged else problem.graph, problem.nodes
    whole: Spec = (-1,) * len(names)

    def dims(port: Any, operand: Any) -> _Dims:
        value = graph.values[operand] if isinstance(operand, int) else operand
        spec = (
            without_partial(project(choices[port.node], port.projection))
            if port.node >= 0
            else whole
        )
        return dims_of(spec, names, len(value.shape))

    kept_or_read = {i.path for i in graph.inputs} if staged is None else _kept(staged, k)
    inputs = {
        item.path: dims(port, item.value)
        for item, port in zip(graph.inputs, nodes.input_ports, strict=True)
        if item.path in kept_or_read
    }
    returned = {o.path for o in (staged.graph if staged else graph).outputs}
    outputs = {
        output.path: dims(port, output.value)
        for output, port in zip(graph.outputs, nodes.output_ports, strict=True)
        if output.path in returned
    }
    # A new parameter is split as the one that it replaces, so that its buffer is reused.
    for item in graph.inputs:
        if item.output is not None and item.path in inputs:
            outputs[graph.outputs[item.output].path] = inputs[item.path]
    return inputs, outputs


def _kept(staged: StagedStep, k: int) -> set[str]:
    """Paths of a stage's inputs that are inputs of the step and that no other stage keeps."""
    extract, home = staged.extracts[k], staged.staging.home
    step_inputs = {item.path for item in staged.graph.inputs}
    homed = {
        item.path for item in extract.graph.inputs if home.get(extract.values[item.value], k) == k
    }
    return homed & step_inputs


def _add_anywhere(full: Graph, stages: list[Shardings]) -> None:
    """Assign to the first stage the inputs that no stage reads, such as unused scalars, and the
    outputs that none computes, such as returned arguments.
    """
    placed = {unranged(path) for inputs, _ in stages for path in inputs}
    # Where a scan is cut, the stages' paths name ranges of layers; the step's own paths do not.
    computed = {unranged(path) for _, outputs in stages for path in outputs}
    inputs, outputs = stages[0]
    for item in full.inputs:
        if item.path not in placed:
            inputs[item.path] = ((),) * len(full.values[item.value].shape)
    for output in full.outputs:
        if output.path not in computed:
            value = full.values[output.value] if isinstance(output.value, int) else output.value
            source = next((i.path for i in full.inputs if i.value == output.value), None)
            outputs[output.path] = inputs.get(source or "", ((),) * len(value.shape))


def _inferred_rules(full: Graph, on_missing_rule: str) -> tuple[InferredRule, ...]:
    """Rules inferred for primitives without a declared one, if the task lets them be inferred."""
    rules = inferred_rules(full) if on_missing_rule == "infer" else ()
    return tuple(InferredRule(primitive=r.primitive, rule=r.text, count=r.count) for r in rules)


def _layers(layers: str | int | None, pipeline: PipelineParts | None) -> str:
    """How a plan says into which layers its step is cut: operators by their places, as the lightest
    of them are merged, which are not the same ones for micro-batches of every size.
    """
    if layers is None or not pipeline:
        return ""
    return named_places(pipeline.layered.layers) if layers == OPERATORS else str(layers)


def _with_flops(model: ModelReference, task: Task) -> ModelReference:
    """The reference with the operations of the step's products, where nobody has counted them.

    A backward pass takes at most twice as many as its forward pass; what is more is recomputed.
    """
    if model.flops_per_step:
        return model
    by_phase: defaultdict[Phase, float] = defaultdict(float)
    by_dtype: defaultdict[str, float] = defaultdict(float)
    for of_node in task.problem(1).work:
        for work in of_node:
            by_phase[work.phase] += work.flops
            by_dtype[work.dtype] += work.flops
    forward, backward = by_phase[Phase.FORWARD], by_phase[Phase.BACKWARD]
    total = forward + min(backward, 2 * forward) + by_phase[Phase.UPDATE]
    if not total:
        return model
    most = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    return msgspec.structs.replace(model, flops_per_step=total, flops_dtype=most)


def array_interfaces(
    graph: Graph,
) -> tuple[tuple[ArrayInterface, ...], tuple[ArrayInterface, ...]]:
    """The inputs and the outputs of a step, as its plan describes them."""

    def of(path: str, operand: Any, role: str) -> ArrayInterface:
        value = graph.values[operand] if isinstance(operand, int) else operand
        return ArrayInterface(
            path=path,
            shape=tuple(value.shape),
            dtype=value.dtype,
            role=role,
            memory=value.memory.value,
        )

    return (
        tuple(of(i.path, i.value, i.role.value) for i in graph.inputs),
        tuple(of(o.path, o.value, "") for o in graph.outputs),
    )
