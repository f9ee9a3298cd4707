"""The prediction for a plan of one program, and the form in which plans store its choices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ..cluster import MEASURED, MEASURED_COMPUTE, Corrections
from ..core import PlanMismatchError
from ..graph import Graph, Op, Phase, line_or_nearest, parameter_of, source_line
from ..plans import CollectiveUse, OpSharding, Prediction, StagePlan
from ..sharding import (
    Choice,
    NodeGraph,
    reshard,
    result_fraction,
    shards_of,
    split_deferred_sums,
    without_axes,
)
from ._choices import can_split
from ._collectives import (
    collective_corrections,
    collective_line,
    combined_share,
    in_hops,
    move_line,
    pieces,
    rounded_bytes,
    split_deferred_axes,
    through_copies,
    widening,
)
from ._evaluate import evaluate
from ._picked import Picked
from ._priced import corrected_work, sum_collective
from .memory import memory_over_time


def predict(
    picked: Picked, memory_limit_bytes: float, graph: Graph, casts_once: bool | None = None
) -> Prediction:
    """Step time, memory and collectives of a step.

    Args:
        casts_once: see `StagePlan`; by default what `Picked.casts_fit` says.
    """
    if casts_once is None:
        casts_once = picked.casts_fit(memory_limit_bytes)
    time = evaluate(picked, casts_once=casts_once)
    memory = picked.memory.keeping_casts if casts_once else picked.memory
    op = graph.ops[min(memory.peak_moment, len(graph.ops) - 1)] if graph.ops else None
    measured = measured_share(picked)
    return Prediction(
        step_time_s=time.total_s,
        compute_s=time.compute_s,
        communication_s=time.communication_s,
        gradient_s=time.gradient_s,
        hidden_s=time.hidden_s,
        host_transfer_s=time.host_transfer_s,
        host_hidden_s=time.host_hidden_s,
        host_memory_bytes=picked.host_memory.peak_parts,
        peak_memory_bytes=memory.peak_bytes,
        memory_limit_bytes=memory_limit_bytes,
        memory_bytes=memory.peak_parts,
        peak_moment=_moment_text(op, graph) if op else "",
        collectives=tuple(with_source_line(use, graph) for use in collective_uses(picked)),
        measured_share=measured.share,
        measured_compute_share=measured.alone_share,
        measured_error=measured.error,
        memory_over_time=memory_over_time(memory, picked, graph, time.total_s),
    )


def with_source_line(use: CollectiveUse, graph: Graph) -> CollectiveUse:
    """A collective whose label names an operator, with the parameter that the operator reads, or
    else with its line of the user's code, or the nearest.

    Other collectives are returned as they are.
    """
    name, _, index = use.label.rpartition(":")
    if not name or not index.isdigit() or int(index) >= len(graph.ops):
        return use
    # The links of a loop, which are no operators of JAX, carry its state.
    what = {"tie": f"state of a loop:{index}", "dot_general": "product"}.get(name, name)
    if path := parameter_of(graph, int(index)):
        phase = graph.ops[int(index)].phase.name.lower()
        return msgspec.structs.replace(use, label=f"{what} with {path}, {phase}")
    return msgspec.structs.replace(
        use, label=f"{what} {line_or_nearest(graph, int(index))}".rstrip()
    )


def _moment_text(op: Op, graph: Graph) -> str:
    """The phase of an operator, what it is, and the parameter that it reads, or else its line."""
    late = {Phase.BACKWARD: "the backward pass", Phase.UPDATE: "the update"}
    what = "the product" if op.name == "dot_general" else f"`{op.name}`"
    path = parameter_of(graph, op.index)
    return f"{what} {f'with {path}' if path else source_line(op)}".rstrip() + (
        f" in {late.get(op.phase, 'the forward pass')}"
    )


class _Collective(NamedTuple):
    """A collective of a step.

    Attributes:
        axes: positions of the mesh axes that it runs over.
        group: number of devices that take part, if it is not the whole of `axes`.
        times: how often it runs in a step.
        entering_bytes, leaving_bytes: on each device before and after one run.
        latency_s, s_per_byte: one run takes `latency_s + s_per_byte * entering_bytes`.
    """

    kind: str
    axes: tuple[int, ...]
    group: int | None
    label: str
    times: float
    entering_bytes: float
    leaving_bytes: float
    latency_s: float
    s_per_byte: float

    @property
    def seconds(self) -> float:
        """Seconds of all its runs in a step."""
        return self.times * (self.latency_s + self.s_per_byte * self.entering_bytes)


def collective_uses(picked: Picked) -> tuple[CollectiveUse, ...]:
    """The collectives of a step, most expensive first; those that differ only in size are added up.

    Bytes are those of the results on each device, which is what compiled programs state.
    """
    totals: dict[tuple[str, tuple[int, ...], str], list[float]] = defaultdict(
        lambda: [0.0, 0.0, 0.0]
    )
    for each in _collectives(picked):
        entry = totals[each.kind, each.axes, each.label]
        entry[0] += each.times
        entry[1] += each.times * each.leaving_bytes
        entry[2] += each.seconds
    names = picked.priced.mesh.axis_names
    uses = [
        CollectiveUse(
            kind=kind,
            axes=tuple(names[a] for a in axes),
            count=count,
            num_bytes=total,
            seconds=seconds,
            label=label,
        )
        for (kind, axes, label), (count, total, seconds) in totals.items()
    ]
    return tuple(sorted(uses, key=lambda u: (-u.seconds, u.kind, u.axes, u.label)))


def _collectives(picked: Picked) -> Iterator[_Collective]:
    """All collectives of a step: those of conversions between nodes, then those within nodes."""
    priced = picked.priced
    sizes, mesh, target = priced.axis_sizes, priced.mesh, priced.target
    for edge_index, s, t in picked.conversions:
        edge, table = priced.graph.edges[edge_index], priced.edges[edge_index]
        changes = [(table.sources[s], table.targets[t])]
        # With micro-batches, a gradient is summed over the data axes, and over tokens, only once,
        # after the last one, and over the other axes for each: two changes instead of one.
        if edge.gradient and priced.repeats > 1 and edge.phase is not Phase.UPDATE:
            waiting = priced.use.waits_over(edge)
            changes = list(split_deferred_sums(*changes[0], waiting))
        elif priced.use.gathers_once and edge.cast:
            # Its cast is gathered once over the axes over which gradients wait, and what is left is
            # done for each.
            gathered = without_axes(changes[0][0], priced.use.data_axes | priced.use.context_axes)
            changes = [(gathered, changes[0][1]), (changes[0][0], gathered)]
            if edge.phase is Phase.BACKWARD:
                del changes[1]
        for (before, after), once in zip(changes, (False, True), strict=False):
            count = edge.count * (1 if once or edge.phase is Phase.UPDATE else priced.repeats)
            total = once and edge.gradient
            total_dtype = edge.total_dtype if total else ""
            whole = edge.num_bytes * widening(edge.dtype, target, total_dtype)
            # Tables were priced with the measured speed of the rounded size. It is used here, too,
            # so that seconds add up to the predicted step time.
            priced_bytes = rounded_bytes(whole, mesh)
            parts = pieces(edge, before, after, target)
            count, whole = count * parts, whole / parts
            for move in (
                reshard(before, after, sizes, sum_collective(edge, target, total=total)) or ()
            ):
                entering, leaving = move.fraction * whole, result_fraction(move, sizes) * whole
                latency_s, s_per_byte = move_line(
                    move, through_copies(move, before, after, target), mesh, target, priced_bytes
                )
                # Rows that are gathered one after the other are not combined.
                if parts == 1 and (edge.kind == "alias" or edge.beside_compute):
                    latency_s *= float(combined_share(whole, target))
                yield _Collective(
                    move.kind,
                    move.axes,
                    move.group,
                    edge.label,
                    count,
                    entering,
                    leaving,
                    latency_s,
                    s_per_byte,
                )
    for node, choice in zip(priced.graph.nodes, picked.choices, strict=True):
        for c in node.collectives:
            axes = tuple(a for a, f in enumerate(choice) if f in c.factors)
            if math.prod(sizes[a] for a in axes) == 1:
                continue
            # As for conversions: sums of gradients run over these axes once in a step, over other
            # axes for each micro-batch.
            waiting = priced.use.waits_over(c)
            for these_axes, once in split_deferred_axes(c, axes, waiting):
                count = c.count * (1 if once or c.phase is Phase.UPDATE else priced.repeats)
                total_dtype = c.total_dtype if once and priced.repeats > 1 else ""
                wide = widening(c.dtype, target, total_dtype)
                local = c.num_bytes * wide / shards_of(choice, c.split_by, sizes)
                # Of an all-gather, the result on each device is that much larger than what enters.
                grown = math.prod(sizes[a] for a in these_axes) if c.kind == "all-gather" else 1
                kind, hops = in_hops(c.kind, these_axes, mesh)
                latency_s, s_per_byte = collective_line(
                    kind, these_axes, mesh, target, near_bytes=local
                )
                if c.gradient:
                    latency_s *= float(combined_share(local, target))
                yield _Collective(
                    kind,
                    these_axes,
                    None,
                    c.label,
                    count * hops,
                    local,
                    local * float(grown),
                    latency_s,
                    s_per_byte,
                )


class MeasuredShare(NamedTuple):
    """The share of predicted seconds that is based on measurements of similar operators.

    Attributes:
        seconds: all seconds, measured or not.
        measured_s: based on measurements of grade `MEASURED`.
        alone_s: based on measurements of one device alone, grade `MEASURED_COMPUTE`; not a part of
            `measured_s`.
        error_s: `measured_s` and `alone_s`, each part times its relative error.
    """

    seconds: float
    measured_s: float
    alone_s: float
    error_s: float

    @property
    def share(self) -> float:
        """The part of all seconds that is `measured_s`, 0 to 1."""
        return self.measured_s / self.seconds if self.seconds else 0.0

    @property
    def alone_share(self) -> float:
        """The part of all seconds that is `alone_s`, 0 to 1."""
        return self.alone_s / self.seconds if self.seconds else 0.0

    @property
    def error(self) -> float:
        """Mean relative error of the measured seconds: the spread of a measurement, or the error of
        an interpolation between measurements.
        """
        measured_s = self.measured_s + self.alone_s
        return self.error_s / measured_s if measured_s else 0.0


def measured_share(picked: Picked) -> MeasuredShare:
    """The measured share of a step's compute and communication."""
    priced = picked.priced
    if priced.mesh.cluster.measured is None:
        return MeasuredShare(0.0, 0.0, 0.0, 0.0)
    total = error = 0.0
    of_grade = {MEASURED: 0.0, MEASURED_COMPUTE: 0.0}

    def count_in(seconds: float, corrections: Corrections) -> None:
        nonlocal total, error
        total += seconds
        if corrections.is_measured[0]:
            of_grade[corrections.grade] += seconds
            error += seconds * float(corrections.errors[0])

    for _, work, sizes, choice in picked.works():
        seconds, corrections = corrected_work(work, sizes, choice, priced.mesh, priced.target)
        times = work.times(priced.repeats)
        if corrections is None:
            total += float(seconds[0]) * times
        else:
            count_in(float(seconds[0] * corrections.ratios[0]) * times, corrections)
    for each in _collectives(picked):
        entering, seconds = (
            np.array([each.entering_bytes]),
            np.array([each.seconds / max(each.times, 1.0)]),
        )
        count_in(
            each.seconds,
            collective_corrections(
                each.kind, each.axes, priced.mesh, each.group, entering, seconds
            ),
        )
    return MeasuredShare(total, of_grade[MEASURED], of_grade[MEASURED_COMPUTE], error)


def encode_interior(
    nodes: NodeGraph,
    choices: Sequence[Choice],
    axis_names: Sequence[str],
    repeat: frozenset[int] = frozenset(),
) -> tuple[OpSharding, ...]:
    """Choices as a plan stores them (`StagePlan.interior`): by the labels of nodes and factors.

    Args:
        repeat: indices of nodes that the backward pass recomputes.
    """
    return tuple(
        OpSharding(
            node=node.label,
            splits={
                a: node.factors[f].label for a, f in zip(axis_names, choice, strict=True) if f >= 0
            },
            copies=node.copies,
            recompute=node.index in repeat,
        )
        for node, choice in zip(nodes.nodes, choices, strict=True)
    )


def decode_interior(stage: StagePlan, nodes: NodeGraph) -> tuple[Choice, ...]:
    """The choices that `encode_interior` stored.

    Raises:
        PlanMismatchError: some entries name other nodes or dimensions than the step has; the
            message lists all.
    """
    faults = []
    if len(stage.interior) != len(nodes.nodes):
        faults.append(
            f"the plan decides about {len(stage.interior)} operators, the step has"
            f" {len(nodes.nodes)}"
        )
    choices = []
    for entry, node in zip(stage.interior, nodes.nodes, strict=False):
        labels = {factor.label: f for f, factor in enumerate(node.factors)}
        unknown = [label for label in entry.splits.values() if label not in labels]
        if entry.node != node.label:
            faults.append(
                f"the plan decides about `{entry.node}` where the step has `{node.label}`"
            )
        elif unknown:
            faults.append(f"`{node.label}` has no dimension {', '.join(unknown)}")
        choices.append(tuple(labels.get(entry.splits.get(a, ""), -1) for a in stage.axis_names))
    if faults:
        raise PlanMismatchError(
            tuple(faults), asked="the plan's interior", advice="Plan this step again."
        )
    return tuple(choices)


def check_choices(nodes: NodeGraph, choices: Sequence[Choice], axis_sizes: Sequence[int]) -> None:
    """Check that choices divide the sizes of what they split.

    Raises:
        PlanMismatchError: some do not; the message lists all.
    """
    faults = [
        f"`{node.label}` cannot be split as {choice}"
        for node, choice in zip(nodes.nodes, choices, strict=True)
        if not can_split(node, choice, axis_sizes)
    ]
    if faults:
        raise PlanMismatchError(
            tuple(faults), asked="the plan's interior", advice="Plan this step again."
        )
