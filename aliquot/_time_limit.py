"""Plans within a time limit: the best so far once the time is over."""

from __future__ import annotations

from dataclasses import replace

from .core import TimeLimit, TimeLimitError, format_seconds
from .planners import (
    AbstractMethod,
    Auto,
    Decision,
    Interrupted,
    ShardParallel,
    Task,
    WholeProgram,
    least_compute_s,
    simple_plan,
)

_STATUS = "time limit reached"
_COMPUTE_ALONE = "all plans, by compute alone that all devices share evenly"


def decide_in_time(method: AbstractMethod, task: Task, limit: TimeLimit) -> Decision:
    """As `method.decide`, but once the time is over, the best decision so far, with its bound.

    Searches that take any program begin with a simple plan, which takes little of the time, so that
    there is one to fall back on.

    Raises:
        TimeLimitError: no plan was complete by then.
        Interrupted: Ctrl-C.
    """

    def report(what: str, done: int, of: int) -> None:
        if task.progress:
            task.progress(what, done, of)
        limit.check()

    best: Decision | None = None
    simple: Decision | None = None
    timed = replace(task, progress=report)
    try:
        with limit.ringing():
            if isinstance(method, Auto | WholeProgram | ShardParallel):
                simple = simple_plan(timed)
            return method.decide(timed)
    except KeyboardInterrupt as stopped:
        if not limit.is_over:
            raise
        best = stopped.decision if isinstance(stopped, Interrupted) else None
    if simple and (best is None or simple.step_time_s < best.step_time_s):
        best = simple
    if best is None:
        raise TimeLimitError(
            f"No plan was complete after {format_seconds(limit.seconds)}, tracing the step"
            " included; whether one fits is not known. Allow more time, or choose a method that"
            " searches less, such as --method zero3."
        )
    if best.lower_bound_s is not None:
        return replace(best, status=_STATUS)
    least_s = least_compute_s(timed.problem(1))
    return replace(
        best, status=_STATUS, lower_bound_s=least_s, gap=None, bound_holds_for=_COMPUTE_ALONE
    )
