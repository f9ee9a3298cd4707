"""Chains whose costs are no sums of units' costs: measured operators with degrees of their own, and
a `Chain` in disguise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aliquot.cost import AbstractChain, Chain, StageChoice, StageFigures, StageOption


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Disguised(AbstractChain):
    """A chain that planners know nothing of but what every chain answers."""

    inner: Chain

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def least_s(self, option, first, last):
        """See `AbstractChain`."""
        return self.inner.least_s(option, first, last)

    def propose(self, option, first, last, **where):
        """See `AbstractChain`."""
        return self.inner.propose(option, first, last, **where)

    def quote(self, stages, in_flight, chunks=1):
        """See `AbstractChain`."""
        return self.inner.quote(stages, in_flight, chunks)

    def find_fault(self, stage):
        """See `AbstractChain`."""
        return self.inner.find_fault(stage)


# Of an operator: tensor-parallel degree, whether it is recomputed.
Way = tuple[int, bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operators(AbstractChain):
    """Operators with seconds and bytes by tensor-parallel degree; the rest of a stage's devices
    split the batch.

    Between operators of different degrees `reshard_s` are paid in each pass. Working memory is the
    largest of the forward passes plus the largest of the backward passes. What crosses an edge goes
    over as many links as the finer side has.
    """

    unit_names: tuple[str, ...]
    options: tuple[StageOption, ...]
    num_micro_batches: int
    memory_limit_bytes: float
    num_hosts: int = 1
    devices_per_host: int = 4
    overlaps_transfers: bool = False
    seconds: np.ndarray
    num_bytes: np.ndarray
    reshard_s: float = 0.1
    edge_s: float = 0.2

    def ways(self, option: int) -> list[Way]:
        """All for an operator in a stage: `unit_options` are positions in it."""
        devices = self.options[option].num_devices
        degrees = [d for d in (1, 2, 4) if devices % d == 0]
        return [(d, again) for again in (False, True) for d in degrees]

    def _pass_s(self, unit: int, devices: int, degree: int) -> float:
        # Tensor parallelism pays for communication.
        return float(self.seconds[unit]) * (1 + 0.1 * (degree - 1)) / devices

    def least_s(self, option, first, last):
        """See `AbstractChain`."""
        best = np.array(
            [
                [3 * self._pass_s(u, o.num_devices, 1) for u in range(self.num_units)]
                for o in self.options
            ]
        )
        sums = np.concatenate((np.zeros((len(best), 1)), best.cumsum(axis=1)), axis=1)
        return np.asarray(sums[option, last] - sums[option, first])

    def propose(self, option, first, last, *, first_device, memory):
        """See `AbstractChain`. All operators alike, with more and more of them recomputed until the
        stage fits.
        """
        ways, count = self.ways(option), last - first
        fitting = []
        for degree, again in itertools.product(dict.fromkeys(d for d, _ in ways), range(count + 1)):
            units = [ways.index((degree, k < again)) for k in range(count)]
            stage = StageChoice(
                first_unit=first,
                last_unit=last,
                option=option,
                first_device=first_device,
                unit_options=tuple(units),
            )
            figures = self._figures(stage, None, memory.in_flight, memory.chunks)
            if figures.peak_bytes <= memory.limit_bytes:
                fitting.append((figures.forward_s + figures.backward_s, stage))
        return min(fitting, key=lambda pair: pair[0], default=(0, None))[1]

    def quote(self, stages: Sequence[StageChoice], in_flight: Sequence[float], chunks: int = 1):
        """See `AbstractChain`."""
        before = [None, *stages[:-1]]
        return tuple(
            self._figures(*row, chunks) for row in zip(stages, before, in_flight, strict=True)
        )

    def find_fault(self, stage):
        """See `AbstractChain`."""
        if len(stage.unit_options) != stage.last_unit - stage.first_unit:
            return "has not an option for each of its operators"
        return None

    def _figures(
        self, stage: StageChoice, before: StageChoice | None, kept: float, chunks: int
    ) -> StageFigures:
        ways = self.ways(stage.option)
        chosen = [ways[k] for k in stage.unit_options]
        devices = self.options[stage.option].num_devices
        units = range(stage.first_unit, stage.last_unit)
        forward = [
            self._pass_s(u, devices, degree) for u, (degree, _) in zip(units, chosen, strict=True)
        ]
        resharded = self.reshard_s * sum(a[0] != b[0] for a, b in zip(chosen, chosen[1:]))
        again = sum(f for f, (_, recomputed) in zip(forward, chosen, strict=True) if recomputed)
        sizes = [float(self.num_bytes[u]) / devices for u in units]
        held = kept * sum(
            n for n, (_, recomputed) in zip(sizes, chosen, strict=True) if not recomputed
        )
        state = (
            4
            * sum(
                float(self.num_bytes[u]) / degree
                for u, (degree, _) in zip(units, chosen, strict=True)
            )
            / 8
        )
        working = max(sizes) + 2 * max(
            n * degree for n, (degree, _) in zip(sizes, chosen, strict=True)
        )
        edge = 0.0
        if before is not None and before.first_device != stage.first_device:
            sender = self.ways(before.option)[before.unit_options[-1]][0]
            edge = self.edge_s / max(sender, chosen[0][0])
        seconds = sum(forward) + resharded
        return StageFigures(
            forward_s=seconds,
            backward_s=2 * sum(forward) + resharded + again,
            weight_gradient_s=0.0,
            exposed_s=3 * sum(forward) + 2 * resharded + again,
            once_s=0.05,
            transfer_s=edge,
            in_flight=kept,
            state_bytes=state,
            held_bytes=held,
            working_bytes=working,
            peak_bytes=chunks * (state + held + working),
        )


def operators(
    num_units: int = 6, *, micro_batches: int = 8, limit_bytes: float = 1e9, seed: int = 0
) -> Operators:
    """Operators on one host of four devices."""
    random = np.random.default_rng(seed)
    options = tuple(
        StageOption(name=f"{n} devices", submesh=(1, n), mesh_shape=(n,), dp=n, tp=1)
        for k, n in enumerate((1, 2, 4))
    )
    return Operators(
        unit_names=tuple(f"operator {k}" for k in range(num_units)),
        options=options,
        num_micro_batches=micro_batches,
        memory_limit_bytes=limit_bytes,
        seconds=random.uniform(1, 3, num_units),
        num_bytes=random.uniform(50, 100, num_units),
    )


def disguised(chain: Chain) -> Disguised:
    """The chain, without what only a `Chain` has; nothing travels, so that tables of quotes are
    exact.
    """
    return Disguised(inner=replace(chain, boundary_bytes=np.zeros(chain.num_units)))
