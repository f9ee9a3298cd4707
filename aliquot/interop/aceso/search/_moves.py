"""The moves of bottleneck relief: from one configuration of uniform stages to its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ._problem import SearchProblem
from ._quotes import UniformStages
from ._space import Floats


@dataclass(frozen=True, slots=True)
class UniformStage:
    """A uniform stage: devices, row of its state, and operators."""

    devices: int
    state: int
    operators: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration of uniform stages."""

    micro_batch: int
    stages: tuple[UniformStage, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of a candidate. Candidates are ordered by memory beyond the limit, then by time.

    Attributes:
        excess_mb: memory beyond the limit, of the stage that needs most.
        time_us: time of an iteration.
        stage_us, memory_mb: time and memory of each stage.
        level, share: level and share of each stage's recomputation; see `UniformStages.quote`.
    """

    excess_mb: float
    time_us: float
    stage_us: tuple[float, ...]
    memory_mb: tuple[float, ...]
    level: tuple[int, ...]
    share: tuple[float, ...]

    @property
    def key(self) -> tuple[float, float]:
        return self.excess_mb, self.time_us


_MOST_ORDERED = 8
_Move = Callable[["Neighbours", Candidate, int, Score], Iterator[Candidate]]


class Neighbours:
    """What moves need to know of a problem, and which candidates can be run."""

    def __init__(
        self, problem: SearchProblem, uniform: dict[int, dict[int, UniformStages]]
    ) -> None:
        self.problem, self.uniform = problem, uniform

    def balanced(self) -> Iterator[Candidate]:
        """For each micro-batch size and every way to divide the devices of a node among stages,
        candidates with balanced stages: one with the least and one with the greatest tensor degree
        of all stages.
        """
        shares = [
            share
            for share in _shares(self.problem.gpus_per_node)
            if len(share) <= self.problem.max_stages
        ]
        for size, by_devices in self.uniform.items():
            for share in shares:
                devices = share * self.problem.num_nodes
                if len(devices) > self.problem.max_stages or not set(devices) <= set(by_devices):
                    continue
                for end in (0, -1):
                    rows = [range(len(by_devices[n].states))[end] for n in devices]
                    sums = {
                        n: by_devices[n].work_us[row, 0]
                        for n, row in zip(devices, rows, strict=True)
                    }
                    cuts = _balanced_cuts([sums[n] for n in devices])
                    yield Candidate(
                        size,
                        tuple(
                            UniformStage(n, row, c)
                            for n, row, c in zip(devices, rows, cuts, strict=True)
                        ),
                    )

    def can_run(self, candidate: Candidate) -> bool:
        """True if every stage has operators and measurements and lies within a node."""
        device, per_node = 0, self.problem.gpus_per_node
        by_devices = self.uniform.get(candidate.micro_batch, {})
        for stage in candidate.stages:
            if stage.operators < 1 or stage.devices not in by_devices:
                return False
            if stage.state >= len(by_devices[stage.devices].states):
                return False
            if device // per_node != (device + stage.devices - 1) // per_node:
                return False
            device += stage.devices
        return (
            device == self.problem.num_devices and len(candidate.stages) <= self.problem.max_stages
        )

    def states(self, candidate: Candidate, devices: int) -> range:
        """Rows of the states that a stage of so many devices can have."""
        uniform = self.uniform[candidate.micro_batch].get(devices)
        return range(len(uniform.states) if uniform else 0)


def _shares(devices: int) -> list[tuple[int, ...]]:
    """Ways to divide devices into powers of two: up to eight devices in every order, more than that
    only into equal parts, because 16 devices have 5,272 orders and 64 more than can be listed.

    >>> _shares(3)
    [(1, 1, 1), (1, 2), (2, 1)]
    >>> _shares(12)
    [(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2), (4, 4, 4)]
    """
    if not devices:
        return [()]
    sizes = [2**k for k in range(devices.bit_length()) if 2**k <= devices]
    if devices > _MOST_ORDERED:
        return [(size,) * (devices // size) for size in sizes if devices % size == 0]
    return [(size, *rest) for size in sizes for rest in _shares(devices - size)]


def _balanced_cuts(sums: Sequence[Floats]) -> list[int]:
    """Numbers of operators of stages that take about the same time.

    Args:
        sums: for each stage, prefix sums of the times of all operators as that stage runs them.
    """
    num = len(sums[0]) - 1
    low, high = 0.0, 2 * float(max(each[-1] for each in sums))
    ends: list[int] = []
    for bisected in range(16):
        bar = (low + high) / 2 if bisected else high
        at, reached = 0, []
        for k, each in enumerate(sums):
            # Every later stage needs at least one operator.
            most = num - (len(sums) - 1 - k)
            at = min(
                max(int(np.searchsorted(each, each[at] + bar, side="right")) - 1, at + 1), most
            )
            reached.append(at)
        if at == num:
            high, ends = bar, reached
        else:
            low = bar
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _with(candidate: Candidate, changes: dict[int, UniformStage]) -> Candidate:
    return replace(
        candidate, stages=tuple(changes.get(k, stage) for k, stage in enumerate(candidate.stages))
    )


def with_moved(at: Candidate, source: int, target: int, count: int) -> Candidate:
    """The candidate with `count` operators fewer in stage `source` and more in stage `target`;
    stages between are shifted.
    """
    one, two = at.stages[source], at.stages[target]
    return _with(
        at,
        {
            source: replace(one, operators=one.operators - count),
            target: replace(two, operators=two.operators + count),
        },
    )


def _move_operators(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Move operators to another stage; all stages between are shifted."""
    most = at.stages[worst].operators - 1
    for partner in range(len(at.stages)):
        for count in (1, 2, 3, 5, 8, 13, 26, 52):
            if partner != worst and count <= most:
                yield with_moved(at, worst, partner, count)


def _exchange_degrees(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Change tensor and data degree on the same devices."""
    stage = at.stages[worst]
    for state in around.states(at, stage.devices):
        if state != stage.state:
            yield _with(at, {worst: replace(stage, state=state)})


def _take_devices(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Exchange devices with another stage that has twice as many."""
    stage = at.stages[worst]
    for partner, other in enumerate(at.stages):
        if other.devices != 2 * stage.devices:
            continue
        for state in around.states(at, other.devices):
            for less in around.states(at, stage.devices):
                candidate = _with(
                    at,
                    {
                        worst: UniformStage(other.devices, state, stage.operators),
                        partner: UniformStage(stage.devices, less, other.operators),
                    },
                )
                if around.can_run(candidate):
                    yield candidate


def _give_operators_for_devices(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Merge two neighbours into one stage with the devices of both."""
    for first in (worst - 1, worst):
        if first < 0 or first + 1 >= len(at.stages):
            continue
        one, two = at.stages[first : first + 2]
        for state in around.states(at, one.devices + two.devices):
            merged = UniformStage(one.devices + two.devices, state, one.operators + two.operators)
            candidate = replace(at, stages=(*at.stages[:first], merged, *at.stages[first + 2 :]))
            if around.can_run(candidate):
                yield candidate


def _split_stage(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Split a stage into two with half of its devices each."""
    for k, stage in enumerate(at.stages):
        half = stage.devices // 2
        if stage.devices % 2 or stage.operators < 2:
            continue
        for state in around.states(at, half):
            front = UniformStage(half, state, stage.operators // 2)
            back = UniformStage(half, state, stage.operators - stage.operators // 2)
            candidate = replace(at, stages=(*at.stages[:k], front, back, *at.stages[k + 1 :]))
            if around.can_run(candidate):
                yield candidate


def _change_micro_batch(
    around: Neighbours, at: Candidate, worst: int, score: Score
) -> Iterator[Candidate]:
    """Take the next larger or smaller micro-batch for all stages; tensor degrees stay if
    possible.
    """
    sizes = sorted(around.uniform)
    k = sizes.index(at.micro_batch)
    for size in (*sizes[max(k - 1, 0) : k], *sizes[k + 1 : k + 2]):
        stages = []
        for stage in at.stages:
            old = around.uniform[at.micro_batch][stage.devices]
            new = around.uniform[size].get(stage.devices)
            if new is None:
                break
            degree = old.space.states[old.states[stage.state]][0]
            rows = [r for r, s in enumerate(new.states) if new.space.states[s][0] == degree]
            stages.append(replace(stage, state=rows[0] if rows else 0))
        else:
            yield Candidate(size, tuple(stages))


MOVES: tuple[tuple[_Move, bool], ...] = (
    (_move_operators, True),
    (_exchange_degrees, True),
    (_take_devices, True),
    (_give_operators_for_devices, True),
    (_split_stage, False),
    (_change_micro_batch, True),
)
"""Every move, and whether it can relieve memory. Recomputation is part of each quote."""
