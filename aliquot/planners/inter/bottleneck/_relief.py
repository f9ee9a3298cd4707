"""Relief of the bottleneck: from balanced stages on, a move gives the stage that is slowest, or
that needs too much memory, less work or more devices; several moves in a row (hops) need not
improve.

All candidates of a hop are quoted at once. The search has no clock, and is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ....cost import ChainPlan, StageChoice, judge_stages
from ....plans import schedule_kind
from .._base import proposed
from ._moves import Candidate, Floats, Ints, Neighbours

_MOST_PUSHED = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """The figures of a candidate. Candidates are ordered by memory beyond the limit, then by time.

    Attributes:
        excess_bytes: memory beyond the limit, of the stage that needs most; infinite if a stage
            cannot be run.
        step_s: closed form of its schedule; where transfers keep both ends busy, they are counted
            at both.
        stage_s, stage_bytes: time of one micro-batch, and memory, of each stage.
    """

    excess_bytes: float
    step_s: float
    stage_s: Floats
    stage_bytes: Floats

    @property
    def key(self) -> tuple[float, float]:
        return self.excess_bytes, self.step_s


InFlight = Callable[[Candidate], Sequence[float]]
"""The most micro-batches in flight in each stage of a candidate."""


class Relief:
    """The search, and the scores of all candidates that it has seen.

    Args:
        around: the chains, and the moves over them.
        in_flight: by default what the schedule keeps.
    """

    def __init__(self, around: Neighbours, *, in_flight: InFlight | None = None) -> None:
        self.scores: dict[Candidate, Score] = {}
        self._around = around
        self._in_flight = in_flight or self._kept

    def run(
        self,
        *,
        starts: int,
        max_steps: int,
        max_hops: int,
        begun: Sequence[Candidate] = (),
        tell: Callable[[], None] = lambda: None,
    ) -> bool:
        """Relieve bottlenecks; true if nothing is left to relieve, false at the limit of steps.

        Args:
            starts: number of balanced candidates to begin with, the best of different variants or
                numbers of devices.
            begun: other candidates to begin with.
            tell: called after each row of hops.
        """
        self._score([*self._around.balanced(), *begun])
        expanded: set[Candidate] = set()
        # A heap with the best candidate first; those that hops reach besides the best are added.
        first = dict.fromkeys([*self.spread(self.ranked(), starts), *begun])
        pool = [(self.scores[c].key, k, c) for k, c in enumerate(first)]
        heapq.heapify(pool)
        steps, order = 0, len(pool)
        while pool and steps < max_steps:
            _, _, at = heapq.heappop(pool)
            for _ in range(max_hops):
                if at in expanded or steps >= max_steps:
                    break
                expanded.add(at)
                steps += 1
                reached = [c for c in self._relieved(at) if c not in expanded]
                if not reached:
                    break
                reached.sort(key=lambda c: self.scores[c].key)
                for other in reached[1 : 1 + _MOST_PUSHED]:
                    order += 1
                    heapq.heappush(pool, (self.scores[other].key, order, other))
                at = reached[0]
            tell()
        return not pool

    def ranked(self) -> list[Candidate]:
        """All candidates, the best first."""
        return sorted(self.scores, key=lambda candidate: self.scores[candidate].key)

    def spread(self, ranked: Sequence[Candidate], count: int) -> list[Candidate]:
        """The best candidates, one for each combination of variant and numbers of devices of the
        stages.
        """
        chosen: dict[object, Candidate] = {}
        for candidate in ranked:
            chosen.setdefault((candidate.variant, self._around.layout(candidate)), candidate)
            if len(chosen) >= count:
                break
        return list(chosen.values())

    def judged(self, candidate: Candidate) -> ChainPlan:
        """A candidate's stages with the figures of the judge."""
        variant = self._around.variants[candidate.variant]
        return judge_stages(
            variant.chain,
            self.proposed(candidate),
            variant.schedule,
            num_submeshes=candidate.num_submeshes,
        )

    def proposed(self, candidate: Candidate) -> list[StageChoice]:
        """A candidate's stages as its chain proposes them, within the memory limit if possible."""
        chain = self._around.variants[candidate.variant].chain
        _, first, last, devices = self._columns([candidate])
        stages = []
        for option, i, j, device, kept in zip(
            candidate.options,
            first[0].tolist(),
            last[0].tolist(),
            devices[0].tolist(),
            self._in_flight(candidate),
            strict=True,
        ):
            chunks = len(candidate.options) // candidate.num_submeshes
            choice = proposed(
                chain, option, i, j, first_device=device, in_flight=kept, chunks=chunks
            )
            assert choice is not None, "stages that cannot be run are not among the candidates"
            stages.append(choice)
        return stages

    def _columns(self, group: Sequence[Candidate]) -> tuple[Ints, Ints, Ints, Ints]:
        """[C, S] each: options, first units, last units and first devices of candidates with the
        same variant and numbers of stages and submeshes.
        """
        variant, num_submeshes = self._around.variants[group[0].variant], group[0].num_submeshes
        options = np.array([c.options for c in group], np.int64)
        last = np.cumsum([c.units for c in group], axis=1)
        first = np.concatenate((np.zeros_like(last[:, :1]), last[:, :-1]), axis=1)
        sizes = variant.chain.device_counts()[options]
        devices = np.cumsum(sizes, axis=1) - sizes
        if num_submeshes < options.shape[1]:
            placement = schedule_kind(variant.schedule).placement(options.shape[1], num_submeshes)
            devices = devices[:, list(placement)]
        return options, first, last, devices

    def _relieved(self, at: Candidate) -> list[Candidate]:
        """Candidates that one move of the worst stage leads to; if there are none, of the second
        worst.
        """
        score = self.scores[at]
        too_large = score.excess_bytes > 0
        figures = score.stage_bytes if too_large else score.stage_s
        for worst in np.argsort(figures)[::-1][:2].tolist():
            candidates = self._around.reached(at, worst, relieves_memory=too_large)
            self._score(candidates)
            if candidates:
                return candidates
        return []

    def _kept(self, candidate: Candidate) -> Sequence[float]:
        variant = self._around.variants[candidate.variant]
        return schedule_kind(variant.schedule).in_flight(
            len(candidate.options), variant.chain.num_micro_batches, candidate.num_submeshes
        )

    def _score(self, candidates: Sequence[Candidate]) -> None:
        """Score the candidates that have no score yet, those of one shape together."""
        alike: dict[tuple[int, int, int], list[Candidate]] = {}
        for c in dict.fromkeys(candidates):
            if c not in self.scores:
                alike.setdefault((c.variant, len(c.options), c.num_submeshes), []).append(c)
        found: dict[Candidate, Score] = {}
        for group in alike.values():
            found |= zip(group, self._scored(group), strict=True)
        # In the order in which they came, whatever their shape: equal scores rank by it.
        self.scores |= {c: found[c] for c in candidates if c in found}

    def _scored(self, group: Sequence[Candidate]) -> list[Score]:
        """Scores of candidates with the same variant and numbers of stages and submeshes."""
        first = group[0]
        variant, num_stages = self._around.variants[first.variant], len(first.options)
        chain, kind = variant.chain, schedule_kind(variant.schedule)
        count, chunks = chain.num_micro_batches, num_stages // first.num_submeshes
        options, begins, ends, devices = self._columns(group)
        quoted = chain.quote_many(
            options,
            begins,
            ends,
            first_device=devices,
            in_flight=self._in_flight(first),
            chunks=chunks,
        )
        edges = quoted.transfer_s
        form = kind.closed_form(quoted, count, chunks)
        step_s = form.total_s(edges, overlaps=chain.overlaps_transfers)
        stage_s = quoted.forward_s + quoted.backward_s
        if not chain.overlaps_transfers:
            received = stage_s + 2 * edges
            stage_s = received.copy()
            stage_s[:, :-1] += 2 * edges[:, 1:]
            if chunks == 1:
                step_s = step_s + (count - 1) * (stage_s.max(axis=1) - received.max(axis=1))
        peak_bytes = quoted.peak_bytes.max(axis=1)
        excess = np.maximum(peak_bytes - chain.memory_limit_bytes, 0.0)
        rows = zip(excess.tolist(), step_s.tolist(), stage_s, quoted.peak_bytes, strict=True)
        found = []
        for over, seconds, times, needs in rows:
            found.append(Score(excess_bytes=over, step_s=seconds, stage_s=times, stage_bytes=needs))
        return found
