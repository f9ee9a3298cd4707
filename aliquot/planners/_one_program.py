"""One program instead of stages: with fewer, larger micro-batches than keep stages busy, that may be the fastest.

What a program gathers for every micro-batch, such as parameters that are held split, grows with their number; so does what
it starts. Memory falls with it. Prices of single layers show neither.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import InfeasibleError
from ..cost import Chain, Problem, alive_over_time
from ..graph import Role
from ._base import Decision, Progress
from ._methods import ShardParallel

# Declared infeasible only 10 % above the limit, as larger micro-batches change what a compiler holds.
_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProgram:
    """A step as one program on all devices: the mesh on which layers take least in sum, and how long if all fitted."""

    mesh_shape: tuple[int, ...]
    least_s: float


def as_one_program(chains: Sequence[Chain]) -> OneProgram | None:
    """Seconds of the layers on all devices, on the mesh where these are least; None if they cannot run there."""
    seconds = [
        (_seconds(chain, k), option.mesh_shape)
        for chain in chains
        for k, option in enumerate(chain.options)
        if option.num_devices == chain.num_devices
    ]
    least_s, mesh_shape = min(seconds, default=(math.inf, ()))
    return OneProgram(mesh_shape=mesh_shape, least_s=least_s) if math.isfinite(least_s) else None


def _seconds(chain: Chain, option: int) -> float:
    passes = float(chain.forward_s[:, option].sum() + chain.backward_s[:, option].sum())
    return chain.num_micro_batches * passes + float(chain.once_s[:, option].sum())


def fewer_micro_batches(
    method: ShardParallel,
    problem_with: Callable[[int], Problem],
    *,
    most: int,
    faster_than_s: float,
    is_hopeless: Callable[[Problem, int], bool] = lambda problem, count: False,
    progress: Progress | None = None,
) -> Decision | None:
    """The best program with fewer micro-batches; None if none is faster than what there is already.

    From the square root of `most` by halves downwards as long as that makes it faster, or upwards until it fits.

    Args:
        problem_with: the problem for a number of micro-batches.
        most: micro-batches; its divisors are tried.
        is_hopeless: whether a problem that was solved shows that with so many micro-batches nothing fits.

    Raises:
        Interrupted: Ctrl-C.
    """
    divisors = [n for n in range(1, most) if most % n == 0]
    place = bisect.bisect_right(divisors, math.isqrt(most)) - 1
    best, step = None, -1
    while 0 <= place < len(divisors):
        problem = problem_with(divisors[place])
        try:
            decision = method.solve(problem, progress)
        except InfeasibleError:
            if best is not None:
                break
            step = 1
        else:
            if best is not None and decision.step_time_s >= best.step_time_s:
                break
            best = decision
            if step > 0:
                break
        place = _next(divisors, place, step)
        if best is not None and place >= 0 and is_hopeless(problem, divisors[place]):
            break
    return best if best is not None and best.step_time_s < faster_than_s else None


def _next(divisors: Sequence[int], place: int, step: int) -> int:
    """The place of the next divisor that is half or less, or twice or more; outside if there is none."""
    wanted = divisors[place] * 2**step
    if step < 0:
        return bisect.bisect_right(divisors, wanted) - 1
    return bisect.bisect_left(divisors, wanted)


def is_too_large(problem: Problem, count: int) -> bool:
    """True if no split of a step with fewer micro-batches than a problem has can fit. It proves this in few of the cases.

    Every array is there when the problem's own is, at most split over all devices. A single micro-batch is another
    program: nothing adds up its gradients.
    """
    if not 1 < count < problem.num_micro_batches:
        return False
    graph, nodes = problem.graph, problem.nodes
    sizes = [graph.values[i.value].shape[0] for i in graph.inputs if i.role is Role.BATCH]
    with_batch = [
        {f for f in factors if sizes and node.factors[f].size % sizes[0] == 0}
        for node, factors in zip(nodes.nodes, nodes.batch_factors, strict=True)
    ]
    larger = problem.num_micro_batches / count
    parts = []
    for r in nodes.residents:
        grows = r.node >= 0 and any(r.projection[f] >= 0 for f in with_batch[r.node])
        parts.append((r, r.num_bytes * (larger if grows else 1.0)))
    least_bytes = float(alive_over_time(parts, nodes.num_ops + 1).max()) / problem.cluster.num_devices
    return least_bytes > _MARGIN * problem.memory_limit_bytes
