"""Learning rates: a number, or a schedule as plain data, which plans keep in their settings.

`learning_rate` makes such data of what users say, and `schedule` turns it into optax's function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..core import InputError, nearest, shortened

LearningRate: TypeAlias = float | Mapping[str, Any]
"""A constant, or the fields of a schedule: `peak`, `end`, `warmup_steps`, `decay`, `steps`."""

DECAYS = ("cosine", "linear", "constant")
_FIELDS = ("peak", "end", "warmup_steps", "decay", "steps")


def learning_rate(
    peak: float,
    *,
    steps: int,
    end: float = 0.0,
    warmup_steps: int | float = 0,
    decay: str = "constant",
) -> LearningRate:
    """The learning rate of a run, as `build` takes it: a number where it is constant.

    It rises linearly from zero in `warmup_steps`, falls to `end` until the last step, and stays
    there.

    >>> learning_rate(1e-3, steps=100, warmup_steps=0.1, decay="cosine")["warmup_steps"]
    10
    >>> learning_rate(1e-3, steps=100)
    0.001

    Args:
        steps: of the run, with those of the warm-up.
        end: the rate in the end; the peak if `decay` is "constant".
        warmup_steps: a number of steps, or, below 1, their share of all.
        decay: "cosine", "linear" or "constant".

    Raises:
        InputError: everything that is wrong with them.
    """
    if 0 < warmup_steps < 1:
        warmup_steps = round(warmup_steps * steps)
    made = {
        "peak": peak,
        "end": peak if decay == "constant" else end,
        "warmup_steps": warmup_steps,
        "decay": decay,
        "steps": steps,
    }
    if faults := rate_faults(made):
        raise InputError(f"This learning rate is impossible: {' '.join(faults)}")
    return made if warmup_steps or decay != "constant" else peak


def rate_faults(rate: Any) -> list[str]:
    """Messages on a learning rate that `build` would refuse."""
    if not isinstance(rate, Mapping):
        ok = _is_number(rate) and rate > 0
        return [] if ok else [f"learning_rate={rate} must be a positive number."]
    faults = [
        f"learning_rate has no {shortened(str(key), 60)!r}: {nearest(str(key), _FIELDS)}"
        for key in rate
        if key not in _FIELDS
    ]
    missing = [key for key in _FIELDS if key not in rate]
    if missing:
        return [*faults, f"learning_rate lacks {', '.join(missing)}."]
    peak, end, warmup, decay, steps = (rate[key] for key in _FIELDS)
    if not (_is_number(peak) and peak > 0):
        faults.append(f"the peak of the learning rate, {peak}, must be a positive number.")
    elif not (_is_number(end) and 0 <= end <= peak):
        faults.append(f"the learning rate ends at {end}, which must be between 0 and {peak}.")
    counts = [warmup, steps]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in counts):
        faults.append(
            f"the learning rate has warmup_steps={warmup} and steps={steps}, which must be whole"
            " numbers that are not negative."
        )
    elif decay != "constant" and steps <= warmup:
        faults.append(
            f"a warm-up of {warmup} steps leaves nothing of {steps} steps for the {decay} decay:"
            " train longer, or warm up shorter."
        )
    if decay not in DECAYS:
        faults.append(f"there is no decay {decay!r}: {nearest(str(decay), DECAYS)}")
    return faults


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def schedule(rate: LearningRate) -> float | Callable[[Any], Any]:
    """The learning rate as optax takes it: the number, or a function of the number of updates."""
    if not isinstance(rate, Mapping):
        return rate
    import optax

    peak, end, warmup, steps = (rate[key] for key in ("peak", "end", "warmup_steps", "steps"))
    falling = max(steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, falling, alpha=end / peak),
        "linear": optax.linear_schedule(peak, end, falling),
        "constant": optax.constant_schedule(peak),
    }[rate["decay"]]
    if not warmup:
        made: Callable[[Any], Any] = after
        return made
    joined: Callable[[Any], Any] = optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), after], [warmup]
    )
    return joined
