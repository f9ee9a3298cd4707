"""Closed forms of a schedule's step time: a sum over stages plus weighted maxima over stages.

Planners can search such a formula exactly, and evaluate it for any list of stages. A schedule
states it for arrays of any shape whose entries add up along the units of a chain: figures of
stages, or prefix sums over units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    # The command line reads plans, and must start without importing NumPy.
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


class StageTimes(Protocol):
    """Seconds of stages, or prefix sums of them over units; arrays of one shape.

    Attributes:
        forward_s, backward_s: passes of one micro-batch.
        weight_gradient_s: the part of `backward_s` whose results nothing needs before the update.
        exposed_s: the idle time that a stage adds to a zero-bubble pipeline while it fills and
            drains: `forward + input gradient - min(weight gradient, forward, input gradient)`.
        once_s: once in a step: gradient synchronisation that is not hidden, and the update.
    """

    @property
    def forward_s(self) -> Floats: ...
    @property
    def backward_s(self) -> Floats: ...
    @property
    def weight_gradient_s(self) -> Floats: ...
    @property
    def exposed_s(self) -> Floats: ...
    @property
    def once_s(self) -> Floats: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maximum:
    """A term `weight * max over stages of (sums + transfers * edge)`, where `edge` is the time of a
    transfer over the edge in front of the stage.

    If transfers overlap with compute, it is `weight * max over stages of max(sums, link * edge)`.
    """

    sums: Floats
    weight: float
    transfers: float = 0.0
    link: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClosedForm:
    """A schedule's step time: the sum over stages of `sums + transfers * edge`, plus the weighted
    `maxima`. For `edge` see `Maximum`.
    """

    sums: Floats
    transfers: float
    maxima: tuple[Maximum, ...]

    def parts_s(self, edges_s: Floats, *, overlaps: bool) -> tuple[Floats, tuple[Floats, ...]]:
        """The sum over stages, and the value of each maximum, unweighted. Stages lie along the last
        axis.

        Args:
            edges_s: for each stage the transfer over the edge in front of it, in one direction.
            overlaps: whether transfers between stages overlap with compute.
        """
        import numpy as np

        maxima = []
        for term in self.maxima:
            both = (
                np.maximum(term.sums, term.link * edges_s)
                if overlaps
                else term.sums + term.transfers * edges_s
            )
            maxima.append(np.asarray(both.max(-1)))
        return np.asarray((self.sums + self.transfers * edges_s).sum(-1)), tuple(maxima)

    def total_s(self, edges_s: Floats, *, overlaps: bool) -> Floats:
        """The step time, for stages along the last axis."""
        import numpy as np

        sums_s, maxima_s = self.parts_s(edges_s, overlaps=overlaps)
        return np.asarray(
            sums_s + sum(term.weight * value for term, value in zip(self.maxima, maxima_s))
        )
