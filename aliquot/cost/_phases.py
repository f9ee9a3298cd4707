"""Costs of a step by phase: forward, backward and update, and the activations that a micro-batch
keeps between them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..graph import Graph, Phase
from ..sharding import PARTIAL
from ._host_copies import copy_times
from ._picked import Picked
from .memory import MemoryUse

_STATE = frozenset({"parameters", "optimizer state", "gradients", "other state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Costs of some layers on one mesh, per device.

    Attributes:
        forward_s, backward_s: for one micro-batch; `deferrable_s` is the part of the backward pass
            whose results no other layer needs, only the update.
        once_s: once a step: gradient synchronisation and the update.
        compute_s, communication_s, gradient_s: the same seconds by kind, for a whole step, without
            the collectives that run beside compute.
        host_transfer_s: copies between device and host memory in a whole step; the passes above
            wait for those that do not run beside compute, as `host_hidden_s` of it do.
        host_state_bytes, host_in_flight_bytes: the same as the next two, in host memory.
        state_bytes: parameters, optimizer state, gradients; `stacked_bytes` of them are gradients
            of one micro-batch, which a loop stacks before they are added to the totals.
        in_flight_bytes: arrays that a micro-batch keeps from its forward to its backward pass,
            including inputs that both passes read, except those of the batch.
        recomputed_bytes: arrays that the backward pass needs and computes again from those, because
            that is as quick as reading them. A compiler may compute all of them at once.
        deferred_bytes: arrays that it keeps for deferred weight gradients until these are computed;
            `handed_bytes` of them are made by its backward pass.
        working_bytes: what else is needed at the peak.
        memory_bytes: the peak with one micro-batch in flight, by part.
        casts_s: what both passes take longer if parameters are cast in each of them, and not once
            a step (`StagePlan.casts_once`).
    """

    forward_s: float
    backward_s: float
    deferrable_s: float
    once_s: float
    compute_s: float
    communication_s: float
    gradient_s: float
    host_transfer_s: float
    host_hidden_s: float
    host_state_bytes: float
    host_in_flight_bytes: float
    state_bytes: float
    stacked_bytes: float
    in_flight_bytes: float
    recomputed_bytes: float
    deferred_bytes: float
    handed_bytes: float
    working_bytes: float
    memory_bytes: dict[str, float]
    casts_s: tuple[float, float] = (0.0, 0.0)


def phase_costs(picked: Picked, graph: Graph) -> PhaseCosts:
    """Costs by phase of a step, or of some of its layers, under a choice for every node.

    Args:
        graph: the graph from which the node graph was built.
    """
    priced = picked.priced
    compute, communication, hideable = np.zeros((3, len(Phase)))
    gradient = hideable_once = deferrable = 0.0
    for node, pick in picked.rows():
        compute += node.compute[:, pick]
        communication += node.communication[:, pick]
        hideable += node.hideable[:, pick]
        hideable_once += float(node.once_hideable_s[pick])
        once = float(node.gradient_once_s[pick])
        gradient += once
        # Other sums of gradients run in every backward pass.
        in_passes = float(node.gradient_s[pick]) - once
        communication[Phase.BACKWARD] += in_passes
        deferrable += float(node.deferrable_s[pick]) + in_passes
    for (index, source, target), paid in picked.conversions.items():
        edge, table = priced.graph.edges[index], priced.edges[index]
        once = float(table.once_s[source, target])
        if edge.gradient:
            gradient += once
        else:
            # Casts of parameters, gathered before the first micro-batch.
            communication[Phase.UPDATE] += once
        hideable_once += float(table.once_hideable_s[source, target])
        # A gradient's partial sums are reduced in the backward pass, even where the edge belongs to
        # the update.
        partial = edge.gradient and min(table.sources[source]) <= PARTIAL
        phase = Phase.BACKWARD if partial else edge.phase
        communication[phase] += paid - once
        hideable[phase] += float(
            table.hideable_s[source, target] - table.once_hideable_s[source, target]
        )
        if phase is Phase.BACKWARD and edge.deferrable:
            deferrable += paid - once
    # Collectives run beside compute of the same task, and those after the last micro-batch behind
    # what is left of its backward pass.
    hidden = np.minimum(hideable, compute)
    communication -= hidden
    last = (compute - hidden)[Phase.BACKWARD] / priced.repeats
    gradient -= min(hideable_once, float(last))
    copied, exposed = copy_times(picked)
    seconds = compute + communication + exposed
    # This memory is for one micro-batch in flight; the schedule adds the others.
    memory, on_host = picked.memory, picked.host_memory
    state, host_state = (
        sum(v for k, v in each.peak_parts.items() if k in _STATE) for each in (memory, on_host)
    )
    alive = _bytes_between_passes(memory, graph)
    kept = alive
    if priced.kept is not None:
        kept = min(alive, picked.bytes_on_device(priced.kept))
    forward, handed = (
        picked.bytes_on_device([item for item in priced.held if item.handed is handed])
        for handed in (False, True)
    )
    return PhaseCosts(
        forward_s=float(seconds[Phase.PROLOGUE] + seconds[Phase.FORWARD]) / priced.repeats,
        backward_s=float(seconds[Phase.BACKWARD]) / priced.repeats,
        # The two sums are added in different orders, so they may differ in their last digits.
        deferrable_s=min(deferrable, float(seconds[Phase.BACKWARD])) / priced.repeats,
        once_s=float(seconds[Phase.UPDATE]) + gradient,
        compute_s=float(compute.sum()),
        communication_s=float(communication.sum()),
        gradient_s=gradient,
        host_transfer_s=float(copied.sum()),
        host_hidden_s=float((copied - exposed).sum()),
        host_state_bytes=host_state,
        host_in_flight_bytes=max(0.0, on_host.peak_bytes - host_state),
        state_bytes=state,
        stacked_bytes=_stacked_bytes(memory) if priced.repeats > 1 else 0.0,
        in_flight_bytes=kept,
        recomputed_bytes=alive - kept,
        deferred_bytes=min(forward, kept) + handed,
        handed_bytes=handed,
        # Rounding may make the parts exceed the peak.
        working_bytes=max(0.0, memory.peak_bytes - state - alive),
        memory_bytes=memory.peak_parts,
        casts_s=picked.casts_s,
    )


def _stacked_bytes(memory: MemoryUse) -> float:
    """Bytes on a device of gradients of one micro-batch that a loop stacks, at the peak."""
    moment, end = memory.peak_moment, memory.num_times - 1
    return sum(
        num_bytes
        * int(np.count_nonzero((r.births <= moment) & (moment <= r.deaths) & (r.deaths < end)))
        for r, num_bytes in memory.residents
        # Totals are alive to the end.
        if r.stacked and r.category == "gradients"
    )


def _bytes_between_passes(memory: MemoryUse, graph: Graph) -> float:
    """Bytes on a device of arrays that are alive between the last forward and the first backward
    operator, without state.
    """
    moment, kept = _between_passes(graph)
    if moment is None:
        return 0.0
    total_bytes = 0.0
    for r, num_bytes in memory.residents:
        if r.category in _STATE or r.category == "batch" or not kept.get(r.label, True):
            continue
        # Casts of parameters are made in each pass, or once for all micro-batches.
        if r.cast is not None:
            continue
        # Made before the moment, and read at it or later.
        alive = int(np.count_nonzero((r.births < moment) & (r.deaths >= moment)))
        total_bytes += alive * num_bytes
    return total_bytes


# Cached, as one graph is priced on many meshes.
@functools.lru_cache(maxsize=1)
def _between_passes(graph: Graph) -> tuple[int | None, dict[str, bool]]:
    """The first backward operator, or None; and for each input, by path, whether both passes read
    it.

    In this graph, inputs are alive from beginning to end. A stage, however, receives inputs that
    only its backward pass reads when that pass runs, and frees those that only its forward pass
    reads. Inputs of category "batch" count in the layer that makes them, because the figures of a
    stage's layers are added up.
    """
    moment = next((op.index for op in graph.ops if op.phase is Phase.BACKWARD), None)
    both = _read(graph, False) & _read(graph, True)
    return moment, {item.path: item.value in both for item in graph.inputs}


def _read(graph: Graph, backward: bool) -> set[int]:
    """Values that the backward pass reads (`backward`), or else those that earlier phases read."""
    return {
        i
        for op in graph.ops
        if op.phase is not Phase.UPDATE and (op.phase is Phase.BACKWARD) is backward
        for i in op.inputs
        if isinstance(i, int)
    }
