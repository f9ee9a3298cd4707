"""The predicted figures of a plan as plain values, alike in all answers with `--json`."""

from __future__ import annotations

from typing import Any

from ._plan import PREDICTED_FIGURES, Plan
from ._summary import step_time_range_s
from ._throughput import examples_per_step, mfu, tokens_per_step

_KEYS = (
    *PREDICTED_FIGURES,
    *("memory_bytes", "host_memory_bytes", "step_time_range_s"),
    *("mfu", "tokens_per_s", "examples_per_s"),
)


def figures(plan: Plan | None, *, seconds: float | None = None) -> dict[str, Any]:
    """What is predicted of a plan, by names that end with units: seconds of the step and of its
    parts, bytes on each device (`peak_memory_bytes`, and `memory_bytes` by part) and in the memory
    of hosts, MFU, and tokens and examples per second.

    Args:
        plan: None gives the same keys, with None for each.
        seconds: from one step or call to the next, if that is not the step time.
    """
    if plan is None:
        return dict.fromkeys(_KEYS)
    p = plan.prediction
    between_s = p.step_time_s if seconds is None else seconds
    used, tokens, examples = mfu(plan), tokens_per_step(plan), examples_per_step(plan)
    values = (
        *(getattr(p, name) for name in PREDICTED_FIGURES),
        dict(p.memory_bytes),
        dict(p.host_memory_bytes),
        step_time_range_s(plan),
        used * p.step_time_s / between_s if used and between_s else used,
        tokens / between_s if tokens and between_s else None,
        examples / between_s if examples and between_s else None,
    )
    return dict(zip(_KEYS, values, strict=True))
