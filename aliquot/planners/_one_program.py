"""Search for the number of micro-batches with which a step is fastest as one program, without
stages: often fewer and larger ones than a pipeline needs.

With more micro-batches, a program gathers split parameters and launches kernels more often, but
needs less memory. Prices of single layers show neither, so programs are solved as a whole.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Chain, Problem
from ._base import (
    AbstractMethod,
    Decision,
    Interrupted,
    Progress,
    Task,
    TooSlowError,
    faster,
)
from ._methods import ShardParallel, WholeProgram
from ._quick_bounds import cannot_fit, is_too_large

# At most so many numbers of micro-batches are tried.
_MOST_PROGRAMS = 6
# After so many programs that are slower than a pipeline, the next mostly is slower, too.
_MOST_SLOW = 2
Found: TypeAlias = Decision | InfeasibleError | None
"""A program, or the error that says why there is none; None if it was not searched because its
arrays alone are too large."""


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
    seconds = [
        (_layers_s(chain, k), option.mesh_shape, chain.num_micro_batches)
        for chain in chains
        for k, option in enumerate(chain.options)
        if option.num_devices == chain.num_devices
    ]
    # Ties go to the smallest tuple, so that the answer does not depend on the order of chains.
    least_s, mesh_shape, count = min(seconds, default=(math.inf, (), 1))
    if not math.isfinite(least_s):
        return None
    return OneProgram(mesh_shape=mesh_shape, num_micro_batches=count, least_s=least_s)


def _layers_s(chain: Chain, option: int) -> float:
    """Seconds of a step whose layers run one after another, all under the same option."""
    passes = float(chain.forward_s[:, option].sum() + chain.backward_s[:, option].sum())
    return chain.num_micro_batches * passes + float(chain.once_s[:, option].sum())


def one_program_by_doubling(
    method: AbstractMethod,
    task: Task,
    *,
    first: int,
    most: int,
    until_it_fits: bool,
    known: MutableMapping[int, Found] | None = None,
    faster_than_s: float = math.inf,
) -> Decision | None:
    """The fastest program with `first`, twice as many, ... up to `most` micro-batches; None if none
    of those tried fits and takes less than `faster_than_s`.

    Stops at the first program that fits and is no faster than one with fewer micro-batches: every
    micro-batch repeats collectives, and the only gain of more of them is memory. At most
    `_MOST_PROGRAMS` are tried.

    Args:
        until_it_fits: whether more micro-batches are tried where `first` does not fit.
        known: the known programs, by their numbers of micro-batches; those that are searched here
            are added.
        faster_than_s: programs that cannot take less are not searched in full.

    Raises:
        Interrupted: Ctrl-C; carries the fastest so far.
    """
    best: Decision | None = None
    known, num_slow = {} if known is None else known, 0
    for count in [first * 2**k for k in range(_MOST_PROGRAMS)]:
        if count > most:
            break
        try:
            problem = task.problem(count)
        # If the batch cannot be cut into so many parts, it cannot be cut into twice as many.
        except (InputError, CaptureError):
            break
        try:
            if count not in known:
                # A program that is no faster than the best so far ends this search, so it need not
                # be searched in full.
                if isinstance(method, WholeProgram):
                    best_s = best.step_time_s if best else math.inf
                    to_beat_s = min(method.faster_than_s, faster_than_s, best_s)
                    method = replace(method, faster_than_s=to_beat_s)
                known[count] = None if cannot_fit(problem) else _solved(method, problem, task)
        except Interrupted as interrupted:
            interrupted.decision = faster(best, interrupted.decision)
            raise
        found = known[count]
        if found is None or isinstance(found, InfeasibleError):
            is_slow = isinstance(found, TooSlowError)
            if best is not None or not (until_it_fits or is_slow):
                break
        else:
            is_slow = found.step_time_s >= faster_than_s
            if best is not None and found.step_time_s >= best.step_time_s:
                break
            best = best if is_slow else found
        num_slow += is_slow
        if num_slow == _MOST_SLOW:
            break
    return best


def _solved(method: AbstractMethod, problem: Problem, task: Task) -> Found:
    """The method's program, or the error if none fits."""
    try:
        return method.solve(problem, task.progress)
    except InfeasibleError as error:
        return error


def program_beside(
    method: WholeProgram,
    problem: Problem,
    progress: Progress | None,
    rival: Callable[[float], float] | None,
) -> Found:
    """The method's program, or why there is none.

    Args:
        rival: a search for other plans. It is called for their least step time if memory makes the
            search of the program long; see `race`.

    Raises:
        Interrupted: Ctrl-C.
    """
    if cannot_fit(problem):
        return None
    try:
        return method.solve_beside(problem, progress, rival)
    except InfeasibleError as error:
        return error


def add_first_program(
    method: WholeProgram,
    task: Task,
    first: int,
    known: MutableMapping[int, Found],
    rival: Callable[[float], float],
) -> None:
    """Add the program with the fewest micro-batches to the known ones, so that pipelines that do
    not promise to be faster need not be solved.

    Args:
        first: the fewest micro-batches.
        known: the known programs, by their numbers of micro-batches.
        rival: the search for pipelines; see `race`.

    Raises:
        Interrupted: Ctrl-C.
    """
    if first in known:
        return
    try:
        problem = task.problem(first)
    except (InputError, CaptureError):
        # The search for pipelines will raise an error that says what is wrong.
        return
    known[first] = program_beside(method, problem, task.progress, rival)


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

    Starts at the square root of `most` and halves the number as long as that is faster, or doubles
    it until a program fits. Numbers of which a problem with more micro-batches shows that no
    program fits are passed over.

    Args:
        problem_with: the problem for a number of micro-batches.
        most: the number of micro-batches whose smaller divisors are tried.
        known: the problem for `most`, if it was made.

    Raises:
        Interrupted: Ctrl-C.
    """
    divisors = [n for n in range(1, most) if most % n == 0]
    # The square root is a guess in the middle, from which both directions are short.
    place = bisect.bisect_right(divisors, math.isqrt(most)) - 1
    best, direction = None, -1
    while 0 <= place < len(divisors):
        count, decision = divisors[place], None
        if known is None or not is_too_large(known, count):
            problem = problem_with(count)
            with contextlib.suppress(InfeasibleError):
                decision = method.solve(problem, progress)
            if known is None or count < known.num_micro_batches:
                known = problem
        if decision is None:
            if best is not None:
                break
            direction = 1
        else:
            if best is not None and decision.step_time_s >= best.step_time_s:
                break
            best = decision
            # When counting upwards, the first program that fits has the largest micro-batches.
            if direction > 0:
                break
        place = _next_divisor(divisors, place, direction)
    return best if best is not None and best.step_time_s < faster_than_s else None


def _next_divisor(divisors: Sequence[int], place: int, direction: int) -> int:
    """Position of the next divisor that is at most half as large (direction -1), or at least twice
    (direction 1); out of range if there is none.
    """
    target = divisors[place] * 2**direction
    if direction < 0:
        return bisect.bisect_right(divisors, target) - 1
    return bisect.bisect_left(divisors, target)
