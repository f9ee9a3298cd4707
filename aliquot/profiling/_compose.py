"""Time and memory of a whole step from those of its segments.

T = sum of the segments' times + resharding between neighbours, and M = sum of what is held
(parameters, state, and what the forward pass keeps) + the most that any segment needs besides.

Reference: arXiv 2504.00598, whose memory adds up everything; what is there only while one segment
runs is counted once here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import resharding_seconds
from ._segments import Combination, Options, SegmentedStep

# Combinations of all kinds that are compared at once.
_MOST = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A whole step, every segment of a kind split alike.

    Attributes:
        options: for each kind those of its blocks.
        seconds, memory_bytes: composed.
        measured_share: of the time, what was measured.
    """

    options: tuple[Options, ...]
    seconds: float
    memory_bytes: float
    measured_share: float


def compose(
    step: SegmentedStep,
    combinations: Sequence[Sequence[Combination]],
    measured_s: Sequence[Mapping[Options, float]],
    *,
    memory_limit_bytes: float = math.inf,
    most: int = 10,
) -> list[Composed]:
    """The fastest ways to split a whole step that fit in memory, best first.

    Args:
        step: its kinds of segment.
        combinations: those of each kind that may be chosen.
        measured_s: for each kind and combination the measured seconds; where there are none those of
            the cost model count.
        most: how many to return.
    """
    kept = [_undominated(some, known) for some, known in zip(combinations, measured_s, strict=True)]
    while math.prod(len(some) for some in kept) > _MOST:
        longest = max(range(len(kept)), key=lambda k: len(kept[k]))
        kept[longest] = sorted(kept[longest], key=lambda c: _seconds(c, measured_s[longest]))[: len(kept[longest]) // 2]
    shape = [len(some) for some in kept]
    seconds, held, working = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for k, some in enumerate(kept):
        count, along = step.kinds[k].count, [1] * len(kept)
        along[k] = len(some)

        def spread(values: list[float], along: list[int] = along) -> np.ndarray:
            return np.array(values, np.float64).reshape(along)

        seconds = seconds + count * spread([_seconds(c, measured_s[k]) for c in some])
        held = held + count * spread([c.state_bytes + c.kept_bytes for c in some])
        working = np.maximum(working, spread([c.working_bytes for c in some]))
    for (a, b), times in Counter(itertools.pairwise(step.sequence)).items():
        along = [1] * len(kept)
        along[a], along[b] = len(kept[a]), len(kept[b])
        if a == b:
            table = np.array([_resharding_s(step, p, p) for p in kept[a]])
        else:
            table = np.array([[_resharding_s(step, p, q) for q in kept[b]] for p in kept[a]])
        seconds = seconds + times * (table.T if a > b else table).reshape(along)
    memory = held + working
    flat = np.where(memory <= memory_limit_bytes, seconds, np.inf).ravel()
    order = np.argsort(flat, kind="stable")[:most]
    return [
        _composed(step, kept, measured_s, index, seconds, memory)
        for index in order.tolist()
        if np.isfinite(flat[index])
    ]


def _composed(
    step: SegmentedStep,
    kept: Sequence[Sequence[Combination]],
    measured_s: Sequence[Mapping[Options, float]],
    index: int,
    seconds: np.ndarray,
    memory: np.ndarray,
) -> Composed:
    place = np.unravel_index(index, seconds.shape)
    chosen = [some[int(p)] for some, p in zip(kept, place, strict=True)]
    known_s = sum(step.kinds[k].count * measured_s[k].get(c.options, 0.0) for k, c in enumerate(chosen))
    total_s = float(seconds[place])
    return Composed(
        options=tuple([c.options for c in chosen]),
        seconds=total_s,
        memory_bytes=float(memory[place]),
        measured_share=known_s / total_s if total_s else 0.0,
    )


def _seconds(combination: Combination, measured_s: Mapping[Options, float]) -> float:
    return measured_s.get(combination.options, combination.seconds)


def _undominated(some: Sequence[Combination], measured_s: Mapping[Options, float]) -> list[Combination]:
    """Combinations to which no other with the same boundary is better in time and in memory."""
    groups: dict[tuple[object, ...], list[Combination]] = {}
    for c in sorted(some, key=lambda c: (_seconds(c, measured_s), c.options)):
        group = groups.setdefault((tuple(sorted(c.enters.items())), tuple(sorted(c.leaves.items()))), [])
        held = c.state_bytes + c.kept_bytes
        if not any(o.state_bytes + o.kept_bytes <= held and o.working_bytes <= c.working_bytes for o in group):
            group.append(c)
    return [c for group in groups.values() for c in group]


def _resharding_s(step: SegmentedStep, before: Combination, after: Combination) -> float:
    """Seconds to bring what crosses between two segments, forward and backward, from the split of one to that of the other."""
    total_s = 0.0
    for leaves, enters, is_backward in ((before.leaves, after.enters, False), (after.leaves, before.enters, True)):
        for crossing, source in leaves.items():
            target = enters.get(crossing)
            if crossing.is_backward == is_backward and target is not None and target != source:
                total_s += resharding_seconds(source, target, crossing.num_bytes, step.mesh)
    return total_s
