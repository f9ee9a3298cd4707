"""Measurement of the programs of segments and of single operators, and what a database knows of a
step.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import MEASURED
from ..core import InputError
from ..cost import resharding_seconds
from ..planners import Progress
from ._compose import MeasuredStep
from ._conversions import LAUNCH, all_conversions, compile_conversion, conversion_key
from ._database import Measurement, ProfileDatabase, ProgramKey
from ._operators import Operator, compile_operator, operator_key
from ._programs import CompiledPart, compile_part, measure_in_turn, program_key
from ._segments import Combination, SegmentedStep
from ._timing import Timing, time_part
from ._together import from_all, from_first, leads, raised_in_all, say_if_lost


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """Outcome of a run of measurements.

    Attributes:
        num_programs: programs that this run was to have measurements of.
        num_measured: those that it measured.
        num_known: those that were in the database before.
        failures: programs that failed, each with the error. They count as measured, and the next
            run tries them again.
    """

    num_programs: int
    num_measured: int
    num_known: int
    seconds: float
    failures: tuple[str, ...] = ()

    @property
    def num_missing(self) -> int:
        """Number of programs that it did not reach within its budget."""
        return self.num_programs - self.num_measured - self.num_known


def priced_combinations(step: SegmentedStep) -> list[list[Combination]]:
    """For each kind of segment, its possible combinations, or the most promising of very many, with
    their costs by the cost model.
    """
    return [kind.promising() for kind in step.kinds]


def measured_step(
    step: SegmentedStep, combinations: Sequence[Sequence[Combination]], database: ProfileDatabase
) -> MeasuredStep:
    """The measurements of a step's segments and conversions that a database holds."""
    mesh_shape, kinds = step.mesh.shape, []
    for kind, some in zip(step.kinds, combinations, strict=True):
        known = {}
        for c in some:
            measurement = database.get(program_key(kind.problem.graph, c.choices, mesh_shape))
            if measurement is not None:
                known[c.options] = math.inf if measurement.seconds is None else measurement.seconds
        kinds.append(known)
    conversions = {}
    for conversion in all_conversions(step, combinations):
        measurement = database.get(conversion_key(conversion, mesh_shape))
        if measurement is not None and measurement.seconds is not None:
            conversions[conversion] = measurement.seconds
    launch_s = conversions.pop(LAUNCH, 0.0)
    ratios = []
    for known, some in zip(kinds, combinations, strict=True):
        pairs = [(c.seconds, known[c.options]) for c in some if c.options in known]
        ratios.append(_ratios(pairs, launch_s))
    of_all = _median(list(itertools.chain(*ratios)), 1.0)
    sizes: dict[tuple[tuple[int, ...], str], float] = {}
    for crossing in itertools.chain(*step.crossings.values()):
        sizes.setdefault((crossing.shape, crossing.dtype), crossing.num_bytes)
    pairs = []
    for conversion, known_s in conversions.items():
        source, target = conversion.source, conversion.target
        num_bytes = sizes[conversion.shape, conversion.dtype]
        pairs.append((resharding_seconds(source, target, num_bytes, step.mesh), known_s))
    return MeasuredStep(
        kinds=tuple(kinds),
        conversions=conversions,
        launch_s=launch_s,
        corrections=tuple(_median(some, of_all) for some in ratios),
        conversion_correction=_median(_ratios(pairs, launch_s), 1.0),
    )


def _ratios(pairs: Sequence[tuple[float, float]], launch_s: float) -> list[float]:
    """Ratios of measured to modelled time of the programs that ran.

    Args:
        pairs: modelled and measured seconds; the latter infinite for programs that ran out of
            memory.
    """
    return [
        max(measured_s - launch_s, 0.0) / modelled_s
        for modelled_s, measured_s in pairs
        if math.isfinite(measured_s) and modelled_s > 0
    ]


def _median(values: Sequence[float], otherwise: float) -> float:
    return float(np.median(values)) if values else otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A program to measure. Programs of one group do the same work, and the slow ones among them
    are not repeated (`Timing.early_stop`).

    Attributes:
        evicts: as in `time_part`.
        grade: stored with its measurement.
    """

    group: int
    key: ProgramKey
    compile: Callable[[], CompiledPart]
    evicts: bool = False
    grade: str = MEASURED


def _jobs(step: SegmentedStep, combinations: Sequence[Sequence[Combination]]) -> list[_Job]:
    """All programs of a step: those of each kind of segment, the most promising first, and then the
    conversions between segments.
    """
    shape, names = step.mesh.shape, step.mesh.axis_names
    jobs = []
    for k, (kind, some) in enumerate(zip(step.kinds, combinations, strict=True)):
        for c in sorted(some, key=lambda c: c.seconds):
            label = f"{kind.name} {list(c.options)}"
            build = functools.partial(
                compile_part, kind.problem, c.choices, shape, names, label=label
            )
            jobs.append(
                _Job(group=k, key=program_key(kind.problem.graph, c.choices, shape), compile=build)
            )
    for number, conversion in enumerate(all_conversions(step, combinations)):
        build = functools.partial(compile_conversion, conversion, shape, names)
        jobs.append(
            _Job(
                group=len(step.kinds) + number, key=conversion_key(conversion, shape), compile=build
            )
        )
    return jobs


def profile_segments(
    step: SegmentedStep,
    database: ProfileDatabase | None,
    combinations: Sequence[Sequence[Combination]] | None = None,
    *,
    share: tuple[int, int] = (1, 1),
    timing: Timing | None = None,
    budget_s: float = math.inf,
    progress: Progress | None = None,
) -> ProfileRun:
    """Measure the programs of a step's segments that a database does not hold yet, the most
    promising first. Each measurement is stored at once.

    Where several processes work together, all must call this, and each runs its part of every
    program. Process 0 alone has the database.

    Args:
        database: where measurements are kept; None in other processes than process 0.
        combinations: of each kind of segment; by default those of `priced_combinations`.
        share: with `(k, n)` only every n-th program is measured, starting with the k-th: the part
            of one of n hosts.
        timing: how often each program runs.
        budget_s: no program is begun after this many seconds.
        progress: told how many programs have measurements.

    Raises:
        InputError: the database cannot be written.
    """
    return _run_jobs(
        _jobs(step, priced_combinations(step) if combinations is None else combinations),
        database,
        share=share,
        timing=timing or Timing(),
        budget_s=budget_s,
        progress=progress,
    )


def profile_operators(
    operators: Sequence[tuple[Operator, tuple[int, ...]]],
    database: ProfileDatabase | None,
    *,
    share: tuple[int, int] = (1, 1),
    timing: Timing | None = None,
    budget_s: float = math.inf,
    grade: str = MEASURED,
    progress: Progress | None = None,
) -> ProfileRun:
    """Measure the operators that a database does not hold yet, in the order given. Each measurement
    is stored at once.

    Args:
        operators: each with the mesh to run it on; see `required_operators`.
        database: as in `profile_segments`, also with several processes.
        share, timing, budget_s, progress: as in `profile_segments`. No two operators do the same
            work, so none is stopped early.
        grade: stored with each measurement; `MEASURED_COMPUTE` if one device alone stands for many.

    Raises:
        InputError: the database cannot be written.
    """
    jobs = [
        _Job(
            group=number,
            key=operator_key(operator, shape),
            compile=functools.partial(compile_operator, operator, shape),
            evicts=True,
            grade=grade,
        )
        for number, (operator, shape) in enumerate(operators)
    ]
    return _run_jobs(
        jobs,
        database,
        share=share,
        timing=timing or Timing(),
        budget_s=budget_s,
        progress=progress,
    )


def _run_jobs(
    jobs: Sequence[_Job],
    database: ProfileDatabase | None,
    *,
    share: tuple[int, int],
    timing: Timing,
    budget_s: float,
    progress: Progress | None,
) -> ProfileRun:
    start, (number, of) = time.perf_counter(), share
    # Every n-th program, not a block of them, so that all hosts begin with the most promising.
    jobs = jobs[number - 1 :: of]
    held = _held(jobs, database)
    missing = [job for job, found in zip(jobs, held, strict=True) if found is None]
    known, best_s = len(jobs) - len(missing), defaultdict[int, float](lambda: math.inf)
    report = progress or (lambda what, done, of: None)

    def note(job: _Job, seconds: float | None) -> None:
        if seconds is not None:
            best_s[job.group] = min(best_s[job.group], seconds)

    for job, seconds in zip(jobs, held, strict=True):
        note(job, seconds)

    def to_compile() -> Iterator[Callable[[], CompiledPart]]:
        for job in missing:
            # Clocks differ: process 0 decides.
            if budget_s < math.inf and from_first(time.perf_counter() - start > budget_s, bool):
                return
            yield job.compile

    measured = 0
    failures: list[str] = []

    def time_one(part: CompiledPart) -> Measurement:
        say_if_lost(part.label)
        job = missing[measured]
        return time_part(part, timing, best_s=best_s[job.group], evicts=job.evicts)

    report("measuring programs", known, len(jobs))
    for measurement in measure_in_turn(to_compile(), time_one):
        job = missing[measured]
        # Stored at once, so that a run that is killed loses nothing that it has measured.
        with raised_in_all():
            if database is not None and leads():
                database.put(job.key, replace(measurement, grade=job.grade))
        note(job, measurement.seconds)
        measured += 1
        if measurement.has_failed:
            failures.append(f"{measurement.label} {measurement.outcome}")
        report(f"measured {measurement.label}", known + measured, len(jobs))
    return ProfileRun(
        num_programs=len(jobs),
        num_measured=measured,
        num_known=known,
        seconds=time.perf_counter() - start,
        failures=tuple(failures),
    )


def _held(jobs: Sequence[_Job], database: ProfileDatabase | None) -> list[float | None]:
    """For each program the seconds that process 0's database has, infinite if it does not fit in
    memory, and None if it is to be measured.

    Raises:
        InputError: the database cannot be read, or the processes have different programs.
    """
    lists = from_all(
        hashlib.sha256(repr([job.key.program for job in jobs]).encode()).hexdigest(), str
    )
    if len(set(lists)) > 1:
        other = next(k for k, one in enumerate(lists) if one != lists[0])
        raise InputError(
            f"processes 0 and {other} would measure different programs, so nothing was measured:"
            " give all the same model, options and kind of machine."
        )
    held: list[float | None] = []
    with raised_in_all():
        if database is not None and leads():
            found = [database.get(job.key) for job in jobs]
            held = [None if m is None or m.has_failed else m.seconds or math.inf for m in found]
    return from_first(held, list[float | None])
