"""Costs of a step by phase: forward, backward and update, and the activations that a micro-batch
keeps between them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..graph import Graph, Memory, Phase
from ..sharding import PARTIAL
from ._estimate import peak_memory, seconds_of_casts
from ._evaluate import conversions
from ._host_copies import copy_times
from ._priced import Ints, Priced
from ._recomputed import bytes_on_device
from .memory import MemoryModel, known_memory, memory_model

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


def phase_costs(
    priced: Priced, picks: Ints, graph: Graph, model: MemoryModel | None = None
) -> PhaseCosts:
    """Costs by phase of a step, or of some of its layers, under a choice for every node.

    Args:
        priced: priced choices, with `repeats` micro-batches.
        picks: the position of each node's choice among them.
        graph: the graph from which the node graph was built.
        model: memory under the choices, as `known_memory` gives it; computed if None.
    """
    compute, communication, hideable = np.zeros((3, len(Phase)))
    gradient = hideable_once = deferrable = 0.0
    for node, pick in zip(priced.nodes, picks.tolist(), strict=True):
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
    for (index, source, target), paid in conversions(priced, picks).items():
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
    copied, exposed = copy_times(priced, picks)
    seconds = compute + communication + exposed
    model = known_memory(priced, picks) if model is None else model
    # This peak is for one micro-batch in flight; the schedule adds the others.
    peak, moment, parts = peak_memory(model, priced, picks)
    state = sum(v for k, v in parts.items() if k in _STATE)
    alive = _bytes_between_passes(model, picks, graph)
    kept = alive
    if priced.kept is not None:
        kept = min(alive, bytes_on_device(priced, picks, priced.kept))
    forward, handed = (
        bytes_on_device(priced, picks, [item for item in priced.held if item.handed is handed])
        for handed in (False, True)
    )
    on_host = memory_model(priced, in_turn=False, memory=Memory.HOST)
    host_peak, _, host_parts = peak_memory(on_host, priced, picks)
    host_state = sum(v for k, v in host_parts.items() if k in _STATE)
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
        host_in_flight_bytes=max(0.0, host_peak - host_state),
        state_bytes=state,
        stacked_bytes=_stacked_bytes(model, picks, moment) if priced.repeats > 1 else 0.0,
        in_flight_bytes=kept,
        recomputed_bytes=alive - kept,
        deferred_bytes=min(forward, kept) + handed,
        handed_bytes=handed,
        # Rounding may make the parts exceed the peak.
        working_bytes=max(0.0, peak - state - alive),
        memory_bytes=parts,
        casts_s=seconds_of_casts(priced, picks),
    )


def _stacked_bytes(model: MemoryModel, picks: Ints, moment: int) -> float:
    """Bytes on a device of gradients of one micro-batch that a loop stacks, at a moment."""
    end = model.num_times - 1
    return sum(
        float(local[picks[r.node]] if r.node >= 0 else local[0])
        * int(np.count_nonzero((r.births <= moment) & (moment <= r.deaths) & (r.deaths < end)))
        for r, local in zip(model.residents, model.local_bytes, strict=True)
        # Totals are alive to the end.
        if r.stacked and r.category == "gradients"
    )


def _bytes_between_passes(model: MemoryModel, picks: Ints, graph: Graph) -> float:
    """Bytes on a device of arrays that are alive between the last forward and the first backward
    operator, without state.
    """
    moment, kept = _between_passes(graph)
    if moment is None:
        return 0.0
    total_bytes = 0.0
    for r, local in zip(model.residents, model.local_bytes, strict=True):
        if r.category in _STATE or r.category == "batch" or not kept.get(r.label, True):
            continue
        # Casts of parameters are made in each pass, or once for all micro-batches.
        if r.cast is not None:
            continue
        # Made before the moment, and read at it or later.
        alive = int(np.count_nonzero((r.births < moment) & (r.deaths >= moment)))
        total_bytes += alive * float(local[picks[r.node]] if r.node >= 0 else local[0])
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
