"""Measure the programs of all segments, and read what is known of them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..planners import Progress
from ._database import Measurement, ProfileDatabase
from ._programs import CompiledPart, compile_part, measure_in_turn, program_key, time_part
from ._segments import Combination, Options, SegmentedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """How far a run came: how many programs it had to do, and what became of them."""

    num_programs: int
    num_measured: int
    num_known: int
    seconds: float

    @property
    def num_missing(self) -> int:
        """Programs that it did not come to."""
        return self.num_programs - self.num_measured - self.num_known


def priced_combinations(step: SegmentedStep) -> list[list[Combination]]:
    """For each kind of segment all combinations that can be split so, with what the cost model says of them."""
    return [[c for options in kind.combinations() if (c := kind.combination(options))] for kind in step.kinds]


def measured_seconds(
    step: SegmentedStep, combinations: Sequence[Sequence[Combination]], database: ProfileDatabase
) -> list[dict[Options, float]]:
    """For each kind the seconds of the combinations that were measured; infinite for what ran out of memory."""
    found: list[dict[Options, float]] = []
    for kind, some in zip(step.kinds, combinations, strict=True):
        known = {}
        for c in some:
            measurement = database.get(program_key(kind.problem.graph, c.choices, step.mesh.shape))
            if measurement is not None:
                known[c.options] = math.inf if measurement.seconds is None else measurement.seconds
        found.append(known)
    return found


def profile_segments(
    step: SegmentedStep,
    database: ProfileDatabase,
    *,
    share: tuple[int, int] = (1, 1),
    repeats: int = 5,
    warm_up: int = 2,
    stops_early: bool = True,
    budget_s: float = math.inf,
    progress: Progress | None = None,
) -> ProfileRun:
    """Measure what a database does not hold yet, most promising first; each measurement is kept at once.

    Args:
        share: `(k, n)` measures every n-th program from the k-th on, as one of n hosts.
        repeats, warm_up: see `time_part`.
        stops_early: whether programs half again as slow as the best of their segment are not
            repeated.
        budget_s: no program is begun after so long.
        progress: told how many are known.

    Raises:
        InputError: the database cannot be written.
    """
    start, (number, of) = time.perf_counter(), share
    programs = [
        (k, c) for k, some in enumerate(priced_combinations(step)) for c in sorted(some, key=lambda c: c.seconds)
    ][number - 1 :: of]
    keys = [program_key(step.kinds[k].problem.graph, c.choices, step.mesh.shape) for k, c in programs]
    held = [database.get(key) for key in keys]
    missing = [place for place, measurement in enumerate(held) if measurement is None]
    known, best_s = len(programs) - len(missing), [math.inf] * len(step.kinds)
    report = progress or (lambda what, done, of: None)

    def note(kind: int, measurement: Measurement) -> None:
        if measurement.seconds is not None:
            best_s[kind] = min(best_s[kind], measurement.seconds)

    for (kind, _), measurement in zip(programs, held, strict=True):
        if measurement is not None:
            note(kind, measurement)

    def jobs() -> Iterator[Callable[[], CompiledPart]]:
        for place in missing:
            if time.perf_counter() - start > budget_s:
                return
            kind, c = step.kinds[programs[place][0]], programs[place][1]
            label = f"{kind.name} {list(c.options)}"
            yield functools.partial(
                compile_part, kind.problem, c.choices, step.mesh.shape, step.mesh.axis_names, label=label
            )

    measured = 0

    def time_one(part: CompiledPart) -> Measurement:
        best = best_s[programs[missing[measured]][0]] if stops_early else math.inf
        return time_part(part, warm_up=warm_up, repeats=repeats, best_s=best)

    report("measuring programs", known, len(programs))
    for measurement in measure_in_turn(jobs(), time_one):
        place = missing[measured]
        database.put(keys[place], measurement)
        note(programs[place][0], measurement)
        measured += 1
        report(f"measured {measurement.label}", known + measured, len(programs))
    return ProfileRun(
        num_programs=len(programs), num_measured=measured, num_known=known, seconds=time.perf_counter() - start
    )
