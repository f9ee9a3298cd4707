"""Decision -> Plan."""

from __future__ import annotations

from typing import Any

from ..cost import Problem, encode_interior, predict
from ..graph import Graph, Role, graph_fingerprint, interface_fingerprint
from ..plans import ArrayInterface, InferredRule, ModelReference, Plan, Provenance, StagePlan
from ..sharding import Spec, dims_of, inferred_rules, project, without_partial
from ._base import Decision
from ._notes import notes


def write_plan(
    decision: Decision,
    problem: Problem,
    full: Graph,
    *,
    model: ModelReference,
    version: str,
    trace_s: float,
    search_s: float,
    combine: dict[str, str] | None = None,
    semantics: str = "exact",
) -> Plan:
    """The plan of a decision.

    Args:
        full: the step at its full batch, whose interface the plan describes; `problem` may hold one micro-batch.
        combine: how the outputs of micro-batches combine.
    """
    priced, graph = decision.priced, problem.graph
    names = priced.mesh.axis_names
    choices = [
        tuple(int(f) for f in table.choices[pick])
        for table, pick in zip(priced.nodes, decision.picks.tolist(), strict=True)
    ]
    whole: Spec = (-1,) * len(names)

    def dims(port: Any, rank: int) -> tuple[tuple[str, ...], ...]:
        spec = without_partial(project(choices[port.node], port.projection)) if port.node >= 0 else whole
        return dims_of(spec, names, rank)

    def rank(operand: Any) -> int:
        return len(graph.values[operand].shape) if isinstance(operand, int) else len(operand.shape)

    shardings = {i.path: dims(p, rank(i.value)) for i, p in zip(graph.inputs, priced.graph.input_ports, strict=True)}
    outputs = {o.path: dims(p, rank(o.value)) for o, p in zip(graph.outputs, priced.graph.output_ports, strict=True)}
    for item in graph.inputs:
        if item.output is not None:
            outputs[graph.outputs[item.output].path] = shardings[item.path]
    bound = decision.lower_bound_s
    return Plan(
        model=model,
        inputs=tuple(_interface(full, i.path, i.value, i.role) for i in full.inputs),
        outputs=tuple(_interface(full, o.path, o.value, None) for o in full.outputs),
        interface_fingerprint=interface_fingerprint(full),
        graph_fingerprint=graph_fingerprint(full),
        cluster=problem.cluster.to_dict(),
        method=decision.method,
        num_micro_batches=problem.num_micro_batches,
        micro_batch_semantics=semantics,
        combine=combine or {},
        stages=(
            StagePlan(
                mesh_shape=priced.mesh.shape,
                axis_names=names,
                shardings=shardings,
                outputs=outputs,
                interior=encode_interior(priced.graph, choices, names),
                data_axes=tuple(names[a] for a in sorted(priced.data_axes)),
            ),
        ),
        inferred_rules=written_rules(full, problem.nodes.on_missing_rule),
        notes=notes(problem, decision),
        prediction=predict(priced, decision.picks, problem.memory_limit_bytes, graph),
        provenance=Provenance(
            planner=decision.planner,
            version=version,
            trace_s=trace_s,
            search_s=search_s,
            lower_bound_s=bound,
            gap=None if bound is None else max(0.0, decision.step_time_s / bound - 1.0),
            bound_holds_for=decision.bound_holds_for,
            status=decision.status,
            candidates=tuple(
                {
                    "name": c.name,
                    "mesh": c.mesh,
                    "lower_bound_s": c.lower_bound_s,
                    "step_time_s": c.step_time_s,
                    "outcome": c.outcome,
                }
                for c in decision.candidates
            ),
        ),
    )


def written_rules(full: Graph, on_missing_rule: str) -> tuple[InferredRule, ...]:
    """What was inferred about primitives without a declared rule, if that was asked for."""
    found = inferred_rules(full) if on_missing_rule == "infer" else ()
    return tuple(InferredRule(primitive=r.primitive, rule=r.text, count=r.count) for r in found)


def _interface(graph: Graph, path: str, operand: Any, role: Role | None) -> ArrayInterface:
    value = graph.values[operand] if isinstance(operand, int) else operand
    return ArrayInterface(path=path, shape=tuple(value.shape), dtype=value.dtype, role=role.value if role else "")
