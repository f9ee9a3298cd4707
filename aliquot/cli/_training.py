"""A training loop with progress, which Ctrl-C ends between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..data import Windows
from ._progress import training_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of a training run: the loss of every step, and the speed once compiled.

    `interrupted` says that Ctrl-C ended it before its time.
    """

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    tokens_per_step: int
    interrupted: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all steps but the first, which compiles."""
        times = self.step_times_s[1:] or self.step_times_s
        return self.tokens_per_step * len(times) / sum(times) if times else 0.0

    @property
    def step_time_s(self) -> float:
        """Median measured time of a step, without the first; 0 if there is none."""
        times = sorted(self.step_times_s[1:] or self.step_times_s)
        return times[len(times) // 2] if times else 0.0


def run(step: Callable[..., Any], state: Any, data: Windows, steps: int, *, label: str) -> Run:
    """Train from `state` on; `step(state, batch)` returns the new state and metrics with a
    `loss`.
    """
    tokens = data.tokens_per_step
    losses: list[float] = []
    times: list[float] = []
    interrupted = False
    with training_progress(label, steps) as report:
        try:
            for index in range(steps):
                started = time.perf_counter()
                state, metrics = step(state, data.batch_at(index))
                loss = float(metrics["loss"])
                times.append(time.perf_counter() - started)
                losses.append(loss)
                recent = times[1:] or times
                report(index + 1, loss, tokens * len(recent) / sum(recent))
        except KeyboardInterrupt:
            interrupted = True
    return Run(
        losses=tuple(losses),
        step_times_s=tuple(times),
        tokens_per_step=tokens,
        interrupted=interrupted,
    )
