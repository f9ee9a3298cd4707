"""What part of a step's cost is whose: forward, backward and update, and what a micro-batch leaves between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..graph import Graph, Phase
from ..sharding import NodeGraph
from ._estimate import peak_memory
from ._evaluate import evaluate
from ._memory import memory_model
from ._priced import Ints, Priced, price

_STATE = frozenset({"parameters", "optimizer state", "gradients", "other state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Costs of some layers on one mesh, per device.

    Attributes:
        forward_s, backward_s: for one micro-batch.
        once_s: once a step: gradient synchronisation and the update.
        compute_s, communication_s, gradient_s: the same seconds by kind, for a whole step.
        state_bytes: parameters, optimizer state, gradients.
        in_flight_bytes: what a micro-batch keeps from its forward to its backward pass, what comes from outside included.
        working_bytes: what else is needed at the worst moment.
        memory_bytes: the peak with one micro-batch in flight, by part.
    """

    forward_s: float
    backward_s: float
    once_s: float
    compute_s: float
    communication_s: float
    gradient_s: float
    state_bytes: float
    in_flight_bytes: float
    working_bytes: float
    memory_bytes: dict[str, float]


def phase_costs(priced: Priced, picks: Ints, graph: Graph) -> PhaseCosts:
    """Costs by phase of a choice for every node of a step, or of some of its layers.

    Args:
        priced: with `repeats` micro-batches.
        picks: the choices.
        graph: what the node graph is of.
    """
    chosen = [table.choices[[pick]] for table, pick in zip(priced.nodes, picks.tolist(), strict=True)]
    zeros = np.zeros(len(chosen), np.int64)
    seconds: dict[Phase, float] = {}
    compute = communication = gradient = 0.0
    for phases in ((Phase.PROLOGUE, Phase.FORWARD), (Phase.BACKWARD,), (Phase.UPDATE,)):
        part = price(
            _only(priced.graph, phases),
            priced.mesh,
            repeats=priced.repeats,
            data_axes=priced.data_axes,
            choices=chosen,
        )
        time = evaluate(part, zeros)
        seconds[phases[-1]] = time.compute_s + time.communication_s
        compute += time.compute_s
        communication += time.communication_s
        gradient += time.gradient_s
    model = memory_model(priced)
    peak, _, parts = peak_memory(model, priced, picks)
    state = sum(v for k, v in parts.items() if k in _STATE)
    kept = _in_flight_bytes(priced, picks, graph)
    return PhaseCosts(
        forward_s=seconds[Phase.FORWARD] / priced.repeats,
        backward_s=seconds[Phase.BACKWARD] / priced.repeats,
        once_s=seconds[Phase.UPDATE] + gradient,
        compute_s=compute,
        communication_s=communication,
        gradient_s=gradient,
        state_bytes=state,
        in_flight_bytes=kept,
        working_bytes=max(0.0, peak - state - kept),
        memory_bytes=parts,
    )


def _only(graph: NodeGraph, phases: tuple[Phase, ...]) -> NodeGraph:
    """The same nodes with the work, collectives and conversions of some phases alone."""
    nodes = tuple(
        replace(
            node,
            work=tuple(w for w in node.work if w.phase in phases),
            collectives=tuple(c for c in node.collectives if c.phase in phases),
        )
        for node in graph.nodes
    )
    edges = tuple(edge if edge.phase in phases else replace(edge, count=0.0) for edge in graph.edges)
    return replace(graph, nodes=nodes, edges=edges)


def _in_flight_bytes(priced: Priced, picks: Ints, graph: Graph) -> float:
    """Bytes on a device of what is alive between the last forward and the first backward operator, without state."""
    backward = [op.index for op in graph.ops if op.phase is Phase.BACKWARD]
    if not backward:
        return 0.0
    moment = backward[0]
    model = memory_model(priced)
    found = 0.0
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        if r.category in _STATE or r.category == "batch":
            continue
        alive = int(np.count_nonzero((r.births < moment) & (r.deaths >= moment)))
        found += alive * float(local[picks[r.node]] if r.node >= 0 else local[0])
    return found
