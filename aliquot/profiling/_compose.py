"""Time and memory of a whole step from those of its segments.

The time is the sum of the segments' times and of the conversions between neighbours. The memory is
the sum of what all segments hold (parameters, optimizer state, residuals for the backward pass)
and the largest working memory of any segment. Every measurement includes the launch of a program,
which counts once for the step. Parts that were not measured have times by the cost model,
multiplied by the median ratio of measured to modelled time of the same kind: otherwise an
optimistic model would favour parts that nobody has measured.

Reference: arXiv 2504.00598, whose memory is the sum of everything; here the working memory of
segments counts once, because only one segment runs at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import resharding_seconds
from ._conversions import Conversion, conversions_between
from ._segments import Combination, Options, SegmentedStep

# The most ways to choose one combination for each kind of segment that are compared.
_MOST = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """Measurements of the programs of a step.

    Attributes:
        kinds: for each kind of segment, the seconds of its combinations; infinite for those that
            ran out of memory.
        conversions: seconds of converting arrays that cross between segments.
        launch_s: seconds of a program that does nothing, which all other measurements include.
        corrections: for each kind of segment, the median ratio of measured to modelled time, by
            which times of combinations that were not measured are multiplied; empty for no
            correction.
        conversion_correction: the same ratio for conversions.
    """

    kinds: tuple[Mapping[Options, float], ...]
    conversions: Mapping[Conversion, float]
    launch_s: float = 0.0
    corrections: tuple[float, ...] = ()
    conversion_correction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One way to split a whole step, the same for all segments of a kind.

    Attributes:
        options: for each kind of segment, the options of its blocks.
        seconds, memory_bytes: step time and memory of each device, composed from the segments.
        measured_share: the share of the time that was measured.
    """

    options: tuple[Options, ...]
    seconds: float
    memory_bytes: float
    measured_share: float


def compose(
    step: SegmentedStep,
    combinations: Sequence[Sequence[Combination]],
    measured: MeasuredStep | None = None,
    *,
    memory_limit_bytes: float = math.inf,
    most: int = 10,
) -> list[Composed]:
    """The fastest ways to split a whole step that fit in memory, best first.

    Args:
        step: the step with its kinds of segment.
        combinations: for each kind of segment, those that may be chosen.
        measured: what was measured; the cost model supplies the rest.
        most: how many to return.
    """
    known = _WithoutLaunch(step, measured)
    kept = []
    for k, some in enumerate(combinations):
        kept.append(_undominated(some, functools.partial(known.seconds, k)))
    while math.prod(map(len, kept)) > _MOST:
        # If even these are too many, the slower half of the longest list is dropped.
        longest = max(range(len(kept)), key=lambda k: len(kept[k]))
        by_time = sorted(kept[longest], key=lambda c: known.seconds(longest, c)[0])
        kept[longest] = by_time[: len(by_time) // 2]
    shape = list(map(len, kept))
    seconds, of_it_measured = np.full(shape, known.launch_s), np.full(shape, known.launch_s)
    held, working = np.zeros(shape), np.zeros(shape)
    for k, some in enumerate(kept):
        count, along = step.kinds[k].count, [1] * len(kept)
        along[k] = len(some)

        def spread(values: list[float], along: list[int] = along) -> np.ndarray:
            return np.array(values, np.float64).reshape(along)

        times = [known.seconds(k, c) for c in some]
        seconds = seconds + count * spread([t for t, _ in times])
        of_it_measured = of_it_measured + count * spread([m for _, m in times])
        # Memory that is held adds up over segments; of their working memory the largest counts.
        held = held + count * spread([c.state_bytes + c.kept_bytes for c in some])
        working = np.maximum(working, spread([c.working_bytes for c in some]))
    for (a, b), count in Counter(itertools.pairwise(step.sequence)).items():
        along = [1] * len(kept)
        along[a], along[b] = len(kept[a]), len(kept[b])
        # All segments of a kind are split alike, so neighbours of one kind share one choice.
        if a == b:
            table = np.array([known.between((a, b), p, p) for p in kept[a]])
        else:
            pairs = itertools.product(kept[a], kept[b])
            table = np.array([known.between((a, b), p, q) for p, q in pairs])
            table = table.reshape(len(kept[a]), len(kept[b]), 2)
        if a > b:
            table = table.swapaxes(0, 1)
        seconds = seconds + count * table[..., 0].reshape(along)
        of_it_measured = of_it_measured + count * table[..., 1].reshape(along)
    memory = held + working
    flat = np.where(memory <= memory_limit_bytes, seconds, np.inf).ravel()
    order = np.argsort(flat, kind="stable")[:most]
    found = []
    for index in order[np.isfinite(flat[order])].tolist():
        places = zip(kept, np.unravel_index(index, shape), strict=True)
        total_s, measured_s = float(seconds.flat[index]), float(of_it_measured.flat[index])
        found.append(
            Composed(
                options=tuple([some[int(p)].options for some, p in places]),
                seconds=total_s,
                memory_bytes=float(memory.flat[index]),
                measured_share=measured_s / total_s if total_s else 0.0,
            )
        )
    return found


class _WithoutLaunch:
    """Seconds of the parts of a step without the launch of a program. Each method returns all
    seconds, and those of them that were measured.
    """

    def __init__(self, step: SegmentedStep, measured: MeasuredStep | None) -> None:
        self._step, self._measured = step, measured
        self._modelled_s: dict[Conversion, float] = {}
        self.launch_s = measured.launch_s if measured else 0.0

    def seconds(self, kind: int, combination: Combination) -> tuple[float, float]:
        """Seconds of a segment."""
        known_s = self._measured.kinds[kind].get(combination.options) if self._measured else None
        if known_s is None:
            corrections = self._measured.corrections if self._measured else ()
            return combination.seconds * (corrections[kind] if corrections else 1.0), 0.0
        return self._net(known_s)

    def between(
        self, kinds: tuple[int, int], before: Combination, after: Combination
    ) -> tuple[float, float]:
        """Seconds of converting the arrays that cross between two segments, forward and backward,
        from the splits of one to those of the other.
        """
        total_s = measured_s = 0.0
        for crossing, conversion in conversions_between(self._step.crossings[kinds], before, after):
            known_s = self._measured.conversions.get(conversion) if self._measured else None
            if known_s is not None:
                net_s, _ = self._net(known_s)
                total_s, measured_s = total_s + net_s, measured_s + net_s
                continue
            if conversion not in self._modelled_s:
                source, target, mesh = conversion.source, conversion.target, self._step.mesh
                self._modelled_s[conversion] = resharding_seconds(
                    source, target, crossing.num_bytes, mesh
                )
            correction = self._measured.conversion_correction if self._measured else 1.0
            total_s += self._modelled_s[conversion] * correction
        return total_s, measured_s

    def _net(self, known_s: float) -> tuple[float, float]:
        # Measurements scatter: one may be shorter than a bare launch.
        net_s = max(known_s - self.launch_s, 0.0)
        return net_s, net_s


def _undominated(
    some: Sequence[Combination], seconds: Callable[[Combination], tuple[float, float]]
) -> list[Combination]:
    """The combinations that are not dominated: no other with the same splits at the boundary is as
    good or better in time and in memory.
    """
    groups: dict[tuple[object, ...], list[Combination]] = {}
    # Fastest first: one that is kept later must need less memory than all before it.
    for c in sorted(some, key=lambda c: (seconds(c)[0], c.options)):
        ends = tuple(sorted(c.enters.items())), tuple(sorted(c.leaves.items()))
        group, held = groups.setdefault(ends, []), c.state_bytes + c.kept_bytes
        if not any(
            o.state_bytes + o.kept_bytes <= held and o.working_bytes <= c.working_bytes
            for o in group
        ):
            group.append(c)
    return list(itertools.chain(*groups.values()))
