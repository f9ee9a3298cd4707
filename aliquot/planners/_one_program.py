"""One program instead of stages, which may be the fastest with fewer and larger micro-batches than
a pipeline needs.

More micro-batches make a program gather split parameters and launch kernels more often, and need
less memory. Prices of single layers show neither.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..cluster import LogicalMesh, subcluster
from ..core import CaptureError, InfeasibleError, InputError
from ..cost import Chain, Problem, alive_over_time, price
from ..graph import Role
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

# A lower bound on memory rules a program out only 10 % above the limit, as a compiler may hold less
# with larger micro-batches.
_MEMORY_MARGIN = 1.1
_MOST_PROGRAMS = 6
# After so many programs that are slower than a pipeline, the next mostly is, too.
_MOST_SLOW = 2
Found: TypeAlias = Decision | InfeasibleError | None
"""A program, or why there is none; None where its arrays alone are too large, so that it was not
searched."""
_ONE_PROGRAM_SCOPES = {
    "all copies of all layers": "",
    "gap_within_folded_space": " that split equal layers equally",
    "gap_within_neighbourhood": " with choices near the solutions of coarser meshes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProgram:
    """An estimate of a step as one program on all devices: the mesh of the least total time of its
    layers, and that time without a memory limit.
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
    # Ties go to the first mesh in order, so that the answer is the same each time.
    least_s, mesh_shape, count = min(seconds, default=(math.inf, (), 1))
    if not math.isfinite(least_s):
        return None
    return OneProgram(mesh_shape=mesh_shape, num_micro_batches=count, least_s=least_s)


def _layers_s(chain: Chain, option: int) -> float:
    """Seconds of a step if all layers, one by one, run under the same option."""
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
    micro-batch repeats collectives, and only memory asks for more. At most `_MOST_PROGRAMS` are
    tried.

    Args:
        until_it_fits: whether more micro-batches are tried where `first` does not fit.
        known: the known programs, by their numbers of micro-batches; those that are searched are
            added.
        faster_than_s: programs that cannot take less are not searched closely.

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
        # Where so many parts do not divide the batch, twice as many do not either.
        except (InputError, CaptureError):
            break
        try:
            if count not in known:
                # A program that is no faster than the best so far ends this search, and need not
                # be searched closely.
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
    """The program of a method, or its error."""
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
    """The program of a method, or why there is none.

    Args:
        rival: a search of other plans, which is asked for their least step time if memory makes the
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
    """Add the program of the fewest micro-batches to the known ones: pipelines that do not promise
    to be faster then need not be solved.

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
        # The search for pipelines says what is wrong.
        return
    known[first] = program_beside(method, problem, task.progress, rival)


def one_program_scope(decision: Decision) -> str:
    """Words for the plans among which the bound of one program holds. It says nothing of pipelines,
    even where these are searched, too.
    """
    if not decision.bound_holds_for:
        return ""
    count = decision.num_micro_batches
    shown = (
        "plans of one program" if count == 1 else f"plans of one program in {count} micro-batches"
    )
    return shown + _ONE_PROGRAM_SCOPES.get(
        decision.bound_holds_for, f", {decision.bound_holds_for}"
    )


def cannot_fit(problem: Problem) -> bool:
    """True if the arrays that are alive at once are too large even if all devices share them
    evenly.
    """
    # Shared evenly by all devices is the least that any split can reach.
    parts = [(r, r.num_bytes) for r in problem.residents]
    least_bytes = (
        float(alive_over_time(parts, problem.nodes.num_ops + 1).max()) / problem.cluster.num_devices
    )
    return least_bytes > _MEMORY_MARGIN * problem.memory_limit_bytes


def least_compute_s(problem: Problem) -> float:
    """Seconds of compute that no plan undercuts: operators on a single device, which then run as
    large and as efficiently as they can, shared evenly by all devices, without communication.
    """
    cluster = subcluster(problem.cluster, (1, 1))
    priced = price(problem, LogicalMesh(shape=(1,), axis_names=("x",), cluster=cluster))
    return sum(float(node.compute_s.min()) for node in priced.nodes) / problem.cluster.num_devices


def fewer_micro_batches(
    method: ShardParallel,
    problem_with: Callable[[int], Problem],
    *,
    most: int,
    faster_than_s: float,
    is_hopeless: Callable[[Problem, int], bool] = lambda problem, count: False,
    progress: Progress | None = None,
) -> Decision | None:
    """The best program with fewer micro-batches; None if none takes less than `faster_than_s`.

    Starts at the square root of `most` and halves the number as long as that is faster, or doubles
    it until a program fits.

    Args:
        problem_with: the problem for a number of micro-batches.
        most: the number of micro-batches whose smaller divisors are tried.
        is_hopeless: whether the problem that was solved last shows that no program with so many
            micro-batches, the next to be tried, fits.

    Raises:
        Interrupted: Ctrl-C.
    """
    divisors = [n for n in range(1, most) if most % n == 0]
    # The square root is a guess in the middle, from which both directions are short.
    place = bisect.bisect_right(divisors, math.isqrt(most)) - 1
    best, direction = None, -1
    while 0 <= place < len(divisors):
        problem = problem_with(divisors[place])
        try:
            decision = method.solve(problem, progress)
        except InfeasibleError:
            if best is not None:
                break
            direction = 1
        else:
            if best is not None and decision.step_time_s >= best.step_time_s:
                break
            best = decision
            # After a search upwards, the first that fits has the largest micro-batches.
            if direction > 0:
                break
        place = _next_divisor(divisors, place, direction)
        if best is not None and place >= 0 and is_hopeless(problem, divisors[place]):
            break
    return best if best is not None and best.step_time_s < faster_than_s else None


def _next_divisor(divisors: Sequence[int], place: int, direction: int) -> int:
    """Position of the next divisor that is at most half as large (direction -1), or at least twice
    (direction 1); out of range if there is none.
    """
    target = divisors[place] * 2**direction
    if direction < 0:
        return bisect.bisect_right(divisors, target) - 1
    return bisect.bisect_left(divisors, target)


def is_too_large(problem: Problem, count: int) -> bool:
    """True if a lower bound on memory shows that no split of the step with only `count`
    micro-batches fits.

    The bound gives every array the live range that it has in the problem and splits it over all
    devices. It says nothing of a single micro-batch, which is another program, without accumulators
    of gradients.
    """
    if not 1 < count < problem.num_micro_batches:
        return False
    graph, nodes = problem.graph, problem.nodes
    sizes = [graph.values[i.value].shape[0] for i in graph.inputs if i.role is Role.BATCH]
    # Factors that the batch's size divides grow with a larger micro-batch.
    batch_factors = [
        {f for f in factors if sizes and node.factors[f].size % sizes[0] == 0}
        for node, factors in zip(nodes.nodes, nodes.batch_factors, strict=True)
    ]
    growth = problem.num_micro_batches / count
    live_ranges = []
    for r in problem.residents:
        holds_batch = r.node >= 0 and any(r.projection[f] >= 0 for f in batch_factors[r.node])
        live_ranges.append((r, r.num_bytes * (growth if holds_batch else 1.0)))
    least_bytes = (
        float(alive_over_time(live_ranges, nodes.num_ops + 1).max()) / problem.cluster.num_devices
    )
    return least_bytes > _MEMORY_MARGIN * problem.memory_limit_bytes
