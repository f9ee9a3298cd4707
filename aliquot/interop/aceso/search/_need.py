"""The memory of the smallest configuration that is found, with its components, for messages that
say that nothing fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .._performance import StageEstimate
from ._bottleneck import Bottleneck
from ._problem import SearchProblem

_QUICK = Bottleneck(max_steps=60, polished=4, relieved=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The smallest memory limit that a configuration is known to meet.

    Attributes:
        limit_mb: the limit on each device.
        fullest: the stage of that configuration that needs the most memory.
        num_nodes: twice or four times the nodes, if with these a configuration meets the problem's
            limit; else None.
    """

    limit_mb: float
    fullest: StageEstimate
    num_nodes: int | None


def smallest_need(problem: SearchProblem) -> Need | None:
    """Bisect over the memory limit with a short search; None if not even 64 times the limit is
    enough.
    """
    enough = _fullest(problem, problem.memory_limit_mb * 64)
    if enough is None:
        return None
    low, high = problem.memory_limit_mb, enough.memory_mb
    for _ in range(8):
        if high <= low * 1.01:
            break
        middle = (low + high) / 2
        stage = _fullest(problem, middle)
        if stage is None:
            low = middle
        else:
            enough, high = stage, stage.memory_mb
    more = next(
        (
            nodes
            for nodes in (problem.num_nodes * 2, problem.num_nodes * 4)
            if _fullest(replace(problem, num_nodes=nodes), problem.memory_limit_mb) is not None
        ),
        None,
    )
    return Need(limit_mb=high, fullest=enough, num_nodes=more)


def _fullest(problem: SearchProblem, limit_mb: float) -> StageEstimate | None:
    result = _QUICK.search(replace(problem, memory_limit_mb=limit_mb))
    if not result.best:
        return None
    return max(result.best[0][1].stages, key=lambda stage: stage.memory_mb)
