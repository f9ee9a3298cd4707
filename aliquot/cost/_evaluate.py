"""The judge's sum: the step time under a choice for every node."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph import Phase
from ._host_copies import copy_times
from ._picked import Picked


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


def evaluate(picked: Picked, *, casts_once: bool = True) -> StepTime:
    """Step time under a choice for every node. Equal conversions of one array are paid once.
    `casts_once`: see `StagePlan`.

    Gathers of parameters, sums of gradients and, in part, sums and gathers of activations run
    beside the compute of the forward and backward pass: as far as the target's compiler overlaps
    them, and at most as long as that compute takes. What is summed once in a step hides behind the
    backward pass of the last micro-batch alone.
    """
    priced = picked.priced
    compute = communication = gradient = hideable = once = beside = last = 0.0
    for node, pick in picked.rows():
        again = 0.0 if casts_once else float(node.casts[:, pick].sum())
        compute += float(node.compute_s[pick]) + again
        beside += float(node.beside_s[pick]) + again
        last += float(node.compute[Phase.BACKWARD, pick]) / priced.repeats
        communication += float(node.communication_s[pick])
        gradient += float(node.gradient_s[pick])
        hideable += float(node.hideable_s[pick])
        once += float(node.once_hideable_s[pick])
    for (edge_index, source, target), seconds in picked.conversions.items():
        table = priced.edges[edge_index]
        hideable += float(table.hideable_s[source, target])
        once += float(table.once_hideable_s[source, target])
        if priced.graph.edges[edge_index].gradient:
            gradient += seconds
        else:
            communication += seconds
    hidden = hidden_seconds(hideable - once, once, beside_s=beside, last_s=last)
    copied, exposed = copy_times(picked)
    return StepTime(
        compute_s=compute,
        communication_s=communication,
        gradient_s=gradient,
        hidden_s=hidden,
        host_transfer_s=float(copied.sum()),
        host_hidden_s=float((copied - exposed).sum()),
    )


def hidden_seconds(hideable_s: float, once_s: float, *, beside_s: float, last_s: float) -> float:
    """Seconds of collectives that are hidden beside compute.

    Args:
        hideable_s: of those in every micro-batch, what can hide.
        once_s: of those after the last micro-batch, what can hide.
        beside_s: compute of all forward and backward passes.
        last_s: compute of the backward pass of the last micro-batch.
    """
    return min(hideable_s + min(once_s, last_s), beside_s)
