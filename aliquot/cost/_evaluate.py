"""The judge's sum: the step time under a choice for every node."""

from __future__ import annotations

from dataclasses import dataclass

from ._host_copies import copy_times
from ._priced import Ints, Priced


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one training step on every device. The parts add up to `total_s`.

    Attributes:
        compute_s: arithmetic and memory traffic.
        communication_s: collectives other than those on gradients.
        gradient_s: collectives on gradients.
        hidden_s: the part of both that runs beside compute.
        host_transfer_s: copies between device and host memory; `host_hidden_s` of it run beside
            compute.
    """

    compute_s: float
    communication_s: float
    gradient_s: float
    hidden_s: float
    host_transfer_s: float
    host_hidden_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        exposed_s = self.host_transfer_s - self.host_hidden_s
        return self.compute_s + self.communication_s + self.gradient_s - self.hidden_s + exposed_s


def evaluate(priced: Priced, picks: Ints) -> StepTime:
    """Step time under a choice for every node. Equal conversions of one array are paid once.

    Sums of gradients and gathers of parameters run beside the compute of the forward and backward
    pass: up to the share that the target's compiler overlaps, and at most as long as that compute
    takes.
    """
    compute = communication = gradient = gathers = beside = 0.0
    for node, pick in zip(priced.nodes, picks.tolist(), strict=True):
        compute += float(node.compute_s[pick])
        beside += float(node.beside_s[pick])
        communication += float(node.communication_s[pick])
        gradient += float(node.gradient_s[pick])
    for (edge_index, _, _), seconds in conversions(priced, picks).items():
        edge = priced.graph.edges[edge_index]
        if edge.gradient:
            gradient += seconds
        else:
            communication += seconds
            gathers += seconds if edge.beside_compute else 0.0
    hidden = hidden_seconds(gradient + gathers, beside, priced.target.overlap_fraction)
    copied, exposed = copy_times(priced, picks)
    return StepTime(
        compute_s=compute,
        communication_s=communication,
        gradient_s=gradient,
        hidden_s=hidden,
        host_transfer_s=float(copied.sum()),
        host_hidden_s=float((copied - exposed).sum()),
    )


def hidden_seconds(collectives_s: float, compute_s: float, overlap_fraction: float) -> float:
    """Seconds of collectives that are hidden beside compute, of those that can be."""
    return min(overlap_fraction * collectives_s, compute_s)


def conversions(priced: Priced, picks: Ints) -> dict[tuple[int, int, int], float]:
    """Every distinct conversion that choices cause: `(edge, source split, target split) ->
    seconds`.

    Of the edges that share a conversion, the first stands for all.
    """
    seen: set[tuple[object, ...]] = set()
    by_edge: dict[tuple[int, int, int], float] = {}
    for edge, table in zip(priced.graph.edges, priced.edges, strict=True):
        s = int(table.source_index[picks[edge.source]])
        t = int(table.target_index[picks[edge.target]])
        if table.sources[s] == table.targets[t]:
            continue
        identity = (edge.share, table.sources[s], table.targets[t])
        if identity not in seen:
            seen.add(identity)
            by_edge[edge.index, s, t] = float(table.seconds[s, t])
    return by_edge
