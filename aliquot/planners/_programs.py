"""Families of plans that are one program without stages, with a number of micro-batches: often
fewer and larger ones than a pipeline needs.

With more micro-batches, a program gathers split parameters and launches kernels more often, but
needs less memory. Prices of single layers show neither, so programs are solved as a whole.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core import CaptureError, InfeasibleError, InputError, divisors
from ..cost import Chain, Problem
from ._base import Decision, Interrupted, Progress, Task, TooSlowError
from ._counts import batch_size, program_counts
from ._quick_bounds import cannot_fit, is_too_large
from ._race import RaceInParts, finished
from ._search import AbstractFamily, Search

if TYPE_CHECKING:
    from ._method import AbstractMethod
    from ._methods import ShardParallel

# At most so many numbers of micro-batches are tried.
_MOST_PROGRAMS = 6
# After so many programs that are slower than a pipeline, the next mostly is slower, too.
_MOST_SLOW = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Programs(AbstractFamily):
    """The step as one program, in the first of some numbers of micro-batches and then in others.

    Every micro-batch repeats collectives, and the only gain of more of them is memory. So the
    search ends at the first program that fits and is no faster than one with fewer micro-batches.
    Where a program does not fit, the next has as many micro-batches as a simple plan that does, or
    at least twice as many; numbers that were passed over are tried once one fits. Where no simple
    plan fits but another plan is known to, more micro-batches are not tried to make a program fit.

    Where memory makes the search of a program long, it pauses once all meshes are bounded. It goes
    on when no other family promises anything, and what these have found then limits it.

    Attributes:
        counts: the numbers of micro-batches that are left, in rising order; the first is opened.
        passed: numbers below the first that were passed over, since they have less than twice as
            many micro-batches as a program that does not fit.
        most_programs: so many numbers of micro-batches are tried at most.
        simple: finds a simple plan of the task in the fewest micro-batches in which one fits.
        is_simple: whether a simple plan is known to fit in the first number.
        in_order: whether every number is tried, and the first that fits is the last.
        until_fits: whether the first that fits is the last.
        pauses: whether a long search pauses.
        fits_elsewhere: whether a plan is known to fit that is not in this search, such as one of
            the step built in another way.
        before_s: the least that a program with fewer micro-batches takes; infinite if none fits.
        num_tried, num_slow: how many programs were tried, and how many of these take longer than a
            plan of another family.
    """

    task: Task
    method: AbstractMethod
    counts: Sequence[int]
    passed: Sequence[int] = ()
    most_programs: int | None = _MOST_PROGRAMS
    simple: Callable[[], Decision | None] | None = None
    is_simple: bool = False
    in_order: bool = False
    until_fits: bool = False
    pauses: bool = False
    fits_elsewhere: bool = False
    expected_s: float = 0.0
    before_s: float = math.inf
    num_tried: int = 0
    num_slow: int = 0

    @classmethod
    def of(
        cls,
        task: Task,
        method: AbstractMethod,
        asked: int | None,
        *,
        fewest: int = 1,
        **settings: Any,
    ) -> Programs:
        """The programs in the number of micro-batches that is asked for, or in any number.

        Args:
            fewest: the least number, of which the others are multiples.
            settings: other attributes.
        """
        counts = [asked or fewest]
        if asked is None:
            every = program_counts(task.graph, task.cluster.num_devices)
            counts += [n for n in every if n > fewest and n % fewest == 0]
        return cls(task=task, method=method, counts=counts, **settings)

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        to_beat_s = search.to_beat_s(self.task)
        is_known = self.fits_elsewhere or search.best is not None
        only_to_fit = self.num_tried and math.isinf(self.before_s)
        if only_to_fit and is_known and not (self.is_simple or self.in_order):
            return ()
        num_slow = self.num_slow + (to_beat_s < self.before_s < math.inf)
        if num_slow == _MOST_SLOW:
            return ()
        trying = replace(self, num_tried=self.num_tried + 1, num_slow=num_slow)
        try:
            problem = self.task.problem(self.counts[0])
        except (InputError, CaptureError):
            if self.num_tried:
                return trying._without_multiples(search)
            raise
        if cannot_fit(problem):
            return trying._with_more(search, math.inf)
        race = self.method.race(
            problem, self.task.progress, faster_than_s=to_beat_s, pauses=self.pauses
        )
        return trying.go_on(search, race, None)

    def go_on(
        self, search: Search, race: RaceInParts, faster_than_s: float | None
    ) -> Iterable[AbstractFamily]:
        """Take the race to its next pause, or to its end."""
        try:
            unfinished = next(race) if faster_than_s is None else race.send(faster_than_s)
        except StopIteration as end:
            found: Decision = end.value
            search.add(found, self.task)
            return self._with_more(search, found.step_time_s)
        except TooSlowError as error:
            search.refusals.append((self, error))
            slow = replace(self, num_slow=self.num_slow + 1)
            return slow._with_more(search, search.to_beat_s(self.task))
        except InfeasibleError as error:
            search.refusals.append((self, error))
            return self._with_more(search, math.inf)
        except InputError:
            if self.num_tried > 1:
                return self._without_multiples(search)
            raise
        except Interrupted as interrupted:
            if interrupted.decision is not None:
                search.add(interrupted.decision, self.task)
            raise
        if unfinished is not None:
            search.add(unfinished, self.task)
        return (_PausedProgram(task=self.task, of=self, race=race),)

    def _with_more(self, search: Search, step_time_s: float) -> Iterable[AbstractFamily]:
        """The programs with more micro-batches, unless the last was no faster than those before."""
        count, *others = self.counts
        fits = math.isfinite(step_time_s)
        if self.num_tried == self.most_programs or (fits and step_time_s >= self.before_s):
            return ()
        tried = replace(self, pauses=False, before_s=min(self.before_s, step_time_s))
        following = []
        if fits and self.passed:
            following.append(replace(tried, counts=self.passed, passed=(), in_order=True))
        if fits and (self.in_order or self.until_fits):
            return following
        enough = count + 1 if self.in_order else 2 * count
        expected_s, is_simple = search.to_beat_s(self.task), False
        if not fits and not self.is_simple and (known := self._simple_plan()):
            # In fewer micro-batches no simple plan fits.
            enough, expected_s, is_simple = known.num_micro_batches, known.step_time_s, True
        more = [n for n in others if n >= enough]
        passed = [] if fits or is_simple else [n for n in others if n < enough and n > count]
        if more:
            tried = replace(tried, counts=more, passed=passed, is_simple=is_simple)
            following.append(replace(tried, expected_s=expected_s))
        return following

    def _simple_plan(self) -> Decision | None:
        """The simple plan, if each device has a row of its micro-batches: one whose devices share
        rows says little of programs with fewer and larger ones.
        """
        known = self.simple() if self.simple else None
        if known is None:
            return None
        rows = batch_size(self.task.graph) // known.num_micro_batches
        return known if rows >= self.task.cluster.num_devices else None

    def _without_multiples(self, search: Search) -> Iterable[AbstractFamily]:
        """The programs with other micro-batches, once the step cannot be cut into the first number:
        then it cannot be cut into any multiple of it either.
        """
        count, *others = self.counts
        kept = [n for n in others if n % count]
        expected_s = search.to_beat_s(self.task)
        return (replace(self, counts=kept, pauses=False, expected_s=expected_s),) if kept else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class _PausedProgram(AbstractFamily):
    """A program whose search goes on when no other family promises anything."""

    task: Task
    of: Programs
    race: RaceInParts

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        return self.of.go_on(search, self.race, search.to_beat_s(self.task))


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProgram:
    """An estimate of a step as one program on all devices: the mesh on which its layers take the
    least time in total, and that time (`least_s`), without a memory limit.
    """

    mesh_shape: tuple[int, ...]
    num_micro_batches: int
    least_s: float


def as_one_program(chains: Sequence[Chain]) -> OneProgram | None:
    """The estimate of a step as one program, from prices of its layers; None if they cannot run on
    all devices.
    """
    seconds = []
    for chain in chains:
        for k, option in enumerate(chain.options):
            if option.num_devices == chain.num_devices:
                # Layers run one after another, all under the same option.
                passes = float(chain.forward_s[:, k].sum() + chain.backward_s[:, k].sum())
                total_s = chain.num_micro_batches * passes + float(chain.once_s[:, k].sum())
                seconds.append((total_s, option.mesh_shape, chain.num_micro_batches))
    # Ties go to the smallest tuple, so that the answer does not depend on the order of chains.
    least_s, mesh_shape, count = min(seconds, default=(math.inf, (), 1))
    if not math.isfinite(least_s):
        return None
    return OneProgram(mesh_shape=mesh_shape, num_micro_batches=count, least_s=least_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class FewerMicroBatches(AbstractFamily):
    """The step as one program with fewer micro-batches than a pipeline has; and for a pipeline of a
    single stage, which is one program itself, the program on the mesh of that stage.

    Attributes:
        whole: makes the method that plans one program on a given mesh.
        pipeline: the fastest pipeline.
        program: an estimate of the program from its layers, if the answer may be one program.
    """

    task: Task
    whole: Callable[[tuple[int, ...]], ShardParallel]
    pipeline: Decision
    program: OneProgram | None
    expected_s: float

    @classmethod
    def than(
        cls,
        pipeline: Decision,
        task: Task,
        whole: Callable[[tuple[int, ...]], ShardParallel],
        program: OneProgram | None,
    ) -> FewerMicroBatches:
        """The family for a pipeline: of a single stage it is expected to take no longer."""
        expected_s = pipeline.step_time_s if len(pipeline.stages) == 1 else math.inf
        return cls(
            task=task, whole=whole, pipeline=pipeline, program=program, expected_s=expected_s
        )

    def open(self, search: Search) -> Iterable[AbstractFamily]:
        task, pipeline, program = self.task, self.pipeline, self.program
        best, most = search.best, pipeline.num_micro_batches
        is_single = len(pipeline.stages) == 1
        if best and best.pipeline is None and best.step_time_s <= pipeline.step_time_s:
            return ()
        found: Decision | None = None
        try:
            limit_s = min(pipeline.step_time_s, search.to_beat_s(task))
            if program is not None and program.least_s < limit_s:
                found = fewer_micro_batches(
                    self.whole(program.mesh_shape),
                    task.problem,
                    most=most,
                    faster_than_s=limit_s,
                    # If none is faster, a single stage becomes a program, for which the problem is
                    # needed.
                    known=task.problem(most) if is_single else None,
                    progress=task.progress,
                )
            if found is None and is_single and pipeline.step_time_s < search.to_beat_s(task):
                method = self.whole(pipeline.picked.priced.mesh.shape)
                found = method.solve(task.problem(most), task.progress)
        except Interrupted as interrupted:
            found = interrupted.decision
            raise
        finally:
            if found is not None:
                search.add(found, task)
        return ()


def fewer_micro_batches(
    method: ShardParallel,
    problem_with: Callable[[int], Problem],
    *,
    most: int,
    faster_than_s: float,
    known: Problem | None = None,
    progress: Progress | None = None,
) -> Decision | None:
    """The best program with fewer micro-batches; None if none takes less than `faster_than_s`.

    Starts at the square root of `most` and halves the number as long as programs take longer than
    that, or as long as it is faster; or doubles it until a program fits. Numbers of which a problem
    with more micro-batches shows that no program fits are passed over.

    Args:
        problem_with: the problem for a number of micro-batches.
        most: the number of micro-batches whose smaller divisors are tried.
        known: the problem for `most`, if it was made.

    Raises:
        Interrupted: Ctrl-C.
    """
    smaller = divisors(most)[:-1]
    # The square root is a guess in the middle, from which both directions are short.
    place = bisect.bisect_right(smaller, math.isqrt(most)) - 1
    best: Decision | None = None
    direction, num_slow = -1, 0
    while 0 <= place < len(smaller):
        count, decision, fits = smaller[place], None, False
        if known is None or not is_too_large(known, count):
            problem = problem_with(count)
            # Programs that take longer are only bounded: to find the best of them can take minutes.
            race = method.race(problem, progress, faster_than_s=faster_than_s, pauses=False)
            try:
                decision, fits = finished(race), True
            except TooSlowError:
                fits = True
            except InfeasibleError:
                pass
            if known is None or count < known.num_micro_batches:
                known = problem
        if not fits:
            if best is not None or num_slow:
                break
            direction = 1
        elif decision is None or decision.step_time_s >= faster_than_s:
            if best is not None:
                break
            num_slow += 1
        else:
            if best is not None and decision.step_time_s >= best.step_time_s:
                break
            best = decision
        # When counting upwards, the first program that fits has the largest micro-batches.
        if fits and direction > 0:
            break
        place = _next_divisor(smaller, place, direction)
    return best


def _next_divisor(numbers: Sequence[int], place: int, direction: int) -> int:
    """Position of the next divisor that is at most half as large (direction -1), or at least twice
    (direction 1); out of range if there is none.
    """
    target = numbers[place] * 2**direction
    if direction < 0:
        return bisect.bisect_right(numbers, target) - 1
    return bisect.bisect_left(numbers, target)
